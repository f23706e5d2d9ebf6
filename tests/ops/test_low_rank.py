"""Low-rank summaries of pages: their bytes, what they keep of keys, and the masses that they give."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foveate import ops
from foveate.ops import KV, Logits
from foveate.ops.compress.low_rank import factors
from tests.problems import LargestTensor, in_buffer

FORMS = [ops.PageRecord(64, 16), ops.PageRecord(80, 7, 1), ops.PageRecord(128, 32, 4), ops.PageRecord(5, 3)]
FORMS += [ops.PageRecord(64, 16, 8, 8), ops.PageRecord(80, 7, 3, 8)]
EACH_FORM = pytest.mark.parametrize("form", FORMS, ids=str)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def logits(rows, keys, form, scaling):
    """Of the keys ``[B, Hkv, P * size, D]``, ``[B, Hkv, G, P, size]``."""
    return (rows @ keys.mT * scaling).unflatten(-1, (-1, form.page_size))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((128, 16), 288),
        ((64, 16), 160),
        ((128, 32), 304),
        ((128, 64, 4), 544),
        ((128, 16, 1), 224),
        ((5, 3), 32),
        ((128, 16, 8, 8), 816),
    ],
)
def test_bytes_of_a_record(sizes, expected):
    form = ops.PageRecord(*sizes)
    assert form.bytes == expected
    numbers = 8 * form.head_dim + 4 * form.rank * form.head_dim + 32 * (form.rank + 1)
    numbers += form.coefficient_bits * form.rank * form.page_size
    assert 0 <= expected - numbers / 8 < 16 + 12 + form.rank


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 16), "head_dim must be at least 1, not 0"),
        ((64, 1), "page_size must be 2 to 64, not 1"),
        ((64, 65), "page_size must be 2 to 64, not 65"),
        ((64, 16, 9), "rank must be 1 to 8, not 9"),
        ((64, 16, 2, 6), "coefficient_bits must be 4 or 8, not 6"),
        ((64, 3, 4), "rank must be 1 to 3, not 4"),
    ],
)
def test_sizes_that_no_record_has(sizes, message):
    with pytest.raises(ValueError, match=message):
        ops.PageRecord(*sizes)


@EACH_FORM
def test_parts_lie_where_they_are_said_to(form):
    """Rebuilt number by number from the bytes."""
    records = ops.compress_pages(draw(1, 1, form.page_size, form.head_dim), form)
    data, found = bytes(records[0, 0, 0].tolist()), factors(records[0, 0, 0], form)
    scales = torch.frombuffer(bytearray(data[: 4 * (form.rank + 1)]), dtype=torch.float32)
    mean = torch.frombuffer(bytearray(data[form.mean : form.mean + form.head_dim]), dtype=torch.int8)
    assert torch.equal(found.mean, mean * scales[0])
    for first, number, factor, scaled in (
        (form.directions, form.head_dim, found.directions, scales[1:]),
        (form.coefficients, form.page_size, found.coefficients, torch.ones(form.rank)),
    ):
        half = (number + 1) // 2
        if first == form.coefficients and form.coefficient_bits == 8:
            stored = torch.tensor(list(data[first : first + form.rank * number])).view(form.rank, number)
            assert torch.equal(factor, stored - 128.0)
            continue
        for row in range(form.rank):
            for j in range(number):
                byte = data[first + row * half + j % half]
                code = byte >> 4 if j >= half else byte & 15
                assert factor[row, j] == (code - 8) * scaled[row]
    assert set(data[4 * (form.rank + 1) : form.mean]) <= {0}
    assert set(data[form.end :]) <= {0}
    assert form.end == form.coefficients + form.rank * ((form.page_size * form.coefficient_bits + 7) // 8)


@EACH_FORM
def test_little_more_is_left_of_the_keys_than_the_best_of_that_rank_leaves(form):
    keys = draw(2, 3, 9 * form.page_size, form.head_dim).unflatten(2, (9, -1))
    found = factors(ops.compress_pages(keys.flatten(2, 3), form), form).keys()
    centred = keys - keys.mean(3, keepdim=True)
    singular = torch.linalg.svdvals(centred)
    whole, best = centred.square().sum(), singular[..., form.rank :].square().sum()
    assert (found - keys).square().sum() - best < 0.1 * (whole - best) + 0.002 * whole


def rounded(x, limit, dim):
    """To integers times the largest of a dimension."""
    scale = x.abs().amax(dim, keepdim=True) / limit
    return (x / scale).round() * scale


def test_no_more_is_left_of_the_keys_than_of_locks_summaries():
    """locks-kv 0.1.4: eight eigenvectors of the Gram matrix, each rounded apart, in as many bytes."""
    form = ops.PageRecord(128, 16, 8, 8)
    keys = draw(1, 4, 32, 16, 24) @ draw(1, 4, 32, 24, 128, seed=1) * draw(1, 4, 32, 1, 128, seed=2).exp()
    found = factors(ops.compress_pages(keys.flatten(2, 3), form), form).keys()
    mean = keys.mean(3, keepdim=True)
    size, vectors = torch.linalg.eigh((keys - mean) @ (keys - mean).mT)
    size, vectors = size[..., -8:].sqrt(), vectors[..., -8:]
    axes = (keys - mean).mT @ vectors / size[..., None, :]
    locks = rounded(mean, 127, -1) + rounded(vectors * size[..., None, :], 127, -1) @ rounded(axes, 7, -2).mT
    assert form.bytes <= 5 * 128 + 10 * 16 + 18
    assert (found - keys).square().sum() < (locks - keys).square().sum()


def test_keys_of_that_rank_are_kept():
    form = ops.PageRecord(64, 16)
    keys = draw(1, 2, 5, 1, 64) + draw(1, 2, 5, 16, 2, seed=1) @ draw(1, 2, 5, 2, 64, seed=2)
    found = factors(ops.compress_pages(keys.flatten(2, 3), form), form).keys()
    assert (found - keys).square().sum() < 0.03 * (keys - keys.mean(3, keepdim=True)).square().sum()


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1e4, 1e30])
def test_the_size_of_keys_does_not_matter(size):
    form, keys = FORMS[0], draw(1, 2, 32, 64)
    small, large = (factors(ops.compress_pages(x, form), form).keys() for x in (keys, keys * size))
    torch.testing.assert_close(large / size, small, rtol=1e-3, atol=1e-3)


def test_keys_that_are_all_alike():
    """Zeros stay zeros; equal keys are off by the mean's rounding alone, which the first direction takes up."""
    form = FORMS[0]
    assert not factors(ops.compress_pages(torch.zeros(1, 1, 16, 64), form), form).keys().any()
    keys = draw(1, 1, 1, 64).expand(-1, -1, 16, -1)
    found = factors(ops.compress_pages(keys, form), form).keys()
    torch.testing.assert_close(found[0, 0, 0], keys[0, 0], rtol=0, atol=1e-3)


@given(st.integers(0, 1000), st.sampled_from(FORMS), st.integers(1, 5), st.sampled_from(["slots", "tokens_first"]))
def test_a_page_does_not_depend_on_others(seed, form, pages, layout):
    keys = draw(2, 2, pages * form.page_size, form.head_dim, seed=seed)
    whole = ops.compress_pages(in_buffer(keys, layout), form)
    for page in range(pages):
        alone = ops.compress_pages(keys[:, :, page * form.page_size : (page + 1) * form.page_size], form)
        left, least = (
            (factors(x, form).keys() - keys.unflatten(2, (pages, -1))[:, :, page]).square().sum((-2, -1))
            for x in (whole[:, :, page], alone[:, :, 0])
        )
        torch.testing.assert_close(left, least, rtol=1e-2, atol=1e-4)


@EACH_FORM
def test_the_newest_page_is_written_when_it_is_full(form):
    keys, weights = draw(2, 2, 3 * form.page_size, form.head_dim), draw(2, 2, form.head_dim).round().exp2()
    whole, records = (ops.compress_pages(x, form, weights) for x in (keys, torch.zeros_like(keys)))
    empty = records.clone()
    for length in range(1, 3 * form.page_size + 1):
        seen = keys.clone()
        seen[:, :, length:] = torch.nan
        ops.compress_newest(KV(seen, lengths=torch.tensor([length, length])), records, form, weights)
        full = length // form.page_size
        assert torch.equal(records[:, :, full:], empty[:, :, full:])
        assert (records[:, :, :full] != whole[:, :, :full]).float().mean() < 0.01 if full else True


@EACH_FORM
def test_the_pages_that_new_tokens_fill(form):
    """Whether they come at once or one by one; blocks of three pages, and padding between the tokens."""
    size = form.page_size
    keys = draw(5, 2, 3 * size, form.head_dim)
    records = torch.zeros(5, 2, 3, form.bytes, dtype=torch.uint8)
    bulk, single = records.clone(), records.clone()
    tokens = torch.cat(
        [torch.arange(3 * size, 5 * size + 1), torch.tensor([-1, -1]), torch.arange(12 * size, 13 * size)]
    )
    ops.compress_written(keys, bulk, tokens, form)
    for token in tokens:
        ops.compress_written(keys, single, token[None], form)
    expected = ops.compress_pages(keys, form)
    for found in (bulk, single):
        filled = (found != 0).any(-1)
        assert filled.all(1).nonzero().tolist() == filled.any(1).nonzero().tolist() == [[1, 0], [1, 1], [4, 0]]
        assert (found[filled] != expected[filled]).float().mean() < 0.01
    with pytest.raises(ValueError, match="do not hold 2 whole pages"):
        ops.compress_written(keys, records[:, :, :2], tokens, form)


@pytest.mark.parametrize("pages", [False, True])
def test_masses_of_records_in_blocks(pages):
    """Blocks of four records; entries of the table that hold no record of a row name no block."""
    form, rows, weights = FORMS[3], draw(2, 2, 3, 5, seed=1), draw(2, 2, 5, seed=2).round().exp2()
    records = ops.compress_pages(draw(2, 2, 10 * 3, 5), form, weights)
    blocks = torch.full((9, 2, 4, form.bytes), 255, dtype=torch.uint8)
    table = torch.tensor([[7, 0, 3], [2, 5, 99]], dtype=torch.int32)
    for row, numbers in enumerate(([7, 0, 3], [2, 5])):
        for place, block in enumerate(numbers):
            part = records[row, :, 4 * place : 4 * place + 4]
            blocks[block, :, : part.shape[1]] = part
    how = {"logits": Logits(0.3)}
    if pages:
        how |= {"pages": torch.tensor([[[3, 0, 4]], [[1, -1, 0]]]), "branch": 2}
    lengths = torch.tensor([6, 6] if pages else [10, 8])
    alone = ops.Records(records, form, weights, lengths=lengths)
    in_blocks = ops.Records(blocks, form, weights, ops.BlockTable(table, 10), lengths)
    assert torch.equal(ops.score.page_lse(rows, in_blocks, **how), ops.score.page_lse(rows, alone, **how))
    if not pages:
        q = rows.flatten(1, 2)[:, :, None]
        found = ops.pooled_mass_of_records(q, in_blocks, **how)
        assert torch.equal(found, ops.pooled_mass_of_records(q, alone, **how))
    one_row = ops.Records(blocks, form, block_table=ops.BlockTable(table[:1], 10))
    with pytest.raises(ValueError, match="a block table of 1 rows does not fit"):
        ops.score.page_lse(rows, one_row, logits=Logits(0.3))


@EACH_FORM
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_masses_are_those_of_the_approximated_keys(form, softcap, weighted):
    keys, rows = draw(2, 2, 9 * form.page_size, form.head_dim), draw(2, 2, 3, form.head_dim, seed=1)
    weights = draw(2, 2, form.head_dim, seed=2).round().exp2() if weighted else None
    records = ops.compress_pages(keys, form, weights)
    lengths = torch.tensor([[0, 9], [4, 30]])
    records[torch.arange(9) >= lengths[..., None]] = 255
    given = ops.Records(records, form, weights, lengths=lengths)
    found = ops.score.page_lse(rows, given, logits=Logits(0.3, softcap=softcap))
    approximated = factors(records, form).keys().flatten(2, 3)
    approximated = approximated if weights is None else approximated / weights[:, :, None]
    expected = logits(rows, approximated, form, 0.3)
    expected = (expected if softcap is None else (expected / softcap).tanh() * softcap).logsumexp(-1)
    there = (torch.arange(9) < lengths[..., None])[:, :, None].expand_as(found)
    torch.testing.assert_close(found[there], expected[there], rtol=1e-4, atol=1e-5)
    assert found[~there].isneginf().all()


@pytest.mark.parametrize("pool", ["kv_head", "layer"])
def test_masses_over_the_largest_of_each_head(pool):
    """Head by head; of a row of the layer that one KV head has not, nothing; and what is not there counts nowhere."""
    form, q, lengths = FORMS[0], draw(2, 6, 1, 64, seed=1), torch.tensor([[9, 7], [5, 0]])
    records = ops.compress_pages(draw(2, 2, 9 * 16, 64), form)
    records[torch.arange(9) >= lengths[..., None]] = 255
    given = ops.Records(records, form, lengths=lengths)
    found = ops.pooled_mass_of_records(q, given, logits=Logits(0.3), pooling="of_largest", pool=pool)
    lse = ops.score.page_lse(q.view(2, 2, 3, 64), given, logits=Logits(0.3))
    for row in range(2):
        heads = [(lse[row, own, member, : int(lengths[row, own])], own) for own in range(2) for member in range(3)]
        for group in range(2) if pool == "kv_head" else [None]:
            mine = [(of_head - of_head.max()).exp() for of_head, own in heads if group in (None, own) and len(of_head)]
            there = min(int(lengths[row, own]) for own in range(2) if group in (None, own))
            expected = sum(mass[:there] for mass in mine) / (6 if group is None else 3)
            torch.testing.assert_close(found[row, group or 0, :there], expected if there else found.new_empty(0))
            assert found[row, group or 0, there:].isneginf().all()


def test_masses_are_close_to_the_pages_own():
    """Of keys that a few directions describe, which a mean alone misses by more than that."""
    form = ops.PageRecord(64, 16)
    keys = draw(1, 2, 40, 1, 64) + 2 * draw(1, 2, 40, 16, 2, seed=1) @ draw(1, 2, 40, 2, 64, seed=2)
    keys = (keys + 0.1 * draw(1, 2, 40, 16, 64, seed=3)).flatten(2, 3)
    rows = draw(1, 2, 4, 64, seed=4)
    true = logits(rows, keys, form, 0.3).logsumexp(-1)
    found = ops.score.page_lse(rows, ops.Records(ops.compress_pages(keys, form), form), logits=Logits(0.3))
    by_mean = logits(rows, keys, form, 0.3).mean(-1) + torch.tensor(16.0).log()
    assert (found - true).abs().mean() < 0.1 * (by_mean - true).abs().mean()


def test_weights_are_powers_of_two_that_follow_the_queries():
    q = draw(2, 6, 16, 64) * torch.linspace(0, 3, 64).exp()
    weights = ops.channel_weights(q, 2)
    assert weights.shape == (2, 2, 64)
    assert torch.equal(weights.log2(), weights.log2().round())
    size = q.unflatten(1, (2, 3)).square().mean((2, 3)).sqrt()
    ratio = weights.square() / (size / size.mean(-1, keepdim=True))
    assert ((ratio > 0.49) & (ratio < 2.01)).all()
    assert torch.equal(ops.channel_weights(1000 * q, 2), weights)
    some = ops.channel_weights(torch.zeros(1, 2, 3, 8), 1)
    assert (some == 1 / 8).all()


def test_weights_keep_what_queries_use():
    """Queries that use a few channels, in which keys differ little."""
    form, channels = ops.PageRecord(64, 16), torch.arange(64) < 8
    keys = draw(1, 2, 40 * 16, 64) * channels.where(channels, 3.0)
    q = draw(1, 8, 16, 64, seed=1) * (3 * channels).float().clamp_min(0.05)
    weights, rows = ops.channel_weights(q, 2), ops.fold_group(q[:, :, -1:], 2)
    true = logits(rows, keys, form, 0.3).logsumexp(-1)
    with_weights, without = (
        ops.score.page_lse(rows, ops.Records(ops.compress_pages(keys, form, how), form, how), logits=Logits(0.3))
        for how in (weights, None)
    )
    assert (with_weights - true).abs().mean() < 0.7 * (without - true).abs().mean()


def test_nothing_as_large_as_the_logits_of_all_keys(monkeypatch):
    monkeypatch.setattr("foveate.ops._math.SCRATCH_BYTES", 1 << 20)
    form, keys, rows = FORMS[0], draw(1, 2, 16 * 500, 64), draw(1, 2, 8, 64)
    with LargestTensor() as largest:
        records = ops.compress_pages(keys, form)
        ops.score.page_lse(rows, ops.Records(records, form), logits=Logits(0.3))
    assert largest.bytes <= 1 << 20, largest.what

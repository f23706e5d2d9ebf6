"""Low-rank summaries of pages against their references, in numbers that Triton's interpreter gets right."""

import math

import pytest
import torch

from foveate.ops import KV, BlockTable, Logits
from foveate.ops.compress import low_rank as summaries
from foveate.ops.compress import low_rank_kernel as summaries_kernel
from foveate.ops.compress.low_rank import PageRecord
from foveate.ops.compress.records import Records
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.score import low_rank, low_rank_kernel
from tests.combinations import every_pair
from tests.problems import in_buffer, of_rows

pytestmark = pytest.mark.usefixtures("poisoned")
FORMS = [PageRecord(64, 16), PageRecord(80, 7, 1), PageRecord(128, 8, 4), PageRecord(5, 3), PageRecord(16, 64, 3)]
FORMS += [PageRecord(64, 16, 8, 8), PageRecord(24, 7, 2, 8)]
EACH_FORM = pytest.mark.parametrize("form", FORMS, ids=str)


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def powers(*shape):
    """Weights of channels."""
    return draw(*shape, seed=2).round().exp2()


def check_records(found, expected, form, keys, weights=None, bytes_off=0.02):
    """Sums in another order may round a number here and there to its neighbour, and must not make a summary worse."""
    assert (found != expected).float().mean() <= bytes_off
    pages = (keys if weights is None else keys * weights[:, :, None]).unflatten(2, (-1, form.page_size)).float()
    left, least = ((summaries.factors(x, form).keys() - pages).square().sum((-2, -1)) for x in (found, expected))
    torch.testing.assert_close(left, least, rtol=2e-2, atol=1e-4)


@every_pair(
    ("form", FORMS), ("dtype", [torch.float32, torch.float16]), ("layout", ["slots", "tokens_first", "padded_rows"])
)
def test_pages(form, dtype, layout):
    keys = in_buffer(draw(2, 2, 2 * form.page_size, form.head_dim, dtype=dtype), layout)
    for weights in (None, powers(2, 2, form.head_dim)):
        found = summaries_kernel.compress_pages(keys, form, weights)
        check_records(found, summaries.compress_pages(keys, form, weights), form, keys, weights)
        if weights is None:
            assert torch.equal(found, summaries_kernel.compress_pages(keys, form))


@EACH_FORM
def test_the_page_that_the_newest_key_fills(form):
    """Of rows whose newest page is open nothing is written; every other record stays as it is."""
    size = form.page_size
    keys, lengths = (
        draw(3, 2, 4 * size, form.head_dim),
        torch.tensor([[3 * size, 0], [size, 0], [2 * size + 1, 0]])[:, 0],
    )
    for row, length in enumerate(lengths.tolist()):
        keys[row, :, length:] = torch.nan
    before = torch.full((3, 2, 4, form.bytes + 16), 7, dtype=torch.uint8)
    found, expected = before.clone(), before.clone()
    weights = powers(3, 2, form.head_dim)
    summaries_kernel.compress_newest(KV(keys, lengths=lengths), found[..., : form.bytes], form, weights)
    summaries.compress_newest(KV(keys, lengths=lengths), expected[..., : form.bytes], form, weights)
    written = torch.zeros(3, 2, 4, dtype=torch.bool)
    written[0, :, 2] = written[1, :, 0] = True
    for records in (found, expected):
        assert torch.equal(records[~written], before[~written])
        assert torch.equal(records[..., form.bytes :], before[..., form.bytes :])
    for row, page in ((0, 2), (1, 0)):
        mine, its = (x[row : row + 1, :, page : page + 1, : form.bytes] for x in (found, expected))
        of_page = keys[row : row + 1, :, page * size : (page + 1) * size]
        check_records(mine, its, form, of_page, weights[row : row + 1])


ALIKE = {"zeros": torch.zeros(16, 8), "equal": torch.full((16, 8), 3.0), "a longest key among equals": torch.eye(16, 8)}


@pytest.mark.parametrize("keys", ALIKE.values(), ids=ALIKE)
def test_pages_without_a_first_direction(keys):
    form, keys = PageRecord(8, 8), keys[None, None]
    found = summaries_kernel.compress_pages(keys, form)
    check_records(found, summaries.compress_pages(keys, form), form, keys, bytes_off=0.2)


@pytest.fixture(params=[1, 100], ids=["one program", "many programs"])
def splits(request, monkeypatch):
    """Few programs, and so many multiprocessors that pages are split."""
    monkeypatch.setattr(low_rank_kernel, "multiprocessors", lambda device: request.param)


LENGTHS = {
    "all": None,
    "rows, the second without any": torch.tensor([38, 0], dtype=torch.int32),
    "heads": torch.tensor([[1, 43], [32, 500]]),
}
PAGES = {torch.float32: 43, torch.float16: 75}
"""Three blocks of 16 that a program reads at once, or two of 64."""


POOLS = [("post_softmax", "kv_head"), ("sqrt", "layer"), ("max", "layer"), ("max_logit", "kv_head")]
POOLS += [("of_largest", "kv_head"), ("of_largest", "layer")]


def check(rows, records, softcap=None, **more):
    how = {"logits": Logits(0.3, softcap=softcap), **more}
    found = of_rows(low_rank_kernel.page_lse(rows, records, **how), records.lengths)
    expected = low_rank.page_lse(rows, records, **how)
    assert found.dtype == torch.float32
    assert torch.equal(found.isneginf(), expected.isneginf())
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6 * float(rows.abs().max()) * 300)


@every_pair(
    ("form", FORMS),
    ("dtype", [torch.float32, torch.float16]),
    ("group", [1, 4, 7]),
    ("lengths", list(LENGTHS.values())),
    ("splits", [1, 100]),
    indirect=["splits"],
)
def test_masses(form, dtype, group, lengths, splits):
    records = summaries.compress_pages(draw(2, 2, PAGES[dtype] * form.page_size, form.head_dim), form)
    if lengths is not None:
        beyond = torch.arange(PAGES[dtype]) >= lengths.view(2, -1, 1).expand(-1, 2, -1)
        records[beyond] = 255  # scales are NaN
    records = torch.nn.functional.pad(records, (0, 32), value=255)[..., : form.bytes]
    rows = draw(2, 2, group, form.head_dim, dtype=dtype, seed=1)
    for weights in (None, powers(2, 2, form.head_dim)):
        check(rows, Records(records, form, weights, lengths=lengths))


@pytest.mark.parametrize("of_layer", [False, True])
@pytest.mark.parametrize(("branch", "group"), [(1, 3), (5, 2)])
def test_masses_of_given_pages(branch, group, of_layer):
    """Records of no given page are not read; the last of the first row's pages is none, the second's are beyond."""
    form = PageRecord(16, 8, 1)
    records = summaries.compress_pages(draw(2, 2, 40 * 8, 16), form)
    pages = torch.tensor([[[0, 2, 3, 7, -1], [1, 2, 4, 6, 7]], [[5, 0, 1, -1, -1], [3, 4, 6, 7, 1]]], dtype=torch.int32)
    pages = pages[:, 1:] if of_layer else pages
    lengths = torch.tensor([[4 * branch, 5 * branch], [2 * branch - 1, 0]])
    read = torch.zeros(2, 2, 40, dtype=torch.bool)
    for row, head in ((0, 0), (0, 1), (1, 0)):
        for place in range(int(lengths[row, head])):
            read[row, head, int(pages[row, 0 if of_layer else head, place // branch]) * branch + place % branch] = True
    records[~read] = 255  # scales are NaN
    rows = draw(2, 2, group, 16, seed=1)
    given = Records(records, form, lengths=lengths)
    check(rows, given, pages=pages, branch=branch)
    expected = low_rank.page_lse(rows, given, logits=Logits(0.3), pages=pages, branch=branch)
    assert expected.shape == (2, 2, group, 5 * branch)
    assert torch.equal(
        ~expected.isneginf(), low_rank.first_keys(lengths, 5 * branch)[:, :, None].expand(expected.shape)
    )


@every_pair(
    ("form", FORMS), ("dtype", [torch.float32, torch.float16]), ("layout", ["slots", "tokens_first", "padded_rows"])
)
def test_the_pages_that_new_tokens_fill(form, dtype, layout):
    size = form.page_size
    keys = in_buffer(draw(4, 2, 2 * size, form.head_dim, dtype=dtype), layout)
    slots = torch.tensor([2 * size - 1, -1, size - 2, 6 * size - 1, -size - 1, 5 * size - 1], dtype=torch.int32)
    found = torch.full((4, 2, 2, form.bytes), 7, dtype=torch.uint8)
    summaries_kernel.compress_written(keys, found, slots, form)
    written = torch.zeros(4, 2, dtype=torch.bool)
    written[0, 1] = written[2] = True
    assert (found[~written[:, None].expand(-1, 2, -1)] == 7).all()
    there, rows = written[:, None].expand(-1, 2, -1), slice(None, None, 2)  # the others' pages are not written
    assert torch.equal(found[rows][there[rows]], summaries_kernel.compress_pages(keys[rows], form)[there[rows]])
    its = found.clone()
    summaries.compress_written(keys, its, slots, form)
    check_records(found[2:3], its[2:3], form, keys[2:3], bytes_off=0.04)  # of as few as 128


@pytest.mark.parametrize("number", [1, 4, 16])
@pytest.mark.parametrize("form", [FORMS[0], FORMS[1]], ids=str)
@pytest.mark.parametrize("splits", [1, 100], indirect=True)
def test_masses_of_records_in_blocks(form, number, splits):
    """What the table names no record for is NaN, or lies outside of memory."""
    records = summaries.compress_pages(draw(2, 2, 37 * form.page_size, form.head_dim), form)
    room = -(-37 // number)
    order = torch.randperm(2 * room, generator=torch.Generator().manual_seed(2))
    table = order.view(2, room).int()
    blocks = torch.full((2 * room, 2, number, form.bytes), 255, dtype=torch.uint8)
    for place in range(37):
        blocks[table[:, place // number].long(), :, place % number] = records[:, :, place]
    lengths = torch.tensor([37, 11])
    table[1, -(-11 // number) :] = 1 << 20
    blocks[table[1, 10 // number], :, 10 % number + 1 :] = 255
    rows, in_blocks = draw(2, 2, 3, form.head_dim, seed=1), {"block_table": BlockTable(table, 37)}
    given = [Records(blocks, form, lengths=lengths, **in_blocks), Records(records, form, lengths=lengths)]
    q, logits = rows.flatten(1, 2)[:, :, None], Logits(0.3)
    for verb, queries in ((low_rank_kernel.page_lse, rows), (low_rank_kernel.pooled_mass_of_records, q)):
        assert torch.equal(*(of_rows(verb(queries, one, logits=logits), lengths) for one in given))
    how = {"logits": logits, "pages": torch.tensor([[[3, 0, -1, 17]], [[1, 4, 0, -1]]]), "branch": 2}
    given = [Records(blocks, form, **in_blocks), Records(records, form)]
    assert torch.equal(*(low_rank_kernel.page_lse(rows, one, **how) for one in given))


@every_pair(
    ("form", FORMS),
    ("dtype", [torch.float32, torch.float16]),
    ("group", [1, 4, 7]),
    ("lengths", list(LENGTHS.values())),
    (("pooling", "pool"), POOLS),
    ("splits", [1, 100]),
    indirect=["splits"],
)
def test_pooled_masses(form, dtype, group, lengths, pooling, pool, splits):
    records = summaries.compress_pages(draw(2, 2, PAGES[dtype] * form.page_size, form.head_dim), form)
    if lengths is not None:
        records[torch.arange(PAGES[dtype]) >= lengths.view(2, -1, 1).expand(-1, 2, -1)] = 255  # scales are NaN
    q = draw(2, 2 * group, 1, form.head_dim, dtype=dtype, seed=1)
    given, how = Records(records, form, lengths=lengths), {"logits": Logits(0.3), "pooling": pooling, "pool": pool}
    found = of_rows(low_rank_kernel.pooled_mass_of_records(q, given, **how), lengths)
    expected = low_rank.pooled_mass_of_records(q, given, **how)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("softcap", [0.7, 20.0])
def test_capped_logits(softcap):
    form = FORMS[0]
    records = summaries.compress_pages(draw(1, 2, 9 * 16, 64), form)
    check(draw(1, 2, 4, 64, seed=1), Records(records, form), softcap)


@pytest.mark.parametrize("reach", [60, 110, 150, 240, 420, 600, 3000])
@pytest.mark.parametrize("form", [PageRecord(16, 8, 1), PageRecord(16, 8, 2), PageRecord(16, 8, 2, 8)], ids=str)
def test_logits_far_apart(form, reach):
    """Sums begin at the largest logit where keys are too far from the mean for exponentials about its logit.

    ``reach``: how far those of a page may be from the mean's, to the base 2, by the largest coefficients.
    """
    keys = draw(1, 1, 8 * 8, 16)
    keys[:, :, ::8] *= 400
    records = summaries.compress_pages(keys, form)
    directions = summaries.factors(records, form).directions
    for group in (4, 40):
        rows = draw(1, 1, group, 16, seed=1)
        along = torch.einsum("bhgd,bhprd->bhgpr", rows, directions) * 0.3 / math.log(2)
        check(rows * (reach / (2 ** (form.coefficient_bits - 1) * along.abs().sum(-1).max())), Records(records, form))


def test_what_is_refused():
    form, keys, rows = PageRecord(8, 4), draw(1, 2, 8, 8), draw(1, 2, 3, 8)
    records = summaries.compress_pages(keys, form)
    for module in (summaries, summaries_kernel):
        with pytest.raises(ValueError, match="whole pages of 4 keys of 8 numbers"):
            module.compress_pages(keys[:, :, :7], form)
        with pytest.raises(ValueError, match="weights must be float32"):
            module.compress_pages(keys, form, torch.ones(1, 2, 8).double())
        with pytest.raises(ValueError, match="records must be uint8"):
            module.compress_newest(KV(keys, lengths=torch.tensor([8])), records[..., 1:], form)
        with pytest.raises(ValueError, match="do not fit records"):
            module.compress_newest(KV(keys[:, :1], lengths=torch.tensor([8])), records, form)
    for module in (low_rank, low_rank_kernel):
        with pytest.raises(ValueError, match="records must be uint8"):
            module.page_lse(rows, Records(records.int(), form), logits=Logits(1.0))
        with pytest.raises(ValueError, match="do not fit records"):
            module.page_lse(rows[:, :1], Records(records, form), logits=Logits(1.0))
        with pytest.raises(ValueError, match=r"weights must be float32 \[1, 2, 8\]"):
            module.page_lse(rows, Records(records, form, torch.ones(2, 8)), logits=Logits(1.0))
    with pytest.raises(UnsupportedError, match="float64"):
        summaries_kernel.compress_pages(keys.double(), form)
    with pytest.raises(UnsupportedError, match="float64"):
        low_rank_kernel.page_lse(rows.double(), Records(records, form), logits=Logits(1.0))
    with pytest.raises(UnsupportedError, match="head dims above 256"):
        summaries_kernel.compress_pages(draw(1, 1, 4, 257), PageRecord(257, 4))
    odd = torch.zeros(1, 2, 2, form.bytes + 1, dtype=torch.uint8)[..., 1:]
    with pytest.raises(UnsupportedError, match="multiples of 4 bytes"):
        low_rank_kernel.page_lse(rows, Records(odd, form), logits=Logits(1.0))
    none = Records(records[:, :, :0], form)
    assert low_rank_kernel.page_lse(rows, none, logits=Logits(1.0)).shape == (1, 2, 3, 0)
    assert summaries_kernel.compress_pages(keys[:, :, :0], form).shape == (1, 2, 0, form.bytes)


def test_what_is_refused_of_given_pages_and_of_pooling():
    form, q = PageRecord(8, 4), draw(2, 6, 1, 8)
    memory, rows = summaries.compress_pages(draw(2, 2, 8, 8), form), q.view(2, 2, 3, 8)
    records = Records(memory, form)
    pages = torch.zeros(2, 2, 1, dtype=torch.int32)
    for module in (low_rank, low_rank_kernel):
        for wrong, branch in ((pages[:1], 1), (pages.expand(-1, 2, -1)[:, :, 0], 1), (pages, 0)):
            with pytest.raises(ValueError, match="do not fit records"):
                module.page_lse(rows, records, logits=Logits(1.0), pages=wrong, branch=branch)
        with pytest.raises(ValueError, match="do not fit records"):
            module.page_lse(rows, records, logits=Logits(1.0), pages=pages.repeat(1, 2, 1))
        for wrong in ({"pooling": "pre_softmax"}, {"pool": "head"}):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                module.pooled_mass_of_records(q, records, logits=Logits(1.0), **wrong)
        none = Records(memory[:, :, :0], form)
        nothing = module.pooled_mass_of_records(q, none, logits=Logits(1.0), pool="layer")
        assert nothing.shape == (2, 1, 0)


def test_pooled_masses_of_weighted_channels_and_capped_logits():
    form, weights = PageRecord(16, 8), powers(2, 2, 16)
    keys, q = draw(2, 2, 21 * 8, 16), draw(2, 6, 1, 16, seed=1)
    records = summaries.compress_pages(keys, form, weights)
    logits, lengths = Logits(1.0, softcap=2.0), torch.tensor([21, 0])
    given = Records(records, form, weights, lengths=lengths)
    found, expected = (module.pooled_mass_of_records(q, given, logits=logits) for module in (low_rank_kernel, low_rank))
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=1e-6)
    for one, how in ((Records(records, form, lengths=lengths), logits), (given, Logits(1.0))):
        other = low_rank.pooled_mass_of_records(q, one, logits=how)
        assert (other - expected)[0].abs().max() > 1e-3

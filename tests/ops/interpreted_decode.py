"""The kernels of decoding against their references, in numbers that Triton's interpreter gets right."""

import math

import pytest
import torch

from foveate import ops
from foveate.ops import KV, Logits
from foveate.ops.attend import decode, decode_kernel, newest
from foveate.ops.attend.pooled import attend_pooled
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu import tiles as gpu_tiles
from foveate.ops.score import pooled, pooled_kernel
from foveate.ops.select import rows_kernel
from tests.combinations import every_pair
from tests.problems import in_blocks, in_buffer, of_rows

pytestmark = pytest.mark.usefixtures("poisoned")


def problem(batch=2, heads=6, kv_heads=2, number=150, dim=16, value_dim=None, dtype=torch.float32, seed=0):
    """``q, k, v``: one query a row."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, 1, dim, generator=generator).to(dtype)
    k = torch.randn(batch, kv_heads, number, dim, generator=generator).to(dtype)
    v = torch.randn(batch, kv_heads, number, value_dim or dim, generator=generator).to(dtype)
    return q, k, v


def selection(batch, heads, number, places, seed=0):
    """Keys in any order ``[B, heads, K]``, unused places among and after them; the second row has none."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(batch, heads, max(number, places), generator=generator).argsort(-1)[..., :places]
    unused = (drawn >= number) | (torch.rand(drawn.shape, generator=generator) < 0.2)
    unused[..., places - places // 4 :] = True
    unused[1:2] = True
    return drawn.masked_fill(unused, -1).to(torch.int32)


def close(found, expected, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(found.out, expected.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-4, atol=1e-4)


def check(q, k, v, indices=None, mask=None, lengths=None):
    """Against the reference over keys of which none is NaN."""
    more = {"logits": Logits(0.3), "need_lse": True}
    k_, v_ = k.nan_to_num(0.0), v.nan_to_num(0.0, 0.0)
    if indices is not None:
        found = decode_kernel.attend_indices(q, KV(k, v), indices, counts=lengths, **more)
        expected = decode.attend_indices(q, KV(k_, v_), indices, counts=lengths, **more)
    else:
        found = decode_kernel.attend(q, KV(k, v, lengths=lengths), mask=mask, **more)
        expected = decode.attend(q, KV(k_, v_, lengths=lengths), mask=mask, **more)
    close(found, expected, q.dtype)
    return found


@pytest.fixture(params=[1, 100], ids=["one program", "many programs"])
def splits(request, monkeypatch):
    """Few programs, and so many multiprocessors that keys are split."""
    for kernel in (decode_kernel, pooled_kernel, rows_kernel):
        monkeypatch.setattr(kernel, "multiprocessors", lambda device: request.param)


HALF = ("dtype", [torch.float32, torch.float16])
POOLING = ("pooling", ["post_softmax", "sqrt", "max", "max_logit"])
POOL = ("pool", ["kv_head", "layer"])
SPLITS = ("splits", [1, 100])


@every_pair(("number", [1, 32, 150]), HALF, SPLITS, indirect=["splits"])
def test_all_keys(dtype, number, splits):
    check(*problem(number=number, dtype=dtype))


@every_pair(
    ("queries", [2, 5]),
    ("lengths", [None, [150, 5], [33, 97]]),
    ("extra", [{}, {"softcap": 2.0}, {"sinks": True}]),
    ("dims", [(16, 16), (24, 40)]),
    HALF,
    SPLITS,
    indirect=["splits"],
)
def test_the_newest_tokens(queries, lengths, extra, dims, dtype, splits):
    """Of every row, each with the keys up to its own, and what stands after a row's keys is not read."""
    _, k, v = problem(dim=dims[0], value_dim=dims[1], dtype=dtype)
    q = problem(number=1, heads=6 * queries, dim=dims[0], dtype=dtype)[0].view(2, 6, queries, -1)
    sinks = torch.linspace(-1, 2, 6).to(dtype) if extra.get("sinks") else None
    how = {"logits": Logits(0.3, sinks, extra.get("softcap"))}
    ends = None if lengths is None else torch.tensor(lengths)
    if lengths is not None:
        for b, length in enumerate(lengths):
            k[b, :, length:] = v[b, :, length:] = float("nan")
    found = decode_kernel.attend_newest(q, KV(k, v, lengths=ends), **how).out
    expected = newest.attend_newest(q, KV(k.nan_to_num(0.0), v.nan_to_num(0.0), lengths=ends), **how).out
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    *memory, table = in_blocks(k, v, 16)
    assert torch.equal(decode_kernel.attend_newest(q, KV(*memory, table, ends), **how).out, found)


@every_pair(("of_heads", [1, 2]), ("of_rows", [1, 2]), HALF, SPLITS, indirect=["splits"], strength=3)
def test_keys_that_a_mask_leaves(dtype, of_heads, of_rows, splits):
    q, k, v = problem(dtype=dtype)
    mask = torch.rand(of_rows, of_heads, 1, 150, generator=torch.manual_seed(1)) < 0.5
    mask[:, :, :, 100:], mask[-1, :, :, 40:] = False, False
    unread = ~mask.expand(2, 2, 1, 150)[:, :, 0]
    k[unread], v[unread] = torch.nan, torch.inf
    check(q, k, v, mask=mask)
    mask[-1] = False
    found = check(q, k, v, mask=mask)
    assert not found.out[-1].any()
    assert found.lse[-1].isneginf().all()


LENGTHS = {
    "rows": torch.tensor([150, 33]),
    "rows, the second without any": torch.tensor([70, 0], dtype=torch.int32),
    "heads": torch.tensor([[1, 150], [64, 5]], dtype=torch.int32),
}


@every_pair(("lengths", LENGTHS), ("masked", [False, True]), HALF, SPLITS, indirect=["splits"], strength=3)
def test_the_first_keys_alone(dtype, lengths, masked, splits):
    q, k, v = problem(dtype=dtype)
    lengths = LENGTHS[lengths]
    mask = torch.rand(2, 1, 1, 150, generator=torch.manual_seed(1)) < 0.5 if masked else None
    beyond = torch.arange(150) >= lengths.view(2, -1, 1).expand(-1, 2, -1)
    k[beyond], v[beyond] = torch.nan, torch.inf
    check(q, k, v, mask=mask, lengths=lengths)
    indices = selection(2, 2, 150, 150)
    chosen = indices.masked_fill(beyond, -1)
    k, v = k.nan_to_num(0.5), v.nan_to_num(0.5, posinf=0.5)
    found = check(q, k, v, indices, lengths=lengths)
    close(found, decode_kernel.attend_indices(q, KV(k, v), chosen, logits=Logits(0.3), need_lse=True), dtype)


@every_pair(("places", [1, 33, 140]), HALF, SPLITS, indirect=["splits"])
def test_chosen_keys(dtype, places, splits):
    q, k, v = problem(value_dim=5, dtype=dtype)
    indices = selection(2, 2, 150, places)
    for b in range(2):
        for head in range(2):
            unread = ~torch.isin(torch.arange(150), indices[b, head])
            k[b, head, unread], v[b, head, unread] = torch.nan, torch.inf
    found = check(q, k, v, indices)
    assert not found.out[1].any()
    assert found.lse[1].isneginf().all()
    check(q, k, v, indices.long())
    check(q, k, v, indices[:, :1].expand(-1, 2, -1).clamp_max(-1))


def test_memory_for_the_output(splits):
    q, k, v = problem(value_dim=5)
    for attend, chosen in ((decode_kernel.attend, ()), (decode_kernel.attend_indices, (selection(2, 2, 150, 33),))):
        out = torch.full((2, 6, 1, 5), torch.nan)
        found = attend(q, KV(k, v), *chosen, logits=Logits(0.3), out=out).out
        assert found.data_ptr() == out.data_ptr()
        assert torch.equal(out, attend(q, KV(k, v), *chosen, logits=Logits(0.3)).out)


@pytest.mark.parametrize("stored", [torch.int32, torch.int64])
def test_keys_that_another_head_has_chosen(stored, splits):
    q, k, v = problem(heads=12, kv_heads=4)
    indices, heads = selection(2, 4, 150, 70).to(stored), torch.tensor([[2, 9], [2, 9], [0, 9], [3, 9]])[:, 0]
    expected = decode.attend_indices(q, KV(k, v), indices[:, [2, 2, 0, 3]], logits=Logits(0.3), need_lse=True)
    for attend in (decode_kernel.attend_indices, decode.attend_indices):
        close(attend(q, KV(k, v), indices, logits=Logits(0.3), need_lse=True, heads=heads), expected, q.dtype)


@pytest.mark.parametrize(("dim", "value_dim"), [(5, 5), (24, 64), (64, 80), (80, 64), (192, 128), (256, 256)])
def test_head_dims(dim, value_dim):
    q, k, v = problem(1, 3, 1, 40, dim, value_dim)
    check(q, k, v)
    check(q, k, v, selection(1, 1, 40, 20))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (7, 1), (6, 6), (12, 2), (40, 2), (130, 1)])
def test_groups(heads, kv_heads, splits):
    q, k, v = problem(1, heads, kv_heads, 60)
    check(q, k, v)
    check(q, k, v, selection(1, kv_heads, 60, 20))


@pytest.mark.parametrize("layout", ["slots", "tokens_first", "padded_rows"])
def test_strides_among_nan(layout, splits):
    q, k, v = (in_buffer(x, layout) for x in problem(value_dim=24))
    check(q, k, v)
    check(q, k, v, torch.stack([selection(2, 2, 150, 20), torch.full((2, 2, 20), 5)], -1)[..., 0])


def test_what_was_not_asked_for_is_none():
    q, k, v = problem()
    assert decode_kernel.attend(q, KV(k, v), logits=Logits(1.0)).lse is None
    assert decode_kernel.attend_indices(q, KV(k, v), selection(2, 2, 150, 3), logits=Logits(1.0)).lse is None


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("lengths", [None, *LENGTHS.values()], ids=["all", *LENGTHS])
def test_the_mass_of_the_keys(masked, lengths):
    q, k, v = problem()
    mask = torch.rand(2, 2, 1, 150, generator=torch.manual_seed(1)) < 0.5 if masked else None
    kv, more = KV(k, v, lengths=lengths), {"logits": Logits(0.3), "mask": mask, "need_lse": True, "need_mass": True}
    found, expected = decode_kernel.attend(q, kv, **more), decode.attend(q, kv, **more)
    close(found, expected, q.dtype)
    torch.testing.assert_close(found.mass, expected.mass)


@every_pair(("level", [-20.0, 0.0, 20.0, float("-inf")]), ("masked", [False, True]), HALF, SPLITS, indirect=["splits"])
def test_learned_sinks(dtype, level, masked, splits):
    """They take their share of every head's attention, and of the mass of the keys; of rows without keys all."""
    q, k, v = problem(dtype=dtype)
    sinks = torch.stack([torch.randn(6, generator=torch.manual_seed(0)) + level, torch.zeros(6)], 1).to(dtype)[:, 0]
    mask = torch.rand(2, 1, 1, 150, generator=torch.manual_seed(1)) < 0.5 if masked else None
    kv = KV(k, v, lengths=torch.tensor([150, 0]))
    more, logits = {"mask": mask, "need_lse": True, "need_mass": True}, Logits(0.3, sinks)
    found = decode_kernel.attend(q, kv, logits=logits, **more)
    expected = decode.attend(q, kv, logits=logits, **more)
    close(found, expected, dtype)
    torch.testing.assert_close(found.mass, expected.mass, rtol=2e-3, atol=2e-5)
    assert not found.out[1].any()
    torch.testing.assert_close(found.lse[1, :, 0], sinks.float())
    without = decode_kernel.attend(q, kv, logits=Logits(0.3), **more)
    assert torch.allclose(found.out, without.out, atol=1e-6) == (level < 0)

    indices, more = selection(2, 2, 150, 70), {"logits": logits, "need_lse": True}
    found, expected = (one.attend_indices(q, KV(k, v), indices, **more) for one in (decode_kernel, decode))
    close(found, expected, dtype)
    pages = torch.tensor([[3, 0, -1, 9], [1, -1, -1, -1]], dtype=torch.int32).expand(2, 2, 4)
    found, expected = (one.attend_pages(q, KV(k, v), pages, 15, **more) for one in (decode_kernel, decode))
    close(found, expected, dtype)
    with pytest.raises(ValueError, match="one logit for each of 6 heads"):
        ops.attend(q, KV(k, v), logits=Logits(0.3, sinks[:5]))


@every_pair(POOLING, POOL, HALF, SPLITS, indirect=["splits"])
def test_pooled_mass_beside_learned_sinks(dtype, pool, pooling, splits):
    q, k, v = problem(dtype=dtype)
    sinks = 5 + 2 * torch.randn(6, generator=torch.manual_seed(0))
    how = {"logits": Logits(0.3, sinks), "pooling": pooling, "pool": pool}
    expected = pooled.pooled_mass(q, KV(k), **how)
    close_enough = {"rtol": 2e-3, "atol": 1e-3 if pooling == "max_logit" else 1e-5}
    torch.testing.assert_close(pooled_kernel.pooled_mass(q, KV(k), **how), expected, **close_enough)
    found = decode_kernel.attend_pooled(q, KV(k, v), **how)
    close(found, attend_pooled(q, KV(k, v), **how), dtype)
    torch.testing.assert_close(found.mass, expected, **close_enough)
    without = pooled.pooled_mass(q, KV(k), **how | {"logits": Logits(0.3)})
    assert torch.allclose(expected, without, rtol=0.1) == (pooling == "max_logit")  # which no sink changes


@every_pair(
    ("softcap", [0.7, 5.0, 50.0]),
    ("masked", [False, True]),
    ("beside", [False, True]),
    HALF,
    SPLITS,
    indirect=["splits"],
)
def test_capped_logits(dtype, softcap, masked, beside, splits):
    """Some far beyond the cap. Learned sinks are not capped."""
    q, k, v = problem(dtype=dtype)
    mask = torch.rand(2, 1, 1, 150, generator=torch.manual_seed(1)) < 0.5 if masked else None
    sinks = torch.randn(6, generator=torch.manual_seed(0)) if beside else None
    how = {"logits": Logits(2.0, sinks, softcap), "need_lse": True}
    kv, more = KV(k, v, lengths=torch.tensor([150, 77])), {"mask": mask, "need_mass": True}
    found, expected = (one.attend(q, kv, **more, **how) for one in (decode_kernel, decode))
    close(found, expected, dtype)
    torch.testing.assert_close(found.mass, expected.mass, rtol=4e-3, atol=2e-5)
    without = decode_kernel.attend(q, kv, **more, **how | {"logits": Logits(2.0, sinks)})
    assert not torch.allclose(found.out, without.out, rtol=0.01, atol=0.01)

    indices = selection(2, 2, 150, 70)
    found, expected = (one.attend_indices(q, KV(k, v), indices, **how) for one in (decode_kernel, decode))
    close(found, expected, dtype)
    pages = torch.tensor([[3, 0, -1, 9], [1, -1, -1, -1]], dtype=torch.int32).expand(2, 2, 4)
    found, expected = (one.attend_pages(q, KV(k, v), pages, 15, **how) for one in (decode_kernel, decode))
    close(found, expected, dtype)


@every_pair(
    ("whole", [(0, 0, 0), (0, 150, 33), (90, 0, 1)]),
    ("bounded", [False, True]),
    ("places", [20, 150]),
    ("of_pages", [False, True]),
    HALF,
    SPLITS,
    indirect=["splits"],
)
def test_rows_that_read_their_first_keys_instead_of_the_chosen_ones(dtype, whole, bounded, places, of_pages, splits):
    """More of them than there are places, too; what was chosen there, and keys after them, may be anything."""
    q, k, v = problem(batch=3, dtype=dtype)
    whole = torch.tensor(whole)
    k_, v_ = k.clone(), v.clone()
    for row in whole.nonzero()[:, 0]:
        k[row, :, whole[row] :], v[row, :, whole[row] :] = torch.nan, torch.inf
        k_[row, :, whole[row] :], v_[row, :, whole[row] :] = 0, 0
    how, lengths = {"logits": Logits(0.3), "need_lse": True}, None
    if of_pages:
        pages = torch.tensor([3, 0, -1, 9, 2], dtype=torch.int32)[: max(2, places // 30)].expand(3, 2, -1)
        chosen, name, size = pages, "attend_pages", (15,)
        lengths = torch.tensor([150, 150, 140]) if bounded else None
    else:
        chosen, name, size = selection(3, 2, 150, places), "attend_indices", ()
        how["counts"] = torch.tensor([10, 3, 0]) if bounded else None
    clean = KV(k_, v_, lengths=lengths)
    found = getattr(decode_kernel, name)(q, KV(k, v, lengths=lengths), chosen, *size, whole=whole, **how)
    close(found, getattr(decode, name)(q, clean, chosen, *size, whole=whole, **how), dtype)
    for block_size in (16, 40):
        *memory, table = in_blocks(k, v, block_size, "side_by_side")
        blocks = KV(*memory, table, lengths)
        in_pieces = getattr(decode_kernel, name)(q, blocks, chosen, *size, whole=whole, **how)
        assert torch.equal(in_pieces.out, found.out)
    sparse = getattr(decode, name)(q, clean, chosen, *size, **how)
    dense = decode.attend(q, KV(k_, v_, lengths=whole), logits=Logits(0.3), need_lse=True)
    rows = (whole > 0)[:, None, None]
    expected = dense.out.where(rows[..., None], sparse.out), dense.lse.where(rows, sparse.lse)
    close(found, ops.Attended(*expected), dtype)


@every_pair(POOLING, POOL, HALF)
def test_the_first_key_that_is_not_there_has_no_score(pooling, pool, dtype):
    """Of a row without keys, too, and of one whose keys fill what programs pool at once."""
    q, k, v = problem(3, number=600, dtype=dtype)
    lengths = torch.tensor([0, 256, 512])
    kv, how = KV(k, v, lengths=lengths), {"logits": Logits(0.3), "pooling": pooling, "pool": pool}
    for found in (pooled_kernel.pooled_mass(q, kv, **how), decode_kernel.attend_pooled(q, kv, **how).mass):
        assert all(found[row, :, length].isneginf().all() for row, length in enumerate(lengths))
        torch.testing.assert_close(
            of_rows(found, lengths), pooled.pooled_mass(q, kv, **how), **tolerance(dtype, pooling)
        )


@every_pair(POOLING, POOL, ("softcap", [0.7, 50.0]), HALF, SPLITS, indirect=["splits"])
def test_pooled_mass_of_capped_logits(dtype, softcap, pool, pooling, splits):
    q, k, v = problem(dtype=dtype)
    how = {"logits": Logits(2.0, softcap=softcap), "pooling": pooling, "pool": pool}
    expected = pooled.pooled_mass(q, KV(k), **how)
    torch.testing.assert_close(pooled_kernel.pooled_mass(q, KV(k), **how), expected, rtol=4e-3, atol=1e-5)
    found = decode_kernel.attend_pooled(q, KV(k, v), **how)
    close(found, attend_pooled(q, KV(k, v), **how), dtype)
    torch.testing.assert_close(found.mass, expected, rtol=4e-3, atol=1e-5)
    assert not torch.allclose(
        expected, pooled.pooled_mass(q, KV(k), **how | {"logits": Logits(2.0)}), rtol=4e-3, atol=1e-5
    )


def test_no_keys():
    q, k, v = problem(number=0)
    found = decode_kernel.attend(q, KV(k, v), logits=Logits(1.0), need_lse=True)
    assert not found.out.any()
    assert found.lse.isneginf().all()


def test_several_queries_are_the_librarys():
    q, k, v = problem()
    q = q.expand(-1, -1, 3, -1)
    expected = decode.attend(q, KV(k, v), logits=Logits(0.3))
    assert torch.equal(decode_kernel.attend(q, KV(k, v), logits=Logits(0.3)).out, expected.out)


def test_what_attention_refuses():
    q, k, v = problem()
    indices, (wide, wide_k, wide_v) = selection(2, 2, 150, 8), problem(dim=257)
    with pytest.raises(UnsupportedError, match="float64"):
        decode_kernel.attend(q.double(), KV(k.double(), v.double()), logits=Logits(1.0))
    with pytest.raises(UnsupportedError, match="head dims above 256"):
        decode_kernel.attend(wide, KV(wide_k, wide_v), logits=Logits(1.0))
    with pytest.raises(UnsupportedError, match="the mass of the keys"):
        decode_kernel.attend_indices(q, KV(k, v), indices, logits=Logits(1.0), need_mass=True)
    with pytest.raises(UnsupportedError, match="more than one query"):
        decode_kernel.attend_indices(q.expand(-1, -1, 2, -1), KV(k, v), indices, logits=Logits(1.0))


@pytest.mark.parametrize("rows", [1, 8, 512])
@pytest.mark.parametrize("blocks", [0, 1, 7, 2048, 8192])
def test_splits_cover_all_blocks_and_none_is_empty(rows, blocks):
    splits, each = gpu_tiles.split(rows, blocks, 264)
    assert splits * each >= blocks
    assert (splits - 1) * each < max(blocks, 1)
    assert blocks < 64 or rows * splits >= min(264, rows * 128)


def check_mass(q, k, lengths=None, **more):
    found = of_rows(pooled_kernel.pooled_mass(q, KV(k, lengths=lengths), logits=Logits(0.3), **more), lengths)
    expected = pooled.pooled_mass(q, KV(k.nan_to_num(0.0), lengths=lengths), logits=Logits(0.3), **more)
    torch.testing.assert_close(found, expected, **tolerance(q.dtype, more.get("pooling")))
    return found


def tolerance(dtype, pooling=None):
    """Half a step of a logit, and the error of fp16 products: of a mass relative, of a logit absolute."""
    if dtype == torch.float32:
        return {"rtol": 1e-5, "atol": 1e-5 if pooling == "max_logit" else 1e-9}
    return {"rtol": 1e-4, "atol": 1e-3} if pooling == "max_logit" else {"rtol": 3e-4, "atol": 1e-9}


@every_pair(("number", [1, 130, 1500]), POOLING, POOL, HALF, SPLITS, indirect=["splits"], strength=3)
def test_pooled_mass(dtype, pooling, pool, number, splits):
    q, k, _ = problem(number=number, dtype=dtype)
    check_mass(q * 3, k, pooling=pooling, pool=pool)


@every_pair(("ragged", [False, True]), POOLING, POOL, HALF, SPLITS, indirect=["splits"], strength=3)
def test_attention_with_pooled_mass_of_the_same_pass(dtype, pooling, pool, ragged, splits):
    q, k, v = problem(number=300, dtype=dtype)
    lengths, more = None, {"logits": Logits(0.3), "pooling": pooling, "pool": pool}
    if ragged:
        lengths = torch.tensor([[300, 17], [0, 131]])
        beyond = torch.arange(300) >= lengths[:, :, None]
        k[beyond], v[beyond] = torch.nan, torch.inf
    found = decode_kernel.attend_pooled(q, KV(k, v, lengths=lengths), **more)
    expected = attend_pooled(q, KV(k.nan_to_num(0.0), v.nan_to_num(0.0, 0.0), lengths=lengths), **more)
    close(found, expected, dtype)
    mass = of_rows(found.mass, lengths)
    torch.testing.assert_close(mass, expected.mass, **tolerance(dtype, pooling))


@every_pair(
    ("lengths", [[300, 41], [[129, 300], [64, 5]]]),
    ("pooling", ["sqrt", "max", "max_logit"]),
    POOL,
    HALF,
    SPLITS,
    indirect=["splits"],
    strength=3,
)
def test_pooled_mass_of_the_first_keys(dtype, pool, pooling, lengths, splits):
    q, k, _ = problem(number=300, dtype=dtype)
    lengths = torch.tensor(lengths)
    k[torch.arange(300) >= lengths.view(2, -1, 1).expand(-1, 2, -1)] = torch.nan
    check_mass(q, k, lengths=lengths, pool=pool, pooling=pooling)


def test_masses_that_are_nothing_in_16_bits():
    q, k, _ = problem(1, 2, 1, 60, dtype=torch.float16)
    k[0, 0, 7] = 400 * q[0, 0, 0] / q[0, 0, 0].float().norm()
    found = pooled_kernel.pooled_mass(q, KV(k), logits=Logits(1.0))
    expected = pooled.pooled_mass(q, KV(k), logits=Logits(1.0))
    torch.testing.assert_close(found, expected, rtol=3e-4, atol=2.0**-32)


def test_logits_far_below_their_blocks_largest_in_16_bits():
    """They count as being at the floor of their head's block, so that their keys can still be chosen."""
    q, k, _ = problem(1, 2, 1, 60, dtype=torch.float16)
    k[0, 0, 7] = 400 * q[0, 0, 0] / q[0, 0, 0].float().norm()
    logits = torch.einsum("hd,nd->hn", q[0, :, 0].double(), k[0, 0].double())
    floors = logits.amax(1, keepdim=True) - 65535 / 512 * math.log(2)
    assert bool((logits[0, :7] < floors[0] - 100).all())
    found = pooled_kernel.pooled_mass(q, KV(k), logits=Logits(1.0), pooling="max_logit")
    torch.testing.assert_close(found[0, 0], logits.maximum(floors).amax(0).float(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("layout", ["slots", "tokens_first", "padded_rows"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(7, 1, 24), (6, 6, 80), (130, 1, 16), (4, 2, 256)])
def test_pooled_mass_of_groups_and_strides(layout, heads, kv_heads, dim, splits):
    q, k, _ = (in_buffer(x, layout) for x in problem(1, heads, kv_heads, 50, dim))
    check_mass(q, k)


def test_what_pooled_mass_refuses():
    (q, k, _), (wide, wide_k, _) = problem(), problem(dim=257)
    assert pooled_kernel.pooled_mass(q, KV(k[:, :, :0]), logits=Logits(1.0)).shape == (2, 2, 0)
    with pytest.raises(UnsupportedError, match="float64"):
        pooled_kernel.pooled_mass(q.double(), KV(k.double()), logits=Logits(1.0))
    with pytest.raises(UnsupportedError, match="head dims above 256"):
        pooled_kernel.pooled_mass(wide, KV(wide_k), logits=Logits(1.0))
    with pytest.raises(ValueError, match="do not fit one query a row"):
        pooled_kernel.pooled_mass(q.expand(-1, -1, 2, -1), KV(k), logits=Logits(1.0))
    with pytest.raises(UnsupportedError, match=r"float32 with keys in torch\.float16"):
        pooled_kernel.pooled_mass(q, KV(k.half()), logits=Logits(1.0))
    for function in (pooled.pooled_mass, pooled_kernel.pooled_mass):
        with pytest.raises(ValueError, match="pooling must be"):
            function(q, KV(k), logits=Logits(1.0), pooling="pre_softmax")
        with pytest.raises(ValueError, match="pool must be"):
            function(q, KV(k), logits=Logits(1.0), pool="head")

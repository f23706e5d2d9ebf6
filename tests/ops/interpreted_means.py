"""The kernels of mean keys against their references, in numbers that Triton's interpreter gets right: fp32 and fp16."""

import pytest
import torch
import torch.nn.functional as F

from foveate import ops
from foveate.ops import KV, Logits, _math
from foveate.ops.attend import chosen as chosen_keys
from foveate.ops.attend import means as merging
from foveate.ops.attend import means_kernel as merge_kernel
from foveate.ops.attend import tiles_kernel
from foveate.ops.compress import means, means_kernel
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.select import WORD_KEYS, TileKeys
from tests.combinations import every_pair
from tests.problems import LAYOUTS, Shape, assert_close, in_blocks, in_buffer, problem

SOME = Shape(batch=2, kv_heads=2, group=3, queries=41, offset=45, dim=16, value_dim=24)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks of tiles, of rows and of keys."""
    small = means_kernel.Tile(16, 32, num_warps=4, num_stages=1)
    monkeypatch.setattr(means_kernel, "tile_for", lambda dtype, dim: small)
    monkeypatch.setattr(merge_kernel, "_ROWS", 16)


def bits(shape, tile, share, heads=None, seed=0):
    """The bits of a share of the keys before each tile, for ``heads`` heads. Unused bits of a last word are 0."""
    generator = torch.Generator().manual_seed(seed)
    before = [tile * t for t in range(shape.offset // tile, -(-shape.keys // tile))]
    begins, starts = (
        F.pad(torch.tensor(numbers).cumsum(0), (1, 0))
        for numbers in ([-(-one // WORD_KEYS) for one in before], [int(share * one) for one in before])
    )
    words = torch.zeros(shape.batch, heads or shape.kv_heads, int(begins[-1]), dtype=torch.int32)
    for t, one in enumerate(before):
        keys = torch.rand(*words.shape[:2], one, generator=generator).argsort(-1)[..., : int(share * one)]
        ops.set_bits(words, keys[:, :, None].int(), begins[t : t + 2])
    return TileKeys(words, begins, starts, tuple(starts.tolist()))


def check_means(kv, chosen, tile, offset, heads=None, dtype=torch.float32):
    how = {"tile": tile, "offset": offset, "heads": heads}
    found = means_kernel.unchosen_means(kv, *chosen[:2], **how)
    expected = means.unchosen_means(kv, *chosen[:2], **how)
    assert torch.equal(found.numbers, expected.numbers)
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    return found


# unchosen_means


@every_pair(("tile", [1, 5, 16, 24, 32, 96]), ("share", [0.0, 0.1, 0.5, 1.0]), ("offset", [0, 14, 48, 333]))
def test_means_of_tiles(tile, share, offset, small_blocks):
    shape = SOME._replace(offset=offset)
    _, k, v = problem(shape, extra=5)
    check_means(KV(k, v), bits(shape, tile, share), tile, offset)


@DTYPES
@pytest.mark.parametrize(("dim", "value_dim"), [(5, 5), (40, 40), (128, 128), (256, 256), (24, 72)])
def test_head_dims_and_blocks_of_the_real_size(dtype, dim, value_dim):
    shape = SOME._replace(dim=dim, value_dim=value_dim, batch=1, kv_heads=1, offset=300)
    _, k, v = problem(shape, dtype=dtype)
    check_means(KV(k, v), bits(shape, 24, 0.3), 24, 300)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_keys_and_words(layout, small_blocks):
    _, k, v = problem(SOME, extra=3)
    chosen = bits(SOME, 8, 0.3)
    expected = check_means(KV(k, v), chosen, 8, 45)
    every_other = chosen._replace(words=chosen.words.repeat_interleave(2, 2)[..., ::2])
    found = check_means(KV(in_buffer(k, layout), in_buffer(v, layout)), every_other, 8, 45)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("heads", [[1, 1, 0], [2, 0, 1]])
def test_heads_that_read_the_choice_of_others(heads, small_blocks):
    shape = SOME._replace(kv_heads=3)
    _, k, v = problem(shape)
    chosen, heads = bits(shape, 8, 0.3), torch.tensor(heads)
    found = check_means(KV(k, v), chosen, 8, 45, heads)
    mapped = chosen._replace(words=chosen.words[:, heads])
    assert all(map(torch.equal, found, check_means(KV(k, v), mapped, 8, 45)))


def test_a_choice_of_the_layer(small_blocks):
    _, k, v = problem(SOME)
    chosen = bits(SOME, 8, 0.3, heads=1)
    of_all = chosen._replace(words=chosen.words.expand(-1, 2, -1))
    check_means(KV(k, v), of_all, 8, 45)


@pytest.mark.parametrize("block_size", [16, 24])
def test_keys_in_blocks(block_size, small_blocks):
    _, k, v = problem(SOME)
    chosen = bits(SOME, 8, 0.3)
    paged_k, paged_v, table = in_blocks(k, v, block_size)
    found = check_means(KV(paged_k, paged_v, table), chosen, 8, 45)
    assert all(map(torch.equal, found, check_means(KV(k, v), chosen, 8, 45)))


def test_keys_behind_the_last_tile_leave_no_trace(small_blocks):
    _, k, v = problem(SOME)
    chosen = bits(SOME, 8, 0.3)
    expected = check_means(KV(k, v), chosen, 8, 45)
    k[:, :, 80:], v[:, :, 80:] = float("nan"), float("inf")
    assert all(map(torch.equal, check_means(KV(k, v), chosen, 8, 45), expected))


def test_words_that_a_tile_does_not_have_count_as_none(small_blocks):
    _, k, v = problem(SOME)
    chosen = bits(SOME, 8, 0.5)
    short = torch.cat([chosen.words[:, :, first : first + 1] for first in chosen.begins[:-1].tolist()], 2)
    begins = torch.arange(len(chosen.begins))
    found = check_means(KV(k, v), chosen._replace(words=short, begins=begins), 8, 45)
    ones = ((short[..., None] >> torch.arange(32)) & 1).sum(-1)
    assert torch.equal(found.numbers, (means.tile_starts(begins, 8, 45) - ones).int())


def test_what_means_refuse():
    _, k, v = problem(SOME)
    chosen, how = bits(SOME, 8, 0.3), {"tile": 8, "offset": 45}
    with pytest.raises(UnsupportedError, match="float64"):
        means_kernel.unchosen_means(KV(k.double(), v.double()), *chosen[:2], **how)
    wide = problem(SOME._replace(dim=272))
    with pytest.raises(UnsupportedError, match="above 256"):
        means_kernel.unchosen_means(KV(*wide[1:]), *chosen[:2], **how)


# merge_means


def merge_problem(shape, tile, dtype=torch.float32, seed=0):
    """Queries, an output, a log-sum-exp, and means; some tiles have none, some stand for many keys."""
    generator = torch.Generator().manual_seed(seed)
    tiles = -(-(shape.offset % tile + shape.queries) // tile)

    def draw(*size):
        return torch.randn(size, generator=generator)

    heads = shape.kv_heads * shape.group
    q = draw(shape.batch, heads, shape.queries, shape.dim).to(dtype)
    out = draw(shape.batch, heads, shape.queries, shape.value_dim).to(dtype)
    numbers = torch.randint(0, 3000, (shape.batch, shape.kv_heads, tiles), generator=generator, dtype=torch.int32)
    numbers[:, :, ::3] = 0
    k, v = (draw(shape.batch, shape.kv_heads, tiles, dim) for dim in (shape.dim, shape.value_dim))
    lse = draw(*out.shape[:3]) + 6
    return q, out, lse, means.TileMeans(k, v, numbers)


def check_merge(q, out, lse, of_tiles, tile, offset, logits, into=None):
    how = {"tile": tile, "logits": logits, "offset": offset}
    expected = merging.merge_means(q, out, lse, of_tiles, **how)
    found = merge_kernel.merge_means(q, out, lse, of_tiles, **how, out=into)
    assert_close(found.out, expected.out, q.dtype)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-5, atol=1e-5)
    return found


@every_pair(
    ("tile", [1, 5, 16, 24]),
    ("group", [1, 3, 6]),
    ("offset", [0, 14, 48]),
    ("softcap", [None, 0.7, 50.0]),
    ("dtype", [torch.float32, torch.float16]),
)
def test_outputs_with_a_mean_key(tile, group, offset, softcap, dtype):
    shape = SOME._replace(group=group, offset=offset)
    check_merge(*merge_problem(shape, tile, dtype), tile, offset, Logits(0.3, softcap=softcap))


@pytest.mark.parametrize(("dim", "value_dim"), [(5, 5), (80, 80), (256, 256), (24, 72)])
def test_head_dims_of_the_merge(dim, value_dim):
    shape = SOME._replace(dim=dim, value_dim=value_dim, queries=20)
    check_merge(*merge_problem(shape, 8), 8, 45, Logits(0.3))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_queries_and_an_output_in_place(layout):
    q, out, lse, of_tiles = merge_problem(SOME, 8)
    expected = check_merge(q, out, lse, of_tiles, 8, 45, Logits(0.3))
    apart = means.TileMeans(*(F.pad(x, (0, 0, 1, 2))[:, :, 1:-2] for x in of_tiles[:2]), of_tiles.numbers)
    q, out = in_buffer(q, layout), in_buffer(out, layout)
    found = check_merge(q, out, lse.mT.contiguous().mT, apart, 8, 45, Logits(0.3), into=out)
    assert found.out.data_ptr() == out.data_ptr()
    assert torch.equal(out, expected.out)
    assert torch.equal(found.lse, expected.lse)


@DTYPES
def test_without_keys_that_are_not_chosen_nothing_changes(dtype):
    q, out, lse, of_tiles = merge_problem(SOME, 8, dtype)
    none = of_tiles._replace(numbers=torch.zeros_like(of_tiles.numbers))
    found = check_merge(q, out, lse, none, 8, 45, Logits(0.3))
    assert torch.equal(found.out, out)
    assert torch.equal(found.lse, lse)
    lse[:, :, 3], out[:, :, 3] = float("-inf"), 0.0  # a query that saw nothing
    found = check_merge(q, out, lse, none, 8, 45, Logits(0.3))
    assert not found.out.isnan().any()


def test_logits_of_mean_keys_far_above_and_below():
    q, out, lse, of_tiles = merge_problem(SOME, 8)
    for scaling in (-60.0, 60.0):
        found = check_merge(q, out, lse, of_tiles, 8, 45, Logits(scaling))
        assert found.out.isfinite().all()


def test_what_the_merge_refuses():
    q, out, lse, of_tiles = merge_problem(SOME, 8)
    how = {"tile": 8, "logits": Logits(0.3), "offset": 45}
    with pytest.raises(UnsupportedError, match="float64"):
        merge_kernel.merge_means(q.double(), out.double(), lse, of_tiles, **how)
    wide = means.TileMeans(of_tiles.k.double(), of_tiles.v.double(), of_tiles.numbers)
    with pytest.raises(UnsupportedError, match="float64"):
        merge_kernel.merge_means(q, out, lse, wide, **how)


# Both after attention


@every_pair(
    ("group", [3, 6]),
    ("heads", [None, [1, 0], "layer"]),
    ("sinks", [False, True]),
    ("softcap", [None, 5.0]),
    ("share", [0.0, 0.3, 1.0]),
    ("room", [1, 3000, 1 << 20]),
    ("dtype", [torch.float32, torch.float16]),
)
def test_attention_by_the_kernels_alone(group, heads, sinks, softcap, share, room, dtype, small_blocks, monkeypatch):
    """In pieces of any size, the same as by the references in one."""
    shape = SOME._replace(group=group, value_dim=16)
    q, k, v = problem(shape, dtype=dtype, extra=3)
    chosen = bits(shape, 8, share, heads=1 if heads == "layer" else None)
    sinks = torch.randn(2 * group, generator=torch.manual_seed(0)) if sinks else None
    how = {"tile": 8, "logits": Logits(0.3, sinks, softcap), "offset": 45, "with_means": True, "need_lse": True}
    how["heads"] = torch.tensor(heads) if isinstance(heads, list) else None
    expected = ops.attend_tile_keys(q, KV(k, v), chosen, **how)
    monkeypatch.setattr(_math, "SCRATCH_BYTES", room)
    monkeypatch.setattr(chosen_keys, "attend_tiles", tiles_kernel.attend_tiles)
    monkeypatch.setattr(chosen_keys, "unchosen_means", means_kernel.unchosen_means)
    monkeypatch.setattr(chosen_keys, "merge_means", merge_kernel.merge_means)
    found = ops.attend_tile_keys(q, KV(k, v), chosen, **how)
    assert_close(found.out, expected.out, dtype)
    assert_close(found.lse, expected.lse, dtype)

"""The kernels of tiles against their references, in numbers that Triton's interpreter gets right: fp32 and fp16."""

import pytest
import torch
import torch.nn.functional as F

from foveate import ops
from foveate.ops import KV, Logits, _math
from foveate.ops.attend import attend_tiles, tiles, tiles_kernel
from foveate.ops.attend import chosen as chosen_keys
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.score import reference
from foveate.ops.score import tiles_kernel as mass_kernel
from tests.combinations import every_pair
from tests.problems import LAYOUTS, Shape, assert_close, in_buffer, listed, problem

SOME = Shape(batch=1, kv_heads=1, group=2, queries=41, offset=14, dim=16, value_dim=16)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks of queries and of keys in everything."""
    for kernel in (tiles_kernel, mass_kernel):
        small = kernel.Tile(16, 16, num_warps=4, num_stages=1)
        monkeypatch.setattr(kernel, "tile_for", lambda dtype, dim, rows, small=small: small)


def selection(shape, tile, number, seed=0):
    """Random keys before each tile, ascending, -1 after them."""
    generator = torch.Generator().manual_seed(seed)
    lead = shape.offset % tile
    count = -(-(lead + shape.queries) // tile)
    chosen = torch.full((shape.batch, shape.kv_heads, count, number), -1, dtype=torch.int32)
    for b in range(shape.batch):
        for h in range(shape.kv_heads):
            for t in range(count):
                before = shape.offset - lead + t * tile
                some = torch.randperm(before, generator=generator)[: max(0, number - t % 3)].sort().values
                chosen[b, h, t, : len(some)] = some.to(torch.int32)
    return chosen


# attend_tiles


def check(q, k, v, indices, tile, offset):
    arguments = {"tile": tile, "logits": Logits(0.3), "offset": offset, **listed(indices)}
    out = tiles_kernel.attend_tiles(q, KV(k, v), **arguments).out
    assert out.dtype == q.dtype
    assert_close(out, tiles.attend_tiles(q, KV(k, v), **arguments).out, q.dtype)
    return out


@every_pair(("tile", [1, 5, 16, 24]), ("number", [0, 1, 16, 37]), ("offset", [0, 14, 48]))
def test_tiles_read_what_is_chosen_and_themselves(tile, offset, number, small_blocks):
    shape = SOME._replace(offset=offset)
    check(*problem(shape, extra=5), selection(shape, tile, number), tile, offset)


@DTYPES
@pytest.mark.parametrize("level", [-20.0, 0.0, 20.0, float("-inf")])
def test_learned_sinks(dtype, level, small_blocks):
    shape = SOME._replace(batch=2, kv_heads=2, group=3, queries=30)
    q, k, v = problem(shape, dtype=dtype)
    sinks = (torch.randn(6, generator=torch.manual_seed(0)) + level).to(dtype)
    how = {"tile": 8, "offset": 14, **listed(selection(shape, 8, 9))}
    out = tiles_kernel.attend_tiles(q, KV(k, v), logits=Logits(0.3, sinks), **how).out
    assert_close(out, tiles.attend_tiles(q, KV(k, v), logits=Logits(0.3, sinks), **how).out, dtype)
    assert torch.equal(out, tiles_kernel.attend_tiles(q, KV(k, v), logits=Logits(0.3), **how).out) == (level < 0)
    with pytest.raises(ValueError, match="one logit for each of 6 heads"):
        attend_tiles(q, KV(k, v), logits=Logits(0.3, sinks[:5]), **how)


@every_pair(
    ("dtype", [torch.float32, torch.float16]),
    ("softcap", [0.7, 5.0, 50.0]),
    ("beside", [False, True]),
)
def test_capped_logits(dtype, softcap, beside, small_blocks):
    """Some far beyond the cap. Learned sinks are not capped."""
    shape = SOME._replace(batch=2, kv_heads=2, group=3, queries=30)
    q, k, v = problem(shape, dtype=dtype)
    how = {"tile": 8, "offset": 14, **listed(selection(shape, 8, 9))}
    sinks = torch.randn(6, generator=torch.manual_seed(0)).to(dtype) if beside else None
    logits, without = Logits(3.0, sinks, softcap), Logits(3.0, sinks)
    out = tiles_kernel.attend_tiles(q, KV(k, v), logits=logits, **how).out
    assert_close(out, tiles.attend_tiles(q, KV(k, v), logits=logits, **how).out, dtype)
    assert not torch.allclose(
        out, tiles_kernel.attend_tiles(q, KV(k, v), logits=without, **how).out, rtol=0.01, atol=0.01
    )


@every_pair(
    ("dtype", [torch.float32, torch.float16]), ("softcap", [0.7, 5.0, 50.0]), ("rows", [2, 7, 40]), ("number", [9, 70])
)
def test_masses_of_capped_logits(dtype, softcap, rows, number, small_blocks):
    """In one block of queries, and in several."""
    generator = torch.Generator().manual_seed(0)
    queries, k = (torch.randn(1, 2, *size, 16, generator=generator).to(dtype) for size in ((3, rows), (number,)))
    begins = torch.tensor([0, 5, 80])
    logits = softcap * (3.0 * torch.einsum("bhtwd,bhnd->bhtwn", queries.float(), k.float()) / softcap).tanh()
    lse = logits.logsumexp(-1)
    found, expected = (
        one.tile_block_mass(queries, k, lse, begins, logits=Logits(3.0, softcap=softcap))
        for one in (mass_kernel, reference)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    total = found[:, :, 2].sum(-1)  # of a tile after all keys
    torch.testing.assert_close(total, torch.full_like(total, float(rows)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_any_tiles(seed, small_blocks):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    shape = SOME._replace(queries=draw(1, 60), offset=draw(0, 60), group=draw(1, 8), kv_heads=draw(1, 3))
    tile = draw(1, 30)
    check(*problem(shape, seed), selection(shape, tile, draw(0, 40), seed), tile, shape.offset)


@pytest.mark.parametrize(("group", "tile"), [(7, 18), (4, 32), (1, 128), (2, 100)])
def test_blocks_of_the_real_size(group, tile):
    shape = SOME._replace(group=group, queries=150, offset=77, dim=64)
    check(*problem(shape, dtype=torch.float16), selection(shape, tile, 70), tile, 77)


@DTYPES
@pytest.mark.parametrize(("dim", "value_dim"), [(5, 5), (40, 40), (80, 80), (128, 128), (256, 256), (24, 72)])
def test_head_dims_of_attention(dtype, dim, value_dim):
    shape = SOME._replace(dim=dim, value_dim=value_dim, queries=20)
    check(*problem(shape, dtype=dtype), selection(shape, 8, 9), 8, 14)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs_of_attention(layout):
    shape = SOME._replace(batch=2, kv_heads=2, queries=20, value_dim=24)
    chosen = selection(shape, 8, 9)
    every_other = torch.stack([chosen, torch.full_like(chosen, 3)], -1)[..., 0].long()
    q, k, v = problem(shape)
    expected = check(q, k, v, chosen, 8, 14)
    assert torch.equal(check(*(in_buffer(x, layout) for x in (q, k, v)), every_other, 8, 14), expected)


@pytest.mark.parametrize("mapped", [False, True])
def test_tiles_of_as_many_places_as_they_need(mapped, small_blocks):
    shape = SOME._replace(batch=2, kv_heads=2, queries=60)
    chosen = selection(shape, 8, 21)
    starts = torch.tensor([0, 0, 21, 26, 26, 47, 50, 71, 92, 113])
    numbers, place = starts.diff()[:, None], torch.arange(21)
    apart = chosen.masked_fill(place >= numbers, -1)
    ragged = torch.cat([chosen[:, :, t, : numbers[t]] for t in range(9)], 2)
    counts = (apart >= 0).sum(-1, dtype=torch.int32)
    assert torch.equal(tiles.side_by_side(ragged, starts, counts)[..., :21], apart)
    q, k, v = problem(shape, extra=3)
    heads = torch.tensor([1, 1]) if mapped else None
    how = {"tile": 8, "logits": Logits(0.3), "offset": 14, "heads": heads}
    own = {"starts": starts, "counts": counts}
    out = tiles_kernel.attend_tiles(q, KV(k, v), ragged, **own, **how).out
    assert torch.equal(out, tiles_kernel.attend_tiles(q, KV(k, v), **listed(apart), **how).out)
    assert_close(out, tiles.attend_tiles(q, KV(k, v), ragged, **own, **how).out, q.dtype)
    every_other = ragged.long().repeat_interleave(2, 2)[..., ::2]
    assert torch.equal(tiles_kernel.attend_tiles(q, KV(k, v), every_other, **own, **how).out, out)
    for wrong, said in ((own | {"starts": starts[1:]}, r"with starts \(9,\)"), (own, r"indices \(2, 2, 9, 21\)")):
        indices = chosen if wrong is own else ragged
        with pytest.raises(ValueError, match=said + ".* do not fit 9 tiles"):
            attend_tiles(q, KV(k, v), indices, **wrong, tile=8, logits=Logits(0.3), offset=14)


@pytest.mark.parametrize("attend", [tiles.attend_tiles, tiles_kernel.attend_tiles], ids=["reference", "kernel"])
def test_counts_and_an_output_that_are_given(attend, small_blocks):
    """The output is one part of a larger one, whose other parts stay; places beyond the counts may hold anything."""
    shape = SOME._replace(batch=2, kv_heads=2, queries=60)
    chosen = selection(shape, 8, 21)
    how = {"tile": 8, "logits": Logits(0.3), "offset": 14}
    q, k, v = problem(shape)
    given = listed(chosen)
    expected = attend(q, KV(k, v), **given, **how).out
    whole = q.new_full((2, 64, q.shape[1], v.shape[3]), 7.0).transpose(1, 2)
    found = attend(q, KV(k, v), **given, out=whole[:, :, 3:63], **how).out
    assert found.data_ptr() == whole[:, :, 3:63].data_ptr()
    assert torch.equal(found, expected)
    assert bool((whole[:, :, [0, 1, 2, 63]] == 7.0).all())
    fewer = given["counts"].clamp_max(5)
    first = listed(chosen.masked_fill(torch.arange(21) >= fewer[..., None], -1))
    assert torch.equal(
        attend(q, KV(k, v), **given | {"counts": fewer}, **how).out, attend(q, KV(k, v), **first, **how).out
    )
    for name, wrong in (
        ("counts", given["counts"][:, :, 1:]),
        ("counts", given["counts"].long()),
        ("out", whole[:, :, 3:62]),
        ("out", whole[:, :, 3:63].half()),
        ("out", q.new_empty(*q.shape[:2], v.shape[3], 60).transpose(2, 3)),
    ):
        with pytest.raises(ValueError, match=f"^{name} must be"):
            attend_tiles(q, KV(k, v), **given | {name: wrong}, **how)


@pytest.mark.parametrize("room", [1, 3000, 1 << 20])
def test_pieces_of_a_prompt_are_the_whole_bit_for_bit(room, small_blocks, monkeypatch):
    """Over keys as bits a kernel runs once a piece."""
    shape = SOME._replace(batch=2, kv_heads=2, queries=200, offset=45)
    q, k, v = problem(shape, extra=3)
    indices = selection(shape, 8, 11)
    before = 8 * torch.arange(5, 31)
    begins, starts = (
        F.pad(x.cumsum(0), (1, 0)) for x in (-(-before // ops.select.WORD_KEYS), torch.full_like(before, 11))
    )
    words = torch.zeros(2, 2, int(begins[-1]), dtype=torch.int32)
    ops.set_bits(words, indices, begins)
    monkeypatch.setattr(_math, "SCRATCH_BYTES", room)
    monkeypatch.setattr(chosen_keys, "attend_tiles", tiles_kernel.attend_tiles)
    how = {"tile": 8, "logits": Logits(0.3), "offset": 45}
    found = ops.attend_tile_keys(q, KV(k, v), ops.TileKeys(words, begins, starts, tuple(starts.tolist())), **how).out
    assert torch.equal(found, tiles_kernel.attend_tiles(q, KV(k, v), **listed(indices), **how).out)


@pytest.mark.parametrize("heads", [[1, 1, 0], [2, 0, 1]])
def test_heads_that_read_the_choice_of_others(heads):
    shape = SOME._replace(batch=2, kv_heads=3, queries=20)
    chosen, heads = selection(shape, 8, 9), torch.tensor(heads)
    chosen[:, 0, :, 4:], chosen[:, 2, 1:] = -1, -1  # some heads have fewer, or none
    q, k, v = problem(shape)
    check(q, k, v, chosen[:, heads], 8, 14)
    arguments = {"tile": 8, "logits": Logits(0.3), "offset": 14}
    mapped = tiles_kernel.attend_tiles(q, KV(k, v), **listed(chosen), heads=heads, **arguments).out
    assert torch.equal(mapped, tiles_kernel.attend_tiles(q, KV(k, v), **listed(chosen[:, heads]), **arguments).out)


def test_keys_that_are_not_chosen_leave_no_trace():
    shape = SOME._replace(queries=20, offset=32)
    q, k, v = problem(shape, extra=7)
    chosen = selection(shape, 16, 5)
    clean = check(q, k, v, chosen, 16, 32)
    read = set(chosen.flatten().tolist()) | set(range(32, 52))
    unread = [slot for slot in range(k.shape[2]) if slot not in read]
    k[:, :, unread], v[:, :, unread] = float("nan"), float("inf")
    assert torch.equal(
        tiles_kernel.attend_tiles(q, KV(k, v), **listed(chosen), tile=16, logits=Logits(0.3), offset=32).out, clean
    )


@every_pair(
    ("dtype", [torch.float32, torch.float16]),
    ("sinks", [None, 0.0, 20.0]),
    ("softcap", [None, 5.0]),
    ("group", [3, 6]),
    ("tile", [5, 16]),
)
def test_the_log_sum_exp(dtype, sinks, softcap, group, tile, small_blocks):
    """It costs no bit of the output."""
    shape = SOME._replace(batch=2, kv_heads=2, group=group)
    q, k, v = problem(shape, dtype=dtype, extra=5)
    drawn = torch.randn(2 * group, generator=torch.manual_seed(0))
    logits = Logits(0.3, None if sinks is None else (drawn + sinks).to(dtype), softcap)
    how = {"tile": tile, "logits": logits, "offset": 14, **listed(selection(shape, tile, 9))}
    found = tiles_kernel.attend_tiles(q, KV(k, v), **how, need_lse=True)
    expected = tiles.attend_tiles(q.float(), KV(k.float(), v.float()), **how, need_lse=True)
    assert found.lse.dtype == torch.float32
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 2e-3)
    alone = tiles_kernel.attend_tiles(q, KV(k, v), **how)
    assert torch.equal(found.out, alone.out)
    assert alone.lse is None


def test_what_attention_refuses():
    q, k, v = problem(SOME)
    chosen = selection(SOME, 8, 4)
    arguments = {"tile": 8, "logits": Logits(0.3), "offset": 14, **listed(chosen)}
    with pytest.raises(UnsupportedError, match="float64"):
        tiles_kernel.attend_tiles(q.double(), KV(k.double(), v.double()), **arguments)
    wide = problem(SOME._replace(dim=272))
    with pytest.raises(UnsupportedError, match="above 256"):
        tiles_kernel.attend_tiles(wide[0], KV(*wide[1:]), **arguments)
    with pytest.raises(ValueError, match=r"counts must be \(1, 1, 6\)"):
        attend_tiles(q, KV(k, v), **arguments | listed(chosen[:, :, :-1]))
    with pytest.raises(ValueError, match="k has 54 keys; offset 14 and 41 queries need 55"):
        attend_tiles(q, KV(k[:, :, :-1], v[:, :, :-1]), **arguments)
    with pytest.raises(ValueError, match="shapes do not fit"):
        attend_tiles(q, KV(k[..., :8], v), **arguments)


# tile_block_mass


def mass_problem(tiles=5, rows=12, keys=70, dim=16, batch=2, heads=2, dtype=torch.float32, seed=0):
    """Queries of tiles with their log-sum-exp over keys before them and themselves; one that adds nothing."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(batch, heads, tiles, rows, dim, generator=generator).to(dtype)
    k = torch.randn(batch, heads, keys, dim, generator=generator).to(dtype)
    lse = torch.randn(batch, heads, tiles, rows, generator=generator) + 3
    lse[:, :, 0, rows // 2 :] = float("inf")
    begins = torch.linspace(0, keys, tiles).long()
    return queries, k, lse, begins


def check_mass(queries, k, lse, begins):
    mass = mass_kernel.tile_block_mass(queries, k, lse, begins, logits=Logits(0.3))
    assert mass.dtype == torch.float32
    expected = reference.tile_block_mass(queries, k, lse, begins, logits=Logits(0.3))
    torch.testing.assert_close(mass, expected, rtol=1e-5 if k.dtype == torch.float32 else 2e-3, atol=1e-6)
    return mass


@pytest.mark.parametrize("rows", [1, 3, 8, 12, 16, 40])
@pytest.mark.parametrize("keys", [0, 1, 15, 70, 300])
def test_mass_of_tiles(rows, keys, small_blocks):
    check_mass(*mass_problem(rows=rows, keys=keys))


@pytest.mark.parametrize("rows", [5, 32, 64, 126, 128, 200])
def test_mass_in_blocks_of_the_real_size(rows):
    check_mass(*mass_problem(tiles=7, rows=rows, keys=333, dim=64, batch=1, dtype=torch.float16))


@DTYPES
@pytest.mark.parametrize("dim", [5, 40, 80, 128, 256])
def test_head_dims_of_mass(dtype, dim):
    check_mass(*mass_problem(dim=dim, batch=1, dtype=dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_keys_among_nan(layout):
    queries, k, lse, begins = mass_problem()
    expected = check_mass(queries, k, lse, begins)
    k = in_buffer(k, layout)
    assert torch.equal(check_mass(queries.transpose(3, 4).contiguous().transpose(3, 4), k, lse, begins), expected)


def test_keys_behind_a_tile_leave_no_trace():
    queries, k, lse, _ = mass_problem()
    begins = torch.full((5,), 33)
    clean = check_mass(queries, k, lse, begins)
    k[:, :, 33:] = float("nan")
    assert torch.equal(mass_kernel.tile_block_mass(queries, k, lse, begins, logits=Logits(0.3)), clean)


def test_what_mass_refuses():
    queries, k, lse, begins = mass_problem()
    with pytest.raises(UnsupportedError, match="float64"):
        mass_kernel.tile_block_mass(queries.double(), k.double(), lse, begins, logits=Logits(0.3))
    with pytest.raises(UnsupportedError, match="above 256"):
        mass_kernel.tile_block_mass(*mass_problem(dim=264), logits=Logits(0.3))


def test_the_verb_gives_the_same_with_the_kernel(monkeypatch):
    """`tile_mass` as a method calls it, in parts of tiles."""
    shape = SOME._replace(batch=2, kv_heads=2, queries=70, offset=13)
    q, k, v = problem(shape)
    lse = ops.attend_causal(q, KV(k, v), logits=Logits(0.3), offset=13, need_lse=True).lse
    how = {"tile": 8, "logits": Logits(0.3), "offset": 13}
    expected = list(ops.tile_mass(q, KV(k), lse, **how))
    monkeypatch.setattr(reference, "_block_mass", mass_kernel.tile_block_mass)
    found = list(ops.tile_mass(q, KV(k), lse, **how))
    for (first, mass), (also_first, also) in zip(expected, found, strict=True):
        assert first == also_first
        torch.testing.assert_close(mass, also)

"""The kernels of tiles on a GPU against their references: odd sizes, every dtype, strides, poison, repeats."""

import pytest
import torch

from foveate import methods, ops
from foveate.ops import KV, Logits, dispatch
from foveate.ops.attend import attend_tiles, tiles_hopper_kernel, tiles_kernel
from foveate.ops.attend import tiles as attend_reference
from foveate.ops.score import reference as score_reference
from foveate.ops.score import tiles_hopper_kernel as mass_hopper_kernel
from foveate.ops.score import tiles_kernel as mass_kernel
from foveate.runtime.decode import decode
from foveate.state.borrowed import cache_of
from tests.combinations import every_pair
from tests.helpers import in_buffer
from tests.kernels import poisoned_memory
from tests.problems import listed

pytestmark = pytest.mark.gpu

DTYPES = ("dtype", [torch.bfloat16, torch.float16, torch.float32])
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 2e-5}
HEADS = (("heads", "kv_heads"), [(1, 1), (8, 8), (9, 3), (14, 2), (12, 2), (32, 8), (16, 1)])


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch):
    """A reference that is reached without being asked for fails the test."""
    pytest.importorskip("triton")
    assert {"attend_tiles", "tile_block_mass"} <= set(dispatch.kernel_status().split(", "))
    monkeypatch.setattr(dispatch, "_say_once", lambda text: pytest.fail(text))


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels that ran."""
    names = []
    for module, name in ((tiles_kernel, "attend_tiles"), (mass_kernel, "tile_block_mass")):
        kernel = getattr(module, name)

        def counted(*args, kernel=kernel, name=name, **more):
            names.append(name)
            return kernel(*args, **more)

        monkeypatch.setattr(module, name, counted)
    return names


@pytest.fixture(params=[True, False], ids=["hopper", "portable"])
def hopper(request, monkeypatch):
    """With and without the kernels for Hopper alone; how often they ran is noted."""
    ran = []
    for module, own, name in (
        (tiles_kernel, tiles_hopper_kernel, "attend_tiles"),
        (mass_kernel, mass_hopper_kernel, "tile_block_mass"),
    ):
        monkeypatch.setattr(module, "_HOPPER", request.param)
        real = getattr(own, name)
        monkeypatch.setattr(own, name, lambda *a, real=real, **k: ran.append(True) or real(*a, **k))
    return ran if request.param and torch.cuda.get_device_capability() == (9, 0) else None


def problem(batch, heads, kv_heads, length, offset, dim, dtype, value_dim=None, extra=0):
    """``q, k, v``, the keys and values with ``extra`` NaN after them."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*size):
        return torch.randn(size, generator=generator, device="cuda").to(dtype)

    q = draw(batch, heads, length, dim)
    k, v = (draw(batch, kv_heads, offset + length + extra, size) for size in (dim, value_dim or dim))
    k[:, :, offset + length :], v[:, :, offset + length :] = float("nan"), float("nan")
    return q, k, v


def selection(batch, kv_heads, length, offset, tile, number):
    """Some keys before each tile, ascending, -1 after them."""
    generator = torch.Generator("cuda").manual_seed(1)
    lead = offset % tile
    count = -(-(lead + length) // tile)
    before = offset - lead + tile * torch.arange(count, device="cuda")
    drawn = torch.rand(batch, kv_heads, count, number, generator=generator, device="cuda").double()
    chosen = (drawn * before[:, None]).long().sort(-1).values
    chosen[..., 1:][chosen[..., 1:] == chosen[..., :-1]] = -1  # a key is chosen once
    chosen[before[None, None, :, None].expand_as(chosen) == 0] = -1
    last = torch.iinfo(torch.int64).max
    chosen = chosen.masked_fill(chosen < 0, last).sort(-1).values
    return chosen.masked_fill(chosen == last, -1).to(torch.int32)


def check(q, k, v, chosen, tile, offset):
    arguments = {"tile": tile, "logits": Logits(q.shape[-1] ** -0.5), "offset": offset, **listed(chosen)}
    with poisoned_memory("cuda"):
        out = attend_tiles(q, KV(k, v), **arguments).out
        assert torch.equal(out, attend_tiles(q, KV(k, v), **arguments).out), "repeats are equal bit for bit"
    assert out.dtype == q.dtype
    exact = attend_reference.attend_tiles(q.double(), KV(k.double(), v.double()), **arguments).out
    torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[q.dtype], atol=TOLERANCE[q.dtype])
    return out


@every_pair(
    DTYPES,
    ("tile", [1, 18, 32, 100, 128, 200]),
    (
        ("length", "offset", "number"),
        [(1, 0, 3), (1, 777, 90), (63, 65, 7), (129, 1000, 300), (333, 0, 64), (1500, 5, 130)],
    ),
)
def test_attention_of_tiles(dtype, tile, length, offset, number, launches):
    chosen = selection(2, 2, length, offset, tile, number)
    check(*problem(2, 14, 2, length, offset, 64, dtype, extra=50), chosen, tile, offset)
    assert launches == ["attend_tiles"] * 2


@every_pair(
    ("dtype", [torch.bfloat16, torch.float16]),
    ("dim", [64, 80, 96, 128, 256]),
    (("heads", "kv_heads", "tile"), [(32, 8, 32), (8, 8, 128), (14, 2, 18), (16, 2, 100), (12, 2, 11), (8, 8, 65)]),
    (("length", "offset", "number"), [(1, 0, 3), (1, 7000, 900), (63, 65, 7), (333, 0, 64), (1500, 5, 130)]),
)
def test_hoppers_own_attention(dtype, dim, heads, kv_heads, tile, length, offset, number, hopper):
    chosen = selection(2, kv_heads, length, offset, tile, number)
    q, k, v = problem(2, heads, kv_heads, length, offset, dim, dtype, extra=50)
    check(q, k, v + 2, chosen, tile, offset)  # a weight too many is seen
    assert hopper is None or len(hopper) == 2


@every_pair(
    ("dtype", [torch.bfloat16, torch.float16]),
    ("dim", [64, 128, 256]),
    ("number", [0, 95, 96, 97, 127, 128, 129, 256, 1000]),
)
def test_more_tiles_than_multiprocessors(dtype, dim, number, hopper):
    """Programs take several tiles in turn, whose blocks go round the ring; some tiles have no keys but their own."""
    q, k, v = problem(1, 32, 8, 4000, 300, dim, dtype)
    chosen = selection(1, 8, 4000, 300, 32, number) if number else k.new_empty(1, 8, 126, 0).int()
    chosen[:, :, ::7], chosen[:, ::3, ::5, number // 3 :] = -1, -1
    check(q, k, v, chosen, 32, 300)
    assert hopper is None or len(hopper) == 2


@every_pair(
    DTYPES,
    ("dim", [64, 80, 128, 256]),
    (("heads", "kv_heads", "tile"), [(32, 8, 32), (8, 8, 128), (14, 2, 18), (12, 2, 11)]),
    (("length", "offset", "number"), [(1, 0, 3), (63, 65, 7), (333, 0, 64), (1500, 5, 130)]),
    ("sinks", [False, True]),
    ("softcap", [None, 20.0]),
)
def test_log_sum_exps_of_tiles(dtype, dim, heads, kv_heads, tile, length, offset, number, sinks, softcap, hopper):
    """With and without Hopper's kernel, over more rows than programs; the output keeps its bits."""
    q, k, v = problem(2, heads, kv_heads, length, offset, dim, dtype, extra=50)
    drawn = torch.randn(heads, generator=torch.Generator("cuda").manual_seed(2), device="cuda") if sinks else None
    logits = Logits(dim**-0.5, drawn, softcap)
    chosen = selection(2, kv_heads, length, offset, tile, number)
    how = {"tile": tile, "logits": logits, "offset": offset, **listed(chosen)}
    with poisoned_memory("cuda"):
        found = attend_tiles(q, KV(k, v), **how, need_lse=True)
        again = attend_tiles(q, KV(k, v), **how, need_lse=True)
        alone = attend_tiles(q, KV(k, v), **how)
    assert torch.equal(found.out, alone.out)
    assert torch.equal(found.lse, again.lse), "repeats are equal bit for bit"
    wide = how | {"logits": Logits(dim**-0.5, None if drawn is None else drawn.double(), softcap)}
    exact = attend_reference.attend_tiles(q.double(), KV(k.double(), v.double()), **wide, need_lse=True)
    torch.testing.assert_close(found.lse.double(), exact.lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.out.double(), exact.out, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@every_pair(DTYPES, ("dim", [64, 128]))
def test_tiles_of_as_many_places_as_they_need(dtype, dim, hopper):
    """Selections one after another are read as those of equal length are."""
    q, k, v = problem(2, 32, 8, 900, 300, dim, dtype)
    chosen = selection(2, 8, 900, 300, 32, 400)
    numbers = torch.arange(chosen.shape[2], device="cuda") * 37 % 401
    starts = torch.nn.functional.pad(numbers.cumsum(0), (1, 0))
    within = torch.arange(400, device="cuda") < numbers[:, None]
    ragged, apart = chosen[:, :, within], listed(chosen.masked_fill(~within, -1))
    how = {"tile": 32, "logits": Logits(dim**-0.5), "offset": 300}
    own = {"indices": ragged, "starts": starts, "counts": apart["counts"]}
    with poisoned_memory("cuda"):
        out = attend_tiles(q, KV(k, v), **own, **how).out
    assert torch.equal(out, attend_tiles(q, KV(k, v), **apart, **how).out)
    exact = attend_reference.attend_tiles(q.double(), KV(k.double(), v.double()), **own, **how).out
    torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert hopper is None or len(hopper) == (0 if dtype == torch.float32 else 2)


@pytest.mark.parametrize("dim", [64, 128])
def test_large_and_small_logits(dim, hopper):
    """Maxima that rise from block to block, and ones far below 0."""
    q, k, v = problem(1, 32, 8, 500, 3000, dim, torch.float16)
    for low, high in ((-8, 8), (-8, -7), (8, -8)):
        rising = torch.linspace(low, high, k.shape[2], device="cuda")[:, None]
        directed = q.abs(), (k.abs() * rising).half()
        check(*directed, v, selection(1, 8, 500, 3000, 32, 900), 32, 3000)


@every_pair(
    DTYPES,
    (
        ("dim", "value_dim"),
        [(16, 16), (20, 20), (40, 40), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128), (24, 72)],
    ),
)
def test_head_dims_of_attention(dtype, dim, value_dim):
    check(*problem(1, 4, 2, 300, 41, dim, dtype, value_dim), selection(1, 2, 300, 41, 64, 70), 64, 41)


@every_pair(DTYPES, HEADS)
def test_heads_of_attention(dtype, heads, kv_heads):
    tile = max(1, 128 // (heads // kv_heads))
    check(*problem(2, heads, kv_heads, 517, 131, 64, dtype), selection(2, kv_heads, 517, 131, tile, 99), tile, 131)


@every_pair(DTYPES)
def test_heads_that_read_the_choice_of_others(dtype, hopper):
    q, k, v = problem(2, 8, 4, 333, 77, 64, dtype)
    chosen, heads = selection(2, 4, 333, 77, 64, 90), torch.tensor([3, 3, 0, 1], device="cuda")
    arguments = {"tile": 64, "logits": Logits(0.125), "offset": 77}
    mapped = attend_tiles(q, KV(k, v), **listed(chosen), heads=heads, **arguments).out
    assert torch.equal(mapped, attend_tiles(q, KV(k, v), **listed(chosen[:, heads]), **arguments).out)


@every_pair(DTYPES)
@pytest.mark.parametrize("layout", ["slots", "tokens_first", "padded_rows"])
@pytest.mark.parametrize("dim", [80, 128])
def test_strides_among_nan(dtype, layout, dim, hopper):
    given = [in_buffer(x, layout) for x in problem(2, 6, 2, 300, 77, dim, dtype)]
    chosen, how = listed(selection(2, 2, 300, 77, 32, 50)), {"tile": 32, "logits": Logits(0.125), "offset": 77}
    check(*given, selection(2, 2, 300, 77, 32, 50), 32, 77)
    indices = chosen.pop("indices")
    every_other = torch.stack([indices, torch.full_like(indices, 5)], -1)[..., 0]
    found = attend_tiles(given[0], KV(*given[1:]), every_other, **chosen, **how).out
    assert torch.equal(found, attend_tiles(given[0], KV(*given[1:]), indices, **chosen, **how).out)


@pytest.mark.usefixtures("much_memory", "hopper")
def test_keys_beyond_the_reach_of_32_bits():
    """Tokens 128 KiB apart, as where many heads share a buffer."""
    q, k, v = problem(1, 2, 2, 400, 35_500, 64, torch.bfloat16)
    buffer = torch.empty(1, 36_000, 1024, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2)[:, :, :35_900]
    k, v = buffer[:, 5:7].copy_(k), buffer[:, 1000:1002].copy_(v)
    check(q, k, v, selection(1, 2, 400, 35_500, 128, 500), 128, 35_500)


def check_mass(q, k, tile, offset, scaling=0.125):
    """All blocks of `tile_mass`, side by side with those of the reference in double precision."""
    lse = ops.attend_causal(q, KV(k, k), logits=Logits(scaling), offset=offset, need_lse=True).lse
    with poisoned_memory("cuda"):
        found = list(ops.tile_mass(q, KV(k), lse, tile=tile, logits=Logits(scaling), offset=offset))
    assert all(
        torch.equal(mass, again)
        for (_, mass), (_, again) in zip(
            found, ops.tile_mass(q, KV(k), lse, tile=tile, logits=Logits(scaling), offset=offset), strict=True
        )
    )
    with dispatch.reference_only():
        expected = score_reference.tile_mass(
            q.double(), KV(k.double()), lse.double(), tile=tile, logits=Logits(scaling), offset=offset
        )
        for (first, mass), (also, exact) in zip(found, expected, strict=True):
            assert first == also
            torch.testing.assert_close(mass, exact.float(), rtol=5e-3 if q.dtype != torch.float32 else 1e-4, atol=1e-7)


@every_pair(
    DTYPES,
    ("tile", [1, 18, 32, 100, 128, 200]),
    (("length", "offset"), [(1, 0), (1, 777), (63, 65), (333, 0), (1500, 5)]),
)
def test_mass_of_tiles(dtype, tile, length, offset, launches):
    q, k, _ = problem(2, 14, 2, length, offset, 64, dtype)
    check_mass(q, k, tile, offset)
    assert "tile_block_mass" in launches


@every_pair(
    ("dtype", [torch.bfloat16, torch.float16]),
    ("dim", [64, 128]),
    (("heads", "kv_heads", "tile"), [(32, 8, 32), (8, 8, 128), (14, 2, 18), (12, 2, 11), (8, 8, 65)]),
    (("length", "offset"), [(1, 7000), (63, 165), (333, 0), (1500, 5), (5000, 3)]),
    ("room", [256 << 20, 1 << 20]),
)
def test_hoppers_own_mass(dtype, dim, heads, kv_heads, tile, length, offset, room, hopper, monkeypatch):
    """Tiles that do not fill a program, programs of no keys, and parts of all tiles."""
    monkeypatch.setattr(score_reference, "GPU_SCORES_BYTES", room)
    q, k, _ = problem(2, heads, kv_heads, length, offset, dim, dtype)
    check_mass(q, in_buffer(k, "tokens_first"), tile, offset, dim**-0.5)
    assert hopper is None or hopper


@pytest.mark.parametrize("span", [1, 3, 128])
def test_masses_of_tiles_in_any_order(span, hopper, monkeypatch):
    """Keys after a tile may be anything finite and leave no trace; tiles beyond all keys have masses of all."""
    monkeypatch.setattr(mass_hopper_kernel, "_SPAN", span)
    generator = torch.Generator("cuda").manual_seed(0)
    for tiles, rows, keys in ((1, 128, 64), (5, 126, 1000), (9, 65, 4001)):
        queries, k = (
            torch.randn(2, 3, *size, 128, generator=generator, device="cuda").half()
            for size in ((tiles, rows), (keys,))
        )
        lse = torch.randn(2, 3, tiles, rows, generator=generator, device="cuda") + 5
        lse[:, :, 0, rows // 2 :] = float("inf")
        begins = torch.randint(0, keys + 100, (tiles,), generator=generator, device="cuda")
        with poisoned_memory("cuda"):
            found = mass_kernel.tile_block_mass(queries, k, lse, begins, logits=Logits(0.09))
            assert torch.equal(found, mass_kernel.tile_block_mass(queries, k, lse, begins, logits=Logits(0.09)))
        exact = score_reference.tile_block_mass(queries.double(), k.double(), lse.double(), begins, logits=Logits(0.09))
        torch.testing.assert_close(found, exact.float(), rtol=1e-4, atol=1e-7)
    assert hopper is None or len(hopper) == 6


@every_pair(DTYPES, ("dim", [16, 20, 40, 80, 96, 128, 256]))
def test_head_dims_of_mass(dtype, dim):
    q, k, _ = problem(1, 4, 2, 300, 41, dim, dtype)
    check_mass(q, k, 64, 41, dim**-0.5)


@every_pair(
    DTYPES,
    ("dim", [64, 80, 128, 256]),
    ("rows", [1, 5, 16, 32, 60, 64]),
    (("tiles", "keys"), [(1, 64), (7, 1000), (33, 4001)]),
)
def test_mass_of_tiles_of_few_queries(dtype, dim, rows, tiles, keys):
    """Several tiles in a program, in any order."""
    generator = torch.Generator("cuda").manual_seed(0)
    queries, k = (
        torch.randn(2, 3, *size, dim, generator=generator, device="cuda").to(dtype) for size in ((tiles, rows), (keys,))
    )
    lse = torch.randn(2, 3, tiles, rows, generator=generator, device="cuda") + 5
    lse[:, :, 0, rows // 2 :] = float("inf")
    begins = torch.randint(0, keys + 100, (tiles,), generator=generator, device="cuda")
    with poisoned_memory("cuda"):
        found = mass_kernel.tile_block_mass(queries, k, lse, begins, logits=Logits(dim**-0.5))
        assert torch.equal(found, mass_kernel.tile_block_mass(queries, k, lse, begins, logits=Logits(dim**-0.5)))
    exact = score_reference.tile_block_mass(
        queries.double(), k.double(), lse.double(), begins, logits=Logits(dim**-0.5)
    )
    torch.testing.assert_close(found, exact.float(), rtol=1e-4, atol=1e-7)


@every_pair(DTYPES, HEADS)
def test_heads_of_mass(dtype, heads, kv_heads):
    q, k, _ = problem(2, heads, kv_heads, 517, 131, 64, dtype)
    check_mass(q, in_buffer(k, "tokens_first"), max(1, 128 // (heads // kv_heads)), 131)


@pytest.mark.parametrize("layer", [2, 3])
def test_a_prompt_of_kascade_takes_the_kernels(layer, launches):
    q, k, v = problem(1, 14, 2, 1613, 0, 64, torch.float32)
    expected, found = None, None
    for device in ("cpu", "cuda"):
        forward = {}
        for number in (2, 3)[: layer - 1]:
            method = methods.parse("kascade_paper:anchors=[0,2],min_k=16").for_layer(number, 4)
            cache = cache_of(k.to(device), v.to(device), 14, forward)
            found = method.prompt(cache, q.to(device), 0.125).out.cpu()
        expected = found if device == "cpu" else expected
    assert {"attend_tiles", "tile_block_mass"} == set(launches)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_decode_step_that_reads_the_choice_of_other_heads_does_not_wait():
    kascade, forward = methods.parse('kascade_paper:anchors=[0,1],heads={"2":[1,1]},min_k=16'), {}
    q, k, v = problem(2, 14, 2, 1, 2999, 64, torch.bfloat16)
    layers = [(kascade.for_layer(n, 3), cache_of(k, v, 14, forward)) for n in range(3)]
    for method, cache in layers:
        cache.counters.declare(method.counters)
    outs = [decode(method, cache, q, 0.125)[0].out for method, cache in layers]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [decode(method, cache, q, 0.125)[0].out for method, cache in layers]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(*pair) for pair in zip(outs, again))
    assert not torch.equal(outs[1], outs[2])  # the second KV head's keys for both

"""The kernels of mean keys on a GPU against their references: odd sizes, every dtype, strides, poison, repeats."""

import itertools

import pytest
import torch

from foveate import methods, ops
from foveate.ops import KV, Logits, _math, dispatch
from foveate.ops.attend import means as merging
from foveate.ops.attend import means_kernel as merge_kernel
from foveate.ops.attend import tiles_kernel
from foveate.ops.compress import means, means_kernel
from foveate.ops.select import WORD_KEYS, TileKeys
from foveate.state.borrowed import cache_of
from tests.combinations import every_pair
from tests.helpers import in_buffer
from tests.kernels import poisoned_memory
from tests.problems import in_blocks

pytestmark = pytest.mark.gpu

DTYPES = ("dtype", [torch.bfloat16, torch.float16, torch.float32])
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 2e-5}


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch):
    """A reference that is reached without being asked for fails the test."""
    pytest.importorskip("triton")
    assert {"attend_tiles", "unchosen_means", "merge_means"} <= set(dispatch.kernel_status().split(", "))
    monkeypatch.setattr(dispatch, "_say_once", lambda text: pytest.fail(text))


def draw(*size, dtype=torch.float32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(size, generator=generator, device="cuda").to(dtype)


def bits(batch, heads, tile, offset, length, share):
    """A share of the keys before each tile, as bits."""
    before = [tile * t for t in range(offset // tile, -(-(offset + length) // tile))]
    numbers = [-(-one // WORD_KEYS) for one in before], [int(share * one) for one in before]
    begins, starts = (tuple(itertools.accumulate(one, initial=0)) for one in numbers)
    words = torch.zeros(batch, heads, begins[-1], dtype=torch.int32, device="cuda")
    ends, generator = torch.tensor(begins, device="cuda"), torch.Generator("cuda").manual_seed(1)
    for t, one in enumerate(before):
        order = torch.rand(batch, heads, one, generator=generator, device="cuda").argsort(-1)
        ops.set_bits(words, order[..., : int(share * one)].int()[:, :, None], ends[t : t + 2])
    return TileKeys(words, ends, torch.tensor(starts, device="cuda"), starts)


def keys_and_values(batch, heads, number, dim, dtype, extra=0, value_dim=None):
    """With NaN after them."""
    k, v = (draw(batch, heads, number + extra, one, dtype=dtype, seed=one) for one in (dim, value_dim or dim))
    k[:, :, number:], v[:, :, number:] = float("nan"), float("nan")
    return k, v + 1


def check_means(k, v, chosen, tile, offset, heads=None, block_table=None):
    how = {"tile": tile, "offset": offset, "heads": heads}
    with poisoned_memory("cuda"):
        found = ops.unchosen_means(KV(k, v, block_table), chosen.words, chosen.begins, **how)
        again = ops.unchosen_means(KV(k, v, block_table), chosen.words, chosen.begins, **how)
    assert all(map(torch.equal, found, again)), "repeats are equal bit for bit"
    with dispatch.reference_only():
        exact = means.unchosen_means(KV(k.double(), v.double(), block_table), chosen.words, chosen.begins, **how)
    assert torch.equal(found.numbers, exact.numbers)
    for one, other in zip(found[:2], exact[:2], strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=3e-4, atol=2e-5)  # matrix units truncate sums
    return found


@every_pair(
    DTYPES,
    ("dim", [64, 80, 128, 256]),
    ("tile", [1, 18, 32, 100, 128]),
    ("share", [0.0, 0.1, 0.9, 1.0]),
    (("length", "offset"), [(1, 0), (1, 777), (63, 65), (333, 0), (900, 3005)]),
)
def test_means_of_tiles(dtype, dim, tile, share, length, offset):
    k, v = keys_and_values(2, 2, offset + length, dim, dtype, extra=50)
    check_means(k, v, bits(2, 2, tile, offset, length, share), tile, offset)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 8])
def test_means_of_a_long_prompt(dtype, heads):
    """More tiles than programs have at once, and sums of many keys in fp32."""
    k, v = keys_and_values(1, 8, 20_000, 128, dtype)
    chosen = bits(1, heads, 32, 0, 20_000, 0.1)
    check_means(k, v, chosen._replace(words=chosen.words.expand(-1, 8, -1)), 32, 0)


@every_pair(DTYPES, ("layout", ["slots", "tokens_first", "padded_rows"]), ("dim", [80, 128]))
def test_strides_among_nan(dtype, layout, dim):
    k, v = keys_and_values(2, 2, 377, dim, dtype)
    chosen = bits(2, 2, 32, 77, 300, 0.2)
    found = check_means(in_buffer(k, layout), in_buffer(v, layout), chosen, 32, 77)
    assert all(map(torch.equal, found, check_means(k, v, chosen, 32, 77)))


@every_pair(DTYPES, ("block_size", [16, 24]))
def test_means_of_keys_in_blocks_and_of_other_heads_choices(dtype, block_size):
    k, v = keys_and_values(2, 4, 377, 64, dtype)
    chosen, heads = bits(2, 4, 32, 77, 300, 0.2), torch.tensor([3, 3, 0, 1], device="cuda")
    expected = check_means(k, v, chosen, 32, 77, heads)
    paged_k, paged_v, table = in_blocks(k, v, block_size)
    with poisoned_memory("cuda"):
        found = ops.unchosen_means(KV(paged_k, paged_v, table), *chosen[:2], tile=32, offset=77, heads=heads)
    assert all(map(torch.equal, found, expected))
    mapped = chosen._replace(words=chosen.words[:, heads])
    assert all(map(torch.equal, check_means(k, v, mapped, 32, 77), expected))


@pytest.mark.usefixtures("much_memory")
def test_keys_beyond_the_reach_of_32_bits():
    """Tokens 128 KiB apart, as where many heads share a buffer."""
    k, v = keys_and_values(1, 2, 35_900, 64, torch.bfloat16)
    buffer = torch.empty(1, 36_000, 1024, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2)[:, :, :35_900]
    k, v = buffer[:, 5:7].copy_(k), buffer[:, 1000:1002].copy_(v)
    check_means(k, v, bits(1, 2, 128, 35_500, 400, 0.1), 128, 35_500)


@every_pair(
    DTYPES,
    (("dim", "value_dim"), [(64, 64), (80, 80), (128, 128), (256, 256), (24, 72)]),
    (("heads", "kv_heads", "tile"), [(32, 8, 32), (8, 8, 128), (9, 3, 18), (12, 2, 11)]),
    (("length", "offset"), [(1, 0), (63, 65), (333, 0), (1500, 5)]),
    ("softcap", [None, 20.0]),
)
def test_outputs_with_a_mean_key(dtype, dim, value_dim, heads, kv_heads, tile, length, offset, softcap):
    """In place and in new memory; tiles without such keys keep their outputs."""
    tiles = -(-(offset % tile + length) // tile)
    q, out = (draw(2, length, heads, one, dtype=dtype, seed=one).transpose(1, 2) for one in (dim, value_dim))
    k, v = (draw(2, kv_heads, tiles, one, seed=one + 1) for one in (dim, value_dim))
    numbers = (draw(2, kv_heads, tiles).abs() * 1000).int()
    numbers[:, :, ::3] = 0
    of_tiles, lse = means.TileMeans(k, v, numbers), draw(2, heads, length) + 6
    how = {"tile": tile, "logits": Logits(dim**-0.5, softcap=softcap), "offset": offset}
    with poisoned_memory("cuda"):
        found = ops.merge_means(q, out, lse, of_tiles, **how)
    wide = means.TileMeans(k.double(), v.double(), numbers)
    with dispatch.reference_only():
        exact = merging.merge_means(q.double(), out.double(), lse.double(), wide, **how)
    torch.testing.assert_close(found.out.double(), exact.out, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(found.lse.double(), exact.lse, rtol=1e-5, atol=1e-5)
    rows = (offset + torch.arange(length, device="cuda")) // tile - offset // tile
    kept = (numbers == 0)[:, :, rows].repeat_interleave(heads // kv_heads, 1)
    assert torch.equal(found.out[kept], out[kept])
    assert torch.equal(found.lse[kept], lse[kept])
    again = ops.merge_means(q, out, lse, of_tiles, **how, out=out)
    assert again.out.data_ptr() == out.data_ptr()
    assert torch.equal(out, found.out)


@pytest.fixture(params=[True, False], ids=["hopper", "portable"])
def hopper(request, monkeypatch):
    """With and without the kernel of attention for Hopper alone."""
    monkeypatch.setattr(tiles_kernel, "_HOPPER", request.param)


@every_pair(
    DTYPES,
    ("dim", [64, 128]),
    (("heads", "kv_heads", "tile"), [(32, 8, 32), (12, 2, 21), (14, 2, 18)]),
    ("pooled", [False, True]),
    ("sinks", [False, True]),
    ("softcap", [None, 20.0]),
    ("room", [1 << 18, 256 << 20]),
)
def test_attention_and_means(dtype, dim, heads, kv_heads, tile, pooled, sinks, softcap, room, hopper, monkeypatch):
    """In pieces of a prompt, from within a tile on."""
    monkeypatch.setattr(_math, "GPU_SCORES_BYTES", room)
    q = draw(1, 2000, heads, dim, dtype=dtype).transpose(1, 2)
    k, v = keys_and_values(1, kv_heads, 2333, dim, dtype, extra=9)
    chosen = bits(1, 1 if pooled else kv_heads, tile, 333, 2000, 0.1)
    drawn = draw(heads, seed=5) if sinks else None
    how = {"tile": tile, "offset": 333, "with_means": True, "need_lse": True}
    with poisoned_memory("cuda"):
        found = ops.attend_tile_keys(q, KV(k, v), chosen, **how, logits=Logits(dim**-0.5, drawn, softcap))
    wide = Logits(dim**-0.5, None if drawn is None else drawn.double(), softcap)
    with dispatch.reference_only():
        exact = ops.attend_tile_keys(q.double(), KV(k.double(), v.double()), chosen, **how, logits=wide)
    torch.testing.assert_close(found.out.double(), exact.out, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(found.lse.double(), exact.lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer", [2, 3])
def test_a_prompt_of_kascade_takes_the_kernels(layer, monkeypatch):
    names = []
    for module, name in ((means_kernel, "unchosen_means"), (merge_kernel, "merge_means")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, real=real, name=name, **k: names.append(name) or real(*a, **k))
    q, k, v = (draw(1, heads, 1613, 64, seed=heads) for heads in (14, 2, 3))
    k, v, expected, found = k, v[:, :2], None, None
    for device in ("cpu", "cuda"):
        forward = {}
        for number in (2, 3)[: layer - 1]:
            method = methods.parse("kascade_paper:anchors=[0,2],min_k=16,rest=mean").for_layer(number, 4)
            cache = cache_of(k.to(device), v.to(device), 14, forward)
            found = method.prompt(cache, q.to(device), 0.125).out.cpu()
        expected = found if device == "cpu" else expected
    assert set(names) == {"unchosen_means", "merge_means"}
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("much_memory")
def test_memory_of_a_long_prompt():
    """Above inputs, output and a bit for each key: the means, and log-sum-exps."""
    q, k, v = (draw(1, heads, 131_072, 128, dtype=torch.bfloat16, seed=heads) for heads in (32, 8, 9))
    v, forward, peaks = v[:, :8], {}, {}
    for spec in ("kascade_paper:anchors=[0,1]", "kascade_paper:anchors=[0,1],rest=mean"):
        for number in (1, 2):
            method, cache = methods.parse(spec).for_layer(number, 3), cache_of(k, v, 32, forward)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = method.prompt(cache, q, 128**-0.5).out
            peaks[spec, number] = torch.cuda.max_memory_allocated() - before - out.nbytes
            del out
    print({f"{spec} in layer {number}": f"{peak / 1e9:.2f} GB" for (spec, number), peak in peaks.items()})
    (plain, mean) = (peak for (_, number), peak in peaks.items() if number == 2)
    assert mean <= plain + 150e6

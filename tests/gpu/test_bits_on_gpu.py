"""Keys of tiles as bits on a GPU: the kernels against their references, and the memory of a long prompt."""

import pytest
import torch

from foveate import methods, ops
from foveate.ops import KV, Logits, _math, dispatch
from foveate.ops.attend import attend_tiles
from foveate.ops.attend import tiles as attend_reference
from foveate.ops.select import bits, bits_kernel
from foveate.state.borrowed import cache_of
from tests.combinations import every_pair
from tests.kernels import poisoned_memory
from tests.problems import listed

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch):
    """A reference that is reached without being asked for fails the test."""
    pytest.importorskip("triton")
    assert {"set_bits", "keys_of_bits", "attend_tiles", "tile_block_mass"} <= set(dispatch.kernel_status().split(", "))
    monkeypatch.setattr(dispatch, "_say_once", lambda text: pytest.fail(text))


def drawn(before, share, batch=2, heads=3):
    """A share of the keys before each tile, int32 ``[B, H, T, K]``, -1 after them, and how many."""
    places = [int(share * number) for number in before]
    found = torch.full((batch, heads, len(before), max(places)), -1, dtype=torch.int32, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    for t, (number, count) in enumerate(zip(before, places, strict=True)):
        order = torch.rand(batch, heads, number, generator=generator, device="cuda").argsort(-1)
        found[:, :, t, :count] = order[..., :count].sort(-1).values.int()
    return found, places


def bounds(numbers):
    return torch.nn.functional.pad(torch.tensor(numbers, device="cuda").cumsum(0), (1, 0))


@every_pair(
    ("before", [[0, 1, 31, 32, 33], [4000, 4032, 4064], [70_001, 3, 70_100]]),
    ("share", [0.02, 0.1, 0.5, 1.0]),
    ("heads", [1, 3]),
)
def test_keys_become_bits_and_bits_keys(before, share, heads):
    indices, places = drawn(before, share, heads=heads)
    begins, starts = bounds([-(-number // bits.WORD_KEYS) for number in before]), bounds(places)
    expected, found = (torch.zeros(2, heads, int(begins[-1]), dtype=torch.int32, device="cuda") for _ in range(2))
    bits.set_bits(expected, indices, begins)
    bits_kernel.set_bits(found, indices, begins)
    assert torch.equal(found, expected)
    with poisoned_memory("cuda"):
        read = bits_kernel.keys_of_bits(found, begins, starts, sum(places))
    assert torch.equal(read.keys, torch.cat([indices[:, :, t, :count] for t, count in enumerate(places)], 2))
    assert torch.equal(read.counts, (indices >= 0).sum(-1, dtype=torch.int32))


@pytest.mark.parametrize("room", [1 << 16, 256 << 20])
def test_attention_over_bits(room, monkeypatch):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, h, 2100, 64, generator=generator, device="cuda").half() for h in (8, 2, 2))
    q, tile, offset = q[:, :, 45:], 32, 45
    before = [tile * t for t in range(offset // tile, -(-2100 // tile))]
    indices, places = drawn(before, 0.1, 1, 2)
    begins, starts = bounds([-(-number // bits.WORD_KEYS) for number in before]), bounds(places)
    words = torch.zeros(1, 2, int(begins[-1]), dtype=torch.int32, device="cuda")
    ops.set_bits(words, indices, begins)
    chosen = ops.TileKeys(words, begins, starts, tuple(starts.tolist()))
    monkeypatch.setattr(_math, "GPU_SCORES_BYTES", room)
    how = {"tile": tile, "logits": Logits(0.125), "offset": offset}
    with poisoned_memory("cuda"):
        found = ops.attend_tile_keys(q, KV(k, v), chosen, **how).out
        assert torch.equal(found, ops.attend_tile_keys(q, KV(k, v), chosen, **how).out), "repeats are equal bit for bit"
    how |= listed(indices)
    assert torch.equal(found, attend_tiles(q, KV(k, v), **how).out)
    exact = attend_reference.attend_tiles(q.double(), KV(k.double(), v.double()), **how).out
    torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize(
    "spec", [f"kascade_paper:anchors=[0,1],{setting}" for setting in ("dense_anchor_prefill=false", "top_k=0.2")]
)
@pytest.mark.parametrize(("length", "chunk"), [(131_072, 131_072), (262_144, 262_144), (524_288, 32_768)])
def test_memory_of_a_long_prompt(spec, length, chunk):
    """Above inputs, outputs and a bit for each key: bounded scratch, for layers that choose and layers that read."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, h, n, 128, generator=generator, device="cuda", dtype=torch.float16)
        for h, n in ((32, chunk), (8, length), (8, length))
    )
    forward, peaks = {}, []
    for number in (1, 2):
        method, cache = methods.parse(spec).for_layer(number, 3), cache_of(k, v, 32, forward)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = method.prompt(cache, q, 128**-0.5).out
        peaks.append(torch.cuda.max_memory_allocated() - before - out.nbytes)
        del out
    (chosen,) = (value for value in forward.values() if isinstance(value, ops.TileKeys))
    choosing, reading = (f"{peak / 1e9:.2f} GB" for peak in peaks)
    print(f"{spec}, {length:,} tokens in chunks of {chunk:,}: {choosing} choosing, {reading} reading")
    assert peaks[0] <= chosen.words.nbytes + 4 * _math.GPU_SCORES_BYTES
    assert peaks[1] <= 3 * _math.GPU_SCORES_BYTES

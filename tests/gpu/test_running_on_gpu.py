"""The kernels of a buffer of the best tokens on a GPU against their references: sizes, ties, repeats, graphs."""

import pytest
import torch

from foveate.hybrids import ops
from foveate.hybrids.ops import running
from foveate.ops import dispatch
from tests.combinations import every_pair
from tests.kernels import poisoned_memory

pytestmark = pytest.mark.gpu

INF = float("inf")


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch):
    """A reference that is reached without being asked for fails the test."""
    pytest.importorskip("triton")
    assert {"running_best", "replace_weakest"} <= set(dispatch.kernel_status().split(", "))
    monkeypatch.setattr(dispatch, "_say_once", lambda text: pytest.fail(text))


def margins(*shape, kind="ties", seed=0):
    """Many equal ones with sinks, NaN and tokens that are not let in; all different; or each better than the last."""
    generator = torch.Generator("cuda").manual_seed(seed)
    if kind == "rising":
        return torch.arange(1, shape[-1] + 1, device="cuda").expand(shape) / 1024
    drawn = torch.rand(shape, generator=generator, device="cuda") - 0.3
    if kind == "ties":
        drawn = (drawn * 16).round() / 16
        drawn[..., ::37], drawn[..., 1::41] = float("nan"), INF
    return drawn


def buffer(batch, heads, size, seed=0):
    """Full and half-full buffers in any order."""
    generator = torch.Generator("cuda").manual_seed(seed)
    order = torch.rand(batch, heads, size, generator=generator, device="cuda").argsort(-1)
    filled = torch.linspace(size, 0, batch * heads, device="cuda").long().view(batch, heads, 1)
    places = (3 * order).masked_fill(order >= filled, -1)
    return (torch.rand(batch, heads, size, generator=generator, device="cuda") * 8).ceil() / 8, places


@every_pair(
    ("size", [1, 31, 128, 512, 1000, 1024]),
    ("count", [1, 31, 256, 513, 2100]),
    ("kind", ["ties", "different", "rising"]),
    (("batch", "heads"), [(1, 8), (3, 5)]),
)
def test_when_tokens_leave(size, count, kind, batch, heads):
    kept, places = buffer(batch, heads, size)
    positions = 5000 + torch.arange(count, device="cuda").repeat(batch, 1)
    positions[-1, count - count // 7 :] = -1
    given = kept, places, margins(batch, heads, count, kind=kind), positions
    with poisoned_memory("cuda"):
        found = ops.running_best(*given)
    for mine, its in zip(found, running.running_best(*given), strict=True):
        assert torch.equal(mine, its)


def test_a_long_prompt_is_its_pieces():
    """32K tokens at once, held against the reference a piece at a time."""
    count, size = 32_768, 512
    kept, places = torch.zeros(1, 8, size, device="cuda"), torch.full((1, 8, size), -1, device="cuda")
    offered, positions = margins(1, 8, count, kind="different"), torch.arange(count, device="cuda")[None]
    found = ops.running_best(kept, places, offered, positions).new
    expected = torch.full_like(found, count)
    for first in range(0, count, 256):
        last = first + 256
        turns = running.running_best(kept, places, offered[:, :, first:last], positions[:, first:last])
        whose = torch.cat([places, positions[:, None, first:last].expand(-1, 8, -1)], 2)
        value = torch.cat([kept, offered[:, :, first:last]], 2)
        turn = torch.cat([turns.kept, turns.new], 2)
        for head in range(8):
            left = (turn[0, head] < 256) & (whose[0, head] >= 0)
            expected[0, head, whose[0, head, left]] = turn[0, head, left] + first
        order = ((turn < 256) | (whose < 0)).to(torch.uint8).argsort(dim=2, stable=True)[:, :, :size]
        stays = (turn.gather(2, order) == 256) & (whose.gather(2, order) >= 0)
        kept, places = value.gather(2, order), whose.gather(2, order).masked_fill(~stays, -1)
    assert torch.equal(found, expected)


@every_pair(
    ("dtype", [torch.bfloat16, torch.float16, torch.float32]),
    ("size", [1, 100, 512, 1024]),
    (("dim", "value_dim"), [(64, 64), (80, 80), (128, 128), (192, 128), (5, 24)]),
    (("batch", "heads"), [(1, 3), (32, 8)]),
)
def test_steps_replace_what_the_reference_replaces(dtype, size, dim, value_dim, batch, heads):
    ring = 9
    kept, places = buffer(batch, heads, size)
    order = (places < 0).to(torch.uint8).argsort(dim=2, stable=True)
    kept, places = kept.gather(2, order), places.gather(2, order)
    generator = torch.Generator("cuda").manual_seed(3)
    drawn = [torch.randn(batch, heads, ring + size, d, generator=generator, device="cuda") for d in (dim, value_dim)]
    held = {
        "keys": drawn[0].to(dtype),
        "values": drawn[1].to(dtype),
        "margins": torch.cat([margins(batch, heads, ring), kept], 2),
        "positions": places,
        "kept": (places >= 0).sum(2),
    }
    its = {name: x.clone() for name, x in held.items()}
    slots, tokens = torch.arange(batch, device="cuda") % ring, torch.arange(batch, device="cuda") + 9000
    tokens[1::5] = -1
    graph = torch.cuda.CUDAGraph()
    before = {name: x.clone() for name, x in held.items()}
    ops.replace_weakest(**held, slots=slots, tokens=tokens, ring=ring)  # compiled
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        ops.replace_weakest(**held, slots=slots, tokens=tokens, ring=ring)
    for name, x in held.items():
        x.copy_(before[name])
    for _ in range(2 * ring):  # replayed with what the device holds by then
        graph.replay()
        running.replace_weakest(**its, slots=slots, tokens=tokens, ring=ring)
        slots.add_(1).remainder_(ring)
        tokens.add_(torch.where(tokens >= 0, 1, 0))
    for name in held:
        torch.testing.assert_close(held[name], its[name], rtol=0, atol=0, equal_nan=True)


def test_nothing_waits_for_the_device():
    kept, places = buffer(2, 8, 512)
    given = kept, places, margins(2, 8, 700), 5000 + torch.arange(700, device="cuda").repeat(2, 1)
    ops.running_best(*given)  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.running_best(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")

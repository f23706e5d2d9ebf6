"""Small mixers, and ways to feed them a sequence that must all give the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from foveate.hybrids.layers import GatedDeltaNet, LearnedEviction, NativeSparseAttention, SlidingWindowAttention
from foveate.hybrids.state import BlockMemory, Memory, Packing, RecurrentMemory, RetainedMemory

WIDTH = 32


def eviction(heads: int = 4, **changes) -> LearnedEviction:
    """Retains about a third of the tokens, more than its buffer holds."""
    torch.manual_seed(0)
    settings = {"window": 30, "buffer": 12, "sinks": 3} | changes
    layer = LearnedEviction(WIDTH, heads, 2, 16, **settings)
    nn.init.constant_(layer.scores.head.bias, -0.2)
    return layer.eval()


def window() -> SlidingWindowAttention:
    torch.manual_seed(0)
    return SlidingWindowAttention(WIDTH, 4, 2, 16, window=20).eval()


def native_sparse(**changes) -> NativeSparseAttention:
    torch.manual_seed(0)
    settings = {"block": 8, "blocks": 4, "window": 16} | changes
    return NativeSparseAttention(WIDTH, 4, 2, 16, **settings).eval()


def delta_net() -> GatedDeltaNet:
    torch.manual_seed(0)
    return GatedDeltaNet(WIDTH, 2, 16).eval()


MIXERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Memory]]] = {
    "gdn": (delta_net, RecurrentMemory),
    "swa": (window, lambda: RetainedMemory(20, 0)),
    "lte": (eviction, lambda: RetainedMemory(30, 12)),
    "lte_mlp": (lambda: eviction(scores={"kind": "mlp"}), lambda: RetainedMemory(30, 12)),
    "lte_mha": (lambda: eviction(heads=2), lambda: RetainedMemory(30, 12)),
    "nsa": (native_sparse, lambda: BlockMemory(8)),
    "nsa_mlp": (lambda: native_sparse(compression="mlp"), lambda: BlockMemory(8)),
}


def run(
    mixer: nn.Module, x: Tensor, positions: Tensor, memory: Memory | None = None, packing: Packing | None = None
) -> Tensor:
    """The output for hidden states ``[B, n, WIDTH]``."""
    if isinstance(mixer, GatedDeltaNet):
        return mixer(x, memory, packing)
    out = mixer(x, positions, memory, packing)
    return out[0] if isinstance(out, tuple) else out


def hidden(length: int, batch: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Hidden states and positions."""
    x = torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x, torch.arange(length)[None]

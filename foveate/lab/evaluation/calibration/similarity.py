"""How much of one layer's attention the keys that another layer would choose hold, measured while a prompt is read.

The layers of a prompt come one after another with their queries and keys. What is kept of each are the keys that each
of its KV heads would choose for each tile of queries, k of them; no attention matrix exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from foveate import ops
from foveate.errors import UserError

COVERAGE_KEYS = 256  # keys whose share of the attention is measured for each query head (Kascade, figure 1)
_COVERAGE_QUERIES = 64
_BLOCK = 1 << 24  # elements of a block of logits, or of the masses of the keys that earlier layers would choose


class Measured(NamedTuple):
    """What one prompt shows of L layers with H KV heads and Hq query heads, in T tiles."""

    captured: Tensor
    """fp32 ``[T, L, H, L, H]``: ``[t, a, i, b, j]`` is the attention of head j of layer b, pooled over tile t, on the k
    keys that head i of layer a would choose for it; 0 for a > b."""
    coverage: Tensor
    """fp32 ``[L, Hq]``: attention on the ``COVERAGE_KEYS`` heaviest keys of a query, mean over queries; NaN where the
    prompt has no more keys than these."""


def least_tokens(k: int, tile: int, group: int) -> int:
    """Tokens of the shortest prompt that shows anything: one with a tile after more than k keys."""
    return _first_scored(k, tile, group) * max(1, tile // group) + 1


def _first_scored(k: int, tile: int, group: int) -> int:
    """The first tile that sees more than k keys."""
    return k // max(1, tile // group) + (tile > 1)


@dataclass
class Similarity:
    """Collects the layers of one prompt in their order (Kascade, equation 3, pooled as in sections 3.4 and 3.5).

    Args:
        k: keys chosen for a tile.
        tile: queries that share their keys, the heads of a group counted, among the keys before them; 1 for each token
            by itself, which also sees its own key (equation 3 as written).
        pools_layer: whether the heads of a layer choose together, by their mean attention (section 3.2); each is then
            shown with what the layer has chosen, and what all its heads attend to.
    """

    k: int = 64
    tile: int = 128
    pools_layer: bool = False
    layers: list[int] = field(default_factory=list)
    _heads: int = 0
    _chosen: list[Tensor] = field(default_factory=list)
    _captured: list[Tensor] = field(default_factory=list)
    _coverage: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def look(self, layer: int, q: Tensor, k: Tensor, logits: ops.Logits) -> None:
        """One layer's rotated queries ``[1, Hq, n, D]`` and keys ``[1, H, n, D]`` of the whole prompt.

        Raises `UserError` for a prompt shorter than :func:`least_tokens`, or attention that is not finite.
        """
        group, length = q.shape[1] // k.shape[1], q.shape[2]
        span, least = max(1, self.tile // group), least_tokens(self.k, self.tile, group)
        if length < least:
            raise UserError(
                f"a prompt of {length:,} tokens is too short to calibrate on, which takes at least {least:,}"
            )
        keys = ops.KV(k, k)
        lse = ops.attend_causal(q, keys, logits=logits, need_lse=True).lse
        if not bool(torch.isfinite(lse).all()):
            raise UserError(f"layer {layer}: the attention logits of a prompt are not finite (NaN or infinite)")
        first_scored = _first_scored(self.k, self.tile, group)
        chosen, captured = [], []
        for first, mass in ops.tile_mass(q, keys, lse, tile=span, logits=logits):
            mass = (_with_own(mass, first, q, k, lse, logits) if self.tile == 1 else mass)[0]
            mass = mass[:, max(first_scored - first, 0) :]
            if not mass.shape[1]:
                continue
            if self.pools_layer:
                mass = mass.mean(0, keepdim=True)
            own = ops.topk(mass, self.k)
            done = sum(block.shape[1] for block in chosen)
            earlier = [layer_chosen[:, done : done + own.shape[1]].to(own) for layer_chosen in self._chosen]
            captured.append(_captured(mass, torch.stack([*earlier, own])))
            chosen.append(own.to(torch.int32))
        self.layers.append(layer)
        self._heads = k.shape[1]
        self._chosen.append(torch.cat(chosen, 1))
        self._captured.append(torch.cat(captured, -1))
        self._coverage.append(_coverage(q, k, logits))

    def result(self) -> Measured:
        """What the prompt has shown, on the CPU."""
        number = len(self.layers)
        captured = torch.zeros(self._captured[0].shape[-1], number, self._heads, number, self._heads)
        for b, one in enumerate(self._captured):
            captured[:, : b + 1, :, b] = one.permute(3, 0, 1, 2).cpu()
        return Measured(captured, torch.stack([one.cpu() for one in self._coverage]))


def _with_own(mass: Tensor, first: int, q: Tensor, k: Tensor, lse: Tensor, logits: ops.Logits) -> Tensor:
    """Mass ``[1, H, T, n]`` of the tokens from ``first`` on, with one more column and the mass of each token's own
    key."""
    at = torch.arange(first, first + mass.shape[2], device=q.device)
    rows = q[0, :, at].unflatten(0, (k.shape[1], -1)).transpose(1, 2)  # [H, T, G, D]
    own = ops.key_logits(rows, k[0, :, at, None], logits)[..., 0]
    own = own.sub(lse[0, :, at].unflatten(0, (k.shape[1], -1)).transpose(1, 2)).exp_().mean(2)
    mass = torch.nn.functional.pad(mass, (0, 1), value=float("-inf"))
    mass[0, :, at - first, at] = own
    return mass


def _captured(mass: Tensor, chosen: Tensor) -> Tensor:
    """Mass ``[H, T, n]`` of each head on keys chosen by others ``[A, H, T, k]``: ``[A, Hi, Hj, T]``."""
    heads, tiles, keys = mass.shape
    found = mass.new_empty(*chosen.shape[:2], heads, tiles)
    step = max(1, _BLOCK // (chosen[0].numel() * heads))
    for first in range(0, len(chosen), step):
        some = chosen[first : first + step, :, None].expand(-1, -1, heads, -1, -1)
        found[first : first + step] = mass.expand(*some.shape[:2], heads, tiles, keys).gather(-1, some).sum(-1)
    return found


def _coverage(q: Tensor, k: Tensor, logits: ops.Logits) -> Tensor:
    """The attention on a query's heaviest keys, mean over some queries: ``[Hq]``."""
    length = q.shape[2]
    if length <= COVERAGE_KEYS:
        return q.new_full((q.shape[1],), float("nan"), dtype=torch.float32)
    number = min(_COVERAGE_QUERIES, length - COVERAGE_KEYS)
    queries = torch.linspace(COVERAGE_KEYS, length - 1, number, device=q.device).long()
    keys, covered = torch.arange(length, device=q.device), 0.0
    for at in queries.split(max(1, _BLOCK // (q.shape[1] * length))):
        rows = ops.fold_group(q[:, :, at], k.shape[1])
        scores = ops.key_logits(rows, k, logits)[0].unflatten(1, (-1, len(at)))
        weights = scores.masked_fill_(keys > at[:, None], float("-inf")).softmax(-1)
        covered = covered + weights.topk(COVERAGE_KEYS, -1).values.sum((-1, -2))
    return covered.flatten() / number

"""Evenly spaced tokens: the baseline that knows nothing."""

from typing import ClassVar

import torch
from torch import Tensor

from foveate.methods._settings import redefined
from foveate.methods.base import About, register, setting
from foveate.methods.bases import KeepsByScore
from foveate.state import Evicts, SlotCache


@register
class Uniform(KeepsByScore):
    """Tokens spaced evenly over the context, and the most recent ones.

    The prefill is dense. In decode the token whose neighbours are closest to each other leaves, so that the spacing
    stays even as the context grows.
    """

    name = "uniform"
    about: ClassVar[About] = About("baseline", small_budget={"top_k": 0.15, "min_k": 4, "window": 8})
    evicts = Evicts.IN_DECODE
    sinks = 0

    top_k: int | float = setting(0.125, "evenly spaced tokens: a number, or a share of the tokens so far")
    min_k: int = setting(0, "least number of spaced tokens when top_k is a share")
    window: int = redefined(KeepsByScore, "window", 128)

    def prompt_end(self, cache: SlotCache, scaling: float) -> Tensor | None:
        spaced = self.allowed(cache.lengths[0]) - self.window
        old = cache.used - self.window
        if old <= spaced:
            return None
        positions = cache.positions.long()
        rank = torch.arange(spaced, device=cache.device)
        targets = rank * positions[..., old, None] // max(spaced, 1)
        nearest = torch.searchsorted(positions[..., :old].contiguous(), targets)
        # the first token at or after each target, but every token once
        kept = (nearest - rank).cummax(-1).values.clamp_max(old - spaced) + rank
        window = torch.arange(old, cache.used, device=cache.device).expand(*kept.shape[:2], -1)
        return torch.cat([kept, window], -1)

    def scores(self, cache: SlotCache, scaling: float) -> Tensor:
        return spacing(cache.positions)


def spacing(positions: Tensor) -> Tensor:
    """The distance between the two neighbours of each token, fp32 ``[B, Hkv, S]``, from ``positions [B, Hkv, S]``.

    Position -1 marks an empty slot. The first and the last token have a neighbour on one side only, and get infinity.
    """
    order = positions.argsort(-1)
    ordered = positions.gather(-1, order).float()
    ordered = ordered.masked_fill(ordered < 0, float("-inf"))
    before = torch.nn.functional.pad(ordered[..., :-1], (1, 0), value=float("-inf"))
    after = torch.nn.functional.pad(ordered[..., 1:], (0, 1), value=float("inf"))
    gaps = (after - before).nan_to_num(float("inf"), posinf=float("inf"))
    return torch.empty_like(gaps).scatter_(-1, order, gaps)

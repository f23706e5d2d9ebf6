"""Ada-KV: SnapKV's votes, with one budget for the KV heads of a layer together."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from foveate.methods.base import About, register
from foveate.methods.snapkv import SnapKV
from foveate.state import Evicts, SlotCache


@register
class AdaKV(SnapKV):
    """The prompt tokens that an observation window attends to; KV heads whose attention is spread keep more of them.

    As ``snapkv``, but the KV heads of a layer share the sum of their budgets: the tokens with the most votes in any
    head stay. Every generated token is kept.
    """

    name: ClassVar[str] = "adakv"
    about: ClassVar[About] = About("Ada-KV, Feng et al. 2024, arXiv:2407.11550")
    evicts: ClassVar[Evicts] = Evicts.AT_PROMPT_END | Evicts.UNEVENLY

    floor: ClassVar[float] = 0.2
    """Share of an equal budget, window included, that each KV head keeps at least."""

    def keep(self, cache: SlotCache, scores: Tensor, allowed: int) -> Tensor:
        votes = scores[:, :, : cache.used - self.window]
        held = cache.positions[:, :, : votes.shape[2]] >= 0
        safe = int(self.floor * allowed) - self.window
        rank = votes.masked_fill(~held, float("-inf")).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        votes = votes.masked_fill(rank < safe, float("inf")).masked_fill(~held, float("-inf")).flatten(1)
        best = votes.argsort(dim=-1, descending=True, stable=True)[:, : held.shape[1] * (allowed - self.window)]
        kept = held & torch.zeros_like(votes, dtype=torch.bool).scatter(1, best, True).view_as(held)
        slots = torch.arange(cache.used, device=cache.device)
        return slots.where(F.pad(kept, (0, self.window), value=True), -1)

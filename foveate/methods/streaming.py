"""StreamingLLM: attention sinks and a window of recent tokens."""

import functools
from typing import ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.methods.base import About, Method, Replay, register, setting
from foveate.methods.budgets import Number, budget
from foveate.state import Evicts, SlotCache


@register
class Streaming(Method):
    """The first tokens and the most recent ones; sparse in prefill as in decode.

    Tokens keep their original positions (the paper renumbers them inside the cache).
    """

    name: ClassVar[str] = "streaming"
    about: ClassVar[About] = About(
        "StreamingLLM, Xiao et al. 2024, arXiv:2309.17453",
        full_budget={"window": 1.0},
        small_budget={"sinks": 2, "window": 13},
    )
    evicts: ClassVar[Evicts] = Evicts.IN_DECODE
    replay: ClassVar[Replay] = Replay()

    sinks: int = setting(4, "first tokens that are always kept")
    window: int | float = setting(
        1024, "recent tokens, the query's own included: a number or a share of the tokens so far"
    )

    def __post_init__(self):
        self._check_count("sinks")
        self._check_budget("window")

    def lower(self, position: Number) -> Number:
        """The first position in the window of the query at ``position``, an int or an int64 tensor."""
        return position + 1 - budget(self.window, position + 1, 1)

    def prompt(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Attended:
        length, n = cache.lengths[0], q.shape[2]
        lower = _lower_slots(self.window, length - n, length, cache.used, q.device)
        how = {"lower": lower, "sinks": self.sinks, "offset": cache.used - n}
        return ops.attend_window(q, cache.view(), logits=cache.logits(scaling), **how)

    def prompt_end(self, cache: SlotCache, scaling: float) -> Tensor | None:
        length, used = cache.lengths[0], cache.used
        first = self.lower(length) - (length - used)  # slot of the window's first token, see _lower_slots
        if first <= self.sinks:
            return None
        sinks = torch.arange(self.sinks, device=cache.device)
        return torch.cat([sinks, torch.arange(first, used, device=cache.device)])

    def evict(self, cache: SlotCache, scaling: float) -> None:
        # the next query sees nothing below its window: at most one token leaves it at each step
        rows = cache.plan.where(self._leaves)
        if rows is not None:
            cache.evict(rows, at=cache.plan.per_row(self._leaving))

    def _leaving(self, length: Number) -> Number:
        """The position of the last token that the next query does not see."""
        return self.lower(length) - 1

    def _leaves(self, live: Number, length: Number) -> bool | Tensor:
        """Whether the token :meth:`_leaving` was still in the window of the last query, and is no sink."""
        return (self.lower(length) > self.lower(length - 1)) & (self._leaving(length) >= self.sinks)


@functools.lru_cache(maxsize=64, typed=True)  # 1 is a number, 1.0 a share
def _lower_slots(window: int | float, first: int, end: int, used: int, device: torch.device) -> Tensor:
    """The slot at which each query's window begins, int64 ``[end - first]``; the same in every layer.

    ``end - used`` tokens between the sinks and the first window have left the cache.
    """
    with torch.inference_mode(False):
        positions = torch.arange(first, end, device=device)
        return Streaming(window=window).lower(positions) - (end - used)

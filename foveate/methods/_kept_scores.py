"""Scores that a layer keeps between decode steps, so that it scores keys or pages at every few tokens alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foveate.methods.base import setting
from foveate.state import Channel, SlotCache

AT = "scored_at"
"""The channel that :attr:`Method.scored_at` names."""
MOST = 16
"""Largest ``every``: no key is newer than the last scores by more tokens than `pages` reads at the end anyway."""


def every_setting(what: str) -> Any:
    """The setting ``every``."""
    return setting(
        1, f"score {what} at every so many tokens, 1 to {MOST}; the tokens between use the last scores, and newer keys"
    )


def check_every(method: Any) -> None:
    """Raise unless ``every`` is valid. A method that keeps scores has state that cropping does not undo."""
    method._check_count("every", 1)
    method._check("every", method.every <= MOST, f"1 to {MOST}")
    if method.every > 1:
        method.__dict__["stateful"] = True


def kept_from_token_to_token(every: int) -> str:
    """:attr:`Method.per_request` of a method that keeps scores; empty where every token is scored."""
    if every == 1:
        return ""
    return (
        "keeps scores of a request from token to token, and an engine does not tell whose a row is: leave out "
        f"every={every}"
    )


@dataclass(frozen=True)
class KeptScores:
    """The last scores of each key, or page, and when each row was scored: a row is due ``every`` tokens later.

    Rows that are not due have no keys to score as the scoring kernels see it, so that nothing is read for them: a step
    decides on the device, also within a CUDA graph.

    Args:
        every: tokens from one scoring to the next.
        size: keys of an entry.
    """

    every: int
    size: int = 1

    def channels(self) -> dict[str, Channel]:
        return {"kept_scores": Channel(per=self.size), AT: Channel(per=0, dtype=torch.int64)}

    def renew(
        self, cache: SlotCache, heads: int, number: int, scores_of: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The scores by which one token a row chooses, fp32 ``[B, heads, number]``, and when they were made, ``[B]``.

        A page that was not full then has no score: 0.

        Args:
            heads, number: scores of a row.
            scores_of: gives new ones of the rows of a mask, bool ``[B]``; of other rows anything.
        """
        plan, at = cache.plan, cache.channel(AT)
        lengths = plan["lengths"]
        kept = cache.tensors["kept_scores"][:, :heads, :number]
        due = (at == 0) | (lengths - at >= self.every)
        if plan.may_hold(due):
            there = torch.arange(number, device=due.device) < (lengths // self.size).where(due, 0)[:, None]
            kept.copy_(scores_of(due).where(there[:, None], kept))
            at.copy_(lengths.where(due, at))
        return kept, at

"""Scores that a layer keeps between decode steps, so that it scores keys or pages only once every few tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foveate.methods.base import setting
from foveate.state import Channel, SlotCache

AT = "scored_at"
"""Name of the channel with the length at which each row was last scored, see :attr:`Method.scored_at`."""
MOST = 16
"""Largest ``every``. `pages` always reads its 16 newest tokens, so it reads every key that is newer than the scores."""


def every_setting(what: str) -> Any:
    """The setting ``every`` of a method that keeps scores; ``what`` names the things that are scored."""
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
    """:attr:`Method.per_request` of a method that keeps scores; empty when every token is scored (``every`` is 1)."""
    if every == 1:
        return ""
    return (
        "keeps scores of a request from token to token, and an engine does not tell whose a row is: leave out "
        f"every={every}"
    )


@dataclass(frozen=True)
class KeptScores:
    """The last scores of each key or page, and the length at which each row was scored. A row is due ``every`` tokens
    later.

    A step decides on the device which rows are due, also within a CUDA graph. To the scoring kernels a row that is not
    due has no keys, so they read nothing for it.

    Args:
        every: tokens from one scoring of a row to the next.
        size: keys that one score stands for: 1, or the keys of a page.
    """

    every: int
    size: int = 1

    def channels(self) -> dict[str, Channel]:
        return {"kept_scores": Channel(per=self.size), AT: Channel(per=0, dtype=torch.int64)}

    def renew(
        self, cache: SlotCache, heads: int, number: int, scores_of: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The scores by which one token a row chooses, and the length at which each row was scored.

        A page that was not full when its row was scored has the score 0.

        Args:
            heads: KV heads that have scores of their own.
            number: scores of a row and head.
            scores_of: given the rows that are due, bool ``[B]``, computes new scores, fp32 ``[B, heads, number]``. It
                may return anything for the other rows.

        Returns:
            fp32 ``[B, heads, number]`` and int64 ``[B]``.
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

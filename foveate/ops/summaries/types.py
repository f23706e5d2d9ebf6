"""The rule that :func:`attend_summaries` takes, its results, and the running sums that it updates."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from torch import Tensor

from foveate.ops.attend.attended import Attended
from foveate.ops.attend.partials import with_sinks


@dataclasses.dataclass(frozen=True)
class Refinement:
    """The rule by which nodes are refined, and the weights of summaries.

    On each level the nodes with the largest mass are refined. :attr:`Rows.numbers` gives their number.
    """

    pool: str = "kv_head"
    """``kv_head``: each KV head chooses by the mean mass over its group. ``layer``: all KV heads share one choice, by
    the largest mass in any query head."""
    score: str = "summary"
    """What a node's mass is estimated from: its log-weight (``summary``); the variance of the keys under it, with
    dimensions taken as independent (``spread``); or a low-rank summary of these keys (``lowrank``, see
    :func:`foveate.ops.score.page_lse`)."""
    bias: str = "log"
    """The bias that is added to a summary's logit. ``none``: nothing; ``log``: the logarithm of the number of tokens
    under it; ``entropy``: the entropy of these tokens' weights in the summary."""
    mass: str = "exact"
    """``exact``: children enter the softmax with their own logits; ``preserve``: they share their parent's mass (LuKA,
    equation 3)."""
    prior: float = 0.0
    """Weight of the recent attention (:attr:`Level.recent`) in the mass by which nodes are chosen, 0 to 1."""


class Covered(NamedTuple):
    """Results of :func:`attend_summaries`."""

    out: Tensor
    """``[B, Hq, 1, Dv]``, in the dtype of the values."""
    lse: Tensor | None
    """fp32 ``[B, Hq, 1]``: log-sum-exp of the cover's log-weights, natural; None unless ``need_lse``."""
    read: float | Tensor
    """Number of keys read, a summary counted as :attr:`Level.reads`: the mean over rows and KV heads, or
    ``[B, Hkv]``."""
    refined: float | Tensor
    """Number of refined pages: the mean over rows and KV heads, or ``[B, Hkv]``."""

    def beside(self, sinks: Tensor | None, need_lse: bool) -> Covered:
        """The result with sinks added, see :class:`~foveate.ops.Logits`, and with the log-sum-exp if it is needed."""
        out, lse, _ = with_sinks(Attended(self.out, self.lse), sinks)
        return self._replace(out=out, lse=lse if need_lse else None)


class Sums(NamedTuple):
    """Running sums of attention that :func:`attend_summaries` updates in place.

    The softmax probabilities of sinks and tail, summed over the group, are added to ``total``. ``recent`` (for sinks
    and tail) and :attr:`Level.recent` (for visited nodes) are exponential moving averages of the mean over the group,
    in which the newest step has the weight ``share``. A refined node gets the attention of its children.
    """

    share: float
    total: Tensor | None = None
    """fp32 ``[B, Hkv, S]``, an entry per slot; None: no sum is kept."""
    recent: Tensor | None = None
    """fp32 ``[B, Hkv, S]``, an entry per slot; None: neither tokens nor nodes keep recent attention."""

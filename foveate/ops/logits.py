"""The rule by which queries and keys give logits, an argument of every verb that compares them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Logits:
    """The rule by which ``q . k`` becomes the logits of a softmax.

    A key's logit is ``x = scaling * q . k``, or under a cap ``softcap * tanh(x / softcap)``. The cap is checked here; a
    verb checks that the sinks fit its queries.

    Args:
        scaling: factor of ``q . k``.
        sinks: ``[Hq]``: one logit of each query head that takes its share of every softmax and has no value, such as
            gpt-oss's learned sinks. The log-sum-exp and the mass count it, and no cap applies to it. None: no sinks.
        softcap: the cap of a key's logits, applied before the mask, as in Gemma 2. None: no cap.

    Raises:
        ValueError: for a cap that is not a finite number above 0.
    """

    scaling: float
    sinks: Tensor | None = None
    softcap: float | None = None

    def __post_init__(self):
        softcap = self.softcap
        if softcap is None:
            return
        number = isinstance(softcap, (int, float)) and not isinstance(softcap, bool)
        if not (number and math.isfinite(softcap) and softcap > 0):
            raise ValueError(f"softcap must be a finite number above 0, or None, not {softcap!r}")

    def check_heads(self, q: Tensor) -> None:
        """Raise ValueError unless ``sinks`` is None or has one logit for each head of ``q [B, Hq, Lq, D]``."""
        if self.sinks is not None:
            check_sinks(self.sinks, q.shape[1])

    def without_sinks(self) -> Logits:
        """The same rule without sinks. :func:`foveate.ops.with_sinks` then adds the sinks to the result."""
        return self if self.sinks is None else dataclasses.replace(self, sinks=None)


def check_sinks(sinks: Tensor | None, heads: int) -> None:
    """Raise ValueError unless ``sinks`` is None or has one logit for each head."""
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must be one logit for each of {heads} heads, not {tuple(sinks.shape)}")

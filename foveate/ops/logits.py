"""How logits are made of queries and keys: what every verb that compares them takes."""

from typing import NamedTuple

from torch import Tensor


class Logits(NamedTuple):
    """How the logits of a softmax are made of ``q . k``.

    A key's logit is ``x = scaling * q . k``, or under a cap ``softcap * tanh(x / softcap)``. Verbs raise ValueError for
    sinks of other heads and for a cap that is not a finite number above 0.
    """

    scaling: float
    """Factor of ``q . k``."""
    sinks: Tensor | None = None
    """``[Hq]``: a logit of each query head that takes its share of every softmax and has no value, the learned sinks of
    gpt-oss. The log-sum-exp and the mass count it, and no cap applies to it. None: there is none."""
    softcap: float | None = None
    """The cap of a key's logits, before the mask, as in Gemma 2. None: there is none."""

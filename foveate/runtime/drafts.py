"""Lossless decoding: drafts that read few keys, and passes over all keys that verify them.

A cycle has a draft of k tokens and one verifying pass. The first token of a draft chooses as in any decode step. The
others read the same keys again, and the draft's own tokens. The verifying pass reads the last accepted token and the k
drafts in one go, each with all keys before it, and stores their keys and values in place of the draft's. So the cache
holds what dense decoding leaves in it. Greedy decoding accepts the drafts before the first one that differs from dense
attention's own token; sampling accepts them by the rule of Leviathan et al. 2023 (arXiv:2211.17192, algorithm 1). One
token more follows from the verifying pass itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from foveate import ops
from foveate.methods import Method
from foveate.ops import Choice
from foveate.ops.choice import ALL
from foveate.state import SlotCache
from foveate.state.step_plan import StepPlan

LONGEST = 16
"""Most tokens of a draft."""
LENGTHS = (1, 2, 3, 5, 7, 11, 15)
"""Lengths of drafts that are timed against each other. A verifying pass reads one token more than the draft has, and
these numbers of tokens fill the tiles of :func:`foveate.ops.attend_newest`."""
_FIRST = 5
"""The length that is tried first."""
_FORGET = 0.9
"""Factor by which each cycle lowers the weight of earlier cycles in the share of accepted drafts."""
_UNTRIED = 0.9
"""Factor of the rate of a length that was not tried, because its passes would have to be captured first."""
_TRIALS = 3
"""Cycles that are timed before a length is chosen by its time."""
_TIMED = 5
"""How many of the last cycles of a length give its median."""
_TIMED_AGAIN = 256
"""Cycles after which a pass without a draft is timed again."""
_RESTS = 64
"""Cycles without a draft after one that is not expected to pay."""


@dataclass
class Drafting:
    """A layer's choice for the first token of a draft, which the draft's later tokens read again."""

    _kept: Choice = ALL
    _lengths: Tensor | None = None
    """Tokens of each row at the time of the choice, int64 ``[B]``."""

    @property
    def begun(self) -> bool:
        """Whether the draft has a token before the present one."""
        return self._lengths is not None

    def keep(self, choice: Choice, plan: StepPlan) -> None:
        """Keep the choice of the first token for the later tokens.

        Raises:
            ValueError: for a choice without keys and pages that does not read all keys: no tokens can be added to it.
        """
        if not choice.reads_all and choice.keys is None and choice.pages is None:
            raise ValueError("lossless decoding drafts by choices of keys or pages, and this layer's has neither")
        readers = choice.readers and choice.readers.for_draft(plan["counts"])
        self._kept = choice.for_draft(plan["counts"])._replace(readers=readers)
        self._lengths = plan.cached("draft", lambda: plan["lengths"].clone())

    def again(self, plan: StepPlan) -> Choice:
        """The choice for the present token: the kept choice and the draft's newer tokens."""
        kept, begun = self._kept, self._lengths
        number = plan.cached(("drafted", begun), lambda: plan["lengths"] - begun)

        def with_newest(choice: Choice) -> Choice:
            key = ("newest", begun, choice.page_size, choice.pages is None)
            newest = plan.cached(key, lambda: choice.newest(plan["counts"], number, LONGEST - 1))
            return choice.with_newest(newest, number)

        own = kept if kept.reads_all else with_newest(kept)
        return own._replace(readers=kept.readers and with_newest(kept.readers))


def obstacle(method: Method) -> str:
    """Why a layer's method cannot draft; empty if it can."""
    if method.evicts:
        return "it evicts tokens, which a verifying pass would need"
    if method.stateful:
        return "it keeps a state of its tokens that rejected drafts would stay in"
    role = method.role
    if type(method).choose is Method.choose and role.reads_choice_of is None and not role.reads_all:
        return "it does not choose keys"
    return ""


def verified(method: Method, cache: SlotCache, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """Count one token more in every row, write the last n tokens over their drafts, and attend densely for them.

    Args:
        q, k, v: queries ``[B, Hq, n, D]``, keys and values ``[B, Hkv, n, D(v)]`` of the last n tokens.
        scaling: factor of the logits.

    Returns:
        ``[B, Hq, n, Dv]``.
    """
    kind, number = type(method), q.shape[2]
    cache.write_verified(k, v)
    if kind.note_newest is not Method.note_newest:
        for n in range(number):
            with cache.as_of(number - 1 - n):
                method.note_newest(cache, q[:, :, n : n + 1])
    cache.count_read()
    attended = ops.attend_newest(q, cache.view(cache.stored()[1]), logits=cache.logits(scaling))
    if kind.learn is not Method.learn:
        method.learn(cache, ALL, attended)
    return attended.out


def accept_greedy(drafts: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The drafts that greedy decoding would have written.

    Args:
        drafts: int64 ``[B, k]``.
        scores: ``[B, k + 1, V]``, of the token after the last accepted one and after each draft.

    Returns:
        How many drafts of each row are accepted, int64 ``[B]``, and the token that follows them, int64 ``[B]``.
    """
    best = scores.argmax(-1)
    accepted = (drafts == best[:, :-1]).cumprod(1).sum(1)
    return accepted, best.gather(1, accepted[:, None])[:, 0]


def accept_sampled(drafts: Tensor, drawn_from: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafts so that tokens are distributed as if each were drawn from the scores alone.

    Args:
        drafts: int64 ``[B, k]``, drawn from ``drawn_from``.
        drawn_from: fp32 ``[B, k, V]``, probabilities.
        scores: fp32 ``[B, k + 1, V]``, logits of the token after the last accepted one and after each draft.

    Returns:
        See :func:`accept_greedy`.
    """
    p = scores.softmax(-1)
    one = drafts[..., None]
    ratio = (p[:, :-1].gather(2, one) / drawn_from.gather(2, one))[..., 0]
    accepted = (torch.rand_like(ratio) < ratio).long().cumprod(1).sum(1)
    rows = torch.arange(len(drafts), device=drafts.device)
    rest = p[rows, accepted]
    missed = torch.nn.functional.pad(drawn_from, (0, 0, 0, 1))[rows, accepted]  # nothing was drawn after the last draft
    left = (rest - missed).clamp_min(0)
    left = left.where(left.sum(-1, keepdim=True) > 0, rest)  # all 0 if the distributions differ by rounding alone
    return accepted, torch.multinomial(left, 1)[:, 0]


class DraftLength:
    """How many tokens a draft has: a fixed number, or the one by which most tokens a second are to be expected.

    Cycles are timed. With a share ``a`` of drafts accepted, drafts of a length n give ``1 + a + .. + a ** n`` tokens a
    cycle (Leviathan et al. 2023, equation 1). Where a pass without a draft gives more tokens a second, no draft is made
    for a while.

    Args:
        fixed: the number; None: the best one.
        clock: seconds.
    """

    def __init__(self, fixed: int | None = None, clock: Callable[[], float] = time.perf_counter):
        self.fixed, self._clock = fixed, clock
        self._accepted, self._tried = 8.0, 10.0
        self._cycles, self._number, self._begun = 0, 0, 0.0
        self._seconds: dict[int, deque[float]] = {}
        """By the length of a draft, how long its last cycles took."""
        self._dense_at = 0
        """The cycle of the last pass without a draft."""
        self._rests = 0
        """Cycles without a draft before one is tried."""

    def next(self, most: int) -> int:
        """Tokens of the next draft, at most ``most``, with which a cycle begins."""
        number = self._wanted() if self.fixed is None else self.fixed
        if number > most:  # a length that was tried is captured already
            shorter = [one for one in LENGTHS if one <= most]
            number = max([one for one in shorter if one in self._seconds] or shorter, default=0)
        self._cycles, self._number, self._begun = self._cycles + 1, number, self._clock()
        return number

    def learn(self, accepted: int, tried: int, steady: bool) -> None:
        """End a cycle.

        Args:
            accepted: drafts of all rows.
            tried: the accepted drafts and the first rejected draft of each row.
            steady: whether its time counts: no pass was captured, or ran before it is captured.
        """
        number, took = self._number, self._clock() - self._begun
        if number:
            self._accepted = _FORGET * self._accepted + accepted
            self._tried = _FORGET * self._tried + tried
        if steady:
            self._seconds.setdefault(number, deque(maxlen=_TIMED)).append(took)
            self._dense_at = self._dense_at if number else self._cycles

    def _wanted(self) -> int:
        if not any(number and len(took) >= _TRIALS for number, took in self._seconds.items()):
            return _FIRST
        if len(self._seconds.get(0, ())) < _TRIALS or self._cycles - self._dense_at > _TIMED_AGAIN:
            return 0  # also now and then, for a pass takes longer as the context grows
        if self._rests:
            self._rests -= 1
            return 0
        best = max((0, *LENGTHS), key=self._rate)
        if best:
            return best
        self._rests = _RESTS
        return max(LENGTHS, key=self._rate)

    def _rate(self, number: int) -> float:
        """Tokens a second to be expected of drafts of this length."""
        share = min(self._accepted / self._tried, 0.999)
        tried = 1 if number in self._seconds else _UNTRIED
        return tried * (1 - share ** (number + 1)) / (1 - share) / self._took(number)

    def _took(self, number: int) -> float:
        """Seconds of a cycle; of a length that was not timed, by how long a drafted token of other lengths takes."""
        if number in self._seconds:
            return median(self._seconds[number])
        dense = median(self._seconds[0])
        token = median((median(took) - dense) / one for one, took in self._seconds.items() if one)
        return dense + number * max(token, 0.0)


@dataclass
class DraftUse:
    """What lossless decoding has done."""

    cycles: int = 0
    """Verifying passes, counted once for each row that had not ended."""
    drafted: int = 0
    """Tokens drafted for these rows."""
    accepted: int = 0
    """Drafts that the answers have."""
    ties: int = 0
    """Greedy tokens whose two best scores differ by no more than four units in the last place, and which a pass over
    several tokens may order otherwise than a pass over one."""

    @property
    def per_cycle(self) -> float:
        """Drafts accepted in a verifying pass; a row gains one token more than that."""
        return self.accepted / self.cycles if self.cycles else 0.0

"""Lossless decoding: drafts that read few keys, and passes over all keys that verify them.

A cycle has a draft of k tokens and one verifying pass. The first token of a draft chooses as in any decode step. The
others read the same keys again, and the draft's own tokens. The verifying pass reads the last accepted token and the k
drafts in one go, each with all keys before it, and stores their keys and values in place of the draft's. So the cache
holds what dense decoding leaves in it. Accepted are the drafts before the first that differs from dense attention's own
answer, or, where tokens are sampled, those of the rule of Leviathan et al. 2023 (arXiv:2211.17192, algorithm 1). One
token more follows from the verifying pass itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foveate import ops
from foveate.methods import Method
from foveate.ops import Attended, Choice
from foveate.ops.choice import ALL
from foveate.state import SlotCache
from foveate.state.step_plan import StepPlan

LONGEST = 16
"""Most tokens of a draft."""
_ACCEPTED_WHOLE = 0.5
"""A draft is as long as it can be to be accepted whole with at least this probability."""
_FORGET = 0.9
"""Weight of earlier cycles in what is known of acceptance, to each cycle after them."""


@dataclass
class Drafting:
    """What a layer has chosen for the first token of a draft."""

    after: int = 0
    """Tokens of the draft before the present one."""
    _kept: Choice = ALL

    def keep(self, choice: Choice) -> None:
        """Keep what the first token reads, for the others.

        Raises:
            ValueError: for another choice than of keys or pages, to which no tokens can be added.
        """
        if not choice.reads_all and choice.keys is None and choice.pages is None:
            raise ValueError("lossless decoding drafts by choices of keys or pages, and this layer's has neither")
        self._kept = choice

    def again(self, plan: StepPlan) -> Choice:
        """What the present token reads: the same, and the tokens of the draft since."""
        kept, counts = self._kept, plan["counts"]
        own = kept if kept.reads_all else kept.with_newest(counts, self.after)
        return own._replace(readers=kept.readers and kept.readers.with_newest(counts, self.after))


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


def verified(method: Method, store: SlotCache, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """Store n tokens of every row, and attend densely for them; arguments and result as of :func:`attend_newest`."""
    for n in range(q.shape[2]):
        store.write_step(k[:, :, n : n + 1], v[:, :, n : n + 1])
        method.note_newest(store, q[:, :, n : n + 1])
    store.count_read()
    attended = attend_newest(store, q, k, v, scaling)
    method.learn(store, ALL, attended)
    return attended.out


def attend_newest(store: SlotCache, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Attended:
    """Causal attention of the last n tokens of every row, which the cache holds already, its output ``[B, Hq, n, Dv]``.

    All n queries of a KV head's group share a pass over the keys before them, and attend to each other beside it.

    Args:
        q, k, v: of these tokens, ``[B, Hq, n, D]`` and ``[B, Hkv, n, D(v)]``.
        scaling: factor of the logits.
    """
    batch, heads, n, _ = q.shape
    logits = store.logits(scaling)
    how = {"logits": logits._replace(sinks=None), "need_lse": True}
    folded = q.reshape(batch, heads * n, 1, -1)
    before = ops.attend(folded, *store.memory, lengths=store.plan["counts"] - n, **how)
    causal = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()[None, None]
    parts = [ops.Attended(before.out.reshape(batch, heads, n, -1), before.lse.reshape(batch, heads, n))]
    parts.append(ops.attend(q, k, v, mask=causal, **how))
    return ops.with_sinks(ops.merge(parts), logits.sinks)


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
    """Drafts accepted so that tokens are distributed as if each were drawn from the scores alone.

    Args:
        drafts: int64 ``[B, k]``, drawn from ``drawn_from``.
        drawn_from: fp32 ``[B, k, V]``, probabilities.
        scores: fp32 ``[B, k + 1, V]``, logits; the rest as of :func:`accept_greedy`.
    """
    p = scores.softmax(-1)
    one = drafts[..., None]
    ratio = (p[:, :-1].gather(2, one) / drawn_from.gather(2, one))[..., 0]
    accepted = (torch.rand_like(ratio) < ratio).long().cumprod(1).sum(1)
    rows = torch.arange(len(drafts), device=drafts.device)
    rest = p[rows, accepted]
    missed = torch.nn.functional.pad(drawn_from, (0, 0, 0, 1))[rows, accepted]  # nothing was drawn after the last draft
    left = (rest - missed).clamp_min(0)
    left = left.where(left.sum(-1, keepdim=True) > 0, rest)  # both distributions are equal but for rounding
    return accepted, torch.multinomial(left, 1)[:, 0]


@dataclass
class DraftLength:
    """How many tokens a draft has: a fixed number, or what acceptance so far makes likely to be accepted whole."""

    fixed: int | None = None
    _accepted: float = 8.0
    _tried: float = 10.0

    def next(self) -> int:
        """Tokens of the next draft, at least 1."""
        if self.fixed is not None:
            return self.fixed
        share = min(self._accepted / self._tried, 0.999)
        return min(LONGEST, max(1, int(math.log(_ACCEPTED_WHOLE) / math.log(max(share, 0.01)))))

    def learn(self, accepted: int, tried: int) -> None:
        """Note how many drafts were accepted, of those that were looked at: the accepted and the first other."""
        self._accepted = _FORGET * self._accepted + accepted
        self._tried = _FORGET * self._tried + tried


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

"""Learnable token eviction: which tokens a head goes on seeing when they leave its window (laLTE, section 3.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foveate import ops
from foveate.calibration.retention_scores import RetentionScores
from foveate.hybrids.layers.masked import attend_masked
from foveate.hybrids.layers.rotary import rotate
from foveate.hybrids.layers.window import PIECE, Retention, SlidingWindowAttention
from foveate.hybrids.state import Packing, RetainedMemory

THRESHOLD = 0.5
"""Tokens with a higher retention score are retained."""
GOLDEN = 0.6180339887
"""Rows times this, modulo one, are spread evenly; those below a share are open."""
STAYS = 0.125
"""Share of the rows that stay open after a release, and from which scores learn what a token is worth."""
SCORED = 65536
"""Tokens that are scored at once, of all rows together: a kernel's scratch is 96 MB for 8 KV heads of 64 dimensions in
bf16."""


class LearnedEviction(SlidingWindowAttention):
    """Attention over a window, sinks, and the tokens that each KV head has chosen to retain (equation 5).

    In training nothing caps the retained tokens; a penalty keeps them few (:mod:`foveate.hybrids.training`).
    Everywhere else each KV head retains at most ``buffer`` tokens older than the window: the best so far. What a token
    sees therefore depends on no later token than the scores' reach, and a prompt in pieces is read as one piece.

    Args:
        hidden_size: width of the model.
        num_heads, num_kv_heads, head_dim: of the attention.
        window: tokens that a query sees before its own.
        buffer: retained tokens per KV head, sinks included.
        sinks: first tokens that are always retained.
        rotary_base: of the positions.
        scores: settings of :class:`RetentionScores`.
        whole_prompt: retain the best tokens of the first prompt for all of its queries, as the published code does;
            the prompt must then come in one piece.
        gradient: how scores learn. "value": equation 6's gradient, the value's share in the loss of every query that
            reads it, also of those in whose window it is. "worth": by a lesson of their own (:func:`lesson`), and the
            model's loss moves them not at all. Ours.
    """

    opened: Tensor | None = None
    """Which rows of training are open; fp32 ``[2]`` on the device, their share and a phase that moves them about; None:
    no row. In an open row every token is retained, and scores give keys and values no gradient. A tensor, so that
    layers stay compiled when it changes."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int,
        buffer: int,
        sinks: int = 4,
        rotary_base: float = 10000.0,
        scores: dict | None = None,
        whole_prompt: bool = False,
        gradient: str = "value",
    ):
        super().__init__(hidden_size, num_heads, num_kv_heads, head_dim, window, rotary_base)
        if gradient not in ("value", "worth"):
            raise ValueError(f"gradient must be value or worth, not {gradient!r}")
        self.gradient = gradient
        self.buffer, self.sinks, self.whole_prompt = buffer, sinks, whole_prompt
        self.scores = RetentionScores(num_kv_heads, 2 * head_dim, **(scores or {}))
        seen = 2 * self.reach + 1
        if window < seen:
            raise ValueError(f"window must be at least the {seen} tokens that a score sees, not {window}")
        if not 0 <= sinks <= buffer or buffer < 1:
            raise ValueError(f"buffer must be at least 1 and hold the {sinks} sinks, not {buffer}")

    @property
    def reach(self) -> int:
        return self.scores.reach

    def _train(
        self, q: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor, Tensor], real: Tensor | None
    ) -> tuple[Tensor, Retention]:
        opened = None if self.opened is None else _open_rows(self.opened, len(k))
        scored = (k, v) if self.gradient == "value" else (k.detach(), v.detach())
        if opened is not None:
            scored = (torch.where(opened[..., None], x.detach(), x) for x in scored)
        logits = self.scores.logits(*scored, real)
        scores = self.scores.probabilities(logits)
        retained = (scores > THRESHOLD).detach()
        retained[:, :, : self.sinks].fill_(True)
        if opened is not None:
            retained = retained | opened
        q, k, taught = rotate(q, angles), rotate(k, angles), None
        if self.gradient == "worth":
            rows = self._taught_rows(len(k))
            worth = largest_far_share(q[rows], k[rows], self.scaling, self.window)
            taught = lesson(logits[rows], worth, self.sinks, self.window)
        else:  # a value's share in the loss is the gradient of its score (equation 6), though the factor is 1
            v = v * (1 + scores - scores.detach())[..., None].to(v.dtype)
        length, window, group = k.shape[2], self.window, self.num_heads // self.num_kv_heads
        leaves = torch.arange(length, dtype=torch.int32, device=k.device) + window
        last = torch.where(retained, length, leaves)  # the last query that sees a key, int32 [B, Hkv, L]

        def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i <= last[b, h // group, j]

        return attend_masked(q, k, v, sees, scaling=self.scaling), Retention(scores, taught)

    def _taught_rows(self, rows: int) -> Tensor:
        """The rows that teach scores, int64: the share ``STAYS``, which stays open after a release."""
        phase = 0 if self.opened is None else self.opened[1]
        return _order(rows, phase, self.q_proj.weight.device).argsort()[: max(1, int(rows * STAYS))]

    def _scores(self, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        return self.scores(k, v, real)

    @torch.no_grad()
    def _margins(
        self,
        k: Tensor,
        v: Tensor,
        tokens: Tensor,
        real: Tensor | None,
        first: Tensor,
        slots: Tensor | None = None,
    ) -> Tensor:
        """Scores less the threshold; sinks are beyond any other. A piece at a time, with its neighbours."""
        length, parts = tokens.shape[1], []
        size = max(PIECE, SCORED // len(k))
        for begin in range(0, length, size):
            low, high = max(0, begin - self.reach), min(begin + size + self.reach, length)
            some, there = tokens[:, low:high], None if real is None else real[:, low:high]
            angles = self.rotary.angles(some + first[:, None])
            if slots is None:
                scores = self.scores.of_cached(k[:, :, low:high], v[:, :, low:high], angles, there)
            else:
                scores = self.scores.of_cached(k, v, angles, there, slots[:, low:high])
            margins = (scores - THRESHOLD).masked_fill((some < self.sinks)[:, None], float("inf"))
            parts.append(margins[:, :, begin - low : begin - low + size])
        return torch.cat(parts, 2) if len(parts) > 1 else parts[0]

    def _remember(self, q: Tensor, k: Tensor, v: Tensor, memory: RetainedMemory, packing: Packing | None) -> Tensor:
        if not self.whole_prompt or any(memory.lengths) or q.shape[2] == 1:
            return super()._remember(q, k, v, memory, packing)
        return self._published(q, k, v, memory, packing)

    def _published(self, q: Tensor, k: Tensor, v: Tensor, memory: RetainedMemory, packing: Packing | None) -> Tensor:
        """The first prompt as the published code reads it: the best of all its tokens, for all of its queries."""
        length, ring, held = k.shape[2], memory.ring, memory.tensors
        at = torch.arange(length, device=k.device)
        real = torch.ones(k.shape[0], length, dtype=torch.bool, device=k.device) if packing is None else packing.real
        counts = real.sum(1, keepdim=True)
        margins = self._margins(k, v, at.expand(k.shape[0], -1), real, held["first"])
        left = (at < counts - self.window)[:, None] & (margins > 0)  # tokens that the window has left at the end
        best = margins.masked_fill(~left, float("-inf")).argsort(dim=2, descending=True, stable=True)[
            :, :, : self.buffer
        ]
        there = left.gather(2, best)
        order = torch.where(there, best, length).sort(2).values  # in the order of their positions, empty ones last
        kept = there.sum(2)
        positions = F.pad(order, (0, self.buffer - order.shape[2]), value=length)
        index = positions.clamp_max(length - 1)
        far_k, far_v = ops.gather_slots(k, index), ops.gather_slots(v, index)
        outs = []
        for first in range(0, length, PIECE):
            queries = at[first : first + PIECE, None]
            low, high = max(0, first - self.window), min(first + PIECE, length)
            near = (at[low:high] <= queries) & (at[low:high] >= queries - self.window)
            near = near[None, None].expand(*kept.shape, -1, -1)
            mask = torch.cat([positions[:, :, None] < queries - self.window, near], 3)
            kv = ops.KV(torch.cat([far_k, k[:, :, low:high]], 2), torch.cat([far_v, v[:, :, low:high]], 2))
            outs.append(ops.attend(q[:, :, first:high], kv, logits=ops.Logits(self.scaling), mask=mask).out)
        last = counts + torch.arange(-ring, 0, device=k.device)
        source = last.clamp_min(0)[:, None].expand(-1, self.num_kv_heads, -1)
        into = (last % ring)[:, None].expand(-1, self.num_kv_heads, -1)
        for name, x, far in (("keys", k, far_k), ("values", v, far_v)):
            held[name].scatter_(2, into[..., None].expand(-1, -1, -1, x.shape[3]), ops.gather_slots(x, source))
            held[name][:, :, ring:] = far
        held["margins"].scatter_(2, into, margins.gather(2, source))
        held["margins"][:, :, ring:] = margins.gather(2, index)
        held["positions"].copy_(positions.masked_fill(positions == length, -1))
        held["kept"].copy_(kept)
        memory.advance(length, packing)
        memory.unscored = [max(0, number - self.reach) for number in memory.lengths]
        return torch.cat(outs, 2)


@torch.no_grad()
def largest_far_share(q: Tensor, k: Tensor, scaling: float, window: int) -> Tensor:
    """The largest probability that full attention gives a key of a query beyond its window: fp32 ``[B, Hkv, L]``.

    Args:
        q: ``[B, Hq, L, D]``.
        k: ``[B, Hkv, L, D]``.
        window: query i counts for key j where ``i - j > window``.
    """
    group, at = q.shape[1] // k.shape[1], torch.arange(k.shape[2], device=k.device)
    logits = (q.unflatten(1, (-1, group)) @ k[:, :, None].mT).float() * scaling  # [B, Hkv, group, L, L]
    later = at[:, None] - at
    shares = logits.masked_fill(later < 0, float("-inf")).softmax(-1)
    return shares.masked_fill(later <= window, 0).amax((2, 3))


def lesson(logits: Tensor, worth: Tensor, sinks: int, window: int) -> Tensor:
    """The loss by which scores learn what tokens are worth, a scalar.

    For each sequence and head it is the cross-entropy between two distributions over the tokens: the softmax of the
    scores, and the squared worth divided by its sum. The loss is the mean over sequences and heads, weighted by the
    largest worth: where no query looks for anything far, there is little to learn. The loss does not depend on the
    level of the scores, by which the budget is kept.

    Args:
        logits: scores before cap and sigmoid, fp32 ``[B, Hkv, L]``. (A capped score would have no gradient and could
            not recover.)
        worth: worth of the same tokens, fp32 ``[B, Hkv, L]`` in 0 to 1; see :func:`largest_far_share`.
        sinks: number of first tokens, which are always retained and left out.
        window: the last ``window + 1`` tokens are left out, too, because no query is further away from them.
    """
    counted = slice(sinks, max(sinks + 1, logits.shape[2] - window - 1))
    logits, worth = logits[:, :, counted], worth[:, :, counted]
    squared = worth.square()
    target = squared / squared.sum(2, keepdim=True).clamp_min(1e-20)
    return -(worth.amax(2) * (target * logits.log_softmax(2)).sum(2)).mean()


def _open_rows(opened: Tensor, rows: int) -> Tensor:
    """Bool ``[rows, 1, 1]``: as near to the share as can be, and evenly among the rows."""
    share, phase = opened
    return (_order(rows, phase, opened.device) < share)[:, None, None]


def _order(rows: int, phase: Tensor | float, device: torch.device) -> Tensor:
    """Numbers ``[rows]`` in 0 to 1; the lower a row's, the longer it stays open."""
    return (torch.arange(rows, device=device) * GOLDEN + phase) % 1

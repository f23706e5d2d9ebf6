"""Learnable token eviction: which tokens a head goes on seeing when they leave its window (laLTE, section 3.1)."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate import ops
from foveate.layers.masked import attend_masked
from foveate.layers.rotary import Rotary, rotate
from foveate.state import Packing, RetainedMemory

THRESHOLD = 0.5
"""Tokens with a higher retention score are retained."""
_PIECE = 256
"""Tokens of a prompt that are read at once."""


class RetentionScores(nn.Module):
    """The probability that a token is worth retaining, for each KV head on its own.

    Three convolutions over time, of kernel 3 and dilation 2, read the keys before rotation and the values of 13 tokens,
    six of them later ones; each halves the channels. The last bias starts at 0.5, so everything is retained at first.

    Args:
        num_kv_heads: heads.
        dim: dimensions of a key and its value together, a multiple of 8.
        kind: "conv"; or "mlp", two layers that see one token alone (the paper's LTE-MLP).
        dropout: share of the channels that training drops.
        dropout_at: "input" of every convolution, as the published code does; or "output" of every activation, as the
            paper has it.
    """

    def __init__(
        self,
        num_kv_heads: int,
        dim: int,
        kind: str = "conv",
        dropout: float = 0.1,
        dropout_at: str = "input",
    ):
        super().__init__()
        if kind not in ("conv", "mlp"):
            raise ValueError(f"kind must be conv or mlp, not {kind!r}")
        if dropout_at not in ("input", "output"):
            raise ValueError(f"dropout_at must be input or output, not {dropout_at!r}")
        if dim % 8:
            raise ValueError(f"a key and its value must have a multiple of 8 dimensions together, not {dim}")
        self.num_kv_heads, self.kind, self.dropout, self.dropout_at = num_kv_heads, kind, dropout, dropout_at
        self.kernel = 3 if kind == "conv" else 1
        widths = [dim, dim // 2, dim // 4, dim // 8] if kind == "conv" else [dim, dim // 2]
        how = {"kernel_size": self.kernel, "dilation": 2, "padding": self.kernel - 1, "groups": num_kv_heads}
        self.convs = nn.ModuleList(
            nn.Conv1d(num_kv_heads * wide, num_kv_heads * narrow, **how) for wide, narrow in itertools.pairwise(widths)
        )
        self.head = nn.Conv1d(num_kv_heads * widths[-1], num_kv_heads, 1, groups=num_kv_heads)
        self.reset()

    @property
    def reach(self) -> int:
        """Tokens after a token that its score depends on, and as many before it."""
        return (self.kernel - 1) * len(self.convs)

    @torch.no_grad()
    def reset(self) -> None:
        """Draw the weights anew."""
        for conv in (*self.convs, self.head):
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            conv.bias.zero_()
        self.head.bias.fill_(0.5)

    def forward(self, k: Tensor, v: Tensor, real: Tensor | None = None) -> Tensor:
        """fp32 ``[B, Hkv, L]`` in (0, 1).

        Args:
            k: ``[B, Hkv, L, D]``, before rotation.
            v: ``[B, Hkv, L, Dv]``.
            real: bool ``[B, L]``: where there is a token; what is before the first one is zero in every layer.
        """
        x = torch.cat([k, v], -1).to(self.head.weight.dtype).transpose(2, 3).flatten(1, 2)
        mask = None if real is None else real[:, None].to(x.dtype)
        x = x if mask is None else x * mask
        for conv in self.convs:
            if self.dropout_at == "input":
                x = F.dropout(x, self.dropout, self.training)
            x = conv(x)
            x = F.silu(x if mask is None else x * mask)
            if self.dropout_at == "output":
                x = F.dropout(x, self.dropout, self.training)
        return self.head(x).float().sigmoid()


class LearnedEviction(nn.Module):
    """Attention over a window, sinks, and the tokens that each KV head has chosen to retain (equation 5).

    In training nothing caps the retained tokens; a penalty keeps them few (:mod:`foveate.training`). Everywhere else
    each KV head retains at most ``buffer`` tokens behind the window: the best so far. What a token sees therefore
    depends on no later token than the scores' reach, and a prompt in pieces is read as one piece.

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
    """

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
    ):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.window, self.buffer, self.sinks, self.whole_prompt = window, buffer, sinks, whole_prompt
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.scores = RetentionScores(num_kv_heads, 2 * head_dim, **(scores or {}))
        self.rotary = Rotary(head_dim, rotary_base)
        self.scaling = head_dim**-0.5
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, not {num_heads} of {num_kv_heads}")
        if window <= 2 * self.scores.reach:
            raise ValueError(
                f"window must be more than the {2 * self.scores.reach + 1} tokens that a score sees, not {window}"
            )
        if not 0 <= sinks <= buffer or buffer < 1:
            raise ValueError(f"buffer must be at least 1 and hold the {sinks} sinks, not {buffer}")

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        memory: RetainedMemory | None = None,
        packing: Packing | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """``[B, L, hidden_size]`` to the same, after what the memory holds.

        Args:
            positions: int64 ``[B or 1, L]``, of the new tokens.
            packing: of a padded batch, whose ``hidden`` it has packed.

        Returns:
            The output, and in training the retention scores, fp32 ``[B, Hkv, L]``.
        """
        q, k, v = (self._heads(proj(hidden)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        angles = self.rotary.angles(positions)
        scores = None
        if self.training and memory is None:
            real = None if packing is None else packing.real
            out, scores = self._train(q, k, v, angles, real)
        else:
            memory = RetainedMemory(self.window, self.buffer) if memory is None else memory
            out = self._remember(rotate(q, angles), rotate(k, angles), v, memory, packing)
        return self.o_proj(out.transpose(1, 2).flatten(2)), scores

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    # Training

    def _train(
        self, q: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor, Tensor], real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        scores = self.scores(k, v, real)
        retained = (scores > THRESHOLD).detach()
        retained[:, :, : self.sinks] = True
        # A value's share in the loss is the gradient of its score (equation 6): the factor is 1, its gradient is not.
        v = v * (1 + scores - scores.detach())[..., None].to(v.dtype)
        window, group = self.window, self.num_heads // self.num_kv_heads

        def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i - j <= window) | retained[b, h // group, j]

        return attend_masked(rotate(q, angles), rotate(k, angles), v, sees, scaling=self.scaling), scores

    # Inference

    @torch.no_grad()
    def _margins(self, k: Tensor, v: Tensor, positions: Tensor, real: Tensor) -> Tensor:
        """Scores less the threshold, fp32 ``[B, Hkv, L]``, of rotated keys; sinks are beyond any other."""
        margins = self.scores(rotate(k, self.rotary.angles(positions), inverse=True), v, real) - THRESHOLD
        return margins.masked_fill((positions < self.sinks)[:, None], float("inf"))

    def _remember(self, q: Tensor, k: Tensor, v: Tensor, memory: RetainedMemory, packing: Packing | None) -> Tensor:
        memory.start(k, v)
        if self.whole_prompt and not any(memory.lengths) and q.shape[2] > 1:
            return self._published(q, k, v, memory, packing)
        length = k.shape[2]
        if staged := memory.settled():
            count = staged["k"].shape[1]
            memory.lengths = [held - count for held in memory.lengths]
            self._read(None, staged["k"].transpose(1, 2), staged["v"].transpose(1, 2), memory, None)
        final = memory.final_part(length, packing)
        outs = []
        if final:
            real = None if packing is None else packing.real[:, :final]
            outs.append(self._read(*(x[:, :, :final] for x in (q, k, v)), memory, real))
        if final < length:
            memory.stage({"k": k[:, :, final:].transpose(1, 2), "v": v[:, :, final:].transpose(1, 2)})
            before = memory.staged["k"].shape[1] - (length - final)
            at = [held - before for held in memory.lengths]
            k, v = memory.staged["k"].transpose(1, 2), memory.staged["v"].transpose(1, 2)
            piece = self._piece(memory, k, v, at, None)
            outs.append(self._attend(q[:, :, final:], piece))
            memory.lengths = [held + length - final for held in memory.lengths]
        return torch.cat(outs, 2) if len(outs) > 1 else outs[0]

    def _read(
        self, q: Tensor | None, k: Tensor, v: Tensor, memory: RetainedMemory, real: Tensor | None
    ) -> Tensor | None:
        """Take in tokens for good, a piece at a time; without queries nothing is attended to."""
        if k.shape[2] == 1 and real is None:
            return self._step(q, k, v, memory)
        outs = []
        for first in range(0, k.shape[2], _PIECE):
            some = slice(first, first + _PIECE)
            there = None if real is None else real[:, some]
            piece = self._piece(memory, k[:, :, some], v[:, :, some], memory.lengths, there)
            if q is not None:
                outs.append(self._attend(q[:, :, some], piece))
            self._take_in(memory, piece)
        return torch.cat(outs, 2) if outs else None

    def _piece(self, memory: RetainedMemory, k: Tensor, v: Tensor, lengths: list[int], real: Tensor | None) -> _Piece:
        """What the queries of some new tokens can see: the buffer, the window and the new tokens, and until when.

        Args:
            lengths: tokens of each row before the new ones.
            real: bool ``[B, n]``: which new tokens there are; None: all.
        """
        new, ring, held = k.shape[2], memory.ring, memory.tensors
        before = torch.tensor(lengths, device=k.device)[:, None]
        late = before + torch.arange(-ring, new, device=k.device)  # positions of window and new tokens, in order
        slots = (late[:, :ring] % ring)[:, None, :].expand(-1, k.shape[1], -1)
        keys = torch.cat([ops.gather_slots(held["keys"], slots), k], 2)
        values = torch.cat([ops.gather_slots(held["values"], slots), v], 2)
        there = late >= 0
        if real is not None:
            there[:, ring:] &= real
        margins = self._margins(keys, values, late.clamp_min(0), there)
        known = late < torch.tensor(memory.unscored, device=k.device)[:, None]
        old = held["margins"][:, :, :ring].gather(2, slots)
        margins[:, :, :ring] = torch.where(known[:, None, :ring], old, margins[:, :, :ring])
        # token x of those that leave the window with the new ones leaves it after the query of new token x
        leaving = slice(ring - self.window, ring - self.window + new)
        entered = torch.where(there[:, leaving], late[:, leaving], -1)
        if real is not None:
            entered = torch.where(real, entered, -1)
        turns = ops.running_best(held["margins"][:, :, ring:], held["positions"], margins[:, :, leaving], entered)
        until = torch.full(margins.shape, new, device=k.device)  # queries that see a key: those before this one
        until[:, :, : ring - self.window] = 0
        until[:, :, leaving] = (turns.new + 1).clamp_max(new)
        until = until * there[:, None]
        buffered = (turns.kept + 1).clamp_max(new) * (held["positions"] >= 0)
        whole = real is None
        return _Piece(keys, values, margins, before, there, until, buffered, turns, entered, whole, memory)

    def _attend(self, q: Tensor, piece: _Piece) -> Tensor:
        """Attention of the last new tokens' queries, ``[B, Hq, n, D]``."""
        held, ring, new = piece.memory.tensors, piece.memory.ring, piece.new
        keys = torch.cat([held["keys"][:, :, ring:], piece.keys], 2)
        values = torch.cat([held["values"][:, :, ring:], piece.values], 2)
        until = torch.cat([piece.buffered, piece.until], 2)
        at = torch.arange(new - q.shape[2], new, device=q.device)[:, None]
        come = torch.cat([torch.full((self.buffer + ring,), -1, device=q.device), torch.arange(new, device=q.device)])
        mask = (come <= at) & (at < until[:, :, None])
        return ops.attend(q, keys, values, scaling=self.scaling, mask=mask).out

    def _take_in(self, memory: RetainedMemory, piece: _Piece) -> None:
        """Move the window on over new tokens, and what is retained of those that leave it into the buffer."""
        held, ring, new = memory.tensors, memory.ring, piece.new
        leaving = slice(ring - self.window, ring - self.window + new)
        entered = piece.entered[:, None].expand(-1, self.num_kv_heads, -1)
        positions = torch.cat([held["positions"], entered], 2)
        stays = (torch.cat([piece.turns.kept, piece.turns.new], 2) == new) & (positions >= 0)
        order = stays.logical_not().to(torch.uint8).argsort(dim=2, stable=True)[:, :, : self.buffer]
        kept = stays.sum(2)
        there = piece.there[:, ring:].sum(1, keepdim=True)
        last = piece.before + there + torch.arange(-ring, 0, device=order.device)  # in the window from now on
        source = (last - piece.before + ring)[:, None].expand(-1, self.num_kv_heads, -1)
        into = (last % ring)[:, None].expand(-1, self.num_kv_heads, -1)
        for name in ("keys", "values", "margins"):
            memories, late = held[name], getattr(piece, name)
            if name == "margins":
                buffer = torch.cat([memories[:, :, ring:], late[:, :, leaving]], 2).gather(2, order)
                memories.scatter_(2, into, late.gather(2, source))
            else:
                buffer = ops.gather_slots(torch.cat([memories[:, :, ring:], late[:, :, leaving]], 2), order)
                memories.scatter_(2, into[..., None].expand(-1, -1, -1, late.shape[3]), ops.gather_slots(late, source))
            memories[:, :, ring:] = buffer
        empty = torch.arange(self.buffer, device=order.device) >= kept[..., None]
        held["positions"], held["kept"] = positions.gather(2, order).masked_fill(empty, -1), kept
        numbers = [new] * memory.batch_size if piece.whole else there[:, 0].tolist()
        memory.lengths = [length + number for length, number in zip(memory.lengths, numbers)]
        memory.unscored = [max(old, length - self.scores.reach) for old, length in zip(memory.unscored, memory.lengths)]

    def _step(self, q: Tensor | None, k: Tensor, v: Tensor, memory: RetainedMemory) -> Tensor | None:
        """Take in one token of every row and attend: all that it sees lies in the first slots."""
        held, ring = memory.tensors, memory.ring
        at = memory.lengths_on(k.device)
        slot = (at % ring)[:, None, None, None]
        held["keys"].scatter_(2, slot.expand(k.shape), k)
        held["values"].scatter_(2, slot.expand(v.shape), v)
        memory.lengths = [length + 1 for length in memory.lengths]
        out = None
        if q is not None:
            used = (at + 1).clamp_max(ring)[:, None] + held["kept"]
            out = ops.attend(q, held["keys"], held["values"], scaling=self.scaling, lengths=used).out
        self._score_late(memory)
        leaving = at - self.window
        ops.replace_weakest(
            **{name: held[name] for name in ("keys", "values", "margins", "positions", "kept")},
            slots=leaving % ring,
            tokens=leaving.clamp_min(-1),
            ring=ring,
        )
        return out

    def _score_late(self, memory: RetainedMemory) -> None:
        """Score all tokens that can be scored, when the next step would write over one that a score needs."""
        reach, window = self.scores.reach, self.window
        if all(first > length - 1 - window + reach for first, length in zip(memory.unscored, memory.lengths)):
            return
        held, ring = memory.tensors, memory.ring
        length = memory.lengths_on(held["keys"].device)[:, None]
        late = length + torch.arange(-ring, 0, device=length.device)
        slots = (late % ring)[:, None].expand(-1, self.num_kv_heads, -1)
        keys, values = ops.gather_slots(held["keys"], slots), ops.gather_slots(held["values"], slots)
        margins = self._margins(keys, values, late.clamp_min(0), late >= 0)
        first = torch.tensor(memory.unscored, device=length.device)[:, None]
        fresh = ((late >= first) & (late < length - reach))[:, None]
        margins = torch.where(fresh, margins, held["margins"][:, :, :ring].gather(2, slots))
        held["margins"].scatter_(2, slots, margins)
        memory.unscored = [max(old, number - reach) for old, number in zip(memory.unscored, memory.lengths)]

    def _published(self, q: Tensor, k: Tensor, v: Tensor, memory: RetainedMemory, packing: Packing | None) -> Tensor:
        """The first prompt as the published code reads it: the best of all its tokens, for all of its queries."""
        length, ring, held = k.shape[2], memory.ring, memory.tensors
        at = torch.arange(length, device=k.device)
        real = torch.ones(k.shape[0], length, dtype=torch.bool, device=k.device) if packing is None else packing.real
        counts = real.sum(1, keepdim=True)
        margins = self._margins(k, v, at.expand(k.shape[0], -1), real)
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
        for first in range(0, length, _PIECE):
            queries = at[first : first + _PIECE, None]
            low, high = max(0, first - self.window), min(first + _PIECE, length)
            near = (at[low:high] <= queries) & (at[low:high] >= queries - self.window)
            near = near[None, None].expand(*kept.shape, -1, -1)
            mask = torch.cat([positions[:, :, None] < queries - self.window, near], 3)
            keys, values = torch.cat([far_k, k[:, :, low:high]], 2), torch.cat([far_v, v[:, :, low:high]], 2)
            outs.append(ops.attend(q[:, :, first:high], keys, values, scaling=self.scaling, mask=mask).out)
        last = counts + torch.arange(-ring, 0, device=k.device)
        source = last.clamp_min(0)[:, None].expand(-1, self.num_kv_heads, -1)
        into = (last % ring)[:, None].expand(-1, self.num_kv_heads, -1)
        for name, x, far in (("keys", k, far_k), ("values", v, far_v)):
            held[name].scatter_(2, into[..., None].expand(-1, -1, -1, x.shape[3]), ops.gather_slots(x, source))
            held[name][:, :, ring:] = far
        held["margins"].scatter_(2, into, margins.gather(2, source))
        held["margins"][:, :, ring:] = margins.gather(2, index)
        held["positions"], held["kept"] = positions.masked_fill(positions == length, -1), kept
        memory.advance(length, packing)
        memory.unscored = [max(0, number - self.scores.reach) for number in memory.lengths]
        return torch.cat(outs, 2)


class _Piece(NamedTuple):
    """New tokens and the window before them, in order."""

    keys: Tensor
    """``[B, Hkv, ring + n, D]``"""
    values: Tensor
    margins: Tensor
    """fp32 ``[B, Hkv, ring + n]``"""
    before: Tensor
    """int64 ``[B, 1]``: tokens before the new ones."""
    there: Tensor
    """bool ``[B, ring + n]``"""
    until: Tensor
    """int64 ``[B, Hkv, ring + n]``: the queries of new tokens before this one see the key."""
    buffered: Tensor
    """int64 ``[B, Hkv, buffer]``: the same for the buffer's keys."""
    turns: ops.Leaving
    entered: Tensor
    """int64 ``[B, n]``: the tokens that leave the window; -1: none."""
    whole: bool
    """Whether every row has all new tokens."""
    memory: RetainedMemory

    @property
    def new(self) -> int:
        return self.entered.shape[1]

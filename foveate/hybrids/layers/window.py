"""Attention over a circular window: the last tokens of every row, in memory of constant size."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from foveate import ops
from foveate.hybrids.layers.masked import attend_masked
from foveate.hybrids.layers.rotary import Rotary, rotate
from foveate.hybrids.ops import LARGEST_BUFFER, LARGEST_DIM, Leaving, attend_until, replace_weakest, running_best
from foveate.hybrids.state import Packing, RetainedMemory
from foveate.ops.dispatch import use_kernel

PIECE = 256
"""Tokens of a prompt that are read at once, by references whose tensors grow with pairs of tokens."""
LONG_PIECE = 32768
"""The same by kernels, which need no such tensors; of all rows together."""


class Retention(NamedTuple):
    """What a layer that evicts by learned scores tells beside its output.

    Attributes:
        scores: fp32 ``[B, Hkv, L]`` in (0, 1).
        lesson: the loss by which they learn, a scalar; None where they learn by the model's own.
    """

    scores: Tensor
    lesson: Tensor | None = None


class SlidingWindowAttention(nn.Module):
    """Attention over the last tokens, and over what a subclass retains of those before them.

    Args:
        hidden_size: width of the model.
        num_heads, num_kv_heads, head_dim: of the attention.
        window: tokens that a query sees before its own.
        rotary_base: of the positions.
    """

    buffer = 0
    """Tokens before the window that a KV head can retain."""
    reach = 0
    """Whether a token is retained depends on this many tokens after it and on equally many before it."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int,
        rotary_base: float = 10000.0,
    ):
        super().__init__()
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, not {num_heads} of {num_kv_heads}")
        if window < 0:
            raise ValueError(f"window must be at least 0, not {window}")
        self.num_heads, self.num_kv_heads, self.head_dim, self.window = num_heads, num_kv_heads, head_dim, window
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.rotary = Rotary(head_dim, rotary_base)
        self.scaling = head_dim**-0.5

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        memory: RetainedMemory | None = None,
        packing: Packing | None = None,
        output_scores: bool = False,
    ) -> tuple[Tensor, Retention | None]:
        """``[B, L, hidden_size]`` to the same, after what the memory holds.

        Args:
            positions: int64 ``[B or 1, L]``, of the new tokens, one after another in each row.
            packing: of a padded batch, whose ``hidden`` it has packed.
            output_scores: return retention scores outside of training, too.

        Returns:
            The output, and of a layer that has retention scores those.
        """
        q, k, v = (self._heads(proj(hidden)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        angles = self.rotary.angles(positions)
        real, retention = None if packing is None else packing.real, None
        if self.training and memory is None:
            out, retention = self._train(q, k, v, angles, real)
        else:
            scores = self._scores(k, v, real) if output_scores else None
            retention = None if scores is None else Retention(scores)
            q, k = rotate(q, angles), rotate(k, angles)
            if memory is None and torch.is_grad_enabled() and k.requires_grad:
                out = self._differentiable(q, k, v, positions, real)
            else:
                memory = RetainedMemory(self.window, self.buffer) if memory is None else memory
                memory.start(k, v, positions)
                out = self._remember(q, k, v, memory, packing)
        return self.o_proj(out.transpose(1, 2).flatten(2)), retention

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _train(
        self, q: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor, Tensor], real: Tensor | None
    ) -> tuple[Tensor, Retention | None]:
        """Attention of whole sequences ``[B, Hq, L, D]``, with gradients, and retention scores."""
        window = self.window

        def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i - j <= window

        q, k = rotate(q, angles), rotate(k, angles)
        return attend_masked(q, k, v, sees, scaling=self.scaling, reach=window + 1), None

    def _scores(self, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor | None:
        """Retention scores of keys before rotation and values, fp32 ``[B, Hkv, L]``; None in a layer without."""
        return None

    def _margins(
        self,
        k: Tensor,
        v: Tensor,
        tokens: Tensor,
        real: Tensor | None,
        first: Tensor,
        slots: Tensor | None = None,
    ) -> Tensor:
        """By how much a token deserves to be retained, fp32 ``[B, Hkv, L]``; not at all where it is at most 0.

        Args:
            k: ``[B, Hkv, S, D]``, rotated.
            v: ``[B, Hkv, S, D]``.
            tokens: int64 ``[B, L]``: their numbers, from 0 on in each row.
            real: bool ``[B, L]``: where there is a token; None: everywhere.
            first: int64 ``[B]``: the position by which token 0 of a row was rotated.
            slots: int64 ``[B, L]``: where in ``k`` and ``v`` the tokens are; None: ``L = S`` tokens in order.
        """
        return k.new_full((*k.shape[:2], tokens.shape[1]), -1.0, dtype=torch.float32)

    def _differentiable(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, real: Tensor | None) -> Tensor:
        """Attention of whole sequences as inference has it, with gradients of queries, keys and values."""
        batch, heads, length = k.shape[:3]
        with torch.no_grad():
            tokens = torch.arange(length, device=k.device).expand(batch, -1)
            there = tokens >= 0 if real is None else real
            margins = self._margins(k, v, tokens, there, positions[:, 0].expand(batch))
            empty = margins.new_zeros(batch, heads, self.buffer)
            none = torch.full(empty.shape, -1, device=k.device)
            turns = running_best(empty, none, margins, torch.where(there, tokens, -1))
            until = turns.new + self.window + 1  # token x leaves the window after the query of token x + window
        group = self.num_heads // self.num_kv_heads

        def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i < until[b, h // group, j]

        return attend_masked(q, k, v, sees, scaling=self.scaling)

    # Inference

    def _remember(self, q: Tensor, k: Tensor, v: Tensor, memory: RetainedMemory, packing: Packing | None) -> Tensor:
        length = k.shape[2]
        if staged := memory.settled():
            left = memory.staged["k"].shape[1] if memory.staged else 0
            count = staged["k"].shape[1] + left
            memory.lengths = [held - count for held in memory.lengths]
            self._read(None, staged["k"].transpose(1, 2), staged["v"].transpose(1, 2), memory, None)
            memory.lengths = [held + left for held in memory.lengths]
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
        outs, size = [], self._piece_size(k)
        for first in range(0, k.shape[2], size):
            some = slice(first, first + size)
            there = None if real is None else real[:, some]
            piece = self._piece(memory, k[:, :, some], v[:, :, some], memory.lengths, there)
            if q is not None:
                outs.append(self._attend(q[:, :, some], piece))
            self._take_in(memory, piece)
        return torch.cat(outs, 2) if outs else None

    def _piece_size(self, k: Tensor) -> int:
        """Tokens of a prompt to read at once."""
        kernels = use_kernel(k) and self.buffer <= LARGEST_BUFFER and self.head_dim <= LARGEST_DIM
        return max(PIECE, LONG_PIECE // len(k)) if kernels and k.dtype != torch.float64 else PIECE

    def _piece(self, memory: RetainedMemory, k: Tensor, v: Tensor, lengths: list[int], real: Tensor | None) -> Piece:
        """What the queries of some new tokens can see: the buffer, the window and the new tokens, and until when.

        Args:
            lengths: tokens of each row before the new ones.
            real: bool ``[B, n]``: which new tokens there are; None: all.
        """
        new, ring, held = k.shape[2], memory.ring, memory.tensors
        before = torch.tensor(lengths, device=k.device)[:, None]
        late = before + torch.arange(-ring, new, device=k.device)  # positions of window and new tokens, in order
        slots = (late[:, :ring] % ring)[:, None, :].expand(-1, k.shape[1], -1)
        keys = torch.cat([held["keys"][:, :, ring:], ops.gather_slots(held["keys"], slots), k], 2)
        values = torch.cat([held["values"][:, :, ring:], ops.gather_slots(held["values"], slots), v], 2)
        there = late >= 0
        if real is not None:
            there[:, ring:] &= real
        margins = self._margins(
            *(x[:, :, self.buffer :] for x in (keys, values)), late.clamp_min(0), there, held["first"]
        )
        known = late < torch.tensor(memory.unscored, device=k.device)[:, None]
        old = held["margins"][:, :, :ring].gather(2, slots)
        margins[:, :, :ring] = torch.where(known[:, None, :ring], old, margins[:, :, :ring])
        # the x-th token that leaves the window because of the new ones leaves it after the query of the x-th new token
        leaving = slice(ring - self.window, ring - self.window + new)
        entered = torch.where(there[:, leaving], late[:, leaving], -1)
        if real is not None:
            entered = torch.where(real, entered, -1)
        turns = running_best(held["margins"][:, :, ring:], held["positions"], margins[:, :, leaving], entered)
        until = torch.full(margins.shape, new, device=k.device)  # queries that see a key: those before this one
        until[:, :, : ring - self.window] = 0
        until[:, :, leaving] = (turns.new + 1).clamp_max(new)
        until = until * there[:, None]
        buffered = (turns.kept + 1).clamp_max(new) * (held["positions"] >= 0)
        until, whole = torch.cat([buffered, until], 2), real is None
        return Piece(keys, values, margins, before, there, until, turns, entered, whole, memory)

    def _attend(self, q: Tensor, piece: Piece) -> Tensor:
        """Attention of the last new tokens' queries, ``[B, Hq, n, D]``."""
        until = piece.until - (piece.new - q.shape[2])
        how = {"scaling": self.scaling, "window": self.window, "retained": self.buffer}
        return attend_until(q, piece.keys, piece.values, until, **how).out

    def _take_in(self, memory: RetainedMemory, piece: Piece) -> None:
        """Move the window over new tokens. Tokens that leave the window and are retained go into the buffer."""
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
        for name in ("keys", "values"):
            memories, line = held[name], getattr(piece, name)
            stay = ops.gather_slots(line, order + (order >= self.buffer) * (ring - self.window))
            latest = ops.gather_slots(line, source + self.buffer)
            memories.scatter_(2, into[..., None].expand_as(latest), latest)
            memories[:, :, ring:] = stay
        margins = held["margins"]
        stay = torch.cat([margins[:, :, ring:], piece.margins[:, :, leaving]], 2).gather(2, order)
        margins.scatter_(2, into, piece.margins.gather(2, source))
        margins[:, :, ring:] = stay
        empty = torch.arange(self.buffer, device=order.device) >= kept[..., None]
        held["positions"].copy_(positions.gather(2, order).masked_fill(empty, -1))
        held["kept"].copy_(kept)
        numbers = [new] * memory.batch_size if piece.whole else there[:, 0].tolist()
        memory.lengths = [length + number for length, number in zip(memory.lengths, numbers)]
        memory.unscored = [max(old, length - self.reach) for old, length in zip(memory.unscored, memory.lengths)]

    def _step(self, q: Tensor | None, k: Tensor, v: Tensor, memory: RetainedMemory) -> Tensor | None:
        """Take in one token of every row and attend. All keys that the token sees are in the first slots.

        A step neither waits for the device nor reads changing numbers on the host, except when scores are due before
        it.
        """
        if self.buffer and self._scores_due(memory):
            self._score_late(memory)
        held, ring, device = memory.tensors, memory.ring, k.device
        ops.put_token(ops.KV(held["keys"], held["values"]), k, v, memory.next_slots(device))
        memory.advance_step()
        out = None
        if q is not None:
            used = memory.lengths_on(device).clamp_max(ring)[:, None] + held["kept"]
            kv = ops.KV(held["keys"], held["values"], lengths=used)
            out = ops.attend(q, kv, logits=ops.Logits(self.scaling)).out
        if self.buffer:  # the token that the next one writes over is offered to the buffer
            replace_weakest(
                **{name: held[name] for name in ("keys", "values", "margins", "positions", "kept")},
                slots=memory.next_slots(device),
                tokens=memory.leaving(device),
                ring=ring,
            )
        return out

    def _scores_due(self, memory: RetainedMemory) -> bool:
        """Whether the next step would write over a token that a score needs."""
        last = self.reach - self.window  # of the tokens that may have no score, counted from the new one
        return any(first <= length + last for first, length in zip(memory.unscored, memory.lengths))

    def _score_late(self, memory: RetainedMemory) -> None:
        """Score all tokens that can be scored."""
        held, ring, reach = memory.tensors, memory.ring, self.reach
        length = memory.lengths_on(held["keys"].device)[:, None]
        late = length + torch.arange(-ring, 0, device=length.device)
        slots = late % ring
        there = late >= 0 if min(memory.lengths) < ring else None
        margins = self._margins(held["keys"], held["values"], late.clamp_min(0), there, held["first"], slots)
        slots = slots[:, None].expand(-1, self.num_kv_heads, -1)
        first = torch.tensor(memory.unscored, device=length.device)[:, None]
        fresh = ((late >= first) & (late < length - reach))[:, None]
        margins = torch.where(fresh, margins, held["margins"][:, :, :ring].gather(2, slots))
        held["margins"].scatter_(2, slots, margins)
        memory.unscored = [max(old, number - reach) for old, number in zip(memory.unscored, memory.lengths)]


class Piece(NamedTuple):
    """The buffer, the window and new tokens after it, in order."""

    keys: Tensor
    """``[B, Hkv, buffer + ring + n, D]``"""
    values: Tensor
    margins: Tensor
    """fp32 ``[B, Hkv, ring + n]``, without the buffer's."""
    before: Tensor
    """int64 ``[B, 1]``: tokens before the new ones."""
    there: Tensor
    """bool ``[B, ring + n]``"""
    until: Tensor
    """int64 ``[B, Hkv, buffer + ring + n]``: the queries of new tokens before this one see the key."""
    turns: Leaving
    entered: Tensor
    """int64 ``[B, n]``: the tokens that leave the window; -1: none."""
    whole: bool
    """Whether every row has all new tokens."""
    memory: RetainedMemory

    @property
    def new(self) -> int:
        return self.entered.shape[1]

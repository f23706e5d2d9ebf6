"""Native sparse attention: compressed blocks, chosen blocks and a window, each with a gate (Yuan et al. 2025; laLTE,
equation 2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from foveate import ops
from foveate.hybrids.layers.masked import attend_masked
from foveate.hybrids.layers.rotary import Rotary, rotate
from foveate.hybrids.ops import attend_gated, choose_blocks
from foveate.hybrids.state import BlockMemory, Packing

_PIECE = 256
"""Queries of a prompt that are attended to at once."""
_WORD = 64
"""Blocks in a word of bits."""


class NativeSparseAttention(nn.Module):
    """Three attentions over the same keys, summed with gates that depend on the token.

    *Compressed*: over one key and value for each complete block. *Selected*: over the tokens of the blocks that the
    compressed attention of a group's heads weighs most; the first block, the token's own and the one before it are
    always among them. *Window*: over the last tokens. Any number of query heads per KV head is allowed.

    Args:
        hidden_size: width of the model.
        num_heads, num_kv_heads, head_dim: of the attention.
        block: tokens of a block.
        blocks: blocks that a query selects.
        window: tokens that a query sees in the window, its own included.
        rotary_base: of the positions.
        compression: "mean" of a block's rotated keys and of its values, as the published code does; or "mlp", a learned
            map of the whole block, as the paper's section 2.1 has it.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block: int = 64,
        blocks: int = 16,
        window: int = 512,
        rotary_base: float = 10000.0,
        compression: str = "mean",
    ):
        super().__init__()
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, not {num_heads} of {num_kv_heads}")
        if compression not in ("mean", "mlp"):
            raise ValueError(f"compression must be mean or mlp, not {compression!r}")
        if block < 1 or blocks < 3 or window < 1:
            raise ValueError(
                f"block and window must be at least 1 and blocks at least 3, not {block}, {window}, {blocks}"
            )
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.block, self.blocks, self.window, self.compression = block, blocks, window, compression
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.gates_proj = nn.Linear(hidden_size, 3 * num_heads, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        if compression == "mlp":
            self.compress_k, self.compress_v = _BlockMLP(block, head_dim), _BlockMLP(block, head_dim)
        self.rotary = Rotary(head_dim, rotary_base)
        self.scaling = head_dim**-0.5

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        memory: BlockMemory | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """``[B, L, hidden_size]`` to the same, after what the memory holds.

        Args:
            positions: int64 ``[B or 1, L]``, of the new tokens.
            packing: of a padded batch, whose ``hidden`` it has packed.
        """
        q, k, v = (
            proj(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        angles = self.rotary.angles(positions)
        q, k = rotate(q, angles), rotate(k, angles)
        gates = self.gates_proj(hidden).sigmoid().unflatten(-1, (3, self.num_heads)).permute(2, 0, 3, 1)
        if memory is None:
            before, lengths = torch.zeros(k.shape[0], dtype=torch.int64, device=k.device), [0]
            fused = torch.is_grad_enabled() and q.device.type == "cuda"
            branches = self._fused(q, k, v) if fused else self._branches(q, k, v, before, lengths)
        else:
            if not memory.lengths:
                memory.lengths = [0] * k.shape[0]
            if k.shape[2] == 1 and packing is None and not torch.is_grad_enabled():
                return self.o_proj(self._step(q, k, v, gates, memory).transpose(1, 2).flatten(2))
            before, lengths = memory.lengths_on(k.device), list(memory.lengths)
            memory.append(k, v, packing)
            keys, values = (memory.tensors[name][:, :, : max(lengths) + k.shape[2]] for name in ("keys", "values"))
            branches = self._branches(q, keys, values, before, lengths)
        out = sum(gate[..., None] * branch for gate, branch in zip(gates, branches))
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _step(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, memory: BlockMemory) -> Tensor:
        """Take in one token of every row and attend, ``[B, Hq, 1, D]``; ``gates [3, B, Hq, 1]``."""
        memory.append(k, v, None)
        summaries = memory.summaries(self._compressed)
        used = max(memory.lengths)
        keys, values = (memory.tensors[name][:, :, :used] for name in ("keys", "values"))
        sizes = {"block": self.block, "blocks": self.blocks, "window": self.window}
        lengths = memory.lengths_on(k.device)
        return attend_gated(q, keys, values, *summaries, gates, lengths, scaling=self.scaling, **sizes).out

    def _compressed(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of complete blocks, ``[B, Hkv, N, D]``."""
        count = k.shape[2] // self.block
        k, v = (x[:, :, : count * self.block].unflatten(2, (count, self.block)) for x in (k, v))
        if self.compression == "mlp":
            return self.compress_k(k), self.compress_v(v)
        return k.mean(3), v.mean(3)

    def _select(self, q: Tensor, block_keys: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """See :func:`foveate.hybrids.ops.choose_blocks`."""
        return choose_blocks(q, block_keys, at, scaling=self.scaling, block=self.block, blocks=self.blocks)

    def _branches(self, q: Tensor, k: Tensor, v: Tensor, before: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Compressed, selected and window attention ``[B, Hq, n, D]`` of the tokens after ``before [B]``, which are
        ``lengths`` on the host. A piece of queries reads no keys after its own, and in the window none before it."""
        block_keys, block_values = self._compressed(k, v)
        number = torch.arange(k.shape[2], device=q.device)
        outs: list[list[Tensor]] = [[], [], []]
        for first in range(0, q.shape[2], _PIECE):
            some = q[:, :, first : first + _PIECE]
            at = before[:, None] + first + torch.arange(some.shape[2], device=q.device)
            complete, selected = self._select(some, block_keys, at)
            start, end = max(min(lengths) + first - self.window + 1, 0), max(lengths) + first + some.shape[2]
            causal = (number[:end] <= at[..., None])[:, None]
            near = causal[..., start:] & (number[start:end] > at[..., None] - self.window)[:, None]
            chosen = selected.gather(3, (number[:end] // self.block).expand(*selected.shape[:3], -1)) & causal
            if block_keys.shape[2]:
                outs[0].append(_attend(some, block_keys, block_values, complete, self.scaling))
            else:
                outs[0].append(torch.zeros_like(some))
            outs[1].append(_attend(some, k[:, :, :end], v[:, :, :end], chosen, self.scaling))
            outs[2].append(_attend(some, k[:, :, start:end], v[:, :, start:end], near, self.scaling))
        return [torch.cat(parts, 2) if len(parts) > 1 else parts[0] for parts in outs]

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """The same for whole sequences on a GPU, with gradients and without masks of pairs."""
        length, group, block, window = q.shape[2], self.num_heads // self.num_kv_heads, self.block, self.window
        block_keys, block_values = self._compressed(k, v)
        at = torch.arange(length, device=q.device).expand(q.shape[0], -1)
        complete, selected = self._select(q, block_keys, at)
        compressed = _attend(q, block_keys, block_values, complete, self.scaling)

        words = [word.contiguous() for word in _packed(selected).unbind(3)]

        def chosen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            number = j // block
            word = words[0][b, h // group, i]
            for place, later in enumerate(words[1:], 1):  # each word is loaded for queries, and none for pairs
                word = torch.where(number // _WORD == place, later[b, h // group, i], word)
            return (word >> number % _WORD) & 1 != 0

        def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i - j < window

        return [
            compressed,
            attend_masked(q, k, v, chosen, scaling=self.scaling),
            attend_masked(q, k, v, near, scaling=self.scaling, reach=window),
        ]


def _packed(selected: Tensor) -> Tensor:
    """Bits of a bool ``[B, Hkv, L, N]``, 64 in a word: int64 ``[B, Hkv, L, ceil(N / 64)]``."""
    bits = torch.arange(_WORD, device=selected.device)
    return torch.stack([(some.long() << bits[: some.shape[3]]).sum(-1) for some in selected.split(_WORD, 3)], -1)


class _BlockMLP(nn.Module):
    """A block's tokens, each with a learned position in the block, to one vector."""

    def __init__(self, block: int, dim: int):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(block, dim))
        self.up, self.down = nn.Linear(block * dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, Hkv, N, block, D]`` to ``[B, Hkv, N, D]``."""
        return self.down(F.silu(self.up((x + self.positions).flatten(3))))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Attention under a mask ``[B, 1 or Hkv, n, Lk]``; a query that sees nothing gets 0."""
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))):
        return ops.attend(q, ops.KV(k, v), logits=ops.Logits(scaling), mask=mask).out
    group = q.shape[1] // k.shape[1]
    mask = mask.expand(q.shape[0], k.shape[1], -1, -1).repeat_interleave(group, 1)
    nothing = ~mask.any(-1, keepdim=True)
    # A softmax over nothing has no gradient: it runs over everything, and is left out. PyTorch's own kernel, because
    # cuDNN's gradient of queries is not finite with a mask over few keys (64 blocks of 2,048 tokens, an H200).
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | nothing, scale=scaling, enable_gqa=group > 1)
    return out.masked_fill(nothing, 0.0)

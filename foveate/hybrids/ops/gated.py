"""Three attentions of one query, summed with gates: over blocks' summaries, chosen blocks and a window (NSA; laLTE,
equation 2)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from foveate.ops.attend.attended import Attended
from foveate.ops.attend.decode import attend
from foveate.ops.kv import KV
from foveate.ops.logits import Logits

LARGEST_DIM = 128
"""The largest head dim that the kernels take."""


def choose_blocks(
    q: Tensor, block_keys: Tensor, at: Tensor, *, scaling: float, block: int, blocks: int
) -> tuple[Tensor, Tensor]:
    """Which blocks queries see as summaries, and which blocks they select.

    A query sees the summary of every complete block. The query heads of a group select blocks together, by the sum of
    their attention to the blocks' keys. The first block, the query's own block and the block before it are always
    selected. Of equal weights the earlier block is selected.

    Args:
        q: ``[B, Hq, n, D]``.
        block_keys: ``[B, Hkv, N, D]``: the summary keys of blocks.
        at: int64 ``[B, n]``: positions of the queries.
        scaling: factor of the logits.
        block: tokens of a block.
        blocks: blocks that a query selects.

    Returns:
        The blocks seen as summaries, bool ``[B, 1, n, N]``, and the selected blocks, bool ``[B, Hkv, n, N + 1]``, which
        include the unfinished last block.
    """
    count, num_kv_heads = block_keys.shape[2], block_keys.shape[1]
    number = torch.arange(count + 1, device=q.device)
    own = (at // block)[:, None, :, None]
    complete = number[:count] < ((at + 1) // block)[:, None, :, None]
    with torch.no_grad():
        rows = q.unflatten(1, (num_kv_heads, -1)).float()
        logits = torch.einsum("bhgnd,bhmd->bhgnm", rows, block_keys.float()) * scaling
        weight = logits.masked_fill(~complete[:, :, None], float("-inf")).softmax(-1).nan_to_num(0.0).sum(2)
        weight = F.pad(weight, (0, 1))
        always = (number == 0) | (number == own) | (number == own - 1)
        weight = weight.masked_fill(always, float("inf")).masked_fill(number > own, float("-inf"))
        chosen = weight.argsort(dim=3, descending=True, stable=True)[..., :blocks]
        selected = torch.zeros_like(weight, dtype=torch.bool).scatter_(3, chosen, True) & (number <= own)
    return complete, selected


def attend_gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_keys: Tensor,
    block_values: Tensor,
    gates: Tensor,
    lengths: Tensor,
    *,
    scaling: float,
    block: int,
    blocks: int,
    window: int,
) -> Attended:
    """Native sparse attention of a decode step: the newest token's query over what its row holds.

    Args:
        q: ``[B, Hq, 1, D]``.
        k, v: ``[B, Hkv, Lk, D]``, ``[B, Hkv, Lk, Dv]``, read through their strides.
        block_keys, block_values: ``[B, Hkv, N, D]``, ``[B, Hkv, N, Dv]``: a summary of each complete block, ``N`` at
            least ``Lk // block``. What is not there yet may hold anything finite, here and among the keys.
        gates: ``[3, B, Hq, 1]``: factors of summaries, selected blocks and window.
        lengths: int64 ``[B]``: tokens of each row, the query's own among them.
        scaling: factor of the logits.
        block: tokens of a block.
        blocks: blocks that the query selects, see :func:`choose_blocks`.
        window: tokens that the query sees in the window, its own included.
    """
    check(q, k, v, block_keys, block_values, gates, lengths, block)
    block_keys, block_values = (x[:, :, : k.shape[2] // block] for x in (block_keys, block_values))
    at = (lengths - 1)[:, None]
    complete, selected = choose_blocks(q, block_keys, at, scaling=scaling, block=block, blocks=blocks)
    number = torch.arange(k.shape[2], device=q.device)
    causal = (number <= at)[:, None, None]
    near = causal & (number > at - window)[:, None, None]
    chosen = selected.gather(3, (number // block).expand(*selected.shape[:3], -1)) & causal
    kv = KV(k, v)
    branches = [attend(q, kv, logits=Logits(scaling), mask=mask, need_lse=True).out for mask in (chosen, near)]
    if block_keys.shape[2]:
        compressed = attend(q, KV(block_keys, block_values), logits=Logits(scaling), mask=complete, need_lse=True).out
    else:
        compressed = torch.zeros_like(branches[0])
    return Attended(sum(gate[..., None] * branch for gate, branch in zip(gates, (compressed, *branches))))


def check(q, k, v, block_keys, block_values, gates, lengths, block):
    """Raise unless shapes fit."""
    (batch, num_heads, queries, dim), (_, num_kv_heads, number, value_dim) = q.shape, v.shape
    summaries = block_keys.shape[2]
    fits = queries == 1 and num_heads % num_kv_heads == 0 and k.shape == (batch, num_kv_heads, number, dim)
    fits = fits and block_keys.shape == (batch, num_kv_heads, summaries, dim) and summaries >= number // block
    fits = fits and block_values.shape == (batch, num_kv_heads, summaries, value_dim)
    if not fits or gates.shape != (3, batch, num_heads, 1) or lengths.shape != (batch,):
        given = {"q": q, "k": k, "v": v, "block_keys": block_keys, "block_values": block_values}
        given |= {"gates": gates, "lengths": lengths}
        raise ValueError("shapes do not fit: " + ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items()))

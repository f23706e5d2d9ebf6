"""Attention of prompt queries in tiles, merged with one mean key of each tile."""

import torch
from torch import Tensor

from foveate.ops._math import block_length, capped, tile_rows
from foveate.ops.attend.attended import Attended
from foveate.ops.attend.tiles import rows_to_queries
from foveate.ops.compress import TileMeans
from foveate.ops.logits import Logits


def merge_means(
    q: Tensor,
    attended_out: Tensor,
    lse: Tensor,
    means: TileMeans,
    *,
    tile: int,
    logits: Logits,
    offset: int = 0,
    out: Tensor | None = None,
) -> Attended:
    """Attention to the keys that tiles have read, and to the mean of the others counted as often as there are of them.

    The mean key k of n keys has the logit ``softcap(q k scaling) + log n``, and the value is their mean. Both are exact
    where all n keys are alike. A tile without such keys keeps its output to the last bit.

    Args:
        q: ``[B, Hq, Lq, D]``.
        attended_out: ``[B, Hq, Lq, Dv]``, what :func:`attend_tiles` has returned for the same queries.
        lse: ``[B, Hq, Lq]``, its log-sum-exp, in which sinks count.
        means: of T tiles, see :func:`unchosen_means`.
        tile, offset: as for :func:`attend_tiles`.
        logits: as for :func:`attend_tiles`; its sinks are not read.
        out: ``[B, Hq, Lq, Dv]`` which the output is written to, such as ``attended_out`` itself; None: new memory.

    Returns:
        The output, and the log-sum-exp over all of it, fp32.

    Raises:
        ValueError: for tensors that do not fit the queries and tiles.
    """
    num_kv_heads, tiles, dtype = means.k.shape[1], means.k.shape[2], means.k.dtype
    lead, length = offset % tile, q.shape[2]
    number = means.numbers.to(dtype)
    of_number = number.log()[..., None]  # -inf of no keys
    outs, totals = [], []
    step = block_length(4 * q[:, :, :tile].numel() + 12 * attended_out[:, :, :tile].numel(), tiles)
    for first in range(0, tiles, step):
        since, until = max(0, first * tile - lead), min(length, (first + step) * tile - lead)
        some, part = slice(first, first + step), slice(since, until)
        rows, own_lead = tile_rows(q[:, :, part], num_kv_heads, tile, offset + since)
        of_mean = (rows.to(dtype) @ means.k[:, :, some, :, None])[..., 0] * logits.scaling
        of_mean = capped(of_mean, logits.softcap) + of_number[:, :, some]  # [B, Hkv, T, G * tile]
        of_mean = rows_to_queries(of_mean, tile)[:, :, own_lead : own_lead + until - since].to(lse.dtype)
        total = torch.logaddexp(lse[:, :, part], of_mean)
        finite = total.masked_fill(total.isneginf(), 0.0)
        shares = ((x - finite).exp()[..., None] for x in (lse[:, :, part], of_mean))
        values = means.v[:, :, some].repeat_interleave(q.shape[1] // num_kv_heads, 1).repeat_interleave(tile, 2)
        values = values[:, :, own_lead : own_lead + until - since]
        outs.append(sum(x * share for x, share in zip((attended_out[:, :, part], values), shares)).to(q.dtype))
        totals.append(total)
    found, total = torch.cat(outs, 2), torch.cat(totals, 2)
    return Attended(found if out is None else out.copy_(found), total)


def check_merge(q, attended_out, lse, means, *, tile, logits, offset=0, out=None):
    """Raise for arguments of :func:`merge_means` that cannot be."""
    batch, num_heads, length, dim = q.shape
    tiles, (num_kv_heads, value_dim) = -(-(offset % tile + length) // tile), (means.v.shape[1], means.v.shape[3])
    expected = {
        "attended_out": (attended_out, (batch, num_heads, length, value_dim)),
        "lse": (lse, (batch, num_heads, length)),
        "means.k": (means.k, (batch, num_kv_heads, tiles, dim)),
        "means.v": (means.v, (batch, num_kv_heads, tiles, value_dim)),
        "means.numbers": (means.numbers, (batch, num_kv_heads, tiles)),
        "out": (attended_out if out is None else out, (batch, num_heads, length, value_dim)),
    }
    for name, (x, shape) in expected.items():
        if x.shape != shape:
            raise ValueError(f"{name} must be {shape}, not {tuple(x.shape)}")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"q has {num_heads} heads, which is not a multiple of the {num_kv_heads} KV heads of the means"
        )

"""Softmax attention over chosen keys, with log-sum-exp."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foveate.ops._math import block_length, capped, first_keys, fold_group, matmul_fp32, unfold_group
from foveate.ops.block_table import BlockTable

_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""PyTorch's own kernels. cuDNN's plans anew for every length, which in decode and for prompts of many lengths takes
longer than the attention itself."""


class Attended(NamedTuple):
    """What :func:`attend` and its relatives return; what was not asked for is None."""

    out: Tensor
    """``[B, Hq, Lq, Dv]``, in the dtype of q."""
    lse: Tensor | None = None
    """``[B, Hq, Lq]`` fp32: log-sum-exp of the logits, scaled and capped; -inf where a query saw nothing (its output is
    0)."""
    mass: Tensor | None = None
    """``[B, Hkv, Lk]`` fp32: softmax probability summed over the queries and over the heads of the group."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    sink_logits: Tensor | None = None,
    softcap: float | None = None,
    need_lse: bool = False,
    need_mass: bool = False,
    block_table: BlockTable | None = None,
) -> Attended:
    """Attention of every query over every given key that the mask and the lengths leave.

    Args:
        q: ``[B, Hq, Lq, D]``.
        k, v: ``[B, Hkv, Lk, D]``, ``[B, Hkv, Lk, Dv]``; read through their strides.
        scaling: factor of the logits.
        mask: bool, broadcastable to ``[B, Hkv, Lq, Lk]``; True where a query may look. The keys of a False entry may
            hold anything finite.
        lengths: int ``[B]`` or ``[B, Hkv]``: only the first so many keys are there, the others may hold anything
            finite; None: all are.
        sink_logits: ``[Hq]``: a logit of each query head that takes its share of every softmax and has no value, the
            learned sinks of gpt-oss; the log-sum-exp and the mass count it. None: there is none.
        softcap: each scaled logit x of a key becomes ``softcap * tanh(x / softcap)``, as in Gemma 2, before the mask;
            sinks are not capped. None: there is no cap.
        need_lse, need_mass: whether to return the log-sum-exp and the pooled mass; without both, and without sinks or a
            cap, the fastest library kernel runs.
        block_table: where keys and values are when ``k`` and ``v`` are blocks that all rows share, ``[N, Hkv, n,
            D(v)]``; None: they are in one piece.

    Raises:
        ValueError: for sinks of other heads, a cap that is not a finite number above 0, or a table that does not fit,
            see :meth:`BlockTable.check`.
    """
    if block_table is not None:
        k, v = block_table.gather(q, k, v)
    num_heads, length = q.shape[1:3]
    rows = fold_group(q, k.shape[1])
    if lengths is not None:
        there = first_keys(lengths, k.shape[2])[:, :, None]
        mask = there if mask is None else mask & there
    if mask is not None:
        mask = mask.expand(*mask.shape[:2], length, mask.shape[3])
        mask = mask.repeat(1, 1, rows.shape[2] // length, 1) if length > 1 else mask
    if not (need_lse or need_mass or sink_logits is not None or softcap is not None):
        return Attended(unfold_group(scaled_dot_product(rows, k, v, scaling, mask=mask), num_heads))
    logits = (
        matmul_fp32(rows, k.transpose(-1, -2)).mul_(scaling)
        if not rows.requires_grad
        else (matmul_fp32(rows, k.transpose(-1, -2)) * scaling)
    )
    logits = capped(logits, softcap)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    top = logits.amax(-1, keepdim=True)
    top = top.masked_fill(top.isneginf(), 0.0) if mask is not None else top
    if sink_logits is not None:
        sinks = rows_of_heads(sink_logits, num_heads, k.shape[1], length)
        top = top.maximum(sinks)
    weights = (logits - top).exp_()
    total = weights.sum(-1, keepdim=True)
    if sink_logits is not None:
        total = total + (sinks - top).exp()
    weights = weights / (total.clamp_min(torch.finfo(torch.float32).tiny) if mask is not None else total)
    out = (weights.to(v.dtype) @ v).to(q.dtype)
    lse = (total.log() + top).squeeze(-1) if need_lse else None
    return Attended(
        unfold_group(out, num_heads),
        unfold_group(lse, num_heads) if need_lse else None,
        weights.sum(2) if need_mass else None,
    )


def rows_of_heads(logits: Tensor, num_heads: int, num_kv_heads: int, length: int) -> Tensor:
    """A logit of each query head, ``[Hq]``, for the rows of :func:`fold_group`: fp32 ``[1, Hkv, G * Lq, 1]``.

    Raises:
        ValueError: for logits of other heads.
    """
    check_sinks(logits, num_heads)
    return logits.float().repeat_interleave(length).view(1, num_kv_heads, -1, 1)


def check_sinks(sinks: Tensor | None, heads: int) -> None:
    """Raise unless there are none, or one logit for each head."""
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sink_logits must be one logit for each of {heads} heads, not {tuple(sinks.shape)}")


def attend_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    offset: int = 0,
    sink_logits: Tensor | None = None,
    softcap: float | None = None,
    need_lse: bool = False,
) -> Attended:
    """Dense causal attention of a block of queries: query i sees the keys ``0 .. offset + i``.

    Blocks of queries are computed one after another over all the keys that they may see, so that no ``Lq x Lk`` tensor
    exists.

    Args:
        q: ``[B, Hq, Lq, D]``.
        k, v: ``[B, Hkv, Lk, D(v)]`` with ``Lk >= offset + Lq``; the rest is not read.
        offset: number of keys before the first query's own.
        sink_logits, softcap: see :func:`attend`.

    Raises:
        ValueError: for fewer keys than that.
    """
    batch, num_heads, length = q.shape[:3]
    check_keys(q, k, offset)
    step = block_length(4 * batch * num_heads * (offset + length), length)
    how = {"scaling": scaling, "sink_logits": sink_logits, "softcap": softcap, "need_lse": True}
    parts = []
    for first in range(0, length, step):
        last = min(first + step, length)
        end = offset + last
        query = torch.arange(offset + first, end, device=q.device)[:, None]
        mask = torch.arange(end, device=q.device) <= query
        parts.append(attend(q[:, :, first:last], k[:, :, :end], v[:, :, :end], mask=mask[None, None], **how))
    lse = torch.cat([part.lse for part in parts], 2) if need_lse else None
    return Attended(torch.cat([part.out for part in parts], 2), lse)


def check_keys(q: Tensor, k: Tensor, offset: int) -> None:
    """Raise unless every query has its own key behind ``offset`` others."""
    if k.shape[2] < offset + q.shape[2]:
        raise ValueError(
            f"k has {k.shape[2]} keys; offset {offset} and {q.shape[2]} queries need {offset + q.shape[2]}"
        )


def attend_capped(q: Tensor, k: Tensor, v: Tensor, *, scaling: float, offset: int, softcap: float) -> Attended:
    """:func:`attend_causal` under a cap, with the log-sum-exp."""
    return attend_causal(q, k, v, scaling=scaling, offset=offset, softcap=softcap, need_lse=True)


def attend_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    lower: Tensor,
    sinks: int = 0,
    offset: int = 0,
    sink_logits: Tensor | None = None,
    softcap: float | None = None,
    block_table: BlockTable | None = None,
) -> Attended:
    """Causal attention over the first ``sinks`` keys and a window whose start may move from query to query.

    Args:
        q: ``[B, Hq, Lq, D]``.
        k, v: ``[B, Hkv, Lk, D(v)]`` with ``Lk >= offset + Lq``.
        lower: int64 ``[Lq]`` on the device of q, non-decreasing: query i sees the keys ``lower[i] .. offset + i``, and
            those of the first ``sinks`` that do not lie behind its own. One that sees nothing gets 0.
        sinks: number of keys at the beginning that every query sees.
        offset: number of keys before the first query's own.
        sink_logits, softcap, block_table: see :func:`attend`.
    """
    if block_table is not None:
        k, v = block_table.gather(q, k, v)
    length = q.shape[2]
    starts, lower = lower.tolist(), lower[:, None]
    width = max(offset + i - start for i, start in enumerate(starts)) + sinks + 512
    step = min(512, block_length(4 * q.shape[1] // k.shape[1] * min(width, offset + length), length))
    slots = torch.arange(offset + length, device=q.device)
    outs = []
    for first in range(0, length, step):
        last = min(first + step, length)
        end = offset + last
        start = min(starts[first], end - 1)
        start = start if start > sinks else 0
        keys, values, seen = k[:, :, start:end], v[:, :, start:end], slots[start:end]
        if start > 0 and sinks > 0:
            keys, values = (torch.cat([x[:, :, :sinks], part], 2) for x, part in ((k, keys), (v, values)))
            seen = torch.cat([slots[:sinks], seen])
        query = slots[offset + first : end, None]
        mask = (seen <= query) & ((seen >= lower[first:last]) | (seen < sinks))
        how = {"scaling": scaling, "mask": mask[None, None], "sink_logits": sink_logits, "softcap": softcap}
        outs.append(attend(q[:, :, first:last], keys, values, **how).out)
    return Attended(torch.cat(outs, 2) if len(outs) > 1 else outs[0])


def attend_indices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    scaling: float,
    lengths: Tensor | None = None,
    heads: Tensor | None = None,
    sink_logits: Tensor | None = None,
    softcap: float | None = None,
    need_lse: bool = False,
    need_mass: bool = False,
    block_table: BlockTable | None = None,
) -> Attended:
    """Attention over gathered keys: only the selected keys are read.

    Args:
        indices: int ``[B, Hkv, K]`` into the keys; -1 marks an unused place.
        lengths: int ``[B]`` or ``[B, Hkv]``: only the first so many places are looked at; None: all.
        heads: int64 ``[Hkv]``: the head of ``indices`` whose keys each KV head reads; None for its own.
        sink_logits, softcap, block_table: see :func:`attend`.

    Returns:
        With ``need_mass``, ``mass [B, Hkv, K]`` belongs to the places of ``indices``.
    """
    if block_table is not None:
        k, v = block_table.gather(q, k, v)
    indices = indices if heads is None else indices.index_select(1, heads)
    used = indices >= 0
    if lengths is not None:
        used &= first_keys(lengths, indices.shape[2])
    keys, values = gather_fields([k, v], indices)
    how = {"scaling": scaling, "sink_logits": sink_logits, "softcap": softcap}
    return _attend_gathered(q, keys, values, used, need_lse=need_lse, need_mass=need_mass, **how)


def attend_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    page_size: int,
    *,
    scaling: float,
    lengths: Tensor | None = None,
    sink_logits: Tensor | None = None,
    softcap: float | None = None,
    need_lse: bool = False,
    need_mass: bool = False,
    block_table: BlockTable | None = None,
) -> Attended:
    """Attention over pages: page p is the keys ``p * page_size .. (p + 1) * page_size - 1``, as far as these are there.

    Args:
        pages: int ``[B, H, P]``, of the KV heads, or of the query heads, each of which then reads pages of its own; -1
            marks an unused place. No page stands twice in a row.
        lengths: int ``[B]`` or ``[B, Hkv]``: only the first so many keys are there; None: all are. Keys of no page, and
            those that are not there, may hold anything.
        sink_logits, softcap, block_table: see :func:`attend`. Pages need not have the size of blocks.

    Returns:
        With ``need_mass``, ``mass [B, H, P * page_size]`` belongs to the keys of the pages.

    Raises:
        ValueError: when the pages are of neither kind of heads.
    """
    check_pages(q, k, pages)
    if block_table is not None:
        k, v = block_table.gather(q, k, v)
    num_kv_heads, number = k.shape[1:3]
    shared = pages.shape[1] // num_kv_heads
    ends = number
    if lengths is not None:
        ends = lengths.clamp_max(number)[..., None]
        ends = ends[:, None] if lengths.dim() == 1 else ends.repeat_interleave(shared, 1)
    slots = page_slots(pages, page_size).flatten(2)
    slots = slots.masked_fill(slots >= ends, -1)
    fields = gather_fields([k, v], slots.unflatten(1, (num_kv_heads, shared)).flatten(2))
    keys, values = (x.unflatten(2, (shared, slots.shape[2])).flatten(1, 2) for x in fields)
    how = {"scaling": scaling, "sink_logits": sink_logits, "softcap": softcap}
    return _attend_gathered(q, keys, values, slots >= 0, need_lse=need_lse, need_mass=need_mass, **how)


def check_pages(q: Tensor, k: Tensor, pages: Tensor) -> None:
    """Raise unless pages are of the KV heads or of the query heads."""
    if len(pages) != len(q) or pages.shape[1] not in (k.shape[1], q.shape[1]):
        raise ValueError(f"pages {tuple(pages.shape)} do not fit q {tuple(q.shape)} and k {tuple(k.shape)}")


def gather_slots(x: Tensor, indices: Tensor) -> Tensor:
    """``x [B, Hkv, Lk, ...]`` at ``indices [B, Hkv, K]`` (negative ones read slot 0): ``[B, Hkv, K, ...]``."""
    return gather_fields([x], indices)[0]


def gather_fields(fields: Sequence[Tensor], indices: Tensor, *, complete: bool = False) -> list[Tensor]:
    """:func:`gather_slots` of several tensors at the same slots; ``complete``: no index is negative."""
    index, gathered = (indices if complete else indices.clamp_min(0)).long(), []
    rows_of: dict[int, Tensor] = {}  # of the buffers, by the distance of their heads
    for x in fields:
        if x.dim() == 3:
            gathered.append(x.gather(2, index))
            continue
        if x.requires_grad or not _packed(x):
            gathered.append(x.gather(2, index[..., None].expand(*index.shape, x.shape[-1])))
            continue
        # whole rows of the buffer that x is a view of: several times faster than an element-wise gather
        batch, num_kv_heads, length, dim = x.shape
        per_head = x.stride(1) // dim
        rows = x.as_strided(((batch * num_kv_heads - 1) * per_head + length, dim), (dim, 1))
        if per_head not in rows_of:
            rows_of[per_head] = (index + _begins(batch, num_kv_heads, per_head, x.device)).flatten()
        gathered.append(rows.index_select(0, rows_of[per_head]).view(*index.shape, dim))
    return gathered


def gather_pages(x: Tensor, pages: Tensor, page_size: int, *, complete: bool = False) -> Tensor:
    """Whole pages of ``x [B, Hkv, Lk, D]`` at ``pages [B, Hkv, P]`` (negative ones read page 0).

    ``complete``: no page is negative.

    Returns:
        ``[B, Hkv, P * page_size, D]``.
    """
    batch, num_kv_heads, _, dim = x.shape
    if x.requires_grad or not _packed(x) or x.stride(1) // dim % page_size:
        pages = pages if complete else pages.clamp_min(0)
        return gather_fields([x], page_slots(pages, page_size, complete=True).flatten(-2), complete=True)[0]
    whole = x.as_strided(
        (batch, num_kv_heads, x.shape[2] // page_size, page_size * dim), (*x.stride()[:2], page_size * dim, 1)
    )
    return gather_fields([whole], pages, complete=complete)[0].view(batch, num_kv_heads, -1, dim)


def _packed(x: Tensor) -> bool:
    """Whether the vectors of ``x [B, Hkv, Lk, D]`` are rows of one matrix, heads at equal distances."""
    dim = x.shape[3]
    per_head = x.stride(1) // dim
    return x.stride() == (x.shape[1] * per_head * dim, per_head * dim, dim, 1)


def _begins(batch: int, num_kv_heads: int, per_head: int, device: torch.device) -> Tensor:
    """:func:`_first_rows`; what a graph captures is its own, since a cache may drop what the graph still reads."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return (_first_rows.__wrapped__ if capturing else _first_rows)(batch, num_kv_heads, per_head, device)


@functools.lru_cache(maxsize=64)
def _first_rows(batch: int, num_kv_heads: int, per_head: int, device: torch.device) -> Tensor:
    """int64 ``[B, Hkv, 1]``: the row at which each head begins."""
    with torch.inference_mode(False):
        return torch.arange(0, batch * num_kv_heads * per_head, per_head, device=device).view(batch, num_kv_heads, 1)


def page_slots(pages: Tensor, page_size: int, *, complete: bool = False) -> Tensor:
    """Slots of each page: ``[..., P] -> [..., P, page_size]``, -1 where the page is -1; ``complete``: none is."""
    slots = pages[..., None].long() * page_size + torch.arange(page_size, device=pages.device)
    return slots if complete else slots.masked_fill(pages[..., None] < 0, -1)


def _attend_gathered(q: Tensor, k: Tensor, v: Tensor, used: Tensor, **how: Any) -> Attended:
    """Attention over gathered keys; what lies in unused places, NaN included, has no influence."""
    k, v = (x.masked_fill(~used[..., None], 0) for x in (k, v))
    return attend(q, k, v, mask=used[:, :, None], **how)


def scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """PyTorch's attention, ``[B, Hq, Lq, Dv]``."""

    def run() -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scaling, enable_gqa=grouped)

    if not q.is_cuda:
        return run()
    with sdpa_kernel(_BACKENDS, set_priority=True):
        return run()

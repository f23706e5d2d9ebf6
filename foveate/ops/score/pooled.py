"""The importance of each key to the heads that share it: the attention of one query a row, pooled."""

import torch
from torch import Tensor

from foveate.ops._math import first_keys, fold_group
from foveate.ops.attend.gather import gather_slots, membership_mask, page_slots
from foveate.ops.checks import check_counts, check_number, check_places
from foveate.ops.kv import KV
from foveate.ops.logits import Logits
from foveate.ops.score.nodes import key_logits


def pooled_mass(
    q: Tensor,
    kv: KV,
    *,
    logits: Logits,
    pooling: str = "post_softmax",
    pool: str = "kv_head",
) -> Tensor:
    """The attention that query heads pay to each key: the mean over the heads (Kascade, section 3.3) or the largest
    (OmniKV).

    OmniKV's published configuration takes the largest logit instead. Unlike a head's attention, its logits are not
    relative to the head's other keys.

    Args:
        q: ``[B, Hq, 1, D]``.
        kv: ``k [B, Hkv, N, D]``, in one piece or in blocks, see :class:`~foveate.ops.KV`; values are not read.
        logits: how logits are made, see :class:`~foveate.ops.Logits`.
        pooling: the mean of attention (``post_softmax``) or of its square root (``sqrt``), the largest attention of
            any head (``max``), or the largest scaled logit of any head (``max_logit``), which no sink changes.
        pool: the heads that are pooled: the group of each ``kv_head``, or all heads of the ``layer``.

    Returns:
        fp32 ``[B, Hkv, N]``, or ``[B, 1, N]`` with ``pool="layer"``. After a row's last key, by its length, it may be
        anything, because a step does no work there.

    Raises:
        ValueError: for an unknown ``pooling`` or ``pool``, or as :func:`~foveate.ops.attend`.
    """
    check(pooling, pool)
    k, lengths = kv.keys_in_one_piece(q), kv.lengths
    there = None if lengths is None else first_keys(lengths, k.shape[2])
    return _pooled(q, k, there, logits, pooling, pool)


def _pooled(q: Tensor, k: Tensor, there: Tensor | None, logits: Logits, pooling: str, pool: str) -> Tensor:
    """:func:`pooled_mass` of the keys in the mask ``there``, broadcastable to ``[B, Hkv, N]``; None: of all keys."""
    scores = key_logits(fold_group(q, k.shape[1]), k, logits)
    if there is not None:
        scores.masked_fill_(~there[:, :, None], float("-inf"))
    return pool_logits(scores, there, pooling, pool, logits.sinks)


def pooled_mass_of_pages(
    q: Tensor,
    kv: KV,
    pages: Tensor,
    page_size: int,
    *,
    logits: Logits,
    counts: Tensor | None = None,
    pooling: str = "post_softmax",
    pool: str = "kv_head",
) -> Tensor:
    """:func:`pooled_mass` of the keys of some pages. The attention is relative to these keys, and sinks.

    Page p is the keys ``p * page_size .. (p + 1) * page_size - 1`` that exist.

    Args:
        q, logits, pooling, pool: see :func:`pooled_mass`.
        kv: see :func:`pooled_mass`. Pages need not have the size of blocks. Keys outside the given pages, and keys
            beyond a row's length, may hold anything.
        pages: int ``[B, Hkv, P]``, or ``[B, 1, P]`` for all KV heads, which ``pool="layer"`` needs; -1 marks an unused
            place. A row has no page twice.
        page_size: keys of a page.
        counts: int ``[B]``: number of places of a row that are used; later places are ignored. None: all places are
            used.

    Returns:
        fp32 ``[B, Hkv, P * page_size]``, or ``[B, 1, P * page_size]`` with ``pool="layer"``, in the order of the pages;
        -inf at places without a key in any head. After the keys of a row's first ``counts`` places it may be anything.

    Raises:
        ValueError: for an unknown ``pooling`` or ``pool``, or as :func:`~foveate.ops.attend_pages`.
    """
    check(pooling, pool)
    k, lengths = kv.keys_in_one_piece(q), kv.lengths
    if counts is not None:
        pages = pages.masked_fill(~first_keys(counts, pages.shape[2]), -1)
    slots = page_slots(pages, page_size).flatten(2).expand(-1, k.shape[1], -1)
    ends = k.shape[2] if lengths is None else lengths.clamp_max(k.shape[2]).view(len(q), -1, 1)
    slots = slots.masked_fill(slots >= ends, -1)
    return _pooled(q, gather_slots(k, slots), slots >= 0, logits, pooling, pool)


def pool_logits(logits: Tensor, mask: Tensor | None, pooling: str, pool: str, sinks: Tensor | None = None) -> Tensor:
    """Pool logits, of keys or pages, as :func:`pooled_mass` does.

    Args:
        logits: fp32 ``[B, Hkv, G, N]``; -inf at places without a key.
        mask: bool ``[B, Hkv, N]``: True at places with a key; None: every place has a key.
        pooling, pool: see :func:`pooled_mass` and :func:`~foveate.ops.pooled_mass_of_records`; they are not checked.
        sinks: see :class:`~foveate.ops.Logits`. They do not change ``of_largest``.

    Returns:
        fp32 ``[B, Hkv, N]``, or ``[B, 1, N]`` with ``pool="layer"``; -inf at places without a key in any head.
    """
    if pooling == "of_largest":
        logits = logits - logits.amax(-1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min)
    mass = logits.exp() if pooling == "of_largest" else logits if pooling == "max_logit" else logits.softmax(-1)
    if sinks is not None and pooling not in ("max_logit", "of_largest"):
        sinks = sinks.float().view(1, logits.shape[1], -1, 1)
        mass = mass * (logits.logsumexp(-1, keepdim=True) - sinks).sigmoid()
    mass = mass.sqrt_() if pooling == "sqrt" else mass
    mass = mass if pool == "kv_head" else mass.flatten(1, 2)[:, None]
    scores = mass.amax(2) if pooling in ("max", "max_logit") else mass.mean(2)
    if mask is not None:
        mask = mask if pool == "kv_head" else mask.all(1, keepdim=True)
        scores = scores.masked_fill_(~mask, float("-inf"))
    return scores


def check_mass(q, kv, *, logits, **_):
    """Raise ValueError for invalid arguments of :func:`pooled_mass`."""
    kv.check_queries(q)
    logits.check_heads(q)
    number, lengths = kv.num_keys, kv.lengths

    def read() -> Tensor:
        return torch.ones(1, 1, number, dtype=torch.bool) if lengths is None else first_keys(lengths, number)

    if kv.block_table is not None:
        kv.check_blocks(read)


def check(pooling: str, pool: str, *more: str) -> None:
    """Raise ValueError unless ``pooling`` and ``pool`` are known; ``more`` names further ways of pooling."""
    known = ("post_softmax", "sqrt", *more, "max", "max_logit")
    if pooling not in known:
        raise ValueError(f"pooling must be {', '.join(known[:-1])} or {known[-1]}, not {pooling!r}")
    if pool not in ("kv_head", "layer"):
        raise ValueError(f"pool must be kv_head or layer, not {pool!r}")


def check_mass_of_pages(q, kv, pages, page_size, *, logits, counts=None, pool="kv_head", **_):
    """Raise ValueError for invalid arguments of :func:`pooled_mass_of_pages`."""
    kv.check_queries(q)
    number, lengths = kv.num_keys, kv.lengths
    check_number("page_size", page_size, 1)
    check_places("pages", pages, len(q), {1} if pool == "layer" else {1, kv.k.shape[1]}, -(-number // page_size))
    check_counts(counts, len(q))
    logits.check_heads(q)

    def read() -> Tensor:
        there = membership_mask(page_slots(pages, page_size).flatten(2), number)
        return there if lengths is None else there & first_keys(lengths, number)

    if kv.block_table is not None:
        kv.check_blocks(read)

"""The attention that a page's keys hold, estimated by the page's low-rank summary."""

import torch
from torch import Tensor

from foveate.ops._math import block_length, capped, first_keys, fold_group, matmul_fp32
from foveate.ops.attend.gather import gather_slots, page_slots
from foveate.ops.compress.low_rank import factors
from foveate.ops.compress.records import Records
from foveate.ops.logits import Logits
from foveate.ops.score.pooled import check, pool_logits


def page_lse(
    rows: Tensor,
    records: Records,
    *,
    logits: Logits,
    pages: Tensor | None = None,
    branch: int = 1,
) -> Tensor:
    """Log-sum-exp of the logits of each page's keys as its summary approximates them: the log of the page's mass.

    The summary gives a key the product ``q . mean + sum_i (q . direction_i) coefficient_i`` in place of ``q . k``.

    Args:
        rows: ``[B, Hkv, G, D]``, the queries of a group.
        records: the records of P pages, see :class:`~foveate.ops.Records`.
        logits: how logits are made; sinks do not change the sum.
        pages: int ``[B, Hkv, N]``, or ``[B, 1, N]`` for all KV heads; -1 marks an unused place. For each page p only
            the records ``branch * p`` to ``branch * p + branch - 1`` are read, and the result has these pages alone.
            None: all pages.
        branch: number of records read for each entry of ``pages``.

    Returns:
        fp32 ``[B, Hkv, G, P]``, where P is ``N * branch`` if ``pages`` are given; -inf at unused places. From the
        second place after a row's last page on, by the records' lengths, it may be anything.

    Raises:
        ValueError: for records of another form, or records, weights or pages that do not fit the queries.
    """
    records.check_queries(rows)
    check_pages(rows, pages, branch)
    form, lengths, there, memory = records.form, records.lengths, None, records.in_one_piece(rows)
    if pages is not None:
        slots = page_slots(pages, branch).flatten(2).expand(-1, memory.shape[1], -1)
        memory, there = gather_slots(memory, slots), slots >= 0
    rows = rows.float() if records.weights is None else rows.float() / records.weights[:, :, None]
    number = memory.shape[2]
    found = rows.new_empty(*rows.shape[:3], number, dtype=torch.float32)
    step = block_length(8 * rows.shape[:3].numel() * form.page_size, number)
    for first in range(0, number, step):
        held = factors(memory[:, :, first : first + step], form)
        middle = matmul_fp32(rows, held.mean.mT)
        along = matmul_fp32(rows, held.directions.flatten(2, 3).mT).unflatten(-1, (-1, form.rank))
        scores = middle[..., None]
        for direction in range(form.rank):
            scores = torch.addcmul(scores, along[..., direction, None], held.coefficients[:, :, None, :, direction])
        found[..., first : first + step] = capped(scores.mul_(logits.scaling), logits.softcap).logsumexp(-1)
    if lengths is not None:
        stored = first_keys(lengths, number)
        there = stored if there is None else there & stored
    return found if there is None else found.masked_fill_(~there[:, :, None], float("-inf"))


def pooled_mass_of_records(
    q: Tensor,
    records: Records,
    *,
    logits: Logits,
    pooling: str = "post_softmax",
    pool: str = "kv_head",
) -> Tensor:
    """The attention of query heads to each page, pooled like :func:`~foveate.ops.pooled_mass` with :func:`page_lse` in
    place of logits of keys.

    The attention is relative to all pages of a row; learned sinks take no share.

    Args:
        q: ``[B, Hq, 1, D]``.
        records, logits: see :func:`page_lse`.
        pooling, pool: see :func:`~foveate.ops.pooled_mass`. ``pooling`` may also be ``of_largest``: the mean over the
            heads of each page's mass divided by the head's largest mass. LOCKS takes the sum, which gives the same
            order.

    Returns:
        fp32 ``[B, Hkv, P]``, or ``[B, 1, P]`` with ``pool="layer"``; -inf at places without a page in any head. For
        places after a row's pages see :func:`page_lse`.

    Raises:
        ValueError: for an unknown ``pooling`` or ``pool``, or as :func:`page_lse`.
    """
    check(pooling, pool, "of_largest")
    lse = page_lse(fold_group(q, records.memory.shape[1]), records, logits=logits)
    mask = None if records.lengths is None else first_keys(records.lengths, lse.shape[3])
    return pool_logits(lse, mask, pooling, pool)


def check_pages(rows: Tensor, pages: Tensor | None, branch: int) -> None:
    """Raise ValueError unless ``pages`` have the queries' rows, and their KV heads or one head for all of them."""
    if pages is None:
        return
    if pages.dim() != 3 or len(pages) != len(rows) or pages.shape[1] not in (1, rows.shape[1]) or branch < 1:
        raise ValueError(f"pages {tuple(pages.shape)} of {branch} do not fit records of queries {tuple(rows.shape)}")

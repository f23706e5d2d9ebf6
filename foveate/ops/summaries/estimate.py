"""Estimates of the attention that nodes hold, which a launch of their own computes before nodes are scored."""

from __future__ import annotations

from torch import Tensor

from foveate.ops._math import fold_group
from foveate.ops.attend.gather import gather_fields, page_slots
from foveate.ops.score import page_lse
from foveate.ops.summaries.tree import Level
from foveate.ops.summaries.workspace import Visit


def low_rank_ranks(q: Tensor, level: Level, visit: Visit, scaling: float, softcap: float | None) -> Tensor:
    """The log-sum-exp of each visited node's keys by its low-rank summary, see :func:`foveate.ops.page_lse`.

    Below the top level the records of the nodes that are visited are gathered first.

    Args:
        q: ``[B, Hq, 1, D]``.
        level: of nodes with records.

    Returns:
        fp32 ``[B, Hq, C]`` of equal strides between rows of C places; what is at places of no node is not to be read.
    """
    num_kv_heads, records, counts = level.records.shape[1], level.records, visit.count
    if visit.above is None:
        records = records[:, :, : visit.stage.width]
    else:
        index = page_slots(visit.above.pages, visit.branch).flatten(2).expand(-1, num_kv_heads, -1)
        (records,) = gather_fields([records], index)
        counts = (counts * visit.branch).expand(-1, num_kv_heads)
    rows = fold_group(q, num_kv_heads)
    return page_lse(rows, records, level.record, scaling, lengths=counts, softcap=softcap).flatten(1, 2)

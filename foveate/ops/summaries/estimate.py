"""Estimates of the attention that nodes hold, which a launch of their own computes before nodes are scored."""

from __future__ import annotations

from torch import Tensor

from foveate.ops._math import fold_group
from foveate.ops.score import page_lse
from foveate.ops.summaries.tree import Level
from foveate.ops.summaries.workspace import Visit


def low_rank_ranks(q: Tensor, level: Level, visit: Visit, scaling: float, softcap: float | None) -> Tensor:
    """The log-sum-exp of each visited node's keys by its low-rank summary, see :func:`foveate.ops.page_lse`.

    Below the top level the records of the nodes that are visited are read where they are.

    Args:
        q: ``[B, Hq, 1, D]``.
        level: of nodes with records.

    Returns:
        fp32 ``[B, Hq, C]`` of equal strides between rows of C places; what is at places of no node is not to be read.
    """
    num_kv_heads, records, how = level.records.shape[1], level.records, {"lengths": visit.count, "softcap": softcap}
    if visit.above is None:
        records = records[:, :, : visit.stage.width]
    else:
        counts = (visit.count * visit.branch).expand(-1, num_kv_heads)
        how |= {"pages": visit.above.pages, "branch": visit.branch, "lengths": counts}
    return page_lse(fold_group(q, num_kv_heads), records, level.record, scaling, **how).flatten(1, 2)

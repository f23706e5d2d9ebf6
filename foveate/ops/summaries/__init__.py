"""LuKA's fused operation: attention over summaries of pages, the heaviest of which are replaced by what they stand for.

It scores, selects and attends in one pass, so it has a folder of its own beside the five verbs.
"""

from foveate.ops._dispatch import dispatch
from foveate.ops.summaries import reference
from foveate.ops.summaries.cover import Part, attend_cover, refine
from foveate.ops.summaries.tree import Level, Rows, Tree
from foveate.ops.summaries.types import Covered, Refinement, Sums, VisitedLevel

attend_summaries = dispatch(reference.attend_summaries, "foveate.ops.summaries.launch")

__all__ = [
    "Covered",
    "Level",
    "Part",
    "Refinement",
    "Rows",
    "Sums",
    "Tree",
    "VisitedLevel",
    "attend_cover",
    "attend_summaries",
    "refine",
]

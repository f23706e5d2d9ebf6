"""select: which k of the scored, in bounded memory and in a total order."""

from foveate.ops.select.reference import StreamingTopK, topk, topk_rows

__all__ = ["StreamingTopK", "topk", "topk_rows"]

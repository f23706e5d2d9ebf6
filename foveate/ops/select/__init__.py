"""select: which k of the scored, in bounded memory and in a total order."""

from foveate.ops.select.mass import by_bound, by_mass, first_of
from foveate.ops.select.reference import StreamingTopK, topk, topk_rows

__all__ = ["StreamingTopK", "by_bound", "by_mass", "first_of", "topk", "topk_rows"]

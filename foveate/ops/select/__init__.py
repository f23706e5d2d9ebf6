"""select: which k of the scored, in bounded memory and in a total order."""

from foveate.ops._dispatch import dispatch
from foveate.ops.select import blocks, pages, reference
from foveate.ops.select.mass import by_bound, by_mass, first_of
from foveate.ops.select.reference import StreamingTopK, topk

keys_of_pages = dispatch(pages.keys_of_pages, "foveate.ops.select.pages_kernel")
topk_of_blocks = dispatch(blocks.topk_of_blocks, "foveate.ops.select.blocks_kernel")
topk_rows = dispatch(reference.topk_rows, "foveate.ops.select.rows_kernel")

__all__ = [
    "StreamingTopK",
    "by_bound",
    "by_mass",
    "first_of",
    "keys_of_pages",
    "topk",
    "topk_of_blocks",
    "topk_rows",
]

"""select: which k of the scored, in bounded memory and in a total order."""

from foveate.ops.dispatch import dispatch
from foveate.ops.select import bits, blocks, pages, reference
from foveate.ops.select.bits import WORD_KEYS, KeyLists, TileKeys
from foveate.ops.select.reference import StreamingTopK, by_mass, topk

keys_at_places = dispatch(pages.keys_at_places, "foveate.ops.select.pages_kernel")
keys_of_bits = dispatch(bits.keys_of_bits, "foveate.ops.select.bits_kernel")
keys_of_pages = dispatch(pages.keys_of_pages, "foveate.ops.select.pages_kernel")
mass_of_pages = dispatch(pages.mass_of_pages, "foveate.ops.select.pages_kernel")
with_always_read = dispatch(pages.with_always_read, "foveate.ops.select.pages_kernel")
set_bits = dispatch(bits.set_bits, "foveate.ops.select.bits_kernel")
topk_of_blocks = dispatch(blocks.topk_of_blocks, "foveate.ops.select.blocks_kernel")
topk_rows = dispatch(reference.topk_rows, "foveate.ops.select.rows_kernel")

__all__ = [
    "WORD_KEYS",
    "KeyLists",
    "StreamingTopK",
    "TileKeys",
    "by_mass",
    "keys_at_places",
    "keys_of_bits",
    "keys_of_pages",
    "mass_of_pages",
    "set_bits",
    "topk",
    "topk_of_blocks",
    "topk_rows",
    "with_always_read",
]

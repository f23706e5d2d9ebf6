"""select: the k best of scored items, in bounded memory and in a total order."""

from foveate.ops.dispatch import dispatch
from foveate.ops.select import bits, blocks, pages, reference
from foveate.ops.select.bits import WORD_KEYS as WORD_KEYS
from foveate.ops.select.bits import KeyLists as KeyLists
from foveate.ops.select.bits import TileKeys as TileKeys
from foveate.ops.select.reference import StreamingTopK as StreamingTopK
from foveate.ops.select.reference import by_mass as by_mass
from foveate.ops.select.reference import topk as topk

keys_at_places = dispatch(pages.keys_at_places, "foveate.ops.select.pages_kernel")
keys_of_bits = dispatch(bits.keys_of_bits, "foveate.ops.select.bits_kernel")
keys_of_pages = dispatch(pages.keys_of_pages, "foveate.ops.select.pages_kernel")
mass_of_pages = dispatch(pages.mass_of_pages, "foveate.ops.select.pages_kernel")
with_always_read = dispatch(pages.with_always_read, "foveate.ops.select.pages_kernel")
set_bits = dispatch(bits.set_bits, "foveate.ops.select.bits_kernel", bits.check_bits)
topk_of_blocks = dispatch(blocks.topk_of_blocks, "foveate.ops.select.blocks_kernel")
topk_rows = dispatch(reference.topk_rows, "foveate.ops.select.rows_kernel", reference.check_topk_rows)

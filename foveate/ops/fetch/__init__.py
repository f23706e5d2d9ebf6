"""fetch: keys and values are in host memory, and the device keeps copies of the pages chosen last.

A *hot page* is a copy on the device of a page in host memory. A *row* here is one KV head of one sequence, so each head
keeps its own pages. A step chooses pages. :func:`place_pages` finds slots for the chosen pages that are not on the
device, :func:`fetch_pages` copies them, and attention reads the slots by a block table. The host reads no results.
"""

from foveate.ops.dispatch import dispatch
from foveate.ops.fetch import reference
from foveate.ops.fetch.types import HostPages as HostPages
from foveate.ops.fetch.types import HotPages as HotPages
from foveate.ops.fetch.types import Placed as Placed

fetch_pages = dispatch(reference.fetch_pages, "foveate.ops.fetch.kernel")
place_pages = dispatch(reference.place_pages, "foveate.ops.fetch.kernel", reference.check_place)
put_both = dispatch(reference.put_both, "foveate.ops.fetch.kernel")

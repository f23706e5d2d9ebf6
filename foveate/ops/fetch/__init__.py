"""fetch: keys and values in host memory, of which a device keeps the pages chosen last.

A *hot page* is a copy on the device of a page in host memory. A row here is one KV head of one sequence, so that each
head keeps pages of its own. A step chooses pages, :func:`place_pages` finds slots for those that are not there,
:func:`fetch_pages` copies them, and attention reads the slots by a block table. Nothing is read on the host.
"""

from foveate.ops.dispatch import dispatch
from foveate.ops.fetch import reference
from foveate.ops.fetch.types import HostPages as HostPages
from foveate.ops.fetch.types import HotPages as HotPages
from foveate.ops.fetch.types import Placed as Placed

fetch_pages = dispatch(reference.fetch_pages, "foveate.ops.fetch.kernel")
place_pages = dispatch(reference.place_pages, "foveate.ops.fetch.kernel", reference.check_place)
put_both = dispatch(reference.put_both, "foveate.ops.fetch.kernel")

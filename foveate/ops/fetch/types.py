"""Pages in host memory, hot pages on the device, and the result of placing the pages that a step chooses."""

from typing import NamedTuple

from torch import Tensor

NEVER = -(1 << 30)
"""The step in which a slot was last chosen, for a slot that never was."""
OLDEST = 255
"""Number of steps after which all slots that were not chosen count as equally old."""


class HostPages(NamedTuple):
    """Keys and values of all tokens in host memory, in segments of n slots each.

    Slot s of row r is slot ``s % n`` of segment ``s // n``. A page does not cross from one segment into the next.
    """

    keys: tuple[Tensor, ...]
    """``[B, Hkv, n, D]`` each, contiguous; pinned where a GPU reads them."""
    values: tuple[Tensor, ...]
    """``[B, Hkv, n, Dv]`` each, contiguous; pinned where a GPU reads them."""
    addresses: Tensor
    """int64 ``[2, N]`` on the device: the addresses at which the N segments of keys and the N segments of values
    begin."""

    @property
    def slots(self) -> int:
        """Slots of a segment, n."""
        return self.keys[0].shape[2]


class HotPages(NamedTuple):
    """The pages that the device holds, and the steps in which they were last chosen. All fields are written in place.

    There are R rows of S slots, and each slot holds a page of n keys. Slot s of row r is block ``r * S + s``.
    """

    keys: Tensor
    """``[R * S + 1, 1, n, D]``; the last block is scratch."""
    values: Tensor
    """``[R * S + 1, 1, n, Dv]``."""
    table: Tensor
    """int32 ``[R, M]``: the block that holds a page; -1: the page is not on the device."""
    holds: Tensor
    """int32 ``[R, S]``: the page that a slot holds; -1: none."""
    chosen: Tensor
    """int32 ``[R, S]``: the step in which a slot's page was last chosen."""
    clock: Tensor
    """int32 ``[R]``: number of steps so far."""

    @property
    def page_size(self) -> int:
        """Keys of a page, n."""
        return self.keys.shape[2]


class Placed(NamedTuple):
    """The result of :func:`place_pages`."""

    blocks: Tensor
    """int32 ``[R, P]``: the block to which the page at a place must be copied; -1: the device already holds the page,
    or the place is unused."""
    asked: Tensor
    """int32 ``[R]``: number of chosen pages."""
    missing: Tensor
    """int32 ``[R]``: number of chosen pages that the device did not hold."""

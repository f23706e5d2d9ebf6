"""Pages in host memory, pages that the device keeps, and pages that a step asks for."""

from typing import NamedTuple

from torch import Tensor

NEVER = -(1 << 30)
"""When a slot was chosen last that never was."""
OLDEST = 255
"""Steps after which all slots that were not chosen count as equally old."""


class HostPages(NamedTuple):
    """Keys and values of all tokens in host memory, in segments of n slots each.

    Slot s of row r is slot ``s % n`` of segment ``s // n``. A page does not cross from one segment into the next.
    """

    keys: tuple[Tensor, ...]
    """``[B, Hkv, n, D]`` each, contiguous; pinned where a GPU reads them."""
    values: tuple[Tensor, ...]
    """``[B, Hkv, n, Dv]`` each, likewise."""
    addresses: Tensor
    """int64 ``[2, N]`` on the device: where the segments of keys, and those of values, begin."""

    @property
    def slots(self) -> int:
        """Slots of a segment, n."""
        return self.keys[0].shape[2]


class HotPages(NamedTuple):
    """The pages that the device keeps, and the steps in which they were chosen last; all are written to in place.

    R rows of S slots each, of pages of n keys; slot s of row r is block ``r * S + s``.
    """

    keys: Tensor
    """``[R * S + 1, 1, n, D]``; the last block is scratch."""
    values: Tensor
    """``[R * S + 1, 1, n, Dv]``."""
    table: Tensor
    """int32 ``[R, M]``: the block that holds a page; -1: none does."""
    holds: Tensor
    """int32 ``[R, S]``: the page in a slot; -1: none."""
    chosen: Tensor
    """int32 ``[R, S]``: the step in which a slot's page was chosen last."""
    clock: Tensor
    """int32 ``[R]``: steps so far."""

    @property
    def page_size(self) -> int:
        """Keys of a page, n."""
        return self.keys.shape[2]


class Placed(NamedTuple):
    """What :func:`place_pages` found."""

    blocks: Tensor
    """int32 ``[R, P]``: the block to which the page at a place must be copied; -1: the page is there, or there is no
    page."""
    asked: Tensor
    """int32 ``[R]``: pages that were asked for."""
    missing: Tensor
    """int32 ``[R]``: those of them that were not there."""

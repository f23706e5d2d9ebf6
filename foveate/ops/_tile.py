"""The earlier place of :mod:`foveate.ops.gpu.tiles`."""

from foveate.ops.gpu.tiles import Tile, multiprocessors, split

__all__ = ["Tile", "multiprocessors", "split"]

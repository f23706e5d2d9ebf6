"""The earlier place of :mod:`foveate.ops.gpu.softcap`."""

from foveate.ops.gpu.softcap import capped, constant

__all__ = ["capped", "constant"]

"""compress: what stands for a page or group of keys."""

from foveate.ops._dispatch import dispatch
from foveate.ops.compress import boxes
from foveate.ops.compress.reference import Nodes, importance_weights, random_weights, root_weights, summarise
from foveate.ops.compress.segments import gaussian_ends

bound_newest = dispatch(boxes.bound_newest, "foveate.ops.compress.boxes_kernel")

__all__ = [
    "Nodes",
    "bound_newest",
    "gaussian_ends",
    "importance_weights",
    "random_weights",
    "root_weights",
    "summarise",
]

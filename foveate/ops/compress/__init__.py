"""compress: what stands for a page or group of keys."""

from foveate.ops.compress.reference import Nodes, importance_weights, random_weights, root_weights, summarise
from foveate.ops.compress.segments import divergence_ends, gaussian_ends

__all__ = [
    "Nodes",
    "divergence_ends",
    "gaussian_ends",
    "importance_weights",
    "random_weights",
    "root_weights",
    "summarise",
]

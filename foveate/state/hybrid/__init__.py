"""What the layers of hybrid models (recurrence, learned eviction, native sparse attention) keep between forward passes.

Each of these layers has a :class:`Memory` in the place of a KV cache.
"""

from foveate.state.hybrid.memory import Memory, Packing
from foveate.state.hybrid.native_sparse import BlockMemory
from foveate.state.hybrid.recurrent import RecurrentMemory
from foveate.state.hybrid.retained import RetainedMemory

__all__ = ["BlockMemory", "Memory", "Packing", "RecurrentMemory", "RetainedMemory"]

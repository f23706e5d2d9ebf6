"""What the layers of hybrid models (recurrence, learned eviction, native sparse attention) keep between forward passes.

Each of these layers has a :class:`Memory` in the place of a KV cache.
"""

from foveate.hybrids.state.memory import Memory, Packing
from foveate.hybrids.state.native_sparse import BlockMemory
from foveate.hybrids.state.recurrent import RecurrentMemory
from foveate.hybrids.state.retained import RetainedMemory

__all__ = ["BlockMemory", "Memory", "Packing", "RecurrentMemory", "RetainedMemory"]

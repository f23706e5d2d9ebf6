"""What one layer of a hybrid keeps of its sequences between forward passes."""

from foveate.state.hybrid.memory import Memory, Packing
from foveate.state.hybrid.native_sparse import BlockMemory
from foveate.state.hybrid.recurrent import RecurrentMemory
from foveate.state.hybrid.retained import RetainedMemory

__all__ = ["BlockMemory", "Memory", "Packing", "RecurrentMemory", "RetainedMemory"]

"""What one layer of a hybrid keeps of its sequences between forward passes."""

from foveate.state.memory import Memory, Packing
from foveate.state.native_sparse import BlockMemory
from foveate.state.recurrent import RecurrentMemory
from foveate.state.retained import RetainedMemory

__all__ = ["BlockMemory", "Memory", "Packing", "RecurrentMemory", "RetainedMemory"]

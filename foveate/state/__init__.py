"""What one attention layer keeps of its sequences between forward passes."""

from foveate.state.cache import SlotCache
from foveate.state.counters import Counters
from foveate.state.description import Channel, Geometry

__all__ = ["Channel", "Counters", "Geometry", "SlotCache"]

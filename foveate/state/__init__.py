"""What one attention layer keeps of its sequences between forward passes."""

from foveate.state.cache import SlotCache
from foveate.state.description import Channel, Counters, Geometry

__all__ = ["Channel", "Counters", "Geometry", "SlotCache"]

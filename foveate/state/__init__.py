"""What one attention layer keeps between forward passes: keys, values, a method's state, and counters."""

from foveate.state.cache import SlotCache
from foveate.state.counters import BytesInUse, Counters
from foveate.state.description import Channel, Evicts, Geometry, RowNumber, shareable
from foveate.state.ranks import Ranks

__all__ = ["BytesInUse", "Channel", "Counters", "Evicts", "Geometry", "Ranks", "RowNumber", "SlotCache", "shareable"]

"""What one attention layer keeps between forward passes: keys, values, a method's state, and counters."""

from foveate.state.cache import SlotCache
from foveate.state.counters import BytesInUse, Counters
from foveate.state.description import Channel, Evicts, Geometry, RowNumber, shareable
from foveate.state.ranks import Ranks
from foveate.state.store import FetchingStore, Store, StoreShape

__all__ = [
    "BytesInUse",
    "Channel",
    "Counters",
    "Evicts",
    "FetchingStore",
    "Geometry",
    "Ranks",
    "RowNumber",
    "SlotCache",
    "Store",
    "StoreShape",
    "shareable",
]

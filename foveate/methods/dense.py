"""Dense attention through foveate's own cache: the baseline of every comparison."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from foveate import ops
from foveate.cache import SlotCache
from foveate.methods.base import Method


@dataclass(frozen=True)
class Dense(Method):
    """Every query looks at every earlier key."""

    name: ClassVar[str] = "dense"
    source: ClassVar[str] = "Vaswani et al. 2017"
    stateful: ClassVar[bool] = False

    def decode(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        return attend_all(cache, q, scaling).out


def attend_all(cache: SlotCache, q: Tensor, scaling: float, need_mass: bool = False) -> ops.Attended:
    """Attention of one token per row over every token that the cache holds, counted."""
    holes = cache.holes()
    cache.count_read(cache.used if holes is None else holes.sum(-1))
    mask = None if holes is None else holes[:, :, None]
    return ops.attend(q, cache.keys, cache.values, scaling=scaling, mask=mask, need_mass=need_mass)

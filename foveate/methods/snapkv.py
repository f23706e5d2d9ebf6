"""SnapKV: what the end of the prompt looks at."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from foveate import ops
from foveate.methods._common import note_queries, window_votes
from foveate.methods._settings import MOST_KEPT
from foveate.methods.base import About, Observation, register, setting
from foveate.methods.bases import KeepsByScore
from foveate.state import Channel, Geometry, SlotCache


@register
class SnapKV(KeepsByScore):
    """The prompt tokens, with their neighbours, that an observation window at the prompt's end attends to.

    Compresses the prompt once; every generated token is kept. Per KV head: the votes of the heads of a group are added.
    The authors' configuration for LongBench is ``window=32,kernel_size=7,pooling=max``, and the ``top_k`` that is their
    capacity less the window: 992, 2016 or 4064.
    """

    name = "snapkv"
    about: ClassVar[About] = About(
        "SnapKV, Li et al. 2024, arXiv:2404.14469", small_budget={"top_k": 12, "window": 8, "kernel_size": 3}
    )
    sinks = 0

    top_k: int | float = setting(0.125, "prompt tokens kept beside the window: a number, or a share of the prompt")
    window: int = setting(32, "observation window: the last tokens of the prompt, always kept")
    kernel_size: int = setting(5, "neighbourhood over which votes are pooled, odd")
    pooling: str = setting("avg", "how votes are pooled: avg or max")

    def __post_init__(self):
        super().__post_init__()
        self._check_count("window", 1, MOST_KEPT)
        self._check_odd("kernel_size")
        self._check_choice("pooling", "avg", "max")

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        return {"queries": Channel((geometry.num_heads, self.window, geometry.head_dim), per=0, dtype=None)}

    @property
    def observation(self) -> Observation:
        return Observation(("queries", self.window))

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        note_queries(cache, q, self.window)

    def scores(self, cache: SlotCache, scaling: float) -> Tensor | None:
        votes = window_votes(cache, self.window, scaling)
        if votes is None:
            return None
        pool = F.avg_pool1d if self.pooling == "avg" else F.max_pool1d
        votes = pool(votes, self.kernel_size, 1, self.kernel_size // 2)
        return F.pad(votes.unflatten(1, (cache.geometry.num_kv_heads, -1)).sum(2), (0, self.window))

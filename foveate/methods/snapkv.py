"""SnapKV: what the end of the prompt looks at."""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from foveate import ops
from foveate.methods._common import attend_all, eviction_setting, keep_heavy, note_queries, window_votes
from foveate.methods.base import Method, Observation, Replay, setting
from foveate.methods.budgets import budget
from foveate.state import Channel, Evicts, Geometry, SlotCache


@dataclass(frozen=True)
class SnapKV(Method):
    """The prompt tokens, with their neighbours, that an observation window at the prompt's end attends to.

    Compresses the prompt once; every generated token is kept. Per KV head: the votes of the heads of a group are added.
    The authors' configuration for LongBench is ``window=32,kernel_size=7,pooling=max``, and the ``top_k`` that is their
    capacity less the window: 992, 2016 or 4064.
    """

    name: ClassVar[str] = "snapkv"
    source: ClassVar[str] = "SnapKV, Li et al. 2024, arXiv:2404.14469"
    evicts: ClassVar[Evicts] = Evicts.AT_PROMPT_END
    replay: ClassVar[Replay] = Replay()
    needs_prompt_end: ClassVar[bool] = True
    full_budget: ClassVar[dict] = {"top_k": 1.0}
    small_budget: ClassVar[dict] = {"top_k": 12, "window": 8, "kernel_size": 3}

    top_k: int | float = setting(0.125, "prompt tokens kept beside the window: a number, or a share of the prompt")
    min_k: int = setting(0, "least number of tokens when top_k is a share")
    window: int = setting(32, "observation window: the last tokens of the prompt, always kept")
    kernel_size: int = setting(5, "neighbourhood over which votes are pooled, odd")
    pooling: str = setting("avg", "how votes are pooled: avg or max")
    evict_every: int = eviction_setting()  # type: ignore[misc]

    def __post_init__(self):
        self._check_budget("top_k")
        self._check_count("min_k")
        self._check_count("window", 1)
        self._check_odd("kernel_size")
        self._check_choice("pooling", "avg", "max")
        self._check_count("evict_every")

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        return {"queries": Channel((geometry.num_heads, self.window, geometry.head_dim), per=0, dtype=None)}

    @property
    def observation(self) -> Observation:
        return Observation(("queries", self.window))

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        note_queries(cache, q, self.window)

    def prompt_end(self, cache: SlotCache, scaling: float) -> Tensor | None:
        allowed = budget(self.top_k, cache.lengths[0], self.min_k) + self.window
        votes = window_votes(cache, self.window, allowed, scaling)
        if votes is None:
            return None
        padding = self.kernel_size // 2
        if self.pooling == "avg":
            votes = F.avg_pool1d(votes, self.kernel_size, 1, padding)
        else:
            votes = F.max_pool1d(votes, self.kernel_size, 1, padding)
        votes = votes.unflatten(1, (cache.geometry.num_kv_heads, -1)).sum(2)
        return self.keep(cache, votes, allowed)

    def keep(self, cache: SlotCache, votes: Tensor, allowed: int) -> Tensor:
        """Slots to keep, int64 ``[B, Hkv, K]``: the window, and by their votes as many others as are allowed.

        Args:
            votes: fp32 ``[B, Hkv, used - window]``.
            allowed: tokens that a KV head may keep, window included; fewer than it holds.
        """
        return keep_heavy(cache, F.pad(votes, (0, self.window)), allowed, self.window)

    def decode(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        return attend_all(cache, q, scaling).out

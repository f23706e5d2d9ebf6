"""LuKA's clustered attention: pages stand behind summaries and are read only where the query looks."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.cache import Channel, Geometry, SlotCache
from foveate.methods._common import attend_all
from foveate.methods.base import Method, budget, setting


@dataclass(frozen=True)
class LuKA(Method):
    """Summaries of old pages, the raw tokens of the pages that matter, and a raw tail.

    One level of summaries. The prefill is dense. Pages are made from the oldest token without a summary when the prompt
    ends and every ``compress_every`` decoded tokens; nothing is evicted. Each KV head refines its own pages, by the
    attention mass of their summaries, averaged over the heads of the group.

    ``mass="preserve"`` is the paper's equation 3: a refined page keeps its summary's mass, shared out among its tokens.
    ``mass="exact"`` lets the page's own tokens enter the softmax in the summary's place.
    """

    name: ClassVar[str] = "luka"
    source: ClassVar[str] = "LuKA, Fei et al. 2025, section 3.2"
    needs_prompt_end: ClassVar[bool] = True
    full_budget: ClassVar[dict] = {"top_k": 1.0, "refine": "top_k", "mass": "exact"}
    small_budget: ClassVar[dict] = {
        "page_size": 4,
        "tail": 9,
        "compress_every": 3,
        "top_k": 2,
        "compressor": "attention",
        "temperature": 1.0,
    }

    page_size: int = setting(16, "tokens of a page")
    tail: int = setting(128, "least number of recent tokens that stay raw")
    compress_every: int = setting(16, "decoded tokens between two rounds of making pages")
    compressor: str = setting("mean", "what stands for a page: mean or attention (weighted by accumulated mass)")
    temperature: float = setting(7.0, "temperature of the attention-weighted compressor")
    refine: str = setting("top_k", "which pages are read raw: top_k, or threshold (mass above epsilon)")
    top_k: int | float = setting(3, "pages refined per KV head: a number, or a share of the pages")
    epsilon: float = setting(0.2, "least mass of a refined page under refine=threshold")
    mass: str = setting(
        "exact", "mass of a refined page: exact (its tokens' own) or preserve (its summary's, equation 3)"
    )
    bias: str = setting("none", "added to a summary's logit: none, or log (of the page size)")

    def __post_init__(self):
        self._check_count("page_size", 1)
        self._check_count("tail", 1)
        self._check_count("compress_every", 1)
        self._check_choice("compressor", "mean", "attention")
        self._check("temperature", isinstance(self.temperature, (int, float)) and self.temperature > 0, "above 0")
        self._check_choice("refine", "top_k", "threshold")
        self._check_budget("top_k")
        self._check("epsilon", isinstance(self.epsilon, (int, float)) and 0 < self.epsilon < 1, "between 0 and 1")
        self._check_choice("mass", "exact", "preserve")
        self._check_choice("bias", "none", "log")

    @property
    def dense_at_full_budget(self) -> bool:  # type: ignore[override]
        """Equation 3 keeps the summaries' masses, so refining everything is still not dense attention."""
        return self.mass == "exact"

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        channels = {
            "summary_k": Channel((geometry.head_dim,), per=self.page_size, dtype=None, recomputed=True),
            "summary_v": Channel((geometry.value_dim,), per=self.page_size, dtype=None, recomputed=True),
        }
        if self.observes:
            channels["mass"] = Channel()
        return channels

    @property
    def observes(self) -> bool:
        return self.compressor == "attention"

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        if self.observes:
            offset = cache.used - q.shape[2]
            ops.column_mass(q, cache.keys, attended.lse, scaling=scaling, offset=offset, out=cache.channel("mass"))

    def prompt_end(self, cache: SlotCache, scaling: float) -> None:
        self._make_pages(cache)

    def decode(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        out = self._attend(cache, q, scaling) if max(cache.rows["pages"]) else self._attend_raw(cache, q, scaling)
        if (cache.lengths[0] - cache.rows["prompt"][0]) % self.compress_every == 0:
            rows = [cache] if cache.uniform else [cache.row(b) for b in range(cache.batch_size)]
            for b, row in enumerate(rows):
                self._make_pages(row)
                if row is not cache:
                    cache.put_back(b, row)
        return out

    # Pages

    def _make_pages(self, cache: SlotCache) -> None:
        """Summarise every whole page that lies before the tail; the rows of ``cache`` have one length."""
        first, length = cache.rows["pages"][0], cache.lengths[0]
        last = max(first, (length - self.tail) // self.page_size)
        if last == first:
            return
        slots = slice(first * self.page_size, last * self.page_size)
        weights = None
        if self.observes:
            mass = cache.channel("mass")[:, :, slots] / cache.geometry.group  # the mean over the heads of the group
            weights = ops.page_importance(mass, self.page_size, self.temperature)
        summary_k, summary_v = ops.summarise_pages(
            cache.keys[:, :, slots], cache.values[:, :, slots], self.page_size, weights
        )
        cache.channel("summary_k")[:, :, first:last] = summary_k
        cache.channel("summary_v")[:, :, first:last] = summary_v
        cache.rows["pages"] = [last] * cache.batch_size

    # Attention over the cover

    def _attend_raw(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        attended = attend_all(cache, q, scaling, need_mass=self.observes)
        if self.observes:
            mass = cache.channel("mass")
            mass += attended.mass
        return attended.out

    def _attend(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """One query per row over the cover: summaries, the tokens of refined pages, tail (Algorithm 1)."""
        pages = max(cache.rows["pages"])
        summary_k, summary_v = (cache.channel(name)[:, :, :pages] for name in ("summary_k", "summary_v"))
        tail_k, tail_v, tail_used, tail_slots = self._tail(cache)
        page_used = None if cache.uniform else self._pages_used(cache, pages)
        scores = ops.score_cover(
            q,
            summary_k,
            tail_k,
            scaling=scaling,
            summary_used=page_used,
            tail_used=tail_used,
            bias=math.log(self.page_size) if self.bias == "log" else 0.0,
        )
        refined = self._refined(scores.page_mass, cache, page_used)
        complete = self.refine == "top_k" and cache.uniform
        raw_k, raw_v = (ops.gather_pages(x, refined, self.page_size) for x in (cache.keys, cache.values))
        attended = ops.attend_cover(
            scores, summary_v, tail_v, raw_k, raw_v, refined, preserve=self.mass == "preserve", complete=complete
        )
        if self.observes:
            self._add_mass(cache, attended.tail_mass, tail_slots)
        refined_pages = refined.shape[-1] if complete else (refined >= 0).sum(-1)
        summaries = pages if page_used is None else page_used.sum(-1)
        tail = tail_k.shape[2] if tail_used is None else tail_used.sum(-1)
        cache.count_read(summaries + refined_pages * self.page_size + tail, pages_refined=refined_pages)
        return attended.out

    def _refined(self, mass: Tensor, cache: SlotCache, page_used: Tensor | None) -> Tensor:
        """Pages to read raw, int64 ``[B, Hkv, K]`` ascending, -1 for none, from ``mass [B, Hkv, P]``."""
        if self.refine == "threshold":
            # the masses of the pages sum to at most 1, so no more than 1 / epsilon of them can be above epsilon
            capacity = min(mass.shape[-1], math.ceil(1 / self.epsilon))
            return ops.topk(mass.masked_fill(mass <= self.epsilon, float("-inf")), capacity)
        counts = [budget(self.top_k, pages, 1) for pages in cache.rows["pages"]]
        if page_used is None:
            return ops.topk(mass, counts[0])
        mass = mass.masked_fill(~page_used, float("-inf"))
        return ops.topk_rows(mass, cache.on_device(counts), max(counts))

    def _pages_used(self, cache: SlotCache, pages: int) -> Tensor:
        """bool ``[B, 1, P]``: which summaries exist in each row."""
        return torch.arange(pages, device=cache.device) < cache.row_tensor("pages")[:, None, None]

    def _tail(self, cache: SlotCache) -> tuple[Tensor, Tensor, Tensor | None, Tensor | slice]:
        """Raw tokens without a summary: keys, values, bool ``[B, 1, T]`` of those that exist (or None), slots."""
        first = [pages * self.page_size for pages in cache.rows["pages"]]
        if cache.uniform:
            tail = slice(first[0], cache.used)
            return cache.keys[:, :, tail], cache.values[:, :, tail], None, tail
        width = max(length - start for length, start in zip(cache.lengths, first))
        slots = cache.on_device(first)[:, None] + torch.arange(width, device=cache.device)
        used = slots < cache.row_tensor("lengths")[:, None]
        slots = slots.where(used, 0)[:, None].expand(-1, cache.geometry.num_kv_heads, -1)
        return ops.gather_slots(cache.keys, slots), ops.gather_slots(cache.values, slots), used[:, None], slots

    def _add_mass(self, cache: SlotCache, mass: Tensor, slots: Tensor | slice) -> None:
        """Accumulate the tail's mass: only tokens without a summary can still be given one."""
        total = cache.channel("mass")
        if isinstance(slots, slice):
            total[:, :, slots] += mass
        else:
            total.scatter_add_(2, slots, mass)

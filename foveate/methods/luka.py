"""LuKA's clustered attention: pages stand behind summaries and are read only where the query looks."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.cache import Channel, Geometry, SlotCache
from foveate.methods.base import Method, budget, setting
from foveate.methods.dense import attend_all
from foveate.ops._math import fold_group, matmul_fp32, unfold_group


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
            weights = ops.page_importance(cache.channel("mass")[:, :, slots], self.page_size, self.temperature)
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
        rows = fold_group(q, cache.geometry.num_kv_heads)
        pages = max(cache.rows["pages"])
        summary_k, summary_v = cache.channel("summary_k")[:, :, :pages], cache.channel("summary_v")[:, :, :pages]
        tail_k, tail_v, tail_used, tail_slots = self._tail(cache)
        is_page = None if cache.uniform else self._page_mask(cache, pages)

        at_summary = matmul_fp32(rows, summary_k.transpose(-1, -2)).mul_(scaling)
        if self.bias == "log":
            at_summary += math.log(self.page_size)
        if is_page is not None:
            at_summary.masked_fill_(~is_page, float("-inf"))
        at_tail = matmul_fp32(rows, tail_k.transpose(-1, -2)).mul_(scaling)
        if tail_used is not None:
            at_tail.masked_fill_(~tail_used[:, :, None], float("-inf"))
        cover = torch.cat([at_summary, at_tail], -1).softmax(-1)

        refined = self._refined(cover[..., :pages].mean(2), cache)
        partial = self.refine == "threshold" or not cache.uniform  # places for refined pages may be unused
        raw_k, raw_v = (ops.gather_pages(x, refined, self.page_size) for x in (cache.keys, cache.values))
        at_raw = matmul_fp32(rows, raw_k.transpose(-1, -2)).mul_(scaling)
        used = refined >= 0
        if partial:
            unused = ~used.repeat_interleave(self.page_size, -1)
            at_raw.masked_fill_(unused[:, :, None], float("-inf"))
            raw_v = raw_v.masked_fill(unused[..., None], 0)

        index = refined.clamp_min(0)[:, :, None].expand(-1, -1, rows.shape[2], -1)
        if self.mass == "exact":
            gone = torch.where(used, float("-inf"), 0.0)[:, :, None].expand(index.shape)
            weights = torch.cat([at_summary.scatter_add(-1, index, gone), at_raw, at_tail], -1).softmax(-1)
            of_summary, of_raw, of_tail = weights.split([pages, at_raw.shape[-1], at_tail.shape[-1]], -1)
        else:
            of_summary, of_tail = cover.split([pages, at_tail.shape[-1]], -1)
            shares = at_raw.unflatten(-1, (-1, self.page_size)).softmax(-1)
            parent = of_summary.gather(-1, index) * used[:, :, None]
            of_raw = (shares.nan_to_num(0.0) * parent[..., None]).flatten(-2)
            of_summary = of_summary.scatter_add(-1, index, -parent)

        out = of_tail.to(tail_v.dtype) @ tail_v
        out = out + of_summary.to(summary_v.dtype) @ summary_v + of_raw.to(raw_v.dtype) @ raw_v
        if self.observes:
            self._add_mass(cache, of_tail.sum(2), tail_slots)
        refined_pages = used.sum(-1) if partial else refined.shape[-1]
        tokens = at_tail.shape[-1] if tail_used is None else tail_used.sum(-1)
        summaries = pages if is_page is None else is_page.sum(-1)[:, :, 0]
        cache.count_read(refined_pages * self.page_size + summaries + tokens, pages_refined=refined_pages)
        return unfold_group(out.to(q.dtype), q.shape[1])

    def _refined(self, mass: Tensor, cache: SlotCache) -> Tensor:
        """Pages to read raw, int64 ``[B, Hkv, K]`` ascending, -1 for none, from ``mass [B, Hkv, P]``."""
        if self.refine == "threshold":
            # the masses of the pages sum to at most 1, so no more than 1 / epsilon of them can be above epsilon
            capacity = min(mass.shape[-1], math.ceil(1 / self.epsilon))
            return ops.topk(mass.masked_fill(mass <= self.epsilon, float("-inf")), capacity)
        counts = [budget(self.top_k, pages, 1) for pages in cache.rows["pages"]]
        if len(set(counts)) == 1 and cache.uniform:
            return ops.topk(mass, counts[0])
        pages = torch.arange(mass.shape[-1], device=mass.device)
        mass = mass.masked_fill(pages >= cache.row_tensor("pages")[:, None, None], float("-inf"))
        rows = [ops.topk(mass[b : b + 1], count) for b, count in enumerate(counts)]
        width = max(row.shape[-1] for row in rows)
        return torch.cat([torch.nn.functional.pad(row, (0, width - row.shape[-1]), value=-1) for row in rows])

    def _page_mask(self, cache: SlotCache, pages: int) -> Tensor:
        """bool ``[B, 1, 1, P]``: which summaries exist in each row."""
        return torch.arange(pages, device=cache.device) < cache.row_tensor("pages")[:, None, None, None]

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

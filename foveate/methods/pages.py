"""Pages by the attention that their keys will hold, as low-rank summaries estimate it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._common import note_queries
from foveate.methods._paged import SelectPages
from foveate.methods.base import setting
from foveate.methods.budgets import Number
from foveate.state import Channel, Geometry, SlotCache

_OBSERVED = 16
"""Last queries of a prompt by which the channels of keys are weighted."""


@dataclass(frozen=True)
class Pages(SelectPages):
    """The heads of a group read the pages that hold most of their attention, by a low-rank summary of each page.

    A summary is the page's mean key in eight bits and ``rank`` directions in four (:class:`foveate.ops.PageRecord`),
    3.5 % of a page of 16 keys with their values (head dim 128, bf16). It is made when the page is full. A page's score
    is its share of the attention to all full pages, by the log-sum-exp of the logits that its summary gives its keys,
    averaged over the heads that choose together. Sinks and the newest tokens are always read, in whole pages, and count
    towards ``top_k``. The prefill is dense.

    Published methods of this kind differ: LOCKS (locks-kv) stores summaries of 5 to 16 % of the KV, and its later
    versions estimate a page's mass from its mean and the variance along a few directions, without the keys' own
    coefficients. Budgets, always-read pages, weighted channels and pooling are this method's own.
    """

    name: ClassVar[str] = "pages"
    source: ClassVar[str] = "foveate; of the kind of Quest, arXiv:2406.10774, and LOCKS, pypi.org/project/locks-kv"
    full_budget: ClassVar[dict] = {"top_k": 1.0}
    small_budget: ClassVar[dict] = {"top_k": 16, "page_size": 4, "window": 3, "sinks": 2}

    rank: int = setting(2, "directions of a page's summary, 1 to 4")
    weighted: bool = setting(
        True, "weigh the channels of keys, before they are rounded, by the last queries of the prompt"
    )
    sinks: int = setting(4, "first tokens that are always read")
    window: int = setting(16, "newest tokens that are always read, this one included")
    pool: str = setting("kv_head", "who chooses pages: the heads of a kv_head together, or the whole layer")
    dense_layers: int = setting(0, "first layers that read all keys")

    def __post_init__(self):
        super().__post_init__()
        record = ops.PageRecord
        self._check("page_size", 2 <= self.page_size <= record.largest_page, f"2 to {record.largest_page}")
        self._check_count("rank", 1)
        largest = min(record.largest_rank, self.page_size)
        self._check("rank", self.rank <= largest, f"at most {largest} with pages of {self.page_size}")
        self._check("weighted", isinstance(self.weighted, bool), "true or false")
        self._check_count("sinks")
        self._check_count("window", 1)
        self._check_choice("pool", "kv_head", "layer")

    # State

    def form(self, geometry: Geometry) -> ops.PageRecord:
        """How a page's summary is stored."""
        return ops.PageRecord(geometry.head_dim, self.page_size, self.rank)

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        if self.dense:
            return {}
        width, heads = geometry.head_dim, geometry.num_kv_heads
        record = Channel((self.form(geometry).bytes,), per=self.page_size, dtype=torch.uint8, recomputed=True)
        if not self.weighted:
            return {"records": record}
        return {
            "records": record,
            "queries": Channel((geometry.num_heads, _OBSERVED, width), per=0, dtype=None),
            "channel_weights": Channel((heads, width), per=0, recomputed=True, fill=1.0),  # of a row without a prompt
        }

    @property
    def observation(self) -> Hashable | None:
        return ("queries", _OBSERVED) if self.weighted and not self.dense else None

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        if self.observation is not None:
            note_queries(cache, q, _OBSERVED)

    def prompt_end(self, cache: SlotCache, scaling: float) -> None:
        observed = min(_OBSERVED, cache.rows["observed"][0])
        if self.observation is None or not observed:
            super().prompt_end(cache, scaling)
            return
        queries = cache.channel("queries")[:, :, _OBSERVED - observed :]
        cache.channel("channel_weights").copy_(ops.channel_weights(queries, cache.geometry.num_kv_heads))
        self.summarise(cache, 0, cache.lengths[0] // self.page_size)  # those of earlier prompts had other weights

    def _weights(self, cache: SlotCache) -> Tensor | None:
        return cache.channel("channel_weights") if self.weighted else None

    def summarise(self, cache: SlotCache, first: int, last: int) -> None:
        if first < last:
            keys = cache.keys[:, :, first * self.page_size : last * self.page_size]
            records = ops.compress_pages(keys, self.form(cache.geometry), self._weights(cache))
            cache.channel("records")[:, :, first:last] = records

    def summarise_newest(self, cache: SlotCache) -> None:
        lengths, form = cache.row_tensor("lengths"), self.form(cache.geometry)
        ops.compress_newest(cache.keys, cache.channel("records"), lengths, form, self._weights(cache))

    def scored_share(self, geometry: Geometry, dtype: torch.dtype) -> float:
        """A page has one record; the page that is being filled counts like the others."""
        of_page = self.page_size * (geometry.head_dim + geometry.value_dim) * dtype.itemsize
        return 0.0 if self.dense else self.form(geometry).bytes / of_page

    # Choice

    @property
    def estimates_mass(self) -> bool:  # type: ignore[override]
        return not self.dense

    def full_pages(self, length: Number) -> Number:
        """Pages of a row that have summaries."""
        return length // self.page_size

    def first_newest(self, length: Number) -> Number:
        """The first of the newest pages, which are always read."""
        before = length - self.window
        return before.clamp_min(0) // self.page_size if isinstance(before, Tensor) else max(before, 0) // self.page_size

    def least(self, length: Number) -> Number:
        """The pages of the sinks and the newest ones."""
        between = self.first_newest(length) - self.pages(self.sinks)
        return self.pages(length) - (between.clamp_min(0) if isinstance(between, Tensor) else max(between, 0))

    def most_of_least(self) -> int:
        return self.pages(self.sinks) + (self.window + self.page_size - 2) // self.page_size + 1

    def choose(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        heads, mass = cache.geometry.num_kv_heads, self._mass(cache, q, scaling)
        if self.pool == "layer":
            mass = mass.mean(1, keepdim=True)
        fixed, free = self._fixed(cache, mass.shape[-1])
        pages = self._best(cache, torch.where(free, mass, fixed))
        held = (mass.gather(-1, pages.clamp_min(0).long()) * (pages >= 0)).sum(-1)
        cache.count("mass_read", held.nan_to_num(1.0))  # a row without any full page reads all that it has
        pages = pages.expand(-1, heads, -1)
        cache.count_read(self._keys_of(cache, pages), pages_refined=cache.each_row(self.count)[:, None])
        return pages

    def _fixed(self, cache: SlotCache, number: int) -> tuple[Tensor, Tensor]:
        """Scores of the pages that compete with no others, fp32 ``[B, 1, P]``, and which do compete.

        inf: a page that is always read. -inf: one that a row does not have.
        """
        step = cache.step
        if step is None:
            return self._fixed_now(cache, number)
        return step.once(("fixed pages", self.spec, number), lambda: self._fixed_now(cache, number))

    def _fixed_now(self, cache: SlotCache, number: int) -> tuple[Tensor, Tensor]:
        page = torch.arange(number, device=cache.device)
        newest, end = (cache.each_row(rule)[:, None, None] for rule in (self.first_newest, self.pages))
        always = (page < self.pages(self.sinks)) | (page >= newest)
        fixed = torch.where(always, float("inf"), 0.0).masked_fill(page >= end, float("-inf"))
        return fixed, fixed == 0

    def decode_dense(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        if self.dense:
            return super().decode_dense(cache, q, scaling)
        cache.count("mass_read", 1.0)
        return super().decode_dense(cache, q, scaling)

    def _mass(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """Share of the attention to full pages that each of them holds, the mean over the group: fp32 ``[B, Hkv, P]``.

        0 for a page that is not full; NaN in a row that has no full page. Learned sinks take no share.
        """
        heads = cache.geometry.num_kv_heads
        records = cache.channel("records")[:, :, : cache.most(self.pages)]
        how = {"weights": self._weights(cache), "lengths": cache.each_row(self.full_pages), "softcap": cache.softcap}
        lse = ops.page_lse(ops.fold_group(q, heads), records, self.form(cache.geometry), scaling, **how)
        return lse.softmax(-1).mean(2)

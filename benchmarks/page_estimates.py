"""Scores of LuKA's pages beside the truth: how each ranks and weights them for a query, and what that misses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import bound
from benchmarks.probe import Seen
from foveate import ops
from foveate.methods.luka import LuKA
from foveate.ops.compress.low_rank import factors

COSTS = {
    "summary": 1.0,
    "summary+prior": 1.0,
    "spread": 1.5,
    "spread+prior": 1.5,
    "bound": 2.0,
    "bound+prior": 2.0,
    "prior": 1.0,
    "oracle": 1.0,
}
"""What is read of a page's summary, in keys with their values: both means 1, the spread 0.5, bounds 1.

Records in place of the mean key are in :data:`RECORDS`.
"""


class Record(NamedTuple):
    """A score by low-rank summaries, which are read in place of the mean keys."""

    rank: int
    weighted: bool = True
    """Whether channels are weighted by the prompt's last queries."""
    weighs: bool = True
    """Whether a summary weighs what its record says, and not what its mean key says."""
    coefficient_bits: int = 4


RECORDS = {
    "low_rank1": Record(1),
    "low_rank2": Record(2),
    "low_rank2+prior": Record(2),
    "low_rank4": Record(4),
    "low_rank8": Record(8, weighted=False, coefficient_bits=8),
    "low_rank2_order": Record(2, weighs=False),
}
"""The mean key in eight bits, and directions in four (:class:`foveate.ops.PageRecord`); `low_rank8` is LOCKS's."""
CERTIFYING = "low_rank2"
"""The record that also bounds the attention of pages: by the longest rest of a key that it leaves out."""
SINKS, TAIL, WINDOW = LuKA.sinks, LuKA.tail, LuKA.window
LIMIT = 0.1
"""The most attention that unrefined pages may hold where pages are refined by certified bounds."""
PRIOR = LuKA.prior
"""Share of recent attention in the mass by which pages are ranked, where a score's name ends in ``+prior``."""
_LOST = 0.5

Measures = dict[str, float]


def fits(record: Record, size: int) -> bool:
    """Whether pages of this size can have such a record."""
    return record.rank <= size <= ops.PageRecord.largest_page


class Case(NamedTuple):
    """What is compared. Without a budget, pages are refined until at most ``LIMIT`` is certainly missed."""

    page_size: int
    budget: float | None
    score: str


class Estimate(NamedTuple):
    """What a score makes of the pages for one query."""

    rank: Tensor
    """fp32 ``[1, Hkv, G, N]``: logarithm of the mass by which the query alone ranks pages."""
    weight: Tensor
    """fp32 ``[1, Hkv, G, N]``: log-weights of the summaries of pages that are not refined."""
    v: Tensor
    """``[1, Hkv, N, Dv]``: their values."""


class LayerPages:
    """The pages of one layer at one size, and all that the scores know of them.

    Args:
        k: ``[1, Hkv, N * size, D]``; summaries are held in its dtype, as a cache holds them.
        v: ``[1, Hkv, N * size, Dv]``, fp32.
        recent: fp32 ``[1, Hkv, N * size]``: attention that each token got from the prompt's last queries, their mean.
        channels: fp32 ``[1, Hkv, D]``: what those queries make of the channels of keys.
    """

    def __init__(self, k: Tensor, v: Tensor, recent: Tensor, channels: Tensor, size: int):
        forms = {
            name: ops.PageRecord(k.shape[3], size, one.rank, one.coefficient_bits)
            for name, one in RECORDS.items()
            if fits(one, size)
        }
        self.forms, self.channels = forms, channels
        self.records = {
            name: ops.compress_pages(k, form, channels if RECORDS[name].weighted else None)
            for name, form in forms.items()
            if "+" not in name
        }
        per_token = v.shape[3] + k.shape[3]
        self.costs = COSTS | {
            name: v.shape[3] / per_token + form.bytes / (k.element_size() * per_token) for name, form in forms.items()
        }
        """As :data:`COSTS`, with those of the records, whose values are as wide as the cache's."""
        self.k, self.v, self.size, self.number = k, v, size, k.shape[2] // size
        keys, values, recent = (x.unflatten(2, (-1, size)) for x in (k, v, recent))
        if CERTIFYING in forms:
            left = keys.float() * channels[:, :, None, None]
            left -= factors(self.records[CERTIFYING], forms[CERTIFYING]).keys()
            self.left = left.norm(dim=-1).amax(-1)
        self.whole = ops.summarise(ops.Nodes(keys, values), spread=True)
        self.low, self.high = keys.amin(3), keys.amax(3)
        self.recent = recent.sum(-1)

    def reach(self, rows: Tensor, scaling: float) -> Tensor:
        """How far at most a logit is from that of :data:`CERTIFYING`, by what its record leaves of the page's keys.

        fp32 ``[1, Hkv, G, N]``, of ``rows [1, Hkv, G, D]``.
        """
        return scaling * (rows.float() / self.channels[:, :, None]).norm(dim=-1, keepdim=True) * self.left[:, :, None]

    def estimates(self, rows: Tensor, scaling: float, true: Tensor) -> dict[str, Estimate]:
        """Every score for one query, ``rows [1, Hkv, G, D]``; ``true``: log partition sums of the pages."""
        log_size, v = math.log(self.size), self.whole.v
        plain = ops.key_logits(rows, self.whole.k, ops.Logits(scaling)) + log_size
        deviation = ops.score.logit_deviation(rows, self.whole.spread, scaling)
        spread = plain + ops.score.free_energy(deviation, log_size)
        upper = ops.largest_logit(rows, self.low, self.high, scaling) + log_size
        found = {}
        for name, records in self.records.items():
            channels = self.channels if RECORDS[name].weighted else None
            given = ops.Records(records, self.forms[name], channels)
            rank = ops.score.page_lse(rows, given, logits=ops.Logits(scaling))
            found[name] = Estimate(rank, rank if RECORDS[name].weighs else plain, v)
        return found | {
            "summary": Estimate(plain, plain, v),
            "spread": Estimate(spread, plain, v),
            "bound": Estimate(upper, plain, v),
            "oracle": Estimate(true, plain, v),
        }


class Query:
    """One query over pages and raw tokens: what it would see, and what it misses."""

    def __init__(self, pages: LayerPages, rows: Tensor, scaling: float, raw_k: Tensor, raw_v: Tensor):
        self.pages, self.rows, self.scaling = pages, rows, scaling
        self.raw = ops.summaries.Part(ops.key_logits(rows, raw_k, ops.Logits(scaling)), raw_v)
        self.logits = ops.key_logits(rows, pages.k, ops.Logits(scaling)).unflatten(-1, (-1, pages.size))
        self.others, self.true = self.raw.logits.logsumexp(-1, keepdim=True), self.logits.logsumexp(-1)
        self.mass = self.share(self.true)
        self.exact = ops.summaries.attend_cover([self.raw, ops.summaries.Part(self.logits.flatten(-2), pages.v)])[0]

    def share(self, rank: Tensor) -> Tensor:
        """The attention that pages have by an estimate, fp32 ``[1, Hkv, G, N]``."""
        return torch.cat([rank, self.others], -1).softmax(-1)[..., :-1]

    def order(self, rank: Tensor, prior: float = 0.0) -> Tensor:
        """The pages of each KV head, the heaviest first, as LuKA chooses them: by the mean over the group."""
        mass = self.share(rank).mean(2).lerp(self.pages.recent, prior)
        return mass.sort(dim=-1, descending=True, stable=True).indices

    def miss(self, order: Tensor, count: int | Tensor, estimate: Estimate, cost: float) -> Measures:
        """The measures once the first ``count`` pages of an order, a number or ``[1, Hkv]``, are refined."""
        counts = torch.as_tensor(count, device=order.device)[..., None]
        refined = order.argsort(-1) < counts  # [1, Hkv, N]
        tokens = self.logits.masked_fill(~refined[:, :, None, :, None], float("-inf")).flatten(-2)
        summaries = ops.summaries.Part(estimate.weight.masked_fill(refined[:, :, None], float("-inf")), estimate.v)
        out, _ = ops.summaries.attend_cover([self.raw, ops.summaries.Part(tokens, self.pages.v), summaries])
        error = (out - self.exact).norm(dim=-1) / self.exact.norm(dim=-1)
        missed = self.mass.masked_fill(refined[:, :, None], 0.0).sum(-1)
        share, raw = refined.float().mean().item(), self.raw.v.shape[2]
        keys = raw + self.pages.number * self.pages.size
        return {
            "missed_mass": missed.mean().item(),
            "lost_heads": (missed > _LOST).float().mean().item(),
            "output_error": error.mean().item(),
            "refined_share": share,
            "read_share": (raw + self.pages.number * (cost + share * self.pages.size)) / keys,
            "summary_cost": cost,
        }

    def measure(self, estimates: dict[str, Estimate], budgets: Sequence[float]) -> Iterator[tuple[Case, Measures]]:
        """Every score at every budget that pays for the raw tokens and the summaries, and by certified bounds."""
        pages, raw = self.pages, self.raw.v.shape[2]
        size, keys = pages.size, raw + pages.number * pages.size
        for name, cost in pages.costs.items():
            score, _, prior = name.partition("+")
            estimate = estimates["summary" if score == "prior" else score]
            order = self.order(estimate.rank, PRIOR if prior else float(score == "prior"))
            for budget in budgets:
                count = math.floor((budget * keys - raw - pages.number * cost) / size + 1e-9)
                if count >= 0:
                    yield Case(size, budget, name), self.miss(order, count, estimate, cost)
        plain = estimates["summary"].rank  # by Jensen's inequality a lower bound
        certain = {"bound": (estimates["bound"].rank, plain), "oracle": (self.true, self.true)}
        if CERTIFYING in estimates:
            recorded, reach = estimates[CERTIFYING].rank, pages.reach(self.rows, self.scaling)
            certain[CERTIFYING] = (recorded + reach, recorded - reach)
        for name, (upper, lower) in certain.items():
            order, counts, _ = bound.by_bound(upper, lower, self.others, LIMIT)
            yield Case(size, None, name), self.miss(order, counts, estimates[name], pages.costs[name])


def measure(
    seen: Seen, prompt: int, queries: Sequence[int], sizes: Sequence[int], budgets: Sequence[float]
) -> Iterator[tuple[Case, Measures]]:
    """The measures of every case for some queries of one layer, whose pages are those at the end of the prompt.

    Args:
        prompt: tokens of the prompt.
        queries: their positions, after the prompt.
        sizes, budgets: tokens of a page; keys that are read, as a share of those that the query sees.
    """
    v, offset = seen.v.float(), max(0, prompt - WINDOW)
    channels = ops.channel_weights(seen.q[:, :, offset:prompt], seen.k.shape[1])
    keys, logits = ops.KV(seen.k[:, :, :prompt]), ops.Logits(seen.scaling)
    recent = ops.query_mass(seen.q[:, :, offset:prompt], keys, logits=logits, offset=offset)
    recent = recent.unflatten(1, (seen.k.shape[1], -1)).mean(2) / (prompt - offset)
    for size in sizes:
        stop = SINKS + (prompt - TAIL - SINKS) // size * size
        pages = LayerPages(seen.k[:, :, SINKS:stop], v[:, :, SINKS:stop], recent[:, :, SINKS:stop], channels, size)
        for position in queries:
            rows = ops.fold_group(seen.q[:, :, position : position + 1], seen.k.shape[1])
            raw = (torch.cat([x[:, :, :SINKS], x[:, :, stop : position + 1]], 2) for x in (seen.k, v))
            query = Query(pages, rows, seen.scaling, *raw)
            yield from query.measure(pages.estimates(rows, seen.scaling, query.true), budgets)

"""What attention takes in a decode step: every kind of layer that a method has, beside the fastest dense library.

Keys and values are drawn, and no model is there: of a method with 32 layers each kind of them is timed once, and
their mean, each as often as it occurs, is the method's time. Of the prompt the last queries alone are shown to
methods that learn from them. Level `kernel` looks at one token again and again, and times what that adds to a CUDA
graph where one can be recorded, so that it is the kernels that are timed. It is a token that fills no page: summaries
of full pages, which one step in a page's tokens makes, are upkeep, as LuKA's pages are. Level `layer` decodes token
after token as a model's layer does whose steps are replayed, with the key and value stored, what is evicted, and what
is done now and then, such as making pages; where steps are not recorded, with the time that the host takes. On a GPU
no step finds its keys in the cache. What a layer reads is counted by the layer; steps that are replayed add it to the
totals of all layers at once, at their end, which is timed at level `model` alone.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import breakdown, decode_layer, dense_peers
from benchmarks import cold_cache_timing as cold
from benchmarks.decode_layer import TimedLayer
from benchmarks.layer_kinds import Kind, kinds
from foveate import ops
from foveate.errors import UserError, unknown
from foveate.lab.bench.plan import Keep, Row, Say, check, command, parsed, share_of
from foveate.lab.results.measurements import speed_row
from foveate.methods import Method, get, make, replay_obstacle
from foveate.runtime import capture
from foveate.runtime.decode import decode
from foveate.runtime.layer import finish_prompt
from foveate.state import Channel, Counters, Evicts, Geometry, SlotCache
from foveate.state.borrowed import branch_of
from foveate.state.counters import Tally

LEVELS = ("kernel", "layer")
_OBSERVED = 64
"""Queries of a prompt that methods learn from."""
_CHUNK = 8192
"""Tokens drawn at once."""
_LONGEST = 1025
"""No method does anything less often than this."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure."""

    methods: Sequence[str]
    contexts: Sequence[int]
    batches: Sequence[int]
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    level: str
    dtype: str
    seed: int
    device: str

    def check(self) -> None:
        """Raise UserError that names an option, its value, and what is allowed."""
        if self.level not in LEVELS:
            raise unknown("level", self.level, LEVELS)
        check(self)
        if self.level == "kernel" and min(self.contexts) < 2:
            raise UserError(f"context must be at least 2 at level kernel, not {min(self.contexts)}")
        for spec in self.methods:
            method = parsed(spec)
            if method.evicts and self.level == "kernel":
                raise UserError(f"{method.name} evicts tokens, which is seen at level layer alone")

    @property
    def scaling(self) -> float:
        return self.head_dim**-0.5


@torch.inference_mode()
def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """A row for each implementation of dense attention and each method, at every context and batch size.

    Dense attention of our own is always among them: it may be what the others are compared with.

    Raises:
        UserError: for a plan that cannot be.
    """
    plan.check()
    peers = dense_peers.available(plan.device, plan.dtype, say)
    cold.settle(plan.device)
    rate = cold.memory_rate(plan.device)
    say(f"device memory: {rate:,.1f} GB/s")
    rows: list[Row] = []
    for batch in plan.batches:
        for context in plan.contexts:
            found = _of_size(plan, peers, batch, context, say)
            keep(fresh := _rows(plan, batch, context, found, rate, say))
            rows += fresh
    return rows


class _Found(NamedTuple):
    ms: float
    bytes: float
    """Read in a step, on average."""
    graph: bool
    layers: dict[str, dict[str, Any]] | None
    """What each kind of them takes; None for a library."""
    recall: float | None = None
    """Of a method that chooses keys by approximate scores: the share of the exactly chosen ones that it chooses."""


def _of_size(
    plan: Plan, peers: Mapping[str, dense_peers.Attend], batch: int, context: int, say: Say
) -> dict[str, _Found]:
    """What each library and each method takes, by name."""
    of_methods = {
        method.spec: kinds(method, plan.layers) for method in map(parsed, dict.fromkeys(("dense", *plan.methods)))
    }
    generator = torch.Generator(plan.device).manual_seed(plan.seed)
    choosing = any(kind.chooser is not None for those in of_methods.values() for kind in those)
    # who chooses is timed at level layer alone, where it stores tokens of its own
    tokens = context - (plan.level == "kernel")  # the one that would fill a page is missing, see `_summarised_pages`
    caches = [_drawn(plan, batch, tokens, generator) for _ in range(2 if choosing and plan.level == "layer" else 1)]
    shape = (batch, plan.heads, _OBSERVED, plan.head_dim)
    queries = torch.randn(shape, generator=generator, device=plan.device).to(caches[0].dtype)
    measure = functools.partial(_peer, plan, cache=caches[0], q=queries[:, :, -1:])
    found = dense_peers.measured(peers, measure, context, plan.dtype, say)
    for spec, those in of_methods.items():
        found[spec] = _method(plan, those, caches, queries)
    return found


def _peer(plan: Plan, attend: dense_peers.Attend, cache: SlotCache, q: Tensor) -> _Found:
    branch = branch_of(cache, {}, Evicts.NEVER, Counters(), {})
    layer = TimedLayer(branch, lambda branch: attend(q, branch.keys, branch.values, plan.scaling))
    if plan.level == "kernel":
        tokens, timed = float(branch.used), cold.repeated(layer.look, plan.device)
    elif plan.device == "cuda":
        tokens, timed = branch.used + 1.0, cold.repeated(layer.newest_again(), plan.device)
    else:
        first, (ms, _) = branch.used + 1, decode_layer.one_by_one(layer, None, 0)
        tokens, timed = (first + branch.used) / 2, cold.Timed(ms, False)
    return _Found(timed.ms, tokens * branch.batch_size * branch.counters.bytes_per_key, timed.graph, None)


def _method(plan: Plan, those: Sequence[Kind], caches: Sequence[SlotCache], queries: Tensor) -> _Found:
    layers, graphs, recall = {}, [], None
    for kind in those:
        layer, chooser = _layers(plan, kind, caches, queries)
        approximate = getattr(kind.policy, "scores_summaries", False) and kind.policy.role.chooses
        if plan.level == "kernel":  # counted before it is recorded
            pages = _summarised_pages(kind.policy, layer)
            if pages and layer.cache.used % pages == 0:
                layer.cache.write_step(*decode_layer.newest(layer.cache))
            if chooser is not None:
                chooser.look()
            layer.look()
            read = _bytes_read(layer)
            layer.cache.tally = Tally()
            timed = cold.repeated(layer.look, plan.device)
            parts = breakdown.parts(layer.look, plan.device)
            recall = _recall(plan, kind.policy, layer.cache, queries[:, :, -1:]) if approximate else recall
            upkeep, shared = (
                (_summaries(plan, layer, pages, timed.ms, parts), 0.0) if pages else _upkeep(plan, kind.policy, layer)
            )
            more = {"parts_ms": parts, "upkeep_ms": upkeep, "shared_upkeep_ms": shared}
            layer.cache.tally = None
        else:
            timed, read = _tokens(plan, kind, caches, queries, layer, chooser)
            recall = _recall(plan, kind.policy, layer.cache, queries[:, :, -1:]) if approximate else recall
            more = {}
        graphs.append(timed.graph)
        layers[kind.name] = {"layers": kind.number, "ms": timed.ms, "bytes": read, **more}
    ms, read = (sum(one["layers"] * one[what] for one in layers.values()) / plan.layers for what in ("ms", "bytes"))
    return _Found(ms, read, all(graphs), layers, recall)


def _recall(plan: Plan, policy: Method, cache: SlotCache, q: Tensor) -> float:
    """The share of the keys that exact scores choose which a layer that scores summaries chooses, too."""
    shared = {field.name: getattr(policy, field.name) for field in dataclasses.fields(get("kascade"))}
    exact = make("kascade", **shared | {"calibration": ""}).for_layer(policy.role.layer, plan.layers)
    places = torch.zeros(2, plan.kv_heads * cache.batch_size, cache.used + 1, dtype=torch.bool, device=cache.device)
    for one, method in zip(places, (exact, policy)):
        one.scatter_(1, method.select(cache, q, plan.scaling).flatten(0, 1).long().remainder(cache.used + 1), True)
    wanted, found = places[:, :, :-1]
    return float((wanted & found).sum() / wanted.sum())


def _layers(
    plan: Plan, kind: Kind, caches: Sequence[SlotCache], queries: Tensor
) -> tuple[TimedLayer, TimedLayer | None]:
    """The layer that is timed, and the one whose choice it reads: of the same pass, and after new tokens with keys of
    its own."""

    def prepared(policy: Method, cache: SlotCache) -> TimedLayer:
        branch = _prepared(policy, cache, queries, plan.scaling)
        return TimedLayer(branch, lambda branch: decode(policy, branch, queries[:, :, -1:], plan.scaling)[0].out)

    layer = prepared(kind.policy, caches[0])
    if kind.chooser is None:
        return layer, None
    chooser = prepared(kind.chooser, caches[-1])
    chooser.cache.forward = layer.cache.forward
    return layer, chooser


def _tokens(
    plan: Plan, kind: Kind, caches: Sequence[SlotCache], queries: Tensor, layer: TimedLayer, chooser: TimedLayer | None
) -> tuple[cold.Timed, float]:
    """A token of a layer, as in steps that are replayed if all that is done can be recorded, and the bytes it reads."""
    policy, period = kind.policy, _period(kind.policy)
    if plan.device == "cuda" and not replay_obstacle(policy):
        other = _layers(plan, kind, caches, queries)[0] if chooser is None else chooser
        ms = decode_layer.Replayed(layer, other, policy, period).ms()
        if ms is not None:
            return cold.Timed(ms, True), _bytes_read(layer)
        layer, chooser = _layers(plan, kind, caches, queries)
    ordinary, rare = decode_layer.one_by_one(layer, chooser, period)
    mean = ordinary + (rare - ordinary) / period if period else ordinary
    return cold.Timed(mean, False), _bytes_read(layer)


def _period(policy: Method) -> int:
    """Every so many steps one does more, such as making pages; 0: none does."""
    replay = policy.replay
    return 0 if replay is None else next((step for step in range(1, _LONGEST) if replay.maintenance_due(step)), 0)


def _upkeep(plan: Plan, policy: Method, layer: TimedLayer) -> tuple[float, float | None]:
    """Milliseconds a step, on average, of what every so many steps one does beside attending: LuKA's making pages.

    Of a GPU what its kernels take, by a profile; elsewhere what the step takes longer.

    Returns:
        What a layer does, such as summarising pages; and what the layers of a step do once, such as finding the pages'
        tokens, None where both are in the first number.
    """
    period = _period(policy)
    if not period:
        return 0.0, 0.0
    if plan.device != "cuda":
        ordinary, rare = decode_layer.one_by_one(layer, None, period)
        return max(0.0, rare - ordinary) / period, None
    if policy.replay.maintains and not policy.replay.obstacle:
        own, shared = _between_steps(policy, layer.cache)
        return own / period, shared / period
    k, v = decode_layer.newest(layer.cache)
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(2 * period):
        layer.cache.forward.clear()
        rare = (layer.cache.plan.decoded + 1) % period == 0
        found[rare].append(breakdown.total(functools.partial(layer.token, k, v)))
    return max(0.0, statistics.median(found[True]) - statistics.median(found[False])) / period, None


def _summarised_pages(policy: Method, layer: TimedLayer) -> int:
    """Keys of the pages that the method summarises within steps; 0: it keeps no such summaries."""
    kept = policy.channels(layer.cache.geometry).values()
    size = max((one.per for one in kept if isinstance(one, Channel) and one.recomputed), default=0)
    return 0 if size < 2 or _period(policy) else size


def _summaries(
    plan: Plan, layer: TimedLayer, size: int, open_ms: float, open_parts: Mapping[str, float] | None
) -> float:
    """Milliseconds a step, on average, of summarising a page within the step whose token fills it.

    Of a GPU what the kernels that compress take longer, by a profile; elsewhere what the step takes longer.

    Args:
        size: keys of a page.
        open_ms, open_parts: what a step takes whose token fills no page, and its parts.
    """
    while layer.cache.used % size:
        layer.cache.write_step(*decode_layer.newest(layer.cache))
    parts = breakdown.parts(layer.look, plan.device)
    if parts is None or open_parts is None:
        return max(0.0, cold.repeated(layer.look, plan.device).ms - open_ms) / size
    return max(0.0, parts["other"] - open_parts["other"]) / size


def _between_steps(policy: Method, cache: SlotCache) -> tuple[float, float]:
    """Milliseconds of the kernels of a layer's maintenance between replayed steps, and of what its layers share."""
    rows = capture.move_to_device([cache])
    try:
        for _ in range(2):  # the first round compiles
            with capture.maintenance([rows]):
                both, own = (
                    breakdown.total(functools.partial(policy.replay.maintain_captured, cache)) for _ in range(2)
                )
    finally:
        _ = cache.rows  # from the device
    return own, max(0.0, both - own)


def _bytes_read(layer: TimedLayer) -> float:
    counters = layer.cache.counters
    return float(counters.keys_read) / counters.decode_steps * counters.bytes_per_key


def _rows(
    plan: Plan, batch: int, context: int, found: Mapping[str, _Found], rate: float, say: Say
) -> list[dict[str, Any]]:
    dense = {name: one.ms for name, one in found.items() if one.layers is None or name == "dense"}
    fastest = min(dense, key=dense.__getitem__)
    size = 2 * batch * plan.kv_heads * context * plan.head_dim * getattr(torch, plan.dtype).itemsize
    rows, sizes = [], {name: getattr(plan, name) for name in ("heads", "kv_heads", "head_dim", "dtype", "seed")}
    for name, one in found.items():
        floor, speedup = one.bytes / rate / 1e6, dense[fastest] / one.ms
        layers, below = _beside_floors(name, one, rate)
        words = f"{one.ms:.4f} ms (floor {floor:.4f}), {speedup:.2f}× {fastest}"
        warning = f"; BELOW THE FLOOR, so not read from memory: {', '.join(below)}" if below else ""
        words += "" if one.recall is None else f", recall {one.recall:.3f}"
        say(f"{name} at {context:,} × {batch}: {words}{warning}")
        share = None if one.layers is None else share_of(name)
        case = {"method": name, "context": context, "batch": batch, "share": share, "level": plan.level}
        rows.append(
            speed_row(
                "decode",
                case | sizes,
                plan.device,
                one.ms,
                (fastest, dense[fastest]),
                gb_per_s=one.bytes / one.ms / 1e6,
                floor_ms=floor,
                floor_counts="bytes of keys, values and summaries read, over the fastest read or copy measured",
                below_floor=bool(below),
                memory_gb_per_s=rate,
                layers=layers,
                recall=one.recall,
                cuda_graph=one.graph,
                peak_bytes=size,
                peak_kind="keys and values of a layer",
                command=command("python -m benchmarks.layer decode", plan),
            )
        )
    return rows


def _beside_floors(name: str, one: _Found, rate: float) -> tuple[dict[str, dict[str, Any]] | None, list[str]]:
    """The kinds of layers with what memory of this rate (GB/s) needs for them, and the names of what took less."""
    below = [name] if one.ms < one.bytes / rate / 1e6 else []
    if one.layers is None:
        return None, below
    layers = {kind: {**its, "floor_ms": its["bytes"] / rate / 1e6} for kind, its in one.layers.items()}
    return layers, below + [f"{kind} layers" for kind, its in layers.items() if its["ms"] < its["floor_ms"]]


def _drawn(plan: Plan, batch: int, context: int, generator: torch.Generator) -> SlotCache:
    """A layer's cache with normal keys and values, and room for the tokens to come."""
    dtype, geometry = getattr(torch, plan.dtype), Geometry(plan.heads, plan.kv_heads, plan.head_dim, plan.head_dim)
    cache = SlotCache(geometry, batch, dtype, torch.device(plan.device))
    longest = max(_period(parsed(spec)) for spec in ("dense", *plan.methods))
    cache.reserve(context + decode_layer.room(longest) + ops.PageRecord.largest_page)
    for first in range(0, context, _CHUNK):
        shape = (batch, plan.kv_heads, min(_CHUNK, context - first), plan.head_dim)
        k, v = (torch.randn(shape, generator=generator, device=plan.device).to(dtype) for _ in range(2))
        cache.append(k, v)
    return cache


def _prepared(policy: Method, cache: SlotCache, queries: Tensor, scaling: float) -> SlotCache:
    """The cache as the method has it after a prompt, over the same keys and values."""
    counters = Counters().declare(policy.counters)
    branch = branch_of(cache, policy.channels(cache.geometry), policy.evicts, counters, {})
    branch.counters.on_device(branch.device)  # as those of a step that is replayed
    if policy.observation is not None:
        last = queries[:, :, -min(_OBSERVED, cache.used) :]
        offset = cache.used - last.shape[2]
        how = {"logits": branch.logits(scaling), "offset": offset, "need_lse": policy.observation.needs_lse}
        policy.observe(branch, last, ops.attend_causal(last, branch.view(), **how), scaling)
    branch.rows["observed"] = list(branch.lengths)
    finish_prompt(policy, branch, scaling)
    return branch

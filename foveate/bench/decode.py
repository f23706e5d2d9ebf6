"""What attention takes in a decode step: every kind of layer that a method has, beside the fastest dense library.

Keys and values are drawn, and no model is there: of a method with 32 layers each kind of them is timed once, and their
mean, each as often as it occurs, is the method's time. Of the prompt the last queries alone are shown to methods that
learn from them. Level `kernel` looks at one token again and again, recorded as a CUDA graph where that is possible, so
that it is the kernels that are timed; level `layer` decodes token after token as a model's layer does, with the key and
value stored, what is evicted, and the time that the host takes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate import ops
from foveate.bench import dense_peers
from foveate.cache import Counters, Geometry, SlotCache
from foveate.evaluation import accounting
from foveate.evaluation.errors import UserError
from foveate.methods import Method, parse

BENCH = "decode"
METHODS = ("dense", "kascade:decode_only=true", "luka:page_size=16,top_k=3", "luka", "quest", "omnikv", "lessismore")
CONTEXTS, BATCHES = (8192, 32768, 131072), (1, 32)
LEVELS = ("kernel", "layer")
_DTYPES = ("float16", "bfloat16", "float32")
_BEYOND_CACHES = 512 << 20
"""Bytes of keys and values that no cache of a device holds."""
_OBSERVED = 64
"""Queries of a prompt that methods learn from."""
_CHUNK = 8192
"""Tokens drawn at once."""
_SECONDS, _MOST = 0.5, 200
"""How long one thing is timed, and how often at most."""
_WARM_UP, _STEPS = 8, 32
"""Tokens of level `layer` that are not timed, and those that are."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure; the defaults are a layer of Llama-3.1-8B, as in the papers."""

    methods: Sequence[str] = METHODS
    contexts: Sequence[int] = CONTEXTS
    batches: Sequence[int] = BATCHES
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 32
    level: str = "kernel"
    dtype: str = "float16"
    seed: int = 0
    device: str = "cuda"

    def check(self) -> None:
        """Raises UserError naming what cannot be."""
        for name in ("heads", "kv_heads", "head_dim", "layers"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name, numbers in (("context", self.contexts), ("batch", self.batches)):
            if not numbers or min(numbers) < 1:
                raise UserError(f"{name} must be at least 1, not {min(numbers, default='none')}")
        if self.heads % self.kv_heads:
            raise UserError(f"heads must be a multiple of kv-heads, {self.kv_heads}, not {self.heads}")
        if self.level not in LEVELS:
            raise UserError(f"level must be one of {', '.join(LEVELS)}, not '{self.level}'")
        if self.dtype not in _DTYPES:
            raise UserError(f"dtype must be one of {', '.join(_DTYPES)}, not '{self.dtype}'")
        if self.device not in ("cuda", "cpu"):
            raise UserError(f"device must be cuda or cpu, not '{self.device}'")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("no CUDA device is here; --device cpu measures the references")
        for spec in self.methods:
            method = _parsed(spec)
            if method.evicts and self.level == "kernel":
                raise UserError(f"{method.name} gives up tokens as it decodes, which is seen at level layer alone")

    @property
    def scaling(self) -> float:
        return self.head_dim**-0.5


def _parsed(spec: str) -> Method:
    try:
        return parse(spec)
    except ValueError as error:
        raise UserError(str(error)) from None


@torch.inference_mode()
def run(plan: Plan, say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """A row for each implementation of dense attention and each method, at every context and batch size.

    Raises:
        UserError: for a plan that cannot be.
    """
    plan.check()
    bandwidth = copy_rate(plan.device)
    say(f"device copy: {bandwidth / 1e3:.2f} TB/s")
    rows: list[dict[str, Any]] = []
    for batch in plan.batches:
        for context in plan.contexts:
            rows += _of_size(plan, batch, context, bandwidth, say)
    return rows


class _Timed(NamedTuple):
    ms: float
    graph: bool
    """Whether a CUDA graph was replayed."""


class _Kind(NamedTuple):
    """Layers of a method that do the same."""

    name: str
    number: int
    policy: Method
    chooser: Method | None
    """The policy of the layer whose choice these read."""


def _of_size(
    plan: Plan, batch: int, context: int, bandwidth: float, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    caches = _drawn(plan, batch, context)
    generator = torch.Generator(plan.device).manual_seed(plan.seed)
    shape = (batch, plan.heads, _OBSERVED, plan.head_dim)
    queries = torch.randn(shape, generator=generator, device=plan.device).to(caches[0].dtype)
    q = queries[:, :, -1:]
    size = caches[0].keys.nbytes + caches[0].values.nbytes
    found: dict[str, dict[str, Any]] = {}
    for name, attend in dense_peers.available(plan.device, say).items():
        steps = [functools.partial(attend, q, cache.keys, cache.values, plan.scaling) for cache in caches]
        try:
            timed = _time(steps, plan.device, plan.level == "kernel")
        except RuntimeError as error:
            say(f"{name}: left out at {context:,} tokens, {' '.join(str(error).split())[:200]}")
            continue
        found[name] = {"ms": timed.ms, "graph": timed.graph, "bytes": float(size), "layers": None}
    for spec in plan.methods:
        method = _parsed(spec)
        ms, read, graph, layers = 0.0, 0.0, True, {}
        for kind in _kinds(method, plan.layers):
            timed, bytes_read = _timed(plan, kind, caches, queries)
            ms += kind.number * timed.ms / plan.layers
            read += kind.number * bytes_read / plan.layers
            graph = graph and timed.graph
            layers[kind.name] = {"layers": kind.number, "ms": timed.ms, "bytes": bytes_read}
        found[method.spec] = {"ms": ms, "graph": graph, "bytes": read, "layers": layers}
    peers = {name: one["ms"] for name, one in found.items() if one["layers"] is None}
    fastest = min(peers, key=peers.__getitem__)
    rows = []
    for name, one in found.items():
        floor = one["bytes"] / bandwidth / 1e6
        speedup = peers[fastest] / one["ms"]
        say(f"{name} at {context:,} × {batch}: {one['ms']:.4f} ms (floor {floor:.4f}), {speedup:.2f}× {fastest}")
        own = ("heads", "kv_heads", "head_dim", "dtype", "seed")
        share = getattr(_parsed(name), "top_k", None) if one["layers"] else None
        rows.append(
            {
                "bench": BENCH,
                "case": {
                    "method": name,
                    "context": context,
                    "batch": batch,
                    "share": share if isinstance(share, float) else None,
                    "level": plan.level,
                    **{setting: getattr(plan, setting) for setting in own},
                },
                "ms": one["ms"],
                "floor_ms": floor,
                "floor_counts": "bytes of keys, values and summaries read, over the measured rate of a device copy",
                "copy_gb_per_s": bandwidth,
                "layers": one["layers"],
                "cuda_graph": one["graph"],
                "baseline": fastest,
                "baseline_ms": peers[fastest],
                "speedup": speedup,
                "gb_per_s": one["bytes"] / one["ms"] / 1e6,
                "tflop_per_s": None,
                "peak_bytes": size,
                "peak_kind": "keys and values of a layer",
                "device": accounting.device_name(plan.device),
                "versions": accounting.versions(),
                "commit": accounting.commit(),
            }
        )
    return rows


def copy_rate(device: str) -> float:
    """GB/s of a copy on the device, what is read and what is written both counted: what it can move at most."""
    source = torch.empty((1 << 30) if device == "cuda" else (1 << 24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [accounting.milliseconds(functools.partial(target.copy_, source), device) for _ in range(12)]
    return 2 * source.nbytes / statistics.median(times[2:]) / 1e6


def _drawn(plan: Plan, batch: int, context: int) -> list[SlotCache]:
    """Caches of a layer with normal keys and values, so many that what one needs is not still at hand."""
    dtype, generator = getattr(torch, plan.dtype), torch.Generator(plan.device).manual_seed(plan.seed)
    geometry = Geometry(plan.heads, plan.kv_heads, plan.head_dim, plan.head_dim)
    size = 2 * batch * plan.kv_heads * context * plan.head_dim * dtype.itemsize
    number = min(-(-_BEYOND_CACHES // size), 16) if plan.device == "cuda" else 1
    caches = []
    for _ in range(number):
        cache = SlotCache(geometry, batch, dtype, torch.device(plan.device))
        cache.reserve(context + _WARM_UP + _STEPS)
        for first in range(0, context, _CHUNK):
            shape = (batch, plan.kv_heads, min(_CHUNK, context - first), plan.head_dim)
            k, v = (torch.randn(shape, generator=generator, device=plan.device).to(dtype) for _ in range(2))
            cache.append(k, v)
        caches.append(cache)
    return caches


def _kinds(method: Method, layers: int) -> list[_Kind]:
    """What the layers of a method do, and how many do the same."""
    policies = [method.for_layer(layer, layers) for layer in range(layers)]
    alike: dict[tuple[str, str], list[int]] = {}
    for layer, policy in enumerate(policies):
        alike.setdefault((policy.spec, _name(policy)), []).append(layer)
    kinds = []
    for same in alike.values():
        policy = policies[same[-1]]  # of layers that read, one behind all that choose
        place = getattr(policy, "place", None)
        reads = place is not None and place.reads_another
        kinds.append(_Kind(_name(policy), len(same), policy, policies[place.anchor] if reads else None))
    return kinds


def _name(policy: Method) -> str:
    """What a layer does, in a word."""
    place = getattr(policy, "place", None)
    if place is None:
        return "dense" if policy.name == "dense" or getattr(policy, "dense", False) else policy.name
    if place.reads_another:
        return "reading"
    if place.anchor is None or (place.dense and not place.has_readers):
        return "dense"
    return "dense, choosing" if place.dense else "choosing"


def _timed(plan: Plan, kind: _Kind, caches: Sequence[SlotCache], queries: Tensor) -> tuple[_Timed, float]:
    """Milliseconds of a step of layers of one kind, and the bytes that it reads."""
    branches = [_prepared(plan, kind, cache, queries) for cache in caches]
    q, scaling = queries[:, :, -1:], plan.scaling
    if plan.level == "kernel":
        for branch in branches:
            _choose(kind, branch, q, scaling)
        steps = [functools.partial(kind.policy.decode, branch, q, scaling) for branch in branches]
        steps[0]()
        timed = None
    else:
        timed = _Timed(statistics.median(_token_times(plan, kind, branches, q)), False)
    counters = branches[0].counters
    read = float(counters.keys_read) / counters.decode_steps * counters.bytes_per_key
    return timed or _time(steps, plan.device), read


def _choose(kind: _Kind, branch: SlotCache, q: Tensor, scaling: float) -> None:
    """What the layers before this one have chosen, which is not counted."""
    if kind.chooser is not None:
        own, branch.counters = branch.counters, Counters()
        kind.chooser.decode(branch, q, scaling)
        branch.counters = own


def _token_times(plan: Plan, kind: _Kind, branches: Sequence[SlotCache], q: Tensor) -> list[float]:
    """Milliseconds of token after token, the last of them."""
    k, v = (x[:, :, -1:].clone() for x in (branches[0].keys, branches[0].values))

    def step(branch: SlotCache) -> None:
        branch.write_step(k, v)
        kind.policy.decode(branch, q, plan.scaling)

    times = []
    for number in range(_WARM_UP + _STEPS):
        branch = branches[number % len(branches)]
        if kind.chooser is not None:  # of the token that is about to come
            branch.write_step(k, v)
            _choose(kind, branch, q, plan.scaling)
            branch.truncate(1)
        times.append(accounting.milliseconds(functools.partial(step, branch), plan.device))
    return times[_WARM_UP:]


def _prepared(plan: Plan, kind: _Kind, cache: SlotCache, queries: Tensor) -> SlotCache:
    """The cache with what the method would know of it behind a prompt, over the same keys and values."""
    policy, scaling = kind.policy, plan.scaling
    branch = cache.branch(policy.channels(cache.geometry), policy.evicts, Counters(), {})
    if policy.observation is not None:
        last = queries[:, :, -min(_OBSERVED, cache.used) :]
        offset = cache.used - last.shape[2]
        how = {"scaling": scaling, "offset": offset, "need_lse": policy.observes}
        policy.observe(branch, last, ops.attend_causal(last, branch.keys, branch.values, **how), scaling)
    branch.rows["observed"] = list(branch.lengths)
    keep = policy.prompt_end(branch, scaling)
    if keep is not None:
        branch.retain(keep)
    branch.rows["prompt"], branch.rows["observed"] = list(branch.lengths), [0] * branch.batch_size
    return branch


def _time(steps: Sequence[Callable[[], Any]], device: str, record: bool = True) -> _Timed:
    """Median milliseconds of a step, all of them one behind another."""
    for _ in range(2):
        for step in steps:
            step()
    work, graph = functools.partial(_all, steps), False
    if device == "cuda" and record:
        recorded = _recorded(steps)
        work, graph = (recorded.replay, True) if recorded is not None else (work, False)
    work()
    first = accounting.milliseconds(work, device)
    repeats = max(5, min(_MOST, math.ceil(1e3 * _SECONDS / max(first, 1e-3))))
    times = [accounting.milliseconds(work, device) for _ in range(repeats)]
    return _Timed(statistics.median(times) / len(steps), graph)


def _all(steps: Sequence[Callable[[], Any]]) -> None:
    for step in steps:
        step()


def _recorded(steps: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph | None:
    """The steps as a CUDA graph; None where one of them waits for the device."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            _all(steps)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph

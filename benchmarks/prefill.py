"""What attention takes in a prompt: every kind of layer that a method has, beside the fastest dense library.

Queries, keys and values are drawn, and no model is there: of a method with 32 layers each kind of them reads a causal
prompt in one piece, and their mean, each as often as it occurs, is the method's time. It counts attention, what the
method learns from the prompt's queries, and what it does when the prompt ends. A layer that reads what another chose is
timed after that one. A method runs as an attached model runs it, from its settings' string alone.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import breakdown, dense_peers
from benchmarks import cold_cache_timing as cold
from benchmarks.layer_kinds import Kind, in_prompt, kinds
from foveate import ops
from foveate.io import circumstances
from foveate.lab.bench.plan import Keep, Row, Say, check, command, parsed, share_of
from foveate.lab.results import timing
from foveate.lab.results.measurements import speed_row
from foveate.methods import Method
from foveate.ops.attend import prompt_path
from foveate.state import Counters, Geometry, SlotCache
from foveate.state.borrowed import branch_of

_PROFILED = 2
"""How often a layer runs while its kernels are watched."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure."""

    methods: Sequence[str]
    contexts: Sequence[int]
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    repeats: int
    dtype: str
    seed: int
    device: str

    @property
    def scaling(self) -> float:
        return self.head_dim**-0.5


@torch.inference_mode()
def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """A row for each library that attends densely and for each method, at every context.

    Dense attention of our own is always among them: it may be what the others are compared with.

    Raises:
        UserError: for a plan that cannot be.
    """
    check(plan)
    peers = dense_peers.causal(plan.device, plan.dtype, say)
    rows: list[Row] = []
    for context in plan.contexts:
        keep(fresh := _rows(plan, context, _of_context(plan, peers, context, say), say))
        rows += fresh
    return rows


class _Prompt(NamedTuple):
    """A layer's prompt."""

    q: Tensor
    cache: SlotCache
    """With the keys and values, and room for a token more."""


class _Found(NamedTuple):
    ms: float
    peak_bytes: int
    """Above inputs and output on a GPU; of the whole process on a CPU."""
    layers: dict[str, dict[str, Any]] | None
    """What each kind of them takes; None for a library."""


def _of_context(plan: Plan, peers: Mapping[str, dense_peers.Attend], context: int, say: Say) -> dict[str, _Found]:
    """What each library and each method takes, by name."""
    prompt = _drawn(plan, context)

    def library(attend: dense_peers.Attend) -> _Found:
        step = functools.partial(attend, prompt.q, prompt.cache.keys, prompt.cache.values, plan.scaling)
        return _Found(_ms(plan, step), _peak(plan, step), None)

    found = dense_peers.measured(peers, library, context, plan.dtype, say)
    for method in map(parsed, dict.fromkeys(("dense", *plan.methods))):
        found[method.spec] = _method(plan, kinds(method, plan.layers, in_prompt), prompt)
    return found


def _drawn(plan: Plan, context: int) -> _Prompt:
    generator = torch.Generator(plan.device).manual_seed(plan.seed)

    def normal(heads: int) -> Tensor:
        shape = (1, heads, context, plan.head_dim)
        return torch.randn(shape, generator=generator, device=plan.device, dtype=getattr(torch, plan.dtype))

    q, geometry = normal(plan.heads), Geometry(plan.heads, plan.kv_heads, plan.head_dim, plan.head_dim)
    cache = SlotCache(geometry, 1, q.dtype, torch.device(plan.device))
    cache.append(normal(plan.kv_heads), normal(plan.kv_heads))
    return _Prompt(q, cache)


def _method(plan: Plan, those: Sequence[Kind], prompt: _Prompt) -> _Found:
    layers = {kind.name: {"layers": kind.number, **_kind(plan, kind, prompt)} for kind in those}
    ms = sum(one["layers"] * one["ms"] for one in layers.values()) / plan.layers
    return _Found(ms, max(one["peak_bytes"] for one in layers.values()), layers)


def _kind(plan: Plan, kind: Kind, prompt: _Prompt) -> dict[str, Any]:
    """What a layer of a kind takes: to attend, to learn from the queries, and at the prompt's end."""
    policy, forward = kind.policy, {}
    if kind.chooser is not None:
        _branch(kind.chooser, prompt, forward, of=lambda branch: kind.chooser.prompt(branch, prompt.q, plan.scaling))
    branch = _branch(policy, prompt, forward)

    def attend() -> ops.Attended:
        return policy.prompt(branch, prompt.q, plan.scaling)

    attend_ms, learn_ms = _ms(plan, attend), 0.0
    found = {"attend_ms": attend_ms, "parts_ms": breakdown.parts(attend, plan.device, _PROFILED)}
    peak = _peak(plan, attend)
    if policy.observation is not None:
        attended = attend()
        learn = functools.partial(policy.observe, branch, prompt.q, attended, plan.scaling)
        learn_ms, peak = _ms(plan, learn), max(peak, _peak(plan, learn))
        del attended
    end_ms = statistics.median(_end(plan, policy, prompt, forward) for _ in range(plan.repeats))
    return {"ms": attend_ms + learn_ms + end_ms, **found, "learn_ms": learn_ms, "end_ms": end_ms, "peak_bytes": peak}


def _branch(
    policy: Method,
    prompt: _Prompt,
    forward: dict[Any, Any],
    of: Callable[[SlotCache], Any] = lambda branch: None,
) -> SlotCache:
    """A layer's cache over the prompt's keys and values, of which ``of`` makes use."""
    cache = prompt.cache
    counters = Counters().declare(policy.counters)
    branch = branch_of(cache, policy.channels(cache.geometry), policy.evicts, counters, {})
    branch.forward = forward
    of(branch)
    return branch


def _end(plan: Plan, policy: Method, prompt: _Prompt, forward: dict[Any, Any]) -> float:
    """Milliseconds of a prompt's end: what is computed of what was learnt, and what is given up."""
    if type(policy).prompt_end is Method.prompt_end:
        return 0.0
    branch = _branch(policy, prompt, forward)
    if policy.observation is not None:
        policy.observe(branch, prompt.q, policy.prompt(branch, prompt.q, plan.scaling), plan.scaling)
    branch.rows["observed"] = list(branch.lengths)

    def end() -> None:
        keep = policy.prompt_end(branch, plan.scaling)
        if keep is not None:
            branch.retain(keep, policy.evicts.unevenly)
        policy.prompt_packed(branch)

    return _timed(end, plan.device)


def _ms(plan: Plan, step: Callable[[], Any]) -> float:
    """Median of some runs, after one that compiles and plans."""
    step()
    return statistics.median(_timed(step, plan.device) for _ in range(plan.repeats))


def _timed(step: Callable[[], Any], device: str) -> float:
    cold.flush(device)
    return timing.milliseconds(step, device)


def _peak(plan: Plan, step: Callable[[], Any]) -> int:
    """Bytes above inputs and output on a GPU, where what is kept for other layers counts; else of the process."""
    memory = circumstances.PeakMemory(plan.device)
    memory.start()
    out = step()
    out = out.out if isinstance(out, ops.Attended) else out
    own = out.nbytes if isinstance(out, Tensor) and plan.device == "cuda" else 0
    return memory.added() - own


def _rows(plan: Plan, context: int, found: Mapping[str, _Found], say: Say) -> list[Row]:
    dense = {name: one.ms for name, one in found.items() if one.layers is None or name == "dense"}
    fastest = min(dense, key=dense.__getitem__)
    flops = 2 * plan.heads * plan.head_dim * context * (context + 1)  # two products of the pairs that are seen
    names = ("heads", "kv_heads", "head_dim", "layers", "dtype", "repeats", "seed")
    sizes = {"level": "kernel"} | {name: getattr(plan, name) for name in names}
    rows = []
    for name, one in found.items():
        own = one.layers is not None
        case = {"method": name, "context": context, "batch": 1, "share": share_of(name) if own else None, **sizes}
        row = speed_row(
            "prefill",
            case,
            plan.device,
            one.ms,
            (fastest, dense[fastest]),
            tflop_per_s=flops / one.ms / 1e9 if name in dense else None,
            tflop_counts="both products of every pair of a query and a key that it sees",
            layers=_surcharged(one.layers, dense[fastest]),
            dense_prompts=_library(plan) if own else None,
            peak_bytes=one.peak_bytes,
            peak_kind="above inputs and output" if plan.device == "cuda" else "process",
            command=command("python -m benchmarks.layer prefill", plan),
        )
        took = f"{one.ms:.3f} ms, {row['speedup']:.2f}× {fastest}, {one.peak_bytes / 1e9:.2f} GB"
        say(f"{name} at {context:,}: {took}")
        rows.append(row)
    return rows


def _surcharged(layers: Mapping[str, dict[str, Any]] | None, dense_ms: float) -> dict[str, dict[str, Any]] | None:
    """The kinds of layers, with what learning and the prompt's end add to the fastest dense pass, as a share of it."""
    if layers is None:
        return None
    return {name: {**one, "surcharge": (one["learn_ms"] + one["end_ms"]) / dense_ms} for name, one in layers.items()}


def _library(plan: Plan) -> str:
    """What attends densely in the layers of methods, see :func:`foveate.ops.attend.prompt_path`."""
    dims = (plan.head_dim, plan.head_dim, plan.heads // plan.kv_heads)
    device = torch.device(plan.device, 0) if plan.device == "cuda" else torch.device("cpu")
    return prompt_path(ops.PromptHeads(device, getattr(torch, plan.dtype), *dims))

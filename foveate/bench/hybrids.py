"""What attention takes in the layers of hybrids: learned eviction beside a sliding window, native sparse beside dense.

Keys and values are drawn, and no model is there. A decode step finds nothing of what it reads in the GPU's cache. Every
output is held against attention in fp64 for some of its queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate import ops
from foveate.bench import cold, dense_peers, options
from foveate.bench.indexer import matmul_rate
from foveate.bench.plan import Keep, Row, Say
from foveate.layers import LearnedEviction, NativeSparseAttention
from foveate.ops._dispatch import reference_only
from foveate.results import circumstances
from foveate.results.errors import UserError
from foveate.results.measurements import speed_row
from foveate.state.hybrid import BlockMemory, RetainedMemory

_CHECKED = 16
"""Queries at the end of a prompt whose outputs are compared with those in fp64."""


class Plan(options.Hybrids):
    def check(self) -> None:
        """Raise UserError that names an option, its value, and what is allowed."""
        super().check()
        for name in ("kv_heads", "nsa_kv_heads"):
            self.check_multiple("heads", name)
        if not 0 < self.half < self.buffer:
            raise UserError(f"half must be above 0 and below the buffer's {self.buffer}, not {self.half}")
        if min(self.contexts) <= max(self.window + self.buffer, self.sliding):
            raise UserError(f"context must be more than window and buffer and sliding hold, not {min(self.contexts)}")
        if not 0 < self.share <= 1:
            raise UserError(f"share must be above 0 and at most 1, not {self.share}")

    @property
    def scaling(self) -> float:
        return self.head_dim**-0.5

    @property
    def slots(self) -> int:
        """What learned eviction holds of a KV head."""
        return self.window + 1 + self.buffer


class Case(NamedTuple):
    """One thing to time."""

    what: str
    baseline: str
    step: Callable[[], Any]
    bytes: float | None = None
    flops: float | None = None
    exact: Callable[[], tuple[Tensor, Tensor]] | None = None
    """What was computed and the same in fp64."""
    steps: int = 1
    """Decode steps that share the cost."""


class Limits(NamedTuple):
    """What the device moves and multiplies at most, measured."""

    gb_per_s: float
    tflop_per_s: float


@torch.inference_mode()
def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """A row for each kind of attention, in decode for each batch size and for a prompt of one sequence.

    Raises:
        UserError: for a plan that cannot be.
    """
    plan.check()
    cold.settle(plan.device)
    limits = Limits(cold.memory_rate(plan.device), matmul_rate(plan.dtype, plan.device))
    rows: list[Row] = []
    for context in plan.contexts:
        made = []
        if "decode" in plan.phases:
            for batch in plan.batches:
                for cases in (_decode_cases, _nsa_cases):
                    made.append(("decode", batch, functools.partial(cases, plan, context, batch, say)))
        if "prefill" in plan.phases:
            made.append(("prefill", 1, functools.partial(_prefill_cases, plan, context, say)))
        for phase, batch, cases in made:
            fresh = _rows(plan, context, phase, batch, cases(), limits, say)
            keep(fresh)
            rows += fresh
    return rows


def _rows(
    plan: Plan, context: int, phase: str, batch: int, cases: Sequence[Case], limits: Limits, say: Say
) -> list[Row]:
    """Time cases of one phase; baselines are among them: of several windows or dense libraries the fastest."""
    memory, found, rows = circumstances.PeakMemory(plan.device), {}, []
    for case in cases:
        memory.start()
        case.step()
        peak = memory.added()
        timed = cold.repeated(case.step, plan.device)
        found[case.what] = timed._replace(ms=timed.ms / case.steps), peak, _error(case)
    fastest = {}
    for kind in ("swa", "dense"):
        names = [name for name in found if name.startswith(kind)]
        fastest[kind] = min(names, key=lambda name: found[name][0].ms, default=kind)
    for case in cases:
        timed, peak, error = found[case.what]
        baseline = fastest.get(case.baseline, case.baseline)
        baseline_ms = found[baseline][0].ms
        say(f"{phase}, batch {batch}: {case.what} {1000 * timed.ms:,.1f} µs, {baseline_ms / timed.ms:.2f}× {baseline}")
        sizes = plan.without("contexts", "batches", "phases")
        gb_per_s = None if case.bytes is None else case.bytes / timed.ms / 1e6
        tflop_per_s = None if case.flops is None else case.flops / timed.ms / 1e9
        rows.append(
            speed_row(
                plan.bench,
                {"what": case.what, "phase": phase, "batch": batch, "context": context, **sizes},
                plan.device,
                timed.ms,
                (baseline, baseline_ms),
                gb_per_s,
                tflop_per_s,
                steps_that_share=case.steps,
                cuda_graph=timed.graph,
                error=error,
                error_counts="norm of the difference to fp64 over its norm",
                of_memory=None if gb_per_s is None else gb_per_s / limits.gb_per_s,
                memory_gb_per_s=limits.gb_per_s,
                of_matmul=None if tflop_per_s is None else tflop_per_s / limits.tflop_per_s,
                matmul_tflop_per_s=limits.tflop_per_s,
                peak_bytes=peak,
            )
        )
    return rows


def _error(case: Case) -> float | None:
    if case.exact is None:
        return None
    found, exact = case.exact()
    return ((found.double() - exact).norm() / exact.norm()).item()


def _drawer(plan: Plan) -> Callable[..., Tensor]:
    generator = torch.Generator(plan.device).manual_seed(plan.seed)
    dtype = getattr(torch, plan.dtype)

    def draw(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=plan.device).normal_(generator=generator)

    return draw


def _decode_cases(plan: Plan, context: int, batch: int, say: Say) -> list[Case]:
    """A step of learned eviction with a full and a half-full buffer, of a sliding window, and of dense attention."""
    draw, size = _drawer(plan), (batch, plan.kv_heads)
    q = draw(batch, plan.heads, 1, plan.head_dim)
    token = 2 * plan.kv_heads * plan.head_dim * q.element_size() * batch  # bytes of a key and its value

    def attention(what: str, keys: Tensor, values: Tensor, used: int) -> Case:
        lengths = torch.full(size, used, device=plan.device)
        step = functools.partial(ops.attend, q, keys, values, scaling=plan.scaling, lengths=lengths)

        def exact() -> tuple[Tensor, Tensor]:
            wide = (x[:1].double() for x in (q, keys[:, :, :used], values[:, :, :used]))
            with reference_only():
                expected = ops.attend(*wide, scaling=plan.scaling).out
            return step().out[:1], expected

        return Case(what, "swa", step, bytes=token * used, exact=exact)

    sliding = (draw(*size, plan.sliding, plan.head_dim) for _ in range(2))
    layer, memory = _evicting(plan, context, batch, draw)
    held, ring = memory.tensors, memory.ring
    cases = [attention("swa", *sliding, plan.sliding)]
    cases += [attention("lte, buffer full", held["keys"], held["values"], plan.slots)]
    cases += [attention("lte, buffer half full", held["keys"], held["values"], ring + plan.half)]
    step = functools.partial(layer._step, q, draw(*size, 1, plan.head_dim), draw(*size, 1, plan.head_dim), memory)

    def whole_step() -> None:
        memory.unscored = list(memory.lengths)  # scores are timed by themselves
        step()

    def score() -> None:
        memory.unscored = [length - plan.window + layer.reach for length in memory.lengths]
        layer._score_late(memory)

    together = plan.window - 2 * layer.reach
    cases += [Case("lte, step with replacement", "swa", whole_step, bytes=token * plan.slots)]
    cases += [Case("lte, scores of a step", "lte, buffer full", score, steps=together)]
    keys, values = (draw(*size, context, plan.head_dim) for _ in range(2))
    for name, attend in dense_peers.available(plan.device, plan.dtype, say).items():
        dense = functools.partial(attend, q, keys, values, plan.scaling)
        cases.append(Case(f"dense, {name}", "dense", dense, bytes=token * context))
    return cases


def _evicting(
    plan: Plan, context: int, batch: int, draw: Callable[..., Tensor]
) -> tuple[LearnedEviction, RetainedMemory]:
    """A layer and its memory with a full buffer."""
    torch.manual_seed(plan.seed)
    layer = LearnedEviction(64, plan.heads, plan.kv_heads, plan.head_dim, plan.window, plan.buffer)
    layer = layer.to(plan.device, getattr(torch, plan.dtype)).eval()
    memory = RetainedMemory(plan.window, plan.buffer)
    first = torch.zeros(1, 1, dtype=torch.int64, device=plan.device)
    memory.start(*(draw(batch, plan.kv_heads, 1, plan.head_dim) for _ in range(2)), first)
    held = memory.tensors
    for name in ("keys", "values"):
        held[name].copy_(draw(*held[name].shape))
    held["margins"].uniform_(0, 0.5)
    held["positions"].copy_(torch.arange(plan.buffer, device=plan.device).expand_as(held["positions"]))
    held["kept"].fill_(plan.buffer)
    memory.lengths = [context] * batch
    return layer, memory


def _nsa_cases(plan: Plan, context: int, batch: int, say: Say) -> list[Case]:
    """A step of native sparse attention and of dense attention over the same keys."""
    draw, size = _drawer(plan), (batch, plan.nsa_kv_heads)
    q = draw(batch, plan.heads, 1, plan.head_dim)
    token = 2 * plan.nsa_kv_heads * plan.head_dim * q.element_size() * batch
    torch.manual_seed(plan.seed)
    layer = NativeSparseAttention(
        64, plan.heads, plan.nsa_kv_heads, plan.head_dim, plan.block, plan.blocks, plan.nsa_window
    ).to(plan.device, q.dtype)
    memory = BlockMemory(plan.block)
    memory.append(*(draw(*size, context, plan.head_dim) for _ in range(2)), None)
    keys, values = (memory.tensors[name][:, :, :context] for name in ("keys", "values"))
    lengths = torch.full((batch,), context, device=plan.device)
    gates = torch.rand(3, batch, plan.heads, 1, device=plan.device).to(q.dtype)
    given = q, keys, values, *memory.summaries(layer._compressed), gates
    sizes = {"block": plan.block, "blocks": plan.blocks, "window": plan.nsa_window, "scaling": plan.scaling}
    step = functools.partial(ops.attend_gated, *given, lengths, **sizes)

    def exact() -> tuple[Tensor, Tensor]:
        wide = [x[:, :1].double() if x is gates else x[:1].double() for x in given]
        with reference_only():
            expected = ops.attend_gated(*wide, lengths[:1], **sizes).out
        return step().out[:1], expected

    read = context // plan.block + plan.blocks * plan.block + plan.nsa_window
    cases = [Case("nsa", "dense", step, bytes=token * read, exact=exact)]
    for name, attend in dense_peers.available(plan.device, plan.dtype, lambda text: None).items():
        dense = functools.partial(attend, q, keys, values, plan.scaling)
        cases.append(Case(f"dense of nsa's heads, {name}", "dense", dense, bytes=token * context))
    return cases


def _prefill_cases(plan: Plan, length: int, say: Say) -> list[Case]:
    """The attention of a prompt, and the choice of the tokens to retain."""
    draw = _drawer(plan)
    q = draw(1, plan.heads, length, plan.head_dim)
    k, v = (draw(1, plan.kv_heads, length, plan.head_dim) for _ in range(2))
    generator = torch.Generator(plan.device).manual_seed(plan.seed)
    margins = torch.rand(1, plan.kv_heads, length, generator=generator, device=plan.device) - (1 - plan.share)
    at = torch.arange(length, device=plan.device)
    empty = torch.zeros(1, plan.kv_heads, plan.buffer, device=plan.device)
    left = length - plan.window - 1
    offer = empty, torch.full_like(empty, -1, dtype=torch.int64), margins[:, :, :left], at[None, :left]
    until = torch.full(k.shape[:3], length, device=plan.device)
    until[:, :, :left] = ops.running_best(*offer).new + plan.window + 1
    pair = 4 * plan.heads * plan.head_dim  # FLOP of a query and a key
    how = {"scaling": plan.scaling, "window": plan.window, "retained": plan.buffer}

    def evicting() -> Tensor:
        return ops.attend_until(q, k, v, until, **how).out

    def sliding() -> Tensor:
        return ops.attend_window(q, k, v, scaling=plan.scaling, lower=at - plan.sliding + 1).out

    def exact(step: Callable[[], Tensor], ends: Tensor) -> tuple[Tensor, Tensor]:
        last = q[:, :, -_CHECKED:].double()
        with reference_only():
            wide = ops.attend_until(last, k.double(), v.double(), ends - (length - last.shape[2]), scaling=plan.scaling)
        return step()[:, :, -_CHECKED:], wide.out

    fixed = (at + plan.sliding).clamp_max(length).expand_as(until)
    pairs = [int((ends - at).sum()) / plan.kv_heads for ends in (fixed, until)]
    cases = [
        Case("swa", "swa", sliding, flops=pair * pairs[0], exact=lambda: exact(sliding, fixed)),
        Case("lte", "swa", evicting, flops=pair * pairs[1], exact=lambda: exact(evicting, until)),
        Case("lte, selection of tokens", "swa", lambda: ops.running_best(*offer)),
        Case("lte, with selection", "swa", lambda: (ops.running_best(*offer), evicting()), flops=pair * pairs[1]),
    ]
    for name, attend in dense_peers.causal(plan.device, plan.dtype, say).items():
        dense = functools.partial(attend, q, k, v, plan.scaling)
        cases.append(Case(f"dense, {name}", "dense", dense, flops=pair * length * (length + 1) / 2))
        if name == dense_peers.FLASH_ATTENTION_3:
            window = functools.partial(dense, window=plan.sliding)
            check = functools.partial(exact, window, fixed)
            cases.append(Case(f"swa, {name}", "swa", window, flops=pair * pairs[0], exact=check))
    return cases

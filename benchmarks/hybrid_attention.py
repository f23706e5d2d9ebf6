"""What attention takes in the layers of hybrids: learned eviction beside a sliding window, native sparse beside dense.

Keys and values are drawn, and no model is there. A decode step finds nothing of what it reads in the GPU's cache. Every
output is held against attention in fp64 for some of its queries. The shapes are those of laLTE-1.4B and laNSA-1.4B.

    python -m benchmarks.hybrid_attention --out benchmarks/results/hybrids-speed.jsonl
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from torch import Tensor

from benchmarks import cold_cache_timing as cold
from benchmarks import dense_peers, hybrid_tables
from benchmarks.indexer import matmul_rate
from foveate import ops
from foveate.hybrids.layers import LearnedEviction, NativeSparseAttention
from foveate.hybrids.ops import attend_gated, attend_until, running_best
from foveate.hybrids.state import BlockMemory, RetainedMemory
from foveate.io import circumstances
from foveate.lab.bench.plan import Keep, Row, Say, measure
from foveate.lab.results.measurements import speed_row
from foveate.ops.dispatch import reference_only

_CHECKED = 16
"""Queries at the end of a prompt whose outputs are compared with those in fp64."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure."""

    context: int = 32768
    batches: Sequence[int] = (1, 32, 64)
    phases: Sequence[str] = ("decode", "prefill")
    heads: int = 32
    kv_heads: int = 8
    """Of learned eviction and the window."""
    nsa_kv_heads: int = 2
    head_dim: int = 64
    window: int = 768
    buffer: int = 512
    half: int = 256
    """Retained tokens where the buffer is not full."""
    sliding: int = 1024
    """Tokens of the sliding window that learned eviction is compared with."""
    share: float = 0.25
    """Of a prompt's tokens, those that are offered to the buffer."""
    block: int = 64
    blocks: int = 16
    nsa_window: int = 512
    dtype: str = "bfloat16"
    seed: int = 0
    device: str = "cuda"

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


@torch.inference_mode()
def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """A row for each kind of attention, in decode for each batch size and for a prompt of one sequence."""
    cold.settle(plan.device)
    limits = cold.memory_rate(plan.device), matmul_rate(plan.dtype, plan.device)
    made = [("decode", batch, cases) for batch in plan.batches for cases in (_decode_cases, _nsa_cases)]
    rows: list[Row] = []
    for phase, batch, cases in [*made, ("prefill", 1, _prefill_cases)]:
        if phase in plan.phases:
            keep(fresh := _rows(plan, phase, batch, cases(plan, batch, say), limits, say))
            rows += fresh
    return rows


def _rows(
    plan: Plan, phase: str, batch: int, cases: Sequence[Case], limits: tuple[float, float], say: Say
) -> list[Row]:
    """Time cases of one phase; baselines are among them: of several windows or dense libraries the fastest.

    ``limits``: the GB/s and TFLOP/s that the device reaches.
    """
    memory, found, rows = circumstances.PeakMemory(plan.device), {}, []
    sizes = {name: value for name, value in vars(plan).items() if name not in ("batches", "phases")}
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
        gb_per_s = None if case.bytes is None else case.bytes / timed.ms / 1e6
        tflop_per_s = None if case.flops is None else case.flops / timed.ms / 1e9
        rows.append(
            speed_row(
                "hybrids",
                {"what": case.what, "phase": phase, "batch": batch, **sizes},
                plan.device,
                timed.ms,
                (baseline, baseline_ms),
                gb_per_s,
                tflop_per_s,
                steps_that_share=case.steps,
                cuda_graph=timed.graph,
                error=error,
                error_counts="norm of the difference to fp64 over its norm",
                of_memory=None if gb_per_s is None else gb_per_s / limits[0],
                memory_gb_per_s=limits[0],
                of_matmul=None if tflop_per_s is None else tflop_per_s / limits[1],
                matmul_tflop_per_s=limits[1],
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


def _decode_cases(plan: Plan, batch: int, say: Say) -> list[Case]:
    """A step of learned eviction with a full and a half-full buffer, of a sliding window, and of dense attention."""
    draw, size = _drawer(plan), (batch, plan.kv_heads)
    q = draw(batch, plan.heads, 1, plan.head_dim)
    token = 2 * plan.kv_heads * plan.head_dim * q.element_size() * batch  # bytes of a key and its value

    def attention(what: str, keys: Tensor, values: Tensor, used: int) -> Case:
        lengths = torch.full(size, used, device=plan.device)
        step = functools.partial(ops.attend, q, ops.KV(keys, values, lengths=lengths), logits=ops.Logits(plan.scaling))

        def exact() -> tuple[Tensor, Tensor]:
            wide = ops.KV(*(x[:1, :, :used].double() for x in (keys, values)))
            with reference_only():
                expected = ops.attend(q[:1].double(), wide, logits=ops.Logits(plan.scaling)).out
            return step().out[:1], expected

        return Case(what, "swa", step, bytes=token * used, exact=exact)

    sliding = [draw(*size, plan.sliding, plan.head_dim) for _ in range(2)]
    fresh, oldest = [draw(*size, 1, plan.head_dim) for _ in range(2)], torch.tensor([5], device=plan.device)
    layer, memory = _evicting(plan, batch, draw)
    held, ring = memory.tensors, memory.ring
    cases = [attention("swa", *sliding, plan.sliding)]
    cases += [attention("lte, buffer full", held["keys"], held["values"], plan.slots)]
    cases += [attention("lte, buffer half full", held["keys"], held["values"], ring + plan.half)]
    step = functools.partial(layer._step, q, *fresh, memory)

    def sliding_step() -> None:
        """The new token takes the place of the window's oldest."""
        for ring, new in zip(sliding, fresh):
            ring.index_copy_(2, oldest, new)
        cases[0].step()

    def whole_step() -> None:
        memory.unscored = list(memory.lengths)  # scores are timed by themselves
        step()

    def score() -> None:
        memory.unscored = [length - plan.window + layer.reach for length in memory.lengths]
        layer._score_late(memory)

    together = plan.window - 2 * layer.reach
    cases += [Case("step of swa with its write", "swa", sliding_step, bytes=token * plan.sliding)]
    cases += [Case("lte, step with replacement", "step of swa with its write", whole_step, bytes=token * plan.slots)]
    cases += [Case("lte, scores of a step", "lte, buffer full", score, steps=together)]
    keys, values = (draw(*size, plan.context, plan.head_dim) for _ in range(2))
    for name, attend in dense_peers.available(plan.device, plan.dtype, say).items():
        dense = functools.partial(attend, q, keys, values, plan.scaling)
        cases.append(Case(f"dense, {name}", "dense", dense, bytes=token * plan.context))
    return cases


def _evicting(plan: Plan, batch: int, draw: Callable[..., Tensor]) -> tuple[LearnedEviction, RetainedMemory]:
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
    memory.lengths = [plan.context] * batch
    return layer, memory


def _nsa_cases(plan: Plan, batch: int, say: Say) -> list[Case]:
    """A step of native sparse attention and of dense attention over the same keys."""
    draw, size = _drawer(plan), (batch, plan.nsa_kv_heads)
    q = draw(batch, plan.heads, 1, plan.head_dim)
    token = 2 * plan.nsa_kv_heads * plan.head_dim * q.element_size() * batch
    torch.manual_seed(plan.seed)
    layer = NativeSparseAttention(
        64, plan.heads, plan.nsa_kv_heads, plan.head_dim, plan.block, plan.blocks, plan.nsa_window
    ).to(plan.device, q.dtype)
    memory = BlockMemory(plan.block)
    memory.append(*(draw(*size, plan.context, plan.head_dim) for _ in range(2)), None)
    keys, values = (memory.tensors[name][:, :, : plan.context] for name in ("keys", "values"))
    lengths = torch.full((batch,), plan.context, device=plan.device)
    gates = torch.rand(3, batch, plan.heads, 1, device=plan.device).to(q.dtype)
    given = q, keys, values, *memory.summaries(layer._compressed), gates
    sizes = {"block": plan.block, "blocks": plan.blocks, "window": plan.nsa_window, "scaling": plan.scaling}
    step = functools.partial(attend_gated, *given, lengths, **sizes)

    def exact() -> tuple[Tensor, Tensor]:
        wide = [x[:, :1].double() if x is gates else x[:1].double() for x in given]
        with reference_only():
            expected = attend_gated(*wide, lengths[:1], **sizes).out
        return step().out[:1], expected

    read = plan.context // plan.block + plan.blocks * plan.block + plan.nsa_window
    cases = [Case("nsa", "dense", step, bytes=token * read, exact=exact)]
    for name, attend in dense_peers.available(plan.device, plan.dtype, lambda text: None).items():
        dense = functools.partial(attend, q, keys, values, plan.scaling)
        cases.append(Case(f"dense of nsa's heads, {name}", "dense", dense, bytes=token * plan.context))
    return cases


def _prefill_cases(plan: Plan, batch: int, say: Say) -> list[Case]:
    """The attention of a prompt of one sequence, and the choice of the tokens to retain."""
    draw, length = _drawer(plan), plan.context
    q = draw(1, plan.heads, length, plan.head_dim)
    k, v = (draw(1, plan.kv_heads, length, plan.head_dim) for _ in range(2))
    generator = torch.Generator(plan.device).manual_seed(plan.seed)
    margins = torch.rand(1, plan.kv_heads, length, generator=generator, device=plan.device) - (1 - plan.share)
    at = torch.arange(length, device=plan.device)
    empty = torch.zeros(1, plan.kv_heads, plan.buffer, device=plan.device)
    left = length - plan.window - 1
    offer = empty, torch.full_like(empty, -1, dtype=torch.int64), margins[:, :, :left], at[None, :left]
    until = torch.full(k.shape[:3], length, device=plan.device)
    until[:, :, :left] = running_best(*offer).new + plan.window + 1
    pair = 4 * plan.heads * plan.head_dim  # FLOP of a query and a key
    how = {"scaling": plan.scaling, "window": plan.window, "retained": plan.buffer}

    def evicting() -> Tensor:
        return attend_until(q, k, v, until, **how).out

    def sliding() -> Tensor:
        return ops.attend_window(q, ops.KV(k, v), logits=ops.Logits(plan.scaling), lower=at - plan.sliding + 1).out

    def exact(step: Callable[[], Tensor], ends: Tensor) -> tuple[Tensor, Tensor]:
        last = q[:, :, -_CHECKED:].double()
        with reference_only():
            wide = attend_until(last, k.double(), v.double(), ends - (length - last.shape[2]), scaling=plan.scaling)
        return step()[:, :, -_CHECKED:], wide.out

    fixed = (at + plan.sliding).clamp_max(length).expand_as(until)
    pairs = [int((ends - at).sum()) / plan.kv_heads for ends in (fixed, until)]
    cases = [
        Case("swa", "swa", sliding, flops=pair * pairs[0], exact=lambda: exact(sliding, fixed)),
        Case("lte", "swa", evicting, flops=pair * pairs[1], exact=lambda: exact(evicting, until)),
        Case("lte, selection of tokens", "swa", lambda: running_best(*offer)),
        Case("lte, with selection", "swa", lambda: (running_best(*offer), evicting()), flops=pair * pairs[1]),
    ]
    for name, attend in dense_peers.causal(plan.device, plan.dtype, say).items():
        dense = functools.partial(attend, q, k, v, plan.scaling)
        cases.append(Case(f"dense, {name}", "dense", dense, flops=pair * length * (length + 1) / 2))
        if name == dense_peers.FLASH_ATTENTION_3:
            window = functools.partial(dense, window=plan.sliding)
            check = functools.partial(exact, window, fixed)
            cases.append(Case(f"swa, {name}", "swa", window, flops=pair * pairs[0], exact=check))
    return cases


def main(out: Path | None = None) -> None:
    """Measure decode steps and prompts."""
    measure("hybrids", run, Plan(), out, hybrid_tables.speed)


if __name__ == "__main__":
    typer.run(main)

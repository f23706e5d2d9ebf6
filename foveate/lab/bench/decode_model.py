"""Tokens a second of `generate`: a model with dense attention, with sparse attention, and on Transformers' own path.

The model is a folder's, or one of a known shape with random weights: what a step costs does not depend on them. Prompts
are random tokens, read in chunks; a step takes the mean time from one token to the next, everything included: also
what happens at some steps alone. Methods take turns, round after round, so that what slows the host for a while falls
on all of them. On a GPU some more steps of the last round are watched: what their kernels are for, and how long none
runs.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, StoppingCriteriaList

import foveate
from foveate.errors import UserError
from foveate.io import circumstances
from foveate.lab.bench import breakdown
from foveate.lab.bench.models import Clock, ModelPlan, attach, generate
from foveate.lab.bench.plan import Keep, Row, Say, command
from foveate.lab.results import timing
from foveate.lab.results.measurements import TRANSFORMERS, speed_row
from foveate.runtime import check_dense_below

_CHUNK = 8192  # tokens of a prompt, all sequences together, that are read at once
_WARM_UP = 40
"""Steps that are not timed. The first steps compile kernels and record graphs, also of LuKA's maintenance every 16th
step."""
_WATCHED = 16  # steps after the timed ones whose kernels are watched


@dataclasses.dataclass(frozen=True)
class Plan(ModelPlan):
    """What to measure."""

    model: str
    methods: Sequence[str]
    contexts: Sequence[int]
    batches: Sequence[int]
    steps: int
    rounds: int
    liger: bool
    dense_below: int | str
    dtype: str
    seed: int
    device: str

    def check(self) -> None:
        try:
            check_dense_below(self.dense_below)
        except ValueError as error:
            raise UserError(str(error)) from None
        super().check()
        if self.liger and find_spec("liger_kernel") is None:
            raise UserError("--liger needs Liger's kernels: pip install liger-kernel")

    @property
    def watched(self) -> int:
        """Steps whose kernels are watched."""
        return _WATCHED if self.device == "cuda" else 0

    @property
    def tokens(self) -> int:
        return _WARM_UP + self.steps + self.watched


@torch.inference_mode()
def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """A row for each method, at every context and batch size; the baseline is foveate's own dense.

    Raises `UserError` for a plan that cannot be.
    """
    plan.check()
    timing.settle(plan.device)
    rate = timing.memory_rate(plan.device)
    say(f"device memory: {rate:,.1f} GB/s")
    model = plan.load()
    if plan.liger:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    rows: list[Row] = []
    for batch, context in ((batch, context) for batch in plan.batches for context in plan.contexts):
        ids = plan.prompts(model, batch, context)
        rounds: dict[str, list[_Round]] = {spec: [] for spec in (*plan.specs(), TRANSFORMERS)}
        for number in range(plan.rounds):
            for spec in rounds:
                rounds[spec].append(one := _generated(plan, model, spec, ids, number + 1 == plan.rounds))
                ms = statistics.fmean(one.steps)
                say(f"{spec} at {context:,} × {batch}: {ms:.2f} ms a step, {1e3 * batch / ms:,.1f} tokens/s")
        found = {spec: _of_rounds(those) for spec, those in rounds.items()}
        fresh = [
            _row(plan, model, plan.case(spec, context, batch), one, found["dense"]["ms"], rate)
            for spec, one in found.items()
        ]
        for row in fresh:
            if row["below_floor"]:
                name, floor = row["case"]["method"], row["floor_ms"]
                say(f"{name}: BELOW THE FLOOR of {floor:.2f} ms, so not read from memory")
        keep(fresh)
        rows += fresh
    return rows


class _Round(NamedTuple):
    """What a method did once."""

    steps: list[float]  # milliseconds from a token to the next
    prefill_ms: float
    kernels: dict[str, float] | None  # milliseconds a watched step, by kernel
    peak_bytes: int
    peak_kind: str
    stats: dict[str, Any] | None


def _generated(plan: Plan, model: PreTrainedModel, spec: str, ids: torch.Tensor, last: bool) -> _Round:
    """One call of `generate`; of the last one of a method some steps are watched."""
    memory = circumstances.PeakMemory(plan.device)
    own = spec != TRANSFORMERS
    whole = own and attach(model, plan, spec, dense_below=plan.dense_below).whole_prompt
    memory.start()
    clock = Clock(_WARM_UP + plan.steps + 1, plan.watched if last else 0)
    chunk = 0 if whole else max(1, _CHUNK // len(ids))
    generate(model, ids, plan.tokens + 1, chunk, stopping_criteria=StoppingCriteriaList([clock]))
    stats = foveate.stats(model).summary() if own else None
    if own:
        foveate.detach(model)
    steps = clock.steps(_WARM_UP, plan.steps)
    return _Round(steps, clock.prefill_ms, clock.kernels, memory.peak(), memory.kind, stats)


def _of_rounds(rounds: Sequence[_Round]) -> dict[str, Any]:
    """The fields of a row that the rounds of a method give: times of its steps and prompt, peak memory, counters."""
    steps, last = [ms for one in rounds for ms in one.steps], rounds[-1]
    ms, parts = statistics.fmean(steps), None
    if last.kernels is not None:
        parts = breakdown.by_part(last.kernels)
        parts["idle"] = max(0.0, ms - sum(parts.values()))  # no kernel runs
    return {
        "ms": ms,
        "ms_median": statistics.median(steps),
        "ms_quartiles": statistics.quantiles(steps, n=4) if len(steps) > 1 else steps * 3,
        "ms_rounds": [statistics.fmean(one.steps) for one in rounds],
        "parts_ms": parts,
        "prefill_ms": statistics.median(one.prefill_ms for one in rounds),
        "peak_bytes": max(one.peak_bytes for one in rounds),
        "peak_kind": last.peak_kind,
        "stats": last.stats,
    }


def _row(
    plan: Plan, model: PreTrainedModel, case: dict[str, Any], one: dict[str, Any], dense_ms: float, rate: float
) -> Row:
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = sum(parameter.nbytes for parameter in model.parameters()) - inputs.nbytes
    weights += outputs.nbytes if outputs is inputs else 0
    read = None if one["stats"] is None else weights + case["batch"] * one["stats"]["kv_bytes_per_step"]
    floor = None if read is None else read / rate / 1e6
    return speed_row(
        "decode",
        case | {name: getattr(plan, name) for name in ("dtype", "liger", "dense_below", "steps", "rounds", "seed")},
        plan.device,
        baseline=("dense", dense_ms),
        **one,
        floor_ms=floor,
        floor_counts="weights, keys and values, over the fastest read or copy measured",
        below_floor=floor is not None and one["ms"] < floor,
        memory_gb_per_s=rate,
        tokens_per_s=1e3 * case["batch"] / one["ms"],
        gb_per_s=None if read is None else read / one["ms"] / 1e6,
        gb_counts="weights but for the embedding of tokens, and keys and values",
        command=command("foveate bench decode-model", plan),
    )

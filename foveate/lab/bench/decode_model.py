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
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import foveate
from foveate.errors import UserError
from foveate.lab.bench import breakdown
from foveate.lab.bench import cold_cache_timing as cold
from foveate.lab.bench.models import TimedModel, generate
from foveate.lab.bench.plan import Keep, Row, Say, check, command, share_of
from foveate.lab.results import circumstances
from foveate.lab.results.measurements import TRANSFORMERS, speed_row

_CHUNK = 8192
"""Tokens of a prompt, all sequences together, that are read at once."""
_WARM_UP = 40
"""Steps that are not timed: the first ones compile kernels and record graphs, also of what LuKA does every 16th."""
_WATCHED = 16
"""Steps after the timed ones whose kernels are watched."""


@dataclasses.dataclass(frozen=True)
class Plan:
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
        """Raise UserError that names an option, its value, and what is allowed."""
        check(self)
        if self.dense_below != "auto" and not (isinstance(self.dense_below, int) and self.dense_below >= 0):
            raise UserError(f"dense-below must be a number of tokens, at least 0, or auto, not {self.dense_below}")
        self.of_model.check("context and steps need")
        if self.liger and find_spec("liger_kernel") is None:
            raise UserError("--liger needs Liger's kernels: pip install liger-kernel")

    @property
    def of_model(self) -> TimedModel:
        return TimedModel(self.model, max(self.contexts) + self.tokens, self.dtype, self.seed, self.device)

    @property
    def watched(self) -> int:
        """Steps whose kernels are watched."""
        return _WATCHED if self.device == "cuda" else 0

    @property
    def tokens(self) -> int:
        """What is generated after the first token."""
        return _WARM_UP + self.steps + self.watched


@torch.inference_mode()
def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """A row for each method, at every context and batch size; the baseline is foveate's own dense.

    Raises:
        UserError: for a plan that cannot be.
    """
    plan.check()
    cold.settle(plan.device)
    rate = cold.memory_rate(plan.device)
    say(f"device memory: {rate:,.1f} GB/s")
    model = load(plan)
    rows: list[Row] = []
    for batch in plan.batches:
        for context in plan.contexts:
            generator = torch.Generator(plan.device).manual_seed(plan.seed)
            shape = (batch, context)
            ids = torch.randint(0, model.config.vocab_size, shape, generator=generator, device=plan.device)
            rounds: dict[str, list[_Round]] = {spec: [] for spec in (*plan.of_model.specs(plan.methods), TRANSFORMERS)}
            for number in range(plan.rounds):
                for spec in rounds:
                    rounds[spec].append(one := _generated(plan, model, spec, ids, number + 1 == plan.rounds))
                    ms = statistics.fmean(one.steps)
                    say(f"{spec} at {context:,} × {batch}: {ms:.2f} ms a step, {1e3 * batch / ms:,.1f} tokens/s")
            found = {spec: _together(plan, those) for spec, those in rounds.items()}
            fresh = [_row(plan, model, spec, context, batch, one, found["dense"], rate) for spec, one in found.items()]
            for row in fresh:
                if row["below_floor"]:
                    name, floor = row["case"]["method"], row["floor_ms"]
                    say(f"{name}: BELOW THE FLOOR of {floor:.2f} ms, so not read from memory")
            keep(fresh)
            rows += fresh
    return rows


def load(plan: Plan) -> PreTrainedModel:
    model = plan.of_model.load()
    if plan.liger:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    return model


class Clock(StoppingCriteria):
    """Notes when each token is there: `generate` waits for every one before it asks for the next.

    And what kernels take in the last ``watched`` steps, after the first ``tokens``: ``kernels``, milliseconds a step.
    """

    def __init__(self, tokens: int, watched: int) -> None:
        self.ticks: list[float] = []
        self.kernels: dict[str, float] | None = None
        self._tokens, self._watched = tokens, watched
        self._goes_on: torch.Tensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self._goes_on is None:
            self._goes_on = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        if not self.ticks and input_ids.is_cuda:  # the prompt's time ends here
            torch.cuda.synchronize(input_ids.device)
        self.ticks.append(time.perf_counter())
        if self._watched and len(self.ticks) == self._tokens:
            self._stop = breakdown.start()
        elif self._watched and len(self.ticks) == self._tokens + self._watched:
            self.kernels = {kernel: ms / self._watched for kernel, ms in self._stop().items()}
        return self._goes_on


class _Round(NamedTuple):
    """What a method did once."""

    steps: list[float]
    """Milliseconds from a token to the next."""
    prefill_ms: float
    kernels: dict[str, float] | None
    """Milliseconds a watched step, by kernel."""
    peak_bytes: int
    peak_kind: str
    stats: dict[str, Any] | None


def _generated(plan: Plan, model: PreTrainedModel, spec: str, ids: torch.Tensor, last: bool) -> _Round:
    """One call of `generate`; of the last one of a method some steps are watched."""
    clock = Clock(_WARM_UP + plan.steps + 1, plan.watched if last else 0)
    memory = circumstances.PeakMemory(plan.device)
    whole = False
    if spec != TRANSFORMERS:
        try:
            whole = foveate.attach(model, spec, dense_below=plan.dense_below).whole_prompt
        except ValueError as error:
            raise UserError(f"{plan.model}: {error}") from None
    memory.start()
    begin = time.perf_counter()
    chunk = 0 if whole else max(1, _CHUNK // len(ids))
    generate(model, ids, plan.tokens + 1, chunk, stopping_criteria=StoppingCriteriaList([clock]))
    steps = [1e3 * (after - before) for before, after in zip(clock.ticks, clock.ticks[1:])]
    prefill = 1e3 * (clock.ticks[0] - begin)
    stats = None
    if spec != TRANSFORMERS:
        stats = foveate.stats(model).summary()
        foveate.detach(model)
    timed = steps[_WARM_UP : _WARM_UP + plan.steps]
    return _Round(timed, prefill, clock.kernels, memory.peak(), memory.kind, stats)


def _together(plan: Plan, rounds: Sequence[_Round]) -> dict[str, Any]:
    """What the rounds of a method say of its steps, of the prompt, and of what it read."""
    steps, last = [ms for one in rounds for ms in one.steps], rounds[-1]
    ms = statistics.fmean(steps)
    return {
        "ms": ms,
        "ms_median": statistics.median(steps),
        "ms_quartiles": statistics.quantiles(steps, n=4) if len(steps) > 1 else steps * 3,
        "ms_rounds": [statistics.fmean(one.steps) for one in rounds],
        "parts_ms": None if last.kernels is None else _parts(ms, last.kernels),
        "prefill_ms": statistics.median(one.prefill_ms for one in rounds),
        "peak_bytes": max(one.peak_bytes for one in rounds),
        "peak_kind": last.peak_kind,
        "stats": last.stats,
    }


def _parts(ms: float, kernels: dict[str, float]) -> dict[str, float]:
    """What a step's time goes to: by what kernels are for, and how long none of them runs."""
    parts = breakdown.by_part(kernels)
    return parts | {"idle": max(0.0, ms - sum(parts.values()))}


def _row(
    plan: Plan,
    model: PreTrainedModel,
    spec: str,
    context: int,
    batch: int,
    one: dict[str, Any],
    dense: dict[str, Any],
    rate: float,
) -> Row:
    weights = sum(parameter.nbytes for parameter in model.parameters()) - model.get_input_embeddings().weight.nbytes
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        weights += model.get_output_embeddings().weight.nbytes
    read = None if one["stats"] is None else weights + batch * one["stats"]["kv_bytes_per_step"]
    floor = None if read is None else read / rate / 1e6
    share = None if spec == TRANSFORMERS else share_of(spec)
    case = {"method": spec, "context": context, "batch": batch, "share": share, "level": "model"}
    case |= {"model": plan.of_model.name, "weights": plan.of_model.weights}
    return speed_row(
        "decode",
        case | {name: getattr(plan, name) for name in ("dtype", "liger", "dense_below", "steps", "rounds", "seed")},
        plan.device,
        baseline=("dense", dense["ms"]),
        **one,
        floor_ms=floor,
        floor_counts="weights, keys and values, over the fastest read or copy measured",
        below_floor=floor is not None and one["ms"] < floor,
        memory_gb_per_s=rate,
        tokens_per_s=1e3 * batch / one["ms"],
        gb_per_s=None if read is None else read / one["ms"] / 1e6,
        gb_counts="weights but for the embedding of tokens, and keys and values",
        command=command("foveate bench decode-model", plan),
    )

"""What does a prompt cost, in time to the first token and in peak memory?

The model is a folder's, or one of a known shape with random weights. It reads random tokens under every method, and
generates one token. Prompts are read in one piece, or in chunks. Peaks include weights, activations and the cache.
Methods that accumulate importance may not need much more memory than dense attention does.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

import foveate
from foveate.lab.bench.models import ModelPlan, generate
from foveate.lab.bench.plan import Keep, Row, Say, command
from foveate.lab.evaluation.decoding import Clock
from foveate.lab.results import circumstances
from foveate.lab.results.measurements import TRANSFORMERS, speed_row


@dataclasses.dataclass(frozen=True)
class Plan(ModelPlan):
    """What to measure."""

    model: str
    methods: Sequence[str]
    contexts: Sequence[int]
    chunks: Sequence[int]
    repeats: int
    dtype: str
    seed: int
    device: str

    needs = "the longest context needs"


class _Read(NamedTuple):
    """What a method takes for a prompt."""

    ms: float
    first_ms: float  # of the first prompt of this length, with what is compiled and planned for it
    peak_bytes: int
    peak_kind: str
    resident_bytes: int
    dense_prompts: str | None


@torch.inference_mode()
def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """A row for each method, context and chunk; the baseline is foveate's own dense, read alike.

    Raises `UserError` for a plan that cannot be.
    """
    plan.check()
    model = plan.load()
    rows: list[Row] = []
    for context in plan.contexts:
        ids = plan.prompts(model, 1, context)
        for chunk in plan.chunks:
            found = {}
            for spec in [*plan.specs(), TRANSFORMERS]:
                if (one := _read(plan, model, spec, ids, chunk)) is None:
                    say(f"{spec}: left out in chunks of {chunk:,}, it reads a prompt in one piece")
                    continue
                found[spec] = one
                pieces = f" in chunks of {chunk:,}" if chunk else ""
                say(f"{spec} at {context:,}{pieces}: {one.ms:.1f} ms, peak {one.peak_bytes / 1e9:.2f} GB")
            keep(fresh := [_row(plan, model, spec, context, chunk, one, found) for spec, one in found.items()])
            rows += fresh
    return rows


def _read(plan: Plan, model: PreTrainedModel, spec: str, ids: torch.Tensor, chunk: int) -> _Read | None:
    """Median milliseconds to the first token, peak bytes, and bytes that the cache holds; None if it cannot be."""
    if spec != TRANSFORMERS and foveate.attach(model, spec).whole_prompt and chunk:
        foveate.detach(model)
        return None
    times, memory, library = [], circumstances.PeakMemory(plan.device), None
    for _ in range(plan.repeats + 1):
        clock = Clock(model.device)
        memory.start()
        clock.tick()
        made = generate(model, ids, 1, chunk, return_dict_in_generate=True)
        clock.tick()
        times.append(clock.elapsed_ms)
        peak, resident = memory.peak(), _resident(made.past_key_values)
        del made
    if spec != TRANSFORMERS:
        library = foveate.stats(model).dense_prompts
        foveate.detach(model)
    return _Read(statistics.median(times[1:]), times[0], peak, memory.kind, resident, library)


def _resident(cache: Any) -> int:
    """Bytes that a cache holds after a prompt."""
    if isinstance(cache, foveate.Cache):
        return cache.resident_bytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _row(
    plan: Plan, model: PreTrainedModel, spec: str, context: int, chunk: int, one: _Read, found: dict[str, _Read]
) -> Row:
    flops = 2 * sum(parameter.numel() for parameter in model.parameters())
    more = {"chunk": chunk, "dtype": plan.dtype, "repeats": plan.repeats, "seed": plan.seed}
    return speed_row(
        "prefill",
        plan.case(spec, context, 1, **more),
        plan.device,
        one.ms,
        ("dense", found["dense"].ms),
        first_ms=one.first_ms,
        dense_prompts=one.dense_prompts,
        tflop_per_s=flops * context / one.ms / 1e9,
        tflop_counts="weights only, attention left out",
        peak_bytes=one.peak_bytes,
        peak_kind=one.peak_kind,
        peak_over_dense=one.peak_bytes / found["dense"].peak_bytes,
        resident_bytes=one.resident_bytes,
        command=command("foveate bench prefill-model", plan),
    )

"""What does a prompt cost, in time to the first token and in peak memory?

The model is a folder's, or one of a known shape with random weights. It reads random tokens under every method, and
generates one token. Prompts are read in one piece, or in chunks. Peaks include weights, activations and the cache.
Methods that accumulate importance may not need much more memory than dense attention does.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

import foveate
from foveate.io import circumstances
from foveate.lab.bench.models import ModelPlan, generate
from foveate.lab.bench.plan import Keep, Row, Say, command
from foveate.lab.evaluation.decoding import Clock
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
                say(f"{spec} at {context:,}{pieces}: {one['ms']:.1f} ms, peak {one['peak_bytes'] / 1e9:.2f} GB")
            cases = {spec: plan.case(spec, context, 1, chunk=chunk) for spec in found}
            fresh = [_row(plan, model, cases[spec], one, found["dense"]) for spec, one in found.items()]
            keep(fresh)
            rows += fresh
    return rows


def _read(plan: Plan, model: PreTrainedModel, spec: str, ids: torch.Tensor, chunk: int) -> dict[str, Any] | None:
    """What a method takes for a prompt, the first of its length apart; None if it cannot be read in chunks."""
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
    found = {"ms": statistics.median(times[1:]), "first_ms": times[0], "dense_prompts": library}
    return found | {"peak_bytes": peak, "peak_kind": memory.kind, "resident_bytes": resident}


def _resident(cache: Any) -> int:
    """Bytes that a cache holds after a prompt."""
    if isinstance(cache, foveate.Cache):
        return cache.resident_bytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _row(plan: Plan, model: PreTrainedModel, case: dict[str, Any], one: dict[str, Any], dense: dict[str, Any]) -> Row:
    flops = 2 * sum(parameter.numel() for parameter in model.parameters())
    return speed_row(
        "prefill",
        case | {name: getattr(plan, name) for name in ("dtype", "repeats", "seed")},
        plan.device,
        baseline=("dense", dense["ms"]),
        **one,
        tflop_per_s=flops * case["context"] / one["ms"] / 1e9,
        tflop_counts="weights only, attention left out",
        peak_over_dense=one["peak_bytes"] / dense["peak_bytes"],
        command=command("foveate bench prefill-model", plan),
    )

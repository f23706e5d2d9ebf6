"""How fast is a decode step on a CPU, end to end through a real model: dense, sparse, and Transformers' own path?

Every implementation reads the same prompt and is then fed the same tokens of a book. Their steps are interleaved in
rounds, so that whatever else the machine does meets all of them; the median step counts. All of them share one copy of
the weights.

    python -m benchmarks.cpu_decode MODEL DATA --out benchmarks/results/cpu-decode.jsonl
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import typer

import foveate
from foveate.bench.plan import Keep, Row, Say, measure, specs
from foveate.inputs import loading, model_folder
from foveate.inputs.reading import read_novels
from foveate.integrations.transformers import releases
from foveate.report.tables.general import tables
from foveate.results.errors import UserError
from foveate.results.measurements import TRANSFORMERS, speed_row

_WARM_UP = 4


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    model: Path
    data: Path
    """A folder with books."""
    context: int = 8000
    steps: int = 48
    """That are timed."""
    threads: int = 2
    methods: Sequence[str] = (
        *("streaming:window=1024", "h2o", "quest", "omnikv", "kascade:decode_only=true"),
        *("luka:page_size=16,top_k=3,score=spread", "luka:page_size=16,top_k=0.12", "luka", "luka:score=spread"),
    )


@dataclass
class Contender:
    """One implementation with its own cache after the prompt."""

    name: str
    model: torch.nn.Module
    cache: Any
    prefill_s: float
    milliseconds: list[float] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def step(self, token: torch.Tensor, timed: bool) -> None:
        """Feed one token ``[1, 1]``."""
        start = time.perf_counter()
        out = self.model(token, **{releases.CACHE: self.cache}, use_cache=True, logits_to_keep=1)
        elapsed = time.perf_counter() - start
        self.logits.append(out.logits[0, -1].float())
        if timed:
            self.milliseconds.append(1e3 * elapsed)


@torch.inference_mode()
def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """One row for each implementation.

    Raises:
        UserError: for a context beyond the model or the book, or fewer than one step.
    """
    context, steps, chosen = plan.context, plan.steps, specs(plan.methods)
    facts = model_folder.model_facts(plan.model)
    needed = context + steps + _WARM_UP
    model_folder.check_positions(needed, facts, "context and steps need")
    ids = _book(plan.model, plan.data, needed)
    torch.set_num_threads(plan.threads)
    base = loading.load_model(plan.model, "float32", "cpu")
    contenders = [_prefill(TRANSFORMERS, base, None, ids[:, :context], say)]
    contenders += [_prefill(spec, _twin(base), spec, ids[:, :context], say) for spec in chosen]
    for contender in contenders:
        if contender.name != TRANSFORMERS:
            foveate.stats(contender.model, reset=True)
    for i in range(steps + _WARM_UP):
        token = ids[:, context + i : context + i + 1]
        # a different order each time: nobody always follows the largest cache
        for contender in contenders[i % len(contenders) :] + contenders[: i % len(contenders)]:
            contender.step(token, timed=i >= _WARM_UP)
    rows = _rows(plan, contenders, base, facts)
    keep(rows)
    return rows


def _book(folder: Path, data: Path, tokens: int) -> torch.Tensor:
    tokenizer = loading.load_tokenizer(folder)
    novel = max(read_novels(data), key=lambda novel: len(novel.text))
    ids = tokenizer(novel.text[: 12 * tokens], return_tensors="pt")["input_ids"][:, :tokens]
    if ids.shape[1] < tokens:
        raise UserError(f"{novel.name} has {ids.shape[1]:,} tokens, {tokens:,} are needed; ask for a shorter context")
    return ids


def _twin(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the modules over the same weights, so that each can have its own method."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def _prefill(
    name: str, model: torch.nn.Module, spec: str | None, ids: torch.Tensor, say: Callable[[str], None]
) -> Contender:
    if spec is None:
        cache = transformers.DynamicCache(config=model.config)
    else:
        foveate.attach(model, spec)
        cache = foveate.Cache(model)
    start = time.perf_counter()
    model(ids, **{releases.CACHE: cache}, use_cache=True, logits_to_keep=1)
    elapsed = time.perf_counter() - start
    say(f"{name}: {ids.shape[1]:,} tokens read in {elapsed:.1f} s")
    return Contender(name, model, cache, elapsed)


def _rows(plan: Plan, contenders: Sequence[Contender], base: torch.nn.Module, facts: dict[str, Any]) -> list[Row]:
    medians = {contender.name: statistics.median(contender.milliseconds) for contender in contenders}
    fastest = min((TRANSFORMERS, "dense"), key=medians.__getitem__)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in base.parameters())
    flops = 2 * sum(parameter.numel() for parameter in base.parameters())
    reference = torch.stack(contenders[0].logits)
    rows = []
    for contender in contenders:
        milliseconds = medians[contender.name]
        summary = {} if contender.name == TRANSFORMERS else foveate.stats(contender.model).summary()
        read = summary.get("kv_bytes_per_step", 0.0)
        if contender.name == TRANSFORMERS:
            read = float(sum(layer.keys.nbytes + layer.values.nbytes for layer in contender.cache.layers))
        logits = torch.stack(contender.logits)
        how = {"context": plan.context, "batch": 1, "dtype": "float32", "steps": plan.steps, "threads": plan.threads}
        timed = contender.milliseconds
        rows.append(
            speed_row(
                "cpu-decode",
                {"method": contender.name, "model": plan.model.name, **how},
                "cpu",
                milliseconds,
                (fastest, medians[fastest]),
                ms_quartiles=statistics.quantiles(timed, n=4) if plan.steps > 1 else timed * 3,
                speedup_over_dense=medians["dense"] / milliseconds,
                speedup_over_transformers=medians[TRANSFORMERS] / milliseconds,
                gb_per_s=(weights + read) / milliseconds / 1e6,
                tflop_per_s=flops / milliseconds / 1e9,
                keys_read_share=summary.get("keys_read_share", 1.0),
                kv_bytes_per_step=read,
                same_next_token=(logits.argmax(-1) == reference.argmax(-1)).float().mean().item(),
                largest_logit_difference=(logits - reference).abs().max().item(),
                prefill_ms=1e3 * contender.prefill_s,
                peak_bytes=summary.get("resident_bytes", int(read)),
                peak_kind="resident keys, values and method state",
                architecture=facts,
            )
        )
    return rows


def main(model: Path, data: Path, out: Path | None = None) -> None:
    """Measure decode steps of a model."""
    measure("cpu-decode", run, Plan(model, data), out, tables)


if __name__ == "__main__":
    typer.run(main)

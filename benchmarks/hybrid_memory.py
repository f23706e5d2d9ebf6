"""What a hybrid's cache holds while one sequence grows, beside a hybrid of full attention.

The weights are random, and so LTE retains what fits: its buffers are full. Layers of full attention run foveate's dense
attention, the fastest library that is present. Rows are held against `gdn_attn`.

    python -m benchmarks.hybrid_memory --out benchmarks/results/hybrids-speed.jsonl
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor, nn

import foveate
from benchmarks import hybrid_tables
from benchmarks.hybrid_training import delta_rule
from foveate.hybrids.models import HybridCache, HybridForCausalLM, make_config
from foveate.integrations.transformers import Cache, releases
from foveate.io import circumstances
from foveate.lab.bench.plan import Keep, Row, Say, measure
from foveate.lab.results import timing
from foveate.lab.results.measurements import speed_row

BASELINE = "gdn_attn"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure: contexts of one sequence, ``chunk`` tokens of a prompt at a time, and ``steps`` after each."""

    presets: Sequence[str] = ("gdn_attn", "lalte")
    size: str = "27M"
    contexts: Sequence[int] = (4096, 16384, 65536, 262144, 1048576)
    chunk: int = 4096
    steps: int = 16
    dtype: str = "bfloat16"
    seed: int = 0
    device: str = "cuda"


@torch.inference_mode()
def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """A row for each preset and context."""
    rows: list[Row] = []
    base: dict[int, dict[str, Any]] = {}
    for preset in sorted(plan.presets, key=lambda name: name != BASELINE):
        mine = []
        for context, measured in _growing(plan, preset):
            if preset == BASELINE:
                base[context] = measured
            mine.append(_row(plan, preset, context, measured, base.get(context)))
            say(
                f"{preset}-{plan.size}, {context:,} tokens: cache {measured['cache_bytes'] / 1e6:,.1f} MB, last "
                f"chunk {measured['ms']:,.1f} ms, {measured['decode_ms_per_token']:,.2f} ms a generated token"
            )
        keep(mine)
        rows += mine
    return rows


def _growing(plan: Plan, preset: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each context of one sequence, with what it took since the one before."""
    generator = torch.Generator().manual_seed(plan.seed + 1)
    memory = circumstances.PeakMemory(plan.device)
    with _built(plan, preset) as model:
        vocabulary = model.config.vocab_size
        rule = delta_rule(model.config, model.device, model.dtype)
        before = torch.cuda.memory_allocated() if plan.device == "cuda" else 0
        cache = Cache(model) if "attn" in model.config.mixers else HybridCache(model.config)
        model(_drawn(vocabulary, plan.chunk, generator, plan.device), use_cache=False, logits_to_keep=1)  # compiles
        found: list[Tensor] = []

        def feed(ids: Tensor) -> None:
            found[:] = [_feed(model, ids, cache)]

        for context in plan.contexts:
            memory.start()
            ids = _drawn(vocabulary, context - cache.get_seq_length(), generator, plan.device)
            if isinstance(cache, Cache):
                cache.begin(context, assistant=False)
            *first, last = ids.split(plan.chunk, 1)
            for piece in first:
                feed(piece)
            ms = timing.milliseconds(functools.partial(feed, last), plan.device)
            held, times = _held(cache), []
            for _ in range(plan.steps):
                step = functools.partial(feed, found[0].argmax(-1))
                times.append(timing.milliseconds(step, plan.device))
            yield (
                context,
                {
                    "ms": ms,
                    "ms_counts": f"the last {last.shape[1]:,} tokens of the prompt",
                    "decode_ms_per_token": statistics.median(times),
                    "gated_delta_rule": rule,
                    "cache_bytes": held,
                    "peak_bytes": memory.peak() - before,
                    "peak_counts": f"{memory.kind}; less the weights" if plan.device == "cuda" else memory.kind,
                },
            )


@contextlib.contextmanager
def _built(plan: Plan, preset: str) -> Iterator[nn.Module]:
    """A model of random weights and as many positions as the longest context; full attention is foveate's."""
    torch.manual_seed(plan.seed)
    longest = max(plan.contexts) + plan.steps
    config = make_config(preset, plan.size, max_position_embeddings=longest, eos_token_id=None)
    model = HybridForCausalLM(config).to(plan.device, getattr(torch, plan.dtype)).eval()
    with foveate.attached(model, "dense") if "attn" in config.mixers else contextlib.nullcontext():
        yield model


def _drawn(vocabulary: int, tokens: int, generator: torch.Generator, device: str) -> Tensor:
    return torch.randint(vocabulary, (1, tokens), generator=generator).to(device)


def _feed(model: nn.Module, ids: Tensor, cache: Cache | HybridCache) -> Tensor:
    """Logits after the last token."""
    return model(ids, **{releases.CACHE: cache}, use_cache=True, logits_to_keep=1).logits[:, -1:]


def _held(cache: Cache | HybridCache) -> int:
    return cache.resident_bytes if isinstance(cache, Cache) else cache.nbytes


def _row(
    plan: Plan, preset: str, context: int, measured: dict[str, Any], base: dict[str, Any] | None
) -> dict[str, Any]:
    case = {"what": "cache", "phase": "memory", "preset": preset, "size": plan.size, "batch": 1, "context": context}
    return speed_row(
        "hybrids",
        case | {name: getattr(plan, name) for name in ("chunk", "steps", "dtype", "seed", "device")},
        plan.device,
        baseline=(BASELINE if base else preset, (base or measured)["ms"]),
        **measured,
    )


def main(size: str = Plan.size, out: Path | None = None) -> None:
    """Measure the caches."""
    measure("hybrids", run, Plan(size=size), out, hybrid_tables.memory)


if __name__ == "__main__":
    typer.run(main)

"""What a hybrid's cache holds while one sequence grows, beside a hybrid of full attention.

The weights are random, and so LTE retains what fits: its buffers are full. Layers of full attention run foveate's dense
attention, the fastest library that is present.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import foveate
from foveate.bench import options
from foveate.bench.hybrid_training import delta_rule
from foveate.bench.plan import Keep, Row, Say
from foveate.integrations.transformers import Cache, releases
from foveate.models import PRESETS, SIZES, HybridCache, HybridForCausalLM, make_config
from foveate.results import circumstances, timing
from foveate.results.errors import UserError, unknown
from foveate.results.measurements import speed_row

PHASE = "memory"
BASELINE = "gdn_attn"


class Plan(options.HybridMemory):
    def check(self) -> None:
        """Raise UserError that names an option, its value, and what is allowed."""
        super().check()
        for preset in self.presets:
            if preset not in PRESETS:
                raise unknown("preset", preset, PRESETS)
        if self.size not in SIZES:
            raise unknown("size", self.size, SIZES)
        if any(b - a <= self.steps for a, b in zip([0, *self.contexts], self.contexts)):
            raise UserError(f"context must grow by more than the {self.steps} steps, not {list(self.contexts)}")


@torch.inference_mode()
def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """A row for each preset and context; a preset that runs out of memory has the rows before, and it is said.

    Raises:
        UserError: for a plan that cannot be.
    """
    plan.check()
    rows: list[Row] = []
    base: dict[int, dict[str, Any]] = {}
    for preset in sorted(plan.presets, key=lambda name: name != BASELINE):
        mine = []
        try:
            for context, measured in _growing(plan, preset):
                if preset == BASELINE:
                    base[context] = measured
                mine.append(_row(plan, preset, context, measured, base.get(context)))
                say(
                    f"{preset}-{plan.size}, {context:,} tokens: cache {measured['cache_bytes'] / 1e6:,.1f} MB, last "
                    f"chunk {measured['ms']:,.1f} ms, {measured['decode_ms_per_token']:,.2f} ms a generated token"
                )
        except torch.cuda.OutOfMemoryError:
            say(f"{preset}-{plan.size}: out of memory after {len(mine)} of {len(plan.contexts)} contexts")
        torch.cuda.empty_cache()
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
    case = {"what": "cache", "phase": PHASE, "preset": preset, "size": plan.size, "batch": 1, "context": context}
    return speed_row(
        plan.bench,
        case | plan.values("chunk", "steps", "dtype", "seed", "device"),
        plan.device,
        baseline=(BASELINE if base else preset, (base or measured)["ms"]),
        **measured,
    )

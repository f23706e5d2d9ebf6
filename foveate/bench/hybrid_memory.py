"""What a hybrid's cache holds while one sequence grows, beside a hybrid of full attention.

The weights are random, and so LTE retains what fits: its buffers are full. Layers of full attention run foveate's dense
attention, the fastest library that is present.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import foveate
from foveate.bench.hybrid_training import delta_rule
from foveate.bench.hybrids import BENCH
from foveate.integrations.transformers import Cache, releases
from foveate.models import PRESETS, SIZES, HybridCache, HybridForCausalLM, make_config
from foveate.results import circumstances, timing
from foveate.results.errors import UserError, unknown

PHASE = "memory"
CONTEXTS = (4096, 16384, 65536, 262144, 1048576)
BASELINE = "gdn_attn"
_DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure; rows are held against `gdn_attn` if it is among the presets."""

    presets: Sequence[str] = (BASELINE, "lalte")
    size: str = "27M"
    contexts: Sequence[int] = CONTEXTS
    chunk: int = 4096
    steps: int = 16
    """Tokens generated at each context."""
    dtype: str = "bfloat16"
    seed: int = 0
    device: str = "cuda"

    def check(self) -> None:
        """Raises UserError naming what cannot be."""
        for preset in self.presets:
            if preset not in PRESETS:
                raise unknown("preset", preset, PRESETS)
        if self.size not in SIZES:
            raise unknown("size", self.size, SIZES)
        for name in ("chunk", "steps"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        if any(b - a <= self.steps for a, b in zip([0, *self.contexts], self.contexts)):
            raise UserError(f"context must grow by more than the {self.steps} steps, not {list(self.contexts)}")
        if self.dtype not in _DTYPES:
            raise UserError(f"dtype must be one of {', '.join(_DTYPES)}, not '{self.dtype}'")
        if self.device not in ("cuda", "cpu"):
            raise UserError(f"device must be cuda or cpu, not '{self.device}'")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("no CUDA device is here; --device cpu runs small sizes")


@torch.inference_mode()
def run(
    plan: Plan,
    say: Callable[[str], None] = print,
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """A row for each preset and context; a preset that runs out of memory has the rows before, and it is said.

    Args:
        keep: is given the rows of each preset when they are complete.

    Raises:
        UserError: for a plan that cannot be.
    """
    plan.check()
    rows: list[dict[str, Any]] = []
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
    base_ms = (base or measured)["ms"]
    return {
        "bench": BENCH,
        "case": {
            "what": "cache",
            "phase": PHASE,
            "preset": preset,
            "size": plan.size,
            "batch": 1,
            "context": context,
            **{name: getattr(plan, name) for name in ("chunk", "steps", "dtype", "seed", "device")},
        },
        **measured,
        "baseline": BASELINE if base else preset,
        "baseline_ms": base_ms,
        "speedup": base_ms / measured["ms"],
        "gb_per_s": None,
        "tflop_per_s": None,
        **circumstances.of(plan.device),
    }

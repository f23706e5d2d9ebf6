"""What does a prompt cost, in time to the first token and in peak memory?

The model is a folder's, or one of a known shape with random weights. It reads random tokens under every method, and
generates one token. Prompts are read in one piece, or in chunks. Peaks include weights, activations and the cache.
Methods that accumulate importance may not need much more memory than dense attention does.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

import foveate
from foveate.bench import decode_model
from foveate.bench.decode import command
from foveate.bench.prefill import BENCH, DTYPES, parsed
from foveate.inputs import loading, model_folder
from foveate.results import circumstances
from foveate.results.errors import UserError, unknown
from foveate.results.measurements import TRANSFORMERS

METHODS = (
    "dense",
    "streaming",
    "kascade",
    "kascade:rest=mean",
    "kascade:exact_anchors=false",
    "tova",
    "snapkv",
    "h2o",
    "luka",
    "luka:compressor=attention",
    "mixed",
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure."""

    model: str = "llama-3.1-8b"
    """A folder, or the name of one of :data:`foveate.bench.decode_model.SHAPES`."""
    methods: Sequence[str] = METHODS
    contexts: Sequence[int] = (8192, 16384, 32768)
    chunks: Sequence[int] = (0,)
    """Tokens of a prompt that are read at once; 0: all."""
    repeats: int = 5
    """Timed prompts, after one that warms up."""
    dtype: str = "bfloat16"
    seed: int = 0
    device: str = "cuda"

    def check(self) -> None:
        """Raises UserError naming what cannot be."""
        if self.model not in decode_model.SHAPES and not Path(self.model).is_dir():
            raise unknown("model", self.model, (*decode_model.SHAPES, "a model folder"))
        if self.dtype not in DTYPES:
            raise UserError(f"dtype must be one of {', '.join(DTYPES)}, not '{self.dtype}'")
        if not self.contexts or min(self.contexts) < 1:
            raise UserError(f"context must be at least 1, not {min(self.contexts, default='none')}")
        if self.repeats < 1:
            raise UserError(f"repeats must be at least 1, not {self.repeats}")
        if not self.chunks or min(self.chunks) < 0:
            raise UserError(f"chunk must be a number of tokens, or 0 for all, not {min(self.chunks, default='none')}")
        for spec in self.methods:
            parsed(spec)
        facts = {"max_positions": self.of_model.config().max_position_embeddings}
        model_folder.check_positions(max(self.contexts), facts, "the longest context needs")
        loading.choose_device(self.device)

    @property
    def of_model(self) -> decode_model.Plan:
        """The model, with positions for the longest prompt."""
        return decode_model.Plan(
            self.model, self.methods, self.contexts, dtype=self.dtype, seed=self.seed, device=self.device
        )

    def command(self) -> str:
        """The command line that makes the rows, a folder shortened to its last name."""
        sizes = {"method": self.methods, "context": self.contexts, "chunk": self.chunks}
        rest = {name: getattr(self, name) for name in ("repeats", "dtype", "seed", "device")}
        return command({"level": "model", "model": self.of_model.name, **sizes, **rest}, BENCH)


class _Read(NamedTuple):
    """What a method takes for a prompt."""

    ms: float
    first_ms: float
    """Of the first prompt of this length, with what is compiled and planned for it."""
    peak_bytes: int
    peak_kind: str
    resident_bytes: int
    dense_prompts: str | None


@torch.inference_mode()
def run(
    plan: Plan,
    say: Callable[[str], None] = print,
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """A row for each method, context and chunk; the baseline is foveate's own dense, read alike.

    Args:
        say: told of each.
        keep: given the rows of one context and chunk as soon as they are there.

    Raises:
        UserError: for a plan that cannot be.
    """
    plan.check()
    specs = list(dict.fromkeys(["dense", *(parsed(spec).spec for spec in plan.methods)]))
    model = decode_model.load(plan.of_model)
    rows: list[dict[str, Any]] = []
    for context in plan.contexts:
        generator = torch.Generator(plan.device).manual_seed(plan.seed)
        ids = torch.randint(0, model.config.vocab_size, (1, context), generator=generator, device=plan.device)
        for chunk in plan.chunks:
            found = {}
            for spec in [*specs, TRANSFORMERS]:
                if (one := _read(plan, model, spec, ids, chunk)) is None:
                    say(f"{spec}: left out in chunks of {chunk:,}, it reads a prompt in one piece")
                    continue
                found[spec] = one
                say(f"{spec} at {context:,}{_pieces(chunk)}: {one.ms:.1f} ms, peak {one.peak_bytes / 1e9:.2f} GB")
            keep(fresh := [_row(plan, model, spec, context, chunk, one, found) for spec, one in found.items()])
            rows += fresh
    return rows


def _pieces(chunk: int) -> str:
    return f" in chunks of {chunk:,}" if chunk else ""


def _read(plan: Plan, model: PreTrainedModel, spec: str, ids: torch.Tensor, chunk: int) -> _Read | None:
    """Median milliseconds to the first token, peak bytes, and bytes that the cache holds; None if it cannot be."""
    if spec != TRANSFORMERS and foveate.attach(model, spec).whole_prompt and chunk:
        foveate.detach(model)
        return None
    times, memory, library = [], circumstances.PeakMemory(plan.device), None
    for _ in range(plan.repeats + 1):
        _wait(plan.device)
        memory.start()
        begin = time.perf_counter()
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1,
            eos_token_id=None,
            pad_token_id=0,
            do_sample=False,
            prefill_chunk_size=chunk or None,
            return_dict_in_generate=True,
        )
        _wait(plan.device)
        times.append(1e3 * (time.perf_counter() - begin))
        peak, resident = memory.peak(), _resident(made.past_key_values)
        del made
    if spec != TRANSFORMERS:
        library = foveate.stats(model).dense_prompts
        foveate.detach(model)
    return _Read(statistics.median(times[1:]), times[0], peak, memory.kind, resident, library)


def _wait(device: str) -> None:
    """Until a GPU has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def _resident(cache: Any) -> int:
    """Bytes that a cache holds after a prompt."""
    if isinstance(cache, foveate.Cache):
        return cache.resident_bytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _row(
    plan: Plan,
    model: PreTrainedModel,
    spec: str,
    context: int,
    chunk: int,
    one: _Read,
    found: dict[str, _Read],
) -> dict[str, Any]:
    share = None if spec == TRANSFORMERS else getattr(parsed(spec), "top_k", None)
    flops = 2 * sum(parameter.numel() for parameter in model.parameters())
    return {
        "bench": BENCH,
        "case": {
            "method": spec,
            "context": context,
            "batch": 1,
            "share": share if isinstance(share, float) else None,
            "level": "model",
            "model": plan.of_model.name,
            "weights": "random" if plan.model in decode_model.SHAPES else "trained",
            "chunk": chunk,
            "dtype": plan.dtype,
            "repeats": plan.repeats,
            "seed": plan.seed,
        },
        "ms": one.ms,
        "first_ms": one.first_ms,
        "dense_prompts": one.dense_prompts,
        "baseline": "dense",
        "baseline_ms": found["dense"].ms,
        "speedup": found["dense"].ms / one.ms,
        "gb_per_s": None,
        "tflop_per_s": flops * context / one.ms / 1e9,
        "tflop_counts": "weights only, attention left out",
        "peak_bytes": one.peak_bytes,
        "peak_kind": one.peak_kind,
        "peak_over_dense": one.peak_bytes / found["dense"].peak_bytes,
        "resident_bytes": one.resident_bytes,
        **circumstances.of(plan.device),
        "command": plan.command(),
    }

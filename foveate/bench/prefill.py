"""What does a prompt cost, in time and in peak memory, when a method has to learn from it?

A model reads random tokens under every method, on a GPU; peaks include weights, activations and the cache. Methods that
accumulate importance may not need much more memory than dense attention does.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import foveate
from foveate.evaluation import accounting, inference
from foveate.evaluation.errors import UserError
from foveate.integrations.transformers import releases

BENCH = "prefill"
TRANSFORMERS = "transformers-sdpa"
METHODS = (
    "dense",
    "streaming",
    "kascade",
    "kascade:rest=mean",
    "kascade:exact_anchors=true",
    "tova",
    "snapkv",
    "h2o",
    "luka",
    "luka:compressor=attention",
    "mixed",
)


@torch.inference_mode()
def run(
    folder: Path,
    contexts: Sequence[int] = (8192, 16384, 32768),
    methods: Sequence[str] = METHODS,
    repeats: int = 5,
    dtype: str = "bfloat16",
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Measure and return a row for each method and context; the baseline is foveate's own dense.

    Args:
        folder: a Hugging Face model folder.
        contexts: prompt tokens.
        methods: specs; ``dense`` is always among them.
        repeats: timed runs, after one that warms up.
        dtype: of weights and cache.
        say: where progress goes.

    Raises:
        UserError: without a GPU, or for a context beyond the model.
    """
    if not torch.cuda.is_available():
        raise UserError("bench prefill measures GPU memory, and no CUDA device is here")
    if repeats < 1:
        raise UserError(f"repeats must be at least 1, not {repeats}")
    specs = list(dict.fromkeys(["dense", *(foveate.methods.parse(spec).spec for spec in methods)]))
    facts = accounting.model_facts(folder)
    accounting.check_positions(max(contexts), facts, "the longest context needs")
    model = inference.load_model(folder, dtype, "cuda")
    flops = 2 * sum(parameter.numel() for parameter in model.parameters())
    rows = []
    for context in contexts:
        ids = torch.randint(0, model.config.vocab_size, (1, context), device="cuda")
        for spec in [*specs, TRANSFORMERS]:
            milliseconds, peak, resident = _measure(model, spec, ids, repeats)
            say(f"{spec} at {context:,}: {milliseconds:.1f} ms, peak {peak / 1e9:.2f} GB")
            if spec == "dense":
                dense_ms, dense_peak = milliseconds, peak
            rows.append(
                {
                    "bench": BENCH,
                    "case": {
                        "method": spec,
                        "model": folder.name,
                        "context": context,
                        "batch": 1,
                        "dtype": dtype,
                        "repeats": repeats,
                    },
                    "ms": milliseconds,
                    "baseline": "dense",
                    "baseline_ms": dense_ms,
                    "speedup": dense_ms / milliseconds,
                    "gb_per_s": None,
                    "tflop_per_s": flops * context / milliseconds / 1e9,
                    "tflop_counts": "weights only, attention left out",
                    "peak_bytes": peak,
                    "peak_over_dense": peak / dense_peak,
                    "resident_bytes": resident,
                    "architecture": facts,
                    "device": accounting.device_name("cuda"),
                    "versions": accounting.versions(),
                    "commit": accounting.commit(),
                }
            )
    return rows


def _measure(model: torch.nn.Module, spec: str, ids: torch.Tensor, repeats: int) -> tuple[float, int, int]:
    """Median milliseconds, peak bytes of the prompt, and bytes that the cache holds after it."""
    if spec != TRANSFORMERS:
        foveate.attach(model, spec)
    times, memory = [], accounting.PeakMemory("cuda")
    for repeat in range(repeats + 1):
        cache = transformers.DynamicCache(config=model.config) if spec == TRANSFORMERS else foveate.Cache(model)
        torch.cuda.synchronize()
        memory.start()
        taken = accounting.milliseconds(
            functools.partial(model, ids, **{releases.CACHE: cache}, use_cache=True, logits_to_keep=1), "cuda"
        )
        if repeat:
            times.append(taken)
        if spec == TRANSFORMERS:
            resident = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        else:
            resident = cache.resident_bytes
        peak = memory.peak()
        del cache
    foveate.detach(model)
    return statistics.median(times), peak, resident

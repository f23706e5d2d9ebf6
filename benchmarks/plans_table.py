"""What `foveate plan` answers to cases that people ask about: a table of the documentation, made of configurations."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import transformers

from foveate.lab.bench import models
from foveate.lab.report.markdown import NONE, markdown_table
from foveate.planning.gpus import gpu_of
from foveate.planning.plan import Asked, Decoding, plan_of

SHAPES: Mapping[str, Any] = {
    "Llama-3.1-8B": models.SHAPES["llama-3.1-8b"],
    "Llama-3.3-70B": transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
    "Qwen3-30B-A3B": transformers.Qwen3MoeConfig(
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
    ),
    "gpt-oss-20b": transformers.GptOssConfig(
        num_hidden_layers=24,
        num_local_experts=32,
        hidden_size=2880,
        intermediate_size=2880,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=201088,
        sliding_window=128,
        num_experts_per_tok=4,
    ),
}
"""Published configurations, as far as memory and the time of a step depend on them."""


class Case(NamedTuple):
    words: str
    model: str
    gpu: str
    context: int
    sequences: int
    ranks: int = 1


CASES = (
    Case("eight users of a server, H200", "Llama-3.1-8B", "h200", 30_000, 8),
    Case("one RAG prompt at a time, RTX 4090", "Llama-3.1-8B", "4090", 30_000, 1),
    Case("one long document, 24 GB", "Llama-3.1-8B", "24GB", 128_000, 1),
    Case("16 users, 8 × L40S with tensor parallelism", "Llama-3.3-70B", "l40s", 30_000, 16, 8),
    Case("six users, 4 × A100 with tensor parallelism", "Llama-3.3-70B", "a100", 60_000, 6, 4),
    Case("16 users, one H100", "Qwen3-30B-A3B", "h100", 32_000, 16),
    Case("eight agents, one H100", "gpt-oss-20b", "h100", 60_000, 8),
)


def table() -> str:
    """A line a case: what fits, from how many tokens the method acts, and the estimated gain of a decode step."""
    lines = [("model and case", "tokens", "memory", "sparse from", "a step in Transformers", "a step in vLLM")]
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder}):
        for name, config in SHAPES.items():
            with contextlib.redirect_stderr(io.StringIO()):
                config.save_pretrained(Path(folder) / name)
        for case in CASES:
            asked = Asked(case.context, case.sequences, gpu_of(case.gpu), case.ranks)
            plan = plan_of(Path(folder) / case.model, asked, "auto")
            memory = plan.memory
            size = f"{memory.total / 1e9:.1f} of {memory.room / 1e9:.1f} GB" + (" each" if case.ranks > 1 else "")
            acting = plan.vllm if plan.transformers.refused else plan.transformers
            lines.append(
                (
                    f"{case.model}, {case.words}",
                    f"{case.sequences} × {case.context:,}",
                    size if memory.fits else f"**does not fit**: {size}; {_fewer(plan.most_sequences)}",
                    f"{acting.sparse_from:,} a sequence",
                    _step(plan.transformers, memory.fits),
                    _step(plan.vllm, memory.fits),
                )
            )
    return markdown_table(lines)


def _fewer(sequences: int) -> str:
    return f"{sequences} at once would" if sequences else "nor does one"


def _step(found: Decoding, fits: bool) -> str:
    if found.refused:
        return "not over several GPUs"
    if not fits or found.gain is None:
        return NONE
    return f"{found.gain:.2f} times as fast" if found.acts else "dense"

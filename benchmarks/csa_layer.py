"""A layer of compressed sparse attention: the indexer, and attention over its selection, a window and sinks.

Queries come in chunks, as a model's projections produce them. The queries of one chunk are drawn at random and used
for every chunk; a chunk's output is freed before the next chunk runs. Sizes are DeepSeek-V4's.

    python -m benchmarks.csa_layer --out benchmarks/results/csa.jsonl
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from torch import Tensor

from benchmarks import csa_tables
from benchmarks import indexer as bench
from foveate import csa, ops
from foveate.lab.bench.plan import Keep, Row, Say, measure
from foveate.lab.results.measurements import speed_row
from foveate.ops.dispatch import reference_only

_CHECKED = 16
"""Last queries, whose outputs are compared with fp64."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure; ``chunk`` queries at a time. The lengths are those of StreamIndex's table 5."""

    tokens: Sequence[int] = (8192, 32768, 65536, 131072, 262144)
    heads: int = 64
    dim: int = 512
    index_heads: int = 64
    index_dim: int = 128
    top_k: int = 512
    window: int = 128
    ratio: int = 4
    chunk: int = 16384
    dtype: str = "bfloat16"
    repeats: int = 3
    seed: int = 0
    device: str = "cuda"


@torch.inference_mode()
def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """A row for each length."""
    ceiling = bench.matmul_rate(plan.dtype, plan.device)
    sizes = {name: value for name, value in vars(plan).items() if name not in ("tokens", "device")}
    rows: list[Row] = []
    for tokens in plan.tokens:
        measured = _measure(plan, tokens)
        flops = 4 * plan.heads * plan.dim * _keys_read(plan, tokens)
        flops_of_indexer = 2 * plan.index_heads * plan.index_dim * bench.pairs(tokens, plan.ratio)
        rate = flops / measured["attention_ms"] / 1e9
        say(f"{tokens:,} tokens: {measured['ms']:,.2f} ms, attention at {rate:,.1f} TFLOP/s")
        row = speed_row(
            "csa",
            {"impl": "foveate", "tokens": tokens, **sizes},
            plan.device,
            baseline=("foveate", measured["ms"]),
            impl="foveate",
            **measured,
            peak_counts="above the inputs, selections and a chunk's output included; queries of one chunk are inputs "
            "and stand for all others",
            error_counts=f"norm of the difference to fp64 over its norm, the last {_CHECKED} queries",
            tflop_per_s=(flops + flops_of_indexer) / measured["ms"] / 1e9,
            tflop_counts="products with keys that a query may read, and with those that it attends to",
            attention_tflop_per_s=rate,
            matmul_tflop_per_s=ceiling,
            attention_of_matmul=rate / ceiling,
        )
        keep([row])
        rows.append(row)
    return rows


class _Inputs(NamedTuple):
    """The queries of one chunk and the keys of all tokens."""

    q: Tensor
    compressed: Tensor
    raw: Tensor
    sinks: Tensor
    index_q: Tensor
    index_k: Tensor
    index_weights: Tensor


def _draw(plan: Plan, tokens: int) -> _Inputs:
    """Random normal inputs; those of the indexer are scaled as in its own bench."""
    dtype, generator = getattr(torch, plan.dtype), torch.Generator(plan.device).manual_seed(plan.seed)

    def draw(*shape: int, std: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=plan.device).normal_(std=std, generator=generator)

    chunk, number, small = min(plan.chunk, tokens), tokens // plan.ratio, plan.index_dim**-0.5
    weights = torch.empty(1, chunk, plan.index_heads, device=plan.device).normal_(std=3**-0.5, generator=generator)
    return _Inputs(
        q=draw(1, chunk, plan.heads, plan.dim).transpose(1, 2),
        compressed=draw(1, 1, number, plan.dim),
        raw=draw(1, 1, tokens, plan.dim),
        sinks=draw(plan.heads).float(),
        index_q=draw(1, chunk, plan.index_heads, plan.index_dim, std=small),
        index_k=draw(1, number, plan.index_dim, std=small),
        index_weights=weights.mul_((plan.index_dim * plan.index_heads) ** -0.5),
    )


def _keys_read(plan: Plan, tokens: int) -> int:
    """Number of keys, selected and in windows, that all queries together read."""
    seen = torch.arange(1, tokens + 1)
    return int(((seen // plan.ratio).clamp_max(plan.top_k) + seen.clamp_max(plan.window)).sum())


def _measure(plan: Plan, tokens: int) -> dict[str, Any]:
    """Median milliseconds of the layer and of its parts, peak bytes above the inputs, and the last queries' error."""
    inputs, starts = _draw(plan, tokens), range(0, tokens, plan.chunk)
    how = {"scaling": plan.dim**-0.5, "window": csa.Window(inputs.raw, inputs.raw, plan.window), "sinks": inputs.sinks}

    def index(first: int) -> tuple[Tensor, Tensor, Tensor, int]:
        some = slice(0, min(plan.chunk, tokens - first))
        return inputs.index_q[:, some], inputs.index_k, inputs.index_weights[:, some], plan.top_k

    def select(first: int) -> Tensor:
        return csa.lightning_indexer(*index(first), ratio=plan.ratio, offset=first)

    def attend(first: int, indices: Tensor) -> ops.Attended:
        q = inputs.q[:, :, : indices.shape[1]]
        return csa.sparse_attention(q, inputs.compressed, inputs.compressed, indices, offset=first, **how)

    def layer() -> Tensor:
        out = None
        for first in starts:
            del out  # free it before the next chunk
            q, entries = inputs.q[:, :, : min(plan.chunk, tokens - first)], inputs.compressed[:, 0]
            out = csa.forward(q, entries, *index(first), ratio=plan.ratio, offset=first, **how).out
        return out

    ms, peak, out = bench.timed(plan, layer, bench.ALONE)
    error = _error(plan, inputs, out, starts[-1], select(starts[-1]))
    del out
    indexer_ms, _, selected = bench.timed(plan, lambda: [select(first) for first in starts], bench.ALONE)
    attention_ms, _, _ = bench.timed(
        plan, lambda: [attend(*chunk).lse for chunk in zip(starts, selected, strict=True)], bench.ALONE
    )
    return {"ms": ms, "indexer_ms": indexer_ms, "attention_ms": attention_ms, "peak_bytes": peak, "error": error}


def _error(plan: Plan, inputs: _Inputs, out: Tensor, first: int, indices: Tensor) -> float:
    """Relative error of the last queries against attention in fp64 over the same keys."""
    count = min(_CHECKED, out.shape[2])
    begin = out.shape[2] - count
    compressed, raw = inputs.compressed.double(), inputs.raw[:, :, : first + out.shape[2]].double()
    with reference_only():
        exact = csa.sparse_attention(
            inputs.q[:, :, begin : out.shape[2]].double(),
            compressed,
            compressed,
            indices[:, begin:],
            scaling=plan.dim**-0.5,
            window=csa.Window(raw, raw, plan.window),
            offset=first + begin,
            sinks=inputs.sinks,
        )
    return ((out[:, :, begin:].double() - exact.out).norm() / exact.out.norm()).item()


def main(out: Path | None = None) -> None:
    """Measure a layer of compressed sparse attention at several lengths."""
    measure("csa", run, Plan(), out, csa_tables.csa_layer)


if __name__ == "__main__":
    typer.run(main)

"""A layer of compressed sparse attention: the indexer, and attention over its selection, a window and sinks.

Queries come in chunks, as a model's projections produce them. The queries of one chunk are drawn at random and used
for every chunk; a chunk's output is freed before the next chunk runs.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate import ops
from foveate.bench import indexer as bench
from foveate.bench import options
from foveate.bench.plan import Keep, Row, Say
from foveate.layers import csa
from foveate.ops._dispatch import reference_only
from foveate.results.errors import UserError
from foveate.results.measurements import speed_row

IMPLEMENTATIONS = options.CsaLayer.implementations
_LONGEST = 65536
"""Most tokens for which the reference is measured; beyond, it takes too long."""
_CHECKED = 16
"""Last queries, whose outputs are compared with fp64."""


class Plan(options.CsaLayer):
    def check(self) -> None:
        """Raise UserError that names an option, its value, and what is allowed."""
        super().check()
        self.of_indexer().check()

    def of_indexer(self) -> bench.Plan:
        same = self.values("tokens", "top_k", "ratio", "dtype", "repeats", "seed", "device")
        return bench.Plan(implementations=("foveate",), heads=self.index_heads, dim=self.index_dim, **same)


@torch.inference_mode()
def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """Measure a layer at every length. The baseline has the same indexer, and the reference of the attention.

    Raises:
        UserError: for an invalid plan.
    """
    plan.check()
    ceiling = bench.matmul_rate(plan.dtype, plan.device)
    rows: list[Row] = []
    for tokens in plan.tokens:
        inputs = _draw(plan, tokens)
        flops = 4 * plan.heads * plan.dim * _keys_read(plan, tokens)
        flops_of_indexer = 2 * plan.index_heads * plan.index_dim * bench.pairs(tokens, plan.ratio)
        found = {}
        for name in plan.implementations:
            if name == "reference" and tokens > _LONGEST:
                say(f"{name} at {tokens:,} tokens: left out, it takes too long")
                continue
            found[name] = _measure(plan, name, tokens, inputs)
        baseline = "reference" if "reference" in found else "foveate"
        fresh = []
        for name, measured in found.items():
            rate = flops / measured["attention_ms"] / 1e9
            of_attention = f"attention {measured['attention_ms']:,.2f} ms at {rate:,.1f} TFLOP/s"
            say(f"{name} at {tokens:,} tokens: {measured['ms']:,.2f} ms, {of_attention}")
            fresh.append(
                speed_row(
                    plan.bench,
                    {"impl": name, "tokens": tokens, **plan.without("tokens", "implementations", "device")},
                    plan.device,
                    baseline=(baseline, found[baseline]["ms"]),
                    impl=name,
                    **measured,
                    peak_counts="above the inputs, selections and a chunk's output included; queries of one chunk "
                    "are inputs and stand for all others",
                    error_counts=f"norm of the difference to fp64 over its norm, the last {_CHECKED} queries",
                    tflop_per_s=(flops + flops_of_indexer) / measured["ms"] / 1e9,
                    tflop_counts="products with keys that a query may read, and with those that it attends to",
                    attention_tflop_per_s=rate,
                    matmul_tflop_per_s=ceiling,
                    attention_of_matmul=rate / ceiling,
                )
            )
        keep(fresh)
        rows += fresh
    if not rows:
        raise UserError(f"nothing was measured: the reference is for at most {_LONGEST:,} tokens")
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


def _measure(plan: Plan, name: str, tokens: int, inputs: _Inputs) -> dict[str, Any]:
    """Median milliseconds of the layer and of its parts, peak bytes above the inputs, and the last queries' error."""
    starts = range(0, tokens, plan.chunk)

    def select(first: int) -> Tensor:
        length = min(plan.chunk, tokens - first)
        q, weights = inputs.index_q[:, :length], inputs.index_weights[:, :length]
        return csa.lightning_indexer(q, inputs.index_k, weights, plan.top_k, ratio=plan.ratio, offset=first)

    how = {"scaling": plan.dim**-0.5, "window": csa.Window(inputs.raw, inputs.raw, plan.window), "sinks": inputs.sinks}

    def attend(first: int, indices: Tensor) -> ops.Attended:
        q = inputs.q[:, :, : indices.shape[1]]
        with contextlib.nullcontext() if name == "foveate" else reference_only():
            return csa.sparse_attention(q, inputs.compressed, inputs.compressed, indices, offset=first, **how)

    def layer() -> Tensor:
        out = None
        for first in starts:
            del out  # free it before the next chunk
            if name == "foveate":
                some = slice(0, min(plan.chunk, tokens - first))
                index = inputs.index_q[:, some], inputs.index_k, inputs.index_weights[:, some], plan.top_k
                q, entries = inputs.q[:, :, some], inputs.compressed[:, 0]
                out = csa.forward(q, entries, *index, ratio=plan.ratio, offset=first, **how).out
            else:
                out = attend(first, select(first)).out
        return out

    ms, peak, out = bench.timed(plan, layer, bench.ALONE)
    error = _error(plan, inputs, out, starts[-1], select(starts[-1]))
    del out
    indexer_ms, _, selected = bench.timed(plan, lambda: [select(first) for first in starts], bench.ALONE)
    attention_ms, _, _ = bench.timed(
        plan, lambda: [attend(*chunk).lse for chunk in zip(starts, selected, strict=True)], bench.ALONE
    )
    return {
        "ms": ms,
        "indexer_ms": indexer_ms,
        "attention_ms": attention_ms,
        "peak_bytes": peak,
        "error": error,
    }


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

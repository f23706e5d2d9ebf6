"""The lightning indexer: time, useful arithmetic, peak memory and exactness of its paths (StreamIndex, section 6)."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foveate import csa, ops
from foveate.evaluation import accounting
from foveate.evaluation.errors import UserError

BENCH = "indexer"
IMPLEMENTATIONS = {"foveate": "fused", "chunked": "chunked", "materialised": "materialised"}
TOKENS = (2048, 4096, 8192, 32768, 131072, 262144, 1048576)
_DTYPES = ("bfloat16", "float16", "float32")
_CHECKED = 64
"""Queries whose sets are compared with those of the same kernel's scores."""
_ROOM = 0.8
"""Share of a GPU's free memory that the materialised path may ask for."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure."""

    tokens: Sequence[int] = TOKENS
    implementations: Sequence[str] = tuple(IMPLEMENTATIONS)
    heads: int = 64
    dim: int = 128
    top_k: int = 512
    ratio: int = 4
    dtype: str = "bfloat16"
    repeats: int = 5
    seed: int = 0
    device: str = "cuda"

    def check(self) -> None:
        """Raises UserError naming what cannot be."""
        for name in ("heads", "dim", "top_k", "ratio", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(f"{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if not self.tokens or min(self.tokens) < self.ratio:
            raise UserError(f"tokens must be at least the ratio, {self.ratio}, not {list(self.tokens)}")
        if self.dtype not in _DTYPES:
            raise UserError(f"dtype must be one of {', '.join(_DTYPES)}, not '{self.dtype}'")
        strange = [name for name in self.implementations if name not in IMPLEMENTATIONS]
        if strange or not self.implementations:
            raise UserError(f"impl must be among {', '.join(IMPLEMENTATIONS)}, not {', '.join(strange) or 'none'}")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError("no CUDA device is here; --device cpu measures the references")


@torch.inference_mode()
def run(plan: Plan, say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Measure every implementation at every length that it has memory for; the baseline is the materialised path.

    Raises:
        UserError: for a plan that cannot be.
    """
    plan.check()
    ceiling = _matmul_rate(plan)
    rows = []
    for tokens in plan.tokens:
        q, k, weights = _draw(plan, tokens)
        flops = 2 * plan.heads * plan.dim * _pairs(tokens, plan.ratio)
        found: dict[str, dict[str, Any]] = {}
        for name in plan.implementations:
            if name == "materialised" and not _fits(plan, tokens):
                say(f"{name} at {tokens:,} tokens: products of {_products(plan, tokens) / 1e9:,.0f} GB do not fit")
                continue
            milliseconds, peak, recall = _measure(plan, IMPLEMENTATIONS[name], q, k, weights)
            say(f"{name} at {tokens:,} tokens: {milliseconds:,.2f} ms, {flops / milliseconds / 1e9:,.1f} TFLOP/s")
            found[name] = {"ms": milliseconds, "peak_bytes": peak, "recall_min": recall}
        baseline = next((name for name in ("materialised", "chunked", "foveate") if name in found), None)
        for name, measured in found.items():
            rows.append(
                {
                    "bench": BENCH,
                    "impl": name,
                    "case": {
                        "impl": name,
                        "tokens": tokens,
                        "heads": plan.heads,
                        "dim": plan.dim,
                        "top_k": plan.top_k,
                        "ratio": plan.ratio,
                        "dtype": plan.dtype,
                        "gpus": int(plan.device.startswith("cuda")),
                        "repeats": plan.repeats,
                        "seed": plan.seed,
                    },
                    **measured,
                    "peak_counts": "above the inputs, the result included",
                    "recall_counts": f"least of {min(_CHECKED, tokens)} queries, by the order of the kernel's scores",
                    "baseline": baseline,
                    "baseline_ms": found[baseline]["ms"],
                    "speedup": found[baseline]["ms"] / measured["ms"],
                    "gb_per_s": None,
                    "tflop_per_s": flops / measured["ms"] / 1e9,
                    "tflop_counts": "products with keys that a query may read",
                    "matmul_tflop_per_s": ceiling,
                    "of_matmul": flops / measured["ms"] / 1e9 / ceiling,
                    "device": accounting.device_name(plan.device),
                    "versions": accounting.versions(),
                    "commit": accounting.commit(),
                }
            )
    return rows


def _draw(plan: Plan, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of variance 1 / dim; weights of a fresh linear map, over sqrt(dim · heads) (section 6)."""
    generator = torch.Generator(plan.device).manual_seed(plan.seed)
    shapes = (1, tokens, plan.heads, plan.dim), (1, tokens // plan.ratio, plan.dim)
    q, k = (torch.empty(shape, dtype=getattr(torch, plan.dtype), device=plan.device) for shape in shapes)
    for x in (q, k):
        x.normal_(std=plan.dim**-0.5, generator=generator)
    weights = torch.empty(1, tokens, plan.heads, device=plan.device).uniform_(-1, 1, generator=generator)
    return q, k, weights.mul_((plan.dim * plan.heads) ** -0.5)


def _pairs(tokens: int, ratio: int) -> int:
    """Queries times the keys that each may read."""
    whole, rest = divmod(tokens + 1, ratio)  # query t reads (t + 1) // ratio keys, t + 1 = 1 .. tokens
    return ratio * whole * (whole - 1) // 2 + rest * whole


def _products(plan: Plan, tokens: int) -> int:
    """Bytes of the tensor that the materialised path makes."""
    return 4 * tokens * plan.heads * (tokens // plan.ratio)


def _fits(plan: Plan, tokens: int) -> bool:
    room = torch.cuda.mem_get_info(plan.device)[0] if plan.device.startswith("cuda") else 8 << 30
    return 2.2 * _products(plan, tokens) <= _ROOM * room  # the products, and as much again while they are weighted


def _measure(plan: Plan, path: str, q: Tensor, k: Tensor, weights: Tensor) -> tuple[float, int, float]:
    """Median milliseconds, peak bytes above the inputs, and the least recall of some queries."""

    def select() -> Tensor:
        return csa.lightning_indexer(q, k, weights, plan.top_k, ratio=plan.ratio, path=path)

    cuda = plan.device.startswith("cuda")
    memory = accounting.PeakMemory(plan.device)
    select()
    before = torch.cuda.memory_allocated(plan.device) if cuda else 0
    memory.start()
    found = select()
    peak = memory.peak() - before
    times = [accounting.milliseconds(select, plan.device) for _ in range(plan.repeats)]
    return statistics.median(times), peak, _recall(plan, found, q, k, weights)


def _recall(plan: Plan, found: Tensor, q: Tensor, k: Tensor, weights: Tensor) -> float:
    """The least share of a query's set that the order of the scores themselves asks for, over some queries."""
    tokens, least = q.shape[1], 1.0
    count = min(_CHECKED, tokens)
    for place in range(count):
        t = (place + 1) * tokens // count - 1
        keys = k[:, : max(1, (t + 1) // plan.ratio)]
        scores = ops.indexer_scores(q[:, t : t + 1], keys, weights[:, t : t + 1], ratio=plan.ratio, offset=t).scores
        visible = (t + 1) // plan.ratio
        order = scores[0, 0, :visible].sort(descending=True, stable=True).indices[: plan.top_k]
        if len(order):
            least = min(least, torch.isin(order, found[0, t].long()).double().mean().item())
    return least


def _matmul_rate(plan: Plan) -> float:
    """TFLOP/s of a large product of the same dtype, measured here: what this device can do at most."""
    size = 8192 if plan.device.startswith("cuda") else 512
    a, b = (torch.randn(size, size, device=plan.device).to(getattr(torch, plan.dtype)) for _ in range(2))
    times = [accounting.milliseconds(lambda: a @ b, plan.device) for _ in range(12)]
    return 2 * size**3 / statistics.median(times[2:]) / 1e9

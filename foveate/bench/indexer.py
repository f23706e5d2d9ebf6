"""The lightning indexer: time, useful arithmetic, peak memory and exactness of its paths (StreamIndex, section 6)."""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from foveate import csa, ops
from foveate.evaluation import accounting
from foveate.evaluation.errors import UserError

BENCH = "indexer"
IMPLEMENTATIONS = {"foveate": "fused", "chunked": "chunked", "materialised": "materialised"}
TOKENS = (2048, 4096, 8192, 32768, 131072, 262144, 1048576)
_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")
_CHECKED = 64
"""Queries whose sets are compared with those of the same kernel's scores."""
_TOGETHER = 64
"""Queries and keys at least that the kernel for many is asked for."""
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

    Under torchrun the queries are sharded over its ranks, and the keys are on all of them: foveate alone can do that.
    The slowest rank counts, and the first one returns the rows, the others none.

    Raises:
        UserError: for a plan that cannot be.
    """
    plan.check()
    ranks = _Ranks.of(plan.device)
    if ranks.world > 1 and list(plan.implementations) != ["foveate"]:
        raise UserError("several ranks are for --impl foveate alone")
    plan = dataclasses.replace(plan, device=ranks.device)
    ceiling = matmul_rate(plan)
    rows = []
    for tokens in plan.tokens:
        inputs = _draw(plan, tokens, ranks)
        flops = 2 * plan.heads * plan.dim * pairs(tokens, plan.ratio)
        found: dict[str, dict[str, Any]] = {}
        for name in plan.implementations:
            if name == "materialised" and not _fits(plan, tokens):
                say(f"{name} at {tokens:,} tokens: products of {_products(plan, tokens) / 1e9:,.0f} GB do not fit")
                continue
            milliseconds, peak, recall = _measure(plan, IMPLEMENTATIONS[name], inputs, ranks)
            if not ranks.rank:
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
                        "gpus": ranks.world * int(plan.device.startswith("cuda")),
                        "ranks": ranks.world,
                        "repeats": plan.repeats,
                        "seed": plan.seed,
                    },
                    **measured,
                    "peak_counts": "above the inputs, the result included; of several ranks the most",
                    "recall_counts": f"least of at most {_CHECKED} queries a rank, by the kernel's own scores; "
                    "1 only if sets are equal",
                    "baseline": baseline,
                    "baseline_ms": found[baseline]["ms"],
                    "speedup": found[baseline]["ms"] / measured["ms"],
                    "gb_per_s": None,
                    "tflop_per_s": flops / measured["ms"] / 1e9,
                    "tflop_counts": "products with keys that a query may read",
                    "matmul_tflop_per_s": ceiling,
                    "of_matmul": flops / measured["ms"] / 1e9 / ceiling / ranks.world,
                    "device": accounting.device_name(plan.device),
                    "versions": accounting.versions(),
                    "commit": accounting.commit(),
                }
            )
    ranks.end()
    if not rows:
        raise UserError("nothing was measured: no implementation has the memory")
    return [] if ranks.rank else rows


class _Ranks(NamedTuple):
    """The processes of torchrun, or this one alone."""

    rank: int
    world: int
    device: str
    own: bool = False
    """Whether the process group is of this run alone."""

    @classmethod
    def of(cls, device: str) -> _Ranks:
        world = int(os.environ.get("WORLD_SIZE", 1))
        if world == 1:
            return cls(0, 1, device)
        if device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        own = not dist.is_initialized()
        if own:
            dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
        return cls(dist.get_rank(), world, device, own)

    def worst(self, value: float, least: bool = False) -> float:
        """The largest of all ranks, or the least."""
        if self.world == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, dist.ReduceOp.MIN if least else dist.ReduceOp.MAX)
        return shared.item()

    def end(self) -> None:
        if self.own:
            dist.destroy_process_group()


ALONE = _Ranks(0, 1, "")


class _Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    weights: Tensor
    key_scales: Tensor | None
    pieces: list[tuple[int, int]]
    """The positions of the queries."""


def _draw(plan: Plan, tokens: int, ranks: _Ranks) -> _Inputs:
    """Queries and keys of variance 1 / dim; weights of a fresh linear map, over sqrt(dim · heads) (section 6)."""
    pieces = csa.pieces(tokens, ranks.rank, ranks.world) if ranks.world > 1 else [(0, tokens)]
    number = sum(stop - start for start, stop in pieces)
    eighths = plan.dtype == "float8_e4m3fn"
    dtype = torch.bfloat16 if eighths else getattr(torch, plan.dtype)
    of_keys, of_queries = (
        torch.Generator(plan.device).manual_seed(seed) for seed in (plan.seed, plan.seed + 1 + ranks.rank)
    )
    k = torch.empty(1, tokens // plan.ratio, plan.dim, dtype=dtype, device=plan.device)
    q = torch.empty(1, number, plan.heads, plan.dim, dtype=dtype, device=plan.device)
    k.normal_(std=plan.dim**-0.5, generator=of_keys)
    q.normal_(std=plan.dim**-0.5, generator=of_queries)
    weights = torch.empty(1, number, plan.heads, device=plan.device).uniform_(-1, 1, generator=of_queries)
    weights.mul_((plan.dim * plan.heads) ** -0.5)
    if not eighths:
        return _Inputs(q, k, weights, None, pieces)
    k8, of_k = csa.to_fp8(k)
    q8 = torch.empty_like(q, dtype=k8.dtype)
    for first in range(0, number, 16384):  # in parts, which take less memory
        some = slice(first, first + 16384)
        q8[:, some], of_q = csa.to_fp8(q[:, some])
        weights[:, some] *= of_q
    return _Inputs(q8, k8, weights, of_k, pieces)


def pairs(tokens: int, ratio: int) -> int:
    """Queries times the keys that each may read."""
    whole, rest = divmod(tokens + 1, ratio)  # query t reads (t + 1) // ratio keys, t + 1 = 1 .. tokens
    return ratio * whole * (whole - 1) // 2 + rest * whole


def _products(plan: Plan, tokens: int) -> int:
    """Bytes of the tensor that the materialised path makes."""
    return 4 * tokens * plan.heads * (tokens // plan.ratio)


def _fits(plan: Plan, tokens: int) -> bool:
    room = torch.cuda.mem_get_info(plan.device)[0] if plan.device.startswith("cuda") else 8 << 30
    return 2.2 * _products(plan, tokens) <= _ROOM * room  # the products, and as much again while they are weighted


def _measure(plan: Plan, path: str, inputs: _Inputs, ranks: _Ranks) -> tuple[float, int, float]:
    """Median milliseconds, peak bytes above the inputs, and the least recall of some queries."""
    q, k, weights, key_scales, pieces = inputs

    def select() -> Tensor:
        how = {"ratio": plan.ratio, "key_scales": key_scales}
        if ranks.world > 1:
            return csa.sharded_lightning_indexer(q, k, weights, plan.top_k, pieces=pieces, **how)
        return csa.lightning_indexer(q, k, weights, plan.top_k, path=path, **how)

    milliseconds, peak, found = timed(plan, select, ranks)
    return milliseconds, peak, ranks.worst(_recall(plan, found, inputs), least=True)


def timed(plan: Any, work: Callable[[], Tensor], ranks: _Ranks) -> tuple[float, int, Tensor]:
    """Median milliseconds, peak bytes above what was there before, and the result; `plan` has a device and repeats."""
    cuda, memory = plan.device.startswith("cuda"), accounting.PeakMemory(plan.device)
    work()
    before = torch.cuda.memory_allocated(plan.device) if cuda else 0
    memory.start()
    found = work()
    peak = memory.peak() - before
    times = []
    for _ in range(plan.repeats):
        ranks.worst(0.0)  # all begin together
        times.append(ranks.worst(accounting.milliseconds(work, plan.device)))
    return statistics.median(times), int(ranks.worst(peak)), found


def _recall(plan: Plan, found: Tensor, inputs: _Inputs) -> float:
    """The least share of a query's set that the order of the scores themselves asks for, over some queries; what is
    selected beside it counts against it."""
    q, k, weights, key_scales, pieces = inputs
    least, before = 1.0, 0
    for begin, end in pieces:
        count = min(_CHECKED // len(pieces), end - begin)
        for place in range(count):
            t = begin + (place + 1) * (end - begin) // count - 1
            visible, here = (t + 1) // plan.ratio, before + t - begin
            some, keys = slice(max(before, here + 1 - _TOGETHER), here + 1), slice(0, max(_TOGETHER, visible))
            scales = None if key_scales is None else key_scales[:, keys]
            how = {"ratio": plan.ratio, "offset": t - (here - some.start), "key_scales": scales}
            scores = ops.indexer_scores(q[:, some], k[:, keys], weights[:, some], **how).scores
            order = scores[0, -1, :visible].sort(descending=True, stable=True).indices[: plan.top_k]
            mine = found[0, here].long()
            if len(order):
                right = int(torch.isin(order, mine).sum())
                least = min(least, right / max(len(order), int((mine >= 0).sum())))
        before += end - begin
    return least


def matmul_rate(plan: Plan) -> float:
    """TFLOP/s of a large product of the same dtype, measured here: what this device can do at most."""
    size, dtype = 8192 if plan.device.startswith("cuda") else 512, getattr(torch, plan.dtype)
    a, b = (torch.randn(size, size, device=plan.device).to(dtype) for _ in range(2))
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=plan.device)
        product = functools.partial(torch._scaled_mm, a, b.T, one, one, out_dtype=torch.bfloat16)
    else:
        product = functools.partial(torch.mm, a, b)
    times = [accounting.milliseconds(product, plan.device) for _ in range(12)]
    return 2 * size**3 / statistics.median(times[2:]) / 1e9

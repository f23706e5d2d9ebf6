"""The lightning indexer: time, useful arithmetic, peak memory and exactness of its paths (StreamIndex, section 6).

python -m benchmarks.indexer --tokens 32768 --out runs/indexer.jsonl
torchrun --nproc-per-node 2 -m benchmarks.indexer --impl foveate --tokens 1048576 --out runs/two.jsonl
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from benchmarks import cold_cache_timing as cold
from benchmarks import csa_tables, peers
from foveate import csa, ops
from foveate.csa import indexer
from foveate.errors import UserError
from foveate.io import circumstances
from foveate.lab.bench.plan import Keep, Row, Say, measure
from foveate.lab.results import timing
from foveate.lab.results.measurements import speed_row

IMPLEMENTATIONS = {"foveate": "fused", "chunked": "chunked", "materialised": "materialised"}
_CHECKED = 64
"""Queries whose sets are compared with those of the same kernel's scores."""
_TOGETHER = 64
"""Queries and keys at least that the kernel for many is asked for."""
_LONGEST = 32768
"""Most tokens that the materialised path is tried with on a CPU, whose memory is that of all."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure; the sizes are DeepSeek-V4's."""

    tokens: Sequence[int] = (2048, 4096, 8192, 32768, 131072, 262144, 1048576)
    implementations: Sequence[str] | None = None
    """By default all of ours, and the peer if it can be measured."""
    heads: int = 64
    dim: int = 128
    top_k: int = 512
    ratio: int = 4
    """Tokens a compressed key."""
    dtype: str = "bfloat16"
    repeats: int = 5
    seed: int = 0
    device: str = "cuda"


@torch.inference_mode()
def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """Measure every implementation at every length that it has memory for; the baseline is the materialised path.

    Under torchrun the queries are sharded over its ranks, and the keys are on all of them: foveate alone can do that.
    The slowest rank counts, and the first one keeps and returns the rows, the others none.

    Raises:
        UserError: for a plan that cannot be.
    """
    ranks = _Ranks.of(plan.device)
    if ranks.world > 1 and list(plan.implementations or ()) != ["foveate"]:
        raise UserError("several ranks are for --impl foveate alone")
    plan = dataclasses.replace(plan, device=ranks.device, implementations=_able(plan, say))
    ceiling = matmul_rate(plan.dtype, plan.device)
    rows: list[Row] = []
    for tokens in plan.tokens:
        inputs = _draw(plan, tokens, ranks)
        flops, moved = 2 * plan.heads * plan.dim * pairs(tokens, plan.ratio), _bytes(plan, tokens, inputs, ranks)
        found: dict[str, dict[str, Any]] = {}
        without: list[str] = []
        for name in plan.implementations:
            if name == "materialised" and tokens > _LONGEST and not plan.device.startswith("cuda"):
                say(f"{name} at {tokens:,} tokens: left out, it does not fit into memory")
                continue
            try:
                found[name] = _measure(plan, name, inputs, ranks)
            except torch.cuda.OutOfMemoryError as error:
                if ranks.world > 1:  # the others wait for this one
                    raise
                say(f"{name} at {tokens:,} tokens: out of memory ({error})")
                without.append(name)
                continue
            parts = _parts(plan, inputs, ranks) if name == "foveate" else (None, None)
            found[name] |= dict(zip(("score_ms", "select_ms"), parts))
            if not ranks.rank:
                ms = found[name]["ms"]
                say(f"{name} at {tokens:,} tokens: {ms:,.2f} ms, {flops / ms / 1e9:,.1f} TFLOP/s")
        baseline = next((name for name in ("materialised", peers.NAME, "chunked", "foveate") if name in found), None)
        fresh = []
        for name, measured in found.items():
            rate = flops / measured["ms"] / 1e9
            gpus = ranks.world * int(plan.device.startswith("cuda"))
            sizes = {
                name: getattr(plan, name) for name in ("heads", "dim", "top_k", "ratio", "dtype", "repeats", "seed")
            }
            sizes |= {"gpus": gpus, "ranks": ranks.world}
            ties = "ties to any" if name == peers.NAME else "1 only if sets are equal"
            fresh.append(
                speed_row(
                    "indexer",
                    {"impl": name, "tokens": tokens, **sizes},
                    plan.device,
                    baseline=(baseline, found[baseline]["ms"]),
                    impl=name,
                    out_of_memory=without,
                    **measured,
                    peak_counts="above the inputs, the result included; of several ranks the most",
                    recall_counts=f"least of at most {_CHECKED} queries a rank, by the kernel's own scores; {ties}",
                    gb_per_s=moved / measured["ms"] / 1e6,
                    gb_counts="what must be moved at least: queries, keys (on each rank), weights and scales read, "
                    "scores of keys that a query may read and the selection written, each once",
                    tflop_per_s=rate,
                    tflop_counts="products with keys that a query may read",
                    matmul_tflop_per_s=ceiling,
                    of_matmul=rate / ceiling / ranks.world,
                )
            )
        if not ranks.rank:
            keep(fresh)
        rows += fresh
    ranks.end()
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
    """Queries and keys of variance 1 / dim; weights as a fresh linear map makes them of hidden states of variance 1,
    normal with variance 1 / 3, over sqrt(dim · heads) (section 6)."""
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
    weights = torch.empty(1, number, plan.heads, device=plan.device).normal_(std=3**-0.5, generator=of_queries)
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


def _bytes(plan: Plan, tokens: int, inputs: _Inputs, ranks: _Ranks) -> float:
    """See ``gb_counts`` of a row."""
    of_queries = inputs.q.nbytes + inputs.weights.nbytes + 4 * plan.top_k * inputs.q.shape[1]
    of_keys = inputs.k.nbytes + (0 if inputs.key_scales is None else inputs.key_scales.nbytes)
    return of_queries * tokens / inputs.q.shape[1] + of_keys * ranks.world + 4 * pairs(tokens, plan.ratio)


def _able(plan: Plan, say: Say) -> tuple[str, ...]:
    """The names of what is measured: all that was asked for, or all that can be."""
    asked = plan.implementations
    if peers.NAME not in (asked or (peers.NAME,)):
        return tuple(asked)
    obstacle = peers.obstacle(plan.heads, plan.dim, plan.dtype)
    if asked is None:
        if obstacle:
            say(f"{peers.NAME} is left out: {obstacle}")
        return (*IMPLEMENTATIONS, *([] if obstacle else [peers.NAME]))
    if obstacle:
        raise UserError(f"{peers.NAME}: {obstacle}")
    return tuple(asked)


def _measure(plan: Plan, name: str, inputs: _Inputs, ranks: _Ranks) -> dict[str, Any]:
    """Median milliseconds, peak bytes above the inputs, the least recall of some queries, and the number of those
    that took other keys than the order says among ones with equal scores."""
    q, k, weights, key_scales, pieces = inputs
    of_peer = name == peers.NAME

    def select() -> Tensor:
        if of_peer:
            return peers.select(q[0], k[0], weights[0], key_scales[0], plan.top_k, plan.ratio)[None]
        how = {"ratio": plan.ratio, "key_scales": key_scales}
        if ranks.world > 1:
            return csa.sharded_lightning_indexer(q, k, weights, plan.top_k, pieces=pieces, **how)
        return csa.lightning_indexer(q, k, weights, plan.top_k, path=IMPLEMENTATIONS[name], **how)

    milliseconds, peak, found = timed(plan, select, ranks)
    recall, other_ties = _recall(plan, found, inputs, _own_scores(plan, name, inputs), of_peer)
    recall, other_ties = ranks.worst(recall, least=True), int(ranks.worst(other_ties))
    return {"ms": milliseconds, "peak_bytes": peak, "recall_min": recall, "other_ties": other_ties}


def _parts(plan: Plan, inputs: _Inputs, ranks: _Ranks) -> tuple[float, float]:
    """Median milliseconds of scoring alone and of selection alone, over the blocks that the fused path makes: each
    block is scored and then selected from, and the times of either are added up."""
    q, k, weights, key_scales, pieces = inputs
    mark, between = cold.marks(plan.device)

    def once() -> tuple[float, float]:
        times, before = [], 0
        for begin, end in pieces:
            for some in indexer.cuts(end - begin, 1, k.shape[1], plan.ratio, begin):
                at, rows = begin + some.start, slice(before + some.start, before + some.stop)
                keys = k[:, : (begin + some.stop) // plan.ratio]
                scales = None if key_scales is None else key_scales[:, : keys.shape[1]]
                how = {"ratio": plan.ratio, "offset": at, "key_scales": scales}
                times.append([mark()])
                scores, maxima, _ = ops.score.indexer_scores(q[:, rows], keys, weights[:, rows], **how)
                times[-1].append(mark())
                visible = ops.score.visible_keys(some.stop - some.start, keys.shape[1], plan.ratio, at, q.device)
                ops.select.topk_of_blocks(scores, maxima, visible, plan.top_k, ops.score.INDEXER_BLOCK)
                times[-1].append(mark())
                del scores, maxima  # before the next are made
            before += end - begin
        scored = sum(between(start, middle) for start, middle, _ in times)
        return ranks.worst(scored), ranks.worst(sum(between(middle, end) for _, middle, end in times))

    once()
    scored, selected = zip(*(once() for _ in range(plan.repeats)))
    return statistics.median(scored), statistics.median(selected)


def timed(plan: Any, work: Callable[[], Tensor], ranks: _Ranks) -> tuple[float, int, Tensor]:
    """Median milliseconds, peak bytes above what was there before, and the result; `plan` has a device and repeats."""
    memory = circumstances.PeakMemory(plan.device)
    work()
    memory.start()
    found = work()
    peak = memory.added()
    times = []
    for _ in range(plan.repeats):
        ranks.worst(0.0)  # all begin together
        times.append(ranks.worst(timing.milliseconds(work, plan.device)))
    return statistics.median(times), int(ranks.worst(peak)), found


def _recall(
    plan: Plan, found: Tensor, inputs: _Inputs, own: Callable[[slice, int], Tensor], any_ties: bool
) -> tuple[float, int]:
    """The least share of a query's set that its scores ask for, over some queries; what is selected beside it counts
    against it. ``own`` gives the scores; of keys with the k-th score the first ones have to be taken, or, with
    ``any_ties``, as many as belong in.

    Returns:
        That share, and the number of queries whose set is not that of the order, but is one by the scores.
    """
    least, others, before = 1.0, 0, 0
    for begin, end in inputs.pieces:
        count = min(_CHECKED // len(inputs.pieces), end - begin)
        for place in range(count):
            t = begin + (place + 1) * (end - begin) // count - 1
            visible, here = (t + 1) // plan.ratio, before + t - begin
            if not visible:
                continue
            scores = own(slice(max(before, here + 1 - _TOGETHER), here + 1), t)[:visible]
            strict, fair, whole = (int(number) for number in hits(found[0, here : here + 1], scores[None], plan.top_k))
            least = min(least, (fair if any_ties else strict) / whole)
            others += strict < fair == whole
        before += end - begin
    return least, others


def hits(found: Tensor, scores: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """How many keys of selected sets are those that scores ask for.

    Args:
        found: ``[S, top_k]``, the keys that are selected for each query; -1 for none.
        scores: fp32 ``[S, T]``, -inf where a query may not look.

    Returns:
        Each ``[S]``: the hits where of keys with the k-th score the first ones are asked for; the hits where as many as
        belong in are, whichever; and the keys that are asked for or, if these are more, selected.
    """
    number, (best, order) = scores.shape[1], (x[:, :top_k] for x in scores.sort(dim=1, descending=True, stable=True))
    asked = (~best.isneginf()).sum(1)
    taken = torch.zeros(len(found), number + 1, dtype=torch.bool, device=found.device)
    taken.scatter_(1, found.long().where((found >= 0) & (found < number), number), True)
    taken = taken[:, :number]
    strict = (taken.gather(1, order) & ~best.isneginf()).sum(1)
    least = best.gather(1, (asked - 1).clamp_min(0)[:, None])
    better = scores > least
    fair = (taken & better).sum(1) + (taken & (scores == least)).sum(1).minimum(asked - better.sum(1))
    return strict, fair, asked.maximum((found >= 0).sum(1))


def _own_scores(plan: Plan, name: str, inputs: _Inputs) -> Callable[[slice, int], Tensor]:
    """What gives the scores of the last of some queries, which is at position t, as an implementation computes them."""
    q, k, weights, key_scales, _ = inputs
    if name == "materialised":  # of all queries at once, as it does
        every = indexer.materialised_scores(q, k, weights, key_scales)[0]
        return lambda some, t: every[some.stop - 1]

    def of_kernel(some: slice, t: int) -> Tensor:
        visible, first = (t + 1) // plan.ratio, t + 1 - (some.stop - some.start)
        if name == peers.NAME:
            bounds = torch.arange(first + 1, t + 2, dtype=torch.int32, device=q.device) // plan.ratio
            return peers.scores(q[0, some], k[0], weights[0, some], key_scales[0], bounds, visible)[-1]
        keys = slice(0, max(_TOGETHER, visible))
        scales = None if key_scales is None else key_scales[:, keys]
        how = {"ratio": plan.ratio, "offset": first, "key_scales": scales}
        return ops.score.indexer_scores(q[:, some], k[:, keys], weights[:, some], **how).scores[0, -1]

    return of_kernel


def matmul_rate(name: str, device: str) -> float:
    """TFLOP/s of a large product in a number format, measured here: what this device can do at most."""
    size, dtype = 8192 if device.startswith("cuda") else 128, getattr(torch, name)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=device)
        product = functools.partial(torch._scaled_mm, a, b.T, one, one, out_dtype=torch.bfloat16)
    else:
        product = functools.partial(torch.mm, a, b)
    times = [timing.milliseconds(product, device) for _ in range(12)]
    return 2 * size**3 / statistics.median(times[2:]) / 1e9


def main(
    tokens: Annotated[list[int], typer.Option(help="Length of the context; may be repeated.")] = Plan.tokens,
    impl: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(IMPLEMENTATIONS)} or {peers.NAME} (fp8); may be repeated.")
    ] = None,
    top_k: int = Plan.top_k,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or float8_e4m3fn.")] = Plan.dtype,
    repeats: int = Plan.repeats,
    out: Path | None = None,
) -> None:
    """Measure implementations of the lightning indexer at several lengths."""
    measure(
        "indexer",
        run,
        Plan(tokens, impl or None, top_k=top_k, dtype=dtype, repeats=repeats),
        out,
        csa_tables.indexer_lengths,
    )


if __name__ == "__main__":
    typer.run(main)

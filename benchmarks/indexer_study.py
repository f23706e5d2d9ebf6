"""What the lightning indexer's settings cost, and what goes wrong without its parts (StreamIndex, tables 6 and 7).

python -m benchmarks.indexer_study --out benchmarks/results/indexer-study.jsonl
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor

from benchmarks import csa_tables
from benchmarks import indexer as bench
from foveate import csa, ops
from foveate.csa import indexer
from foveate.lab.bench.plan import Keep, Row, Say, measure
from foveate.lab.results.measurements import speed_row

TOP_K = (64, 256, 512, 1024, 2048)
CHUNKS = (1024, 4096, 16384)
LONG_CHUNKS = (*CHUNKS, 65536, 262144)
"""Of a long context, where a run takes a second or more: they are timed once."""
HELD = (64, 256, 512, 1024, 2048)
"""MB of scores that the fused path holds at once."""
TILE, SMALL_TILE = 1024, 256
"""Keys of a tile in the ablations; the smaller ones hold fewer keys than are to be selected."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings of the fused path at ``tokens``; ablations at ``small``; tiles of the chunked path at both."""

    tokens: int = 262144
    small: int = 16384
    heads: int = 64
    dim: int = 128
    top_k: int = 512
    """Where it is not what varies."""
    ratio: int = 4
    dtype: str = "bfloat16"
    repeats: int = 3
    seed: int = 0
    device: str = "cuda"

    def at(self, tokens: int) -> bench.Plan:
        shared = {name: value for name, value in vars(self).items() if name not in ("tokens", "small")}
        return bench.Plan((tokens,), ("foveate",), **shared)


@torch.inference_mode()
def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """A row for each value of each setting, and each ablation; recall is by the order of the kernel's own scores."""
    rows: list[Row] = []

    def add(
        study: str,
        value: Any,
        tokens: int,
        top_k: int,
        work: Callable[[], Tensor],
        recall: _Recall,
        how: Plan = plan,
    ) -> None:
        ms, peak, found = bench.timed(how, work, bench.ALONE)
        shares = recall(found)
        row = {"study": study, "value": value, "tokens": tokens, "top_k": top_k}
        case = {name: getattr(how, name) for name in ("heads", "dim", "ratio", "dtype", "repeats", "seed")}
        alike = (one["ms"] for one in rows if (one["case"]["study"], one["case"]["tokens"]) == (study, tokens))
        first = next(alike, ms)
        rows.append(
            speed_row(
                "indexer-study",
                row | case,
                plan.device,
                ms,
                ("the study's first", first),
                peak_bytes=peak,
                recall_mean=shares.sum().item() / len(shares),
                recall_min=shares.min().item(),
                recall_whole=int((shares == 1).sum()) / len(shares),
                recall_n=len(shares),
            )
        )
        keep(rows[-1:])
        mean = rows[-1]["recall_mean"]
        say(f"{study} {value} at {tokens:,} tokens: {ms:,.1f} ms, {peak / 1e9:.2f} GB, recall {mean:.4f}")

    def fused(top_k: int) -> Tensor:
        return _select(plan, large, top_k)

    def chunked(inputs: bench._Inputs) -> Tensor:
        return _select(plan, inputs, plan.top_k, "chunked")

    large, small = (bench._draw(plan.at(tokens), tokens, bench.ALONE) for tokens in (plan.tokens, plan.small))
    for top_k in TOP_K:
        add("top_k", top_k, plan.tokens, top_k, lambda top_k=top_k: fused(top_k), _Recall(plan, large, top_k))
    every = _Recall(plan, large, plan.top_k)
    for held in HELD:
        with patch.object(indexer, "SCORES_BYTES", held << 20):
            add("MB of scores held", held, plan.tokens, plan.top_k, lambda: fused(plan.top_k), every)
    once, some = dataclasses.replace(plan, repeats=1), _Recall(plan, large, plan.top_k, parts=16)
    every = _Recall(plan, small, plan.top_k)
    for name in ("QUERY_CHUNK", "KEY_CHUNK"):
        for chunk in CHUNKS:
            with patch.object(indexer, name, chunk):
                add(name.lower(), chunk, plan.small, plan.top_k, lambda: chunked(small), every)
        for chunk in LONG_CHUNKS:
            with patch.object(indexer, name, chunk):
                add(name.lower(), chunk, plan.tokens, plan.top_k, lambda: chunked(large), some, once)
    scores = every.scores()
    for name, work in ABLATIONS.items():
        add("ablation", name, plan.small, plan.top_k, lambda work=work: work(scores, plan.top_k), every)
    return rows


def _select(plan: Plan, inputs: bench._Inputs, top_k: int, path: str = "fused") -> Tensor:
    q, k, weights, key_scales, _ = inputs
    return csa.lightning_indexer(q, k, weights, top_k, ratio=plan.ratio, key_scales=key_scales, path=path)


class _Recall:
    """The share of a query's set that the kernel's own scores ask for, for all queries or, of long contexts, those of
    so many parts. What is selected beside it counts against it."""

    def __init__(self, plan: Plan, inputs: bench._Inputs, top_k: int, parts: int = 64):
        self.inputs, self.plan, self.top_k, self.parts = inputs, plan, top_k, parts

    def scores(self, queries: slice = slice(None)) -> Tensor:
        """fp32 ``[1, S, T]``, -inf where a query may not look."""
        q, k, weights, key_scales, _ = self.inputs
        first = queries.start or 0
        how = {"ratio": self.plan.ratio, "offset": first, "key_scales": key_scales}
        scores = ops.score.indexer_scores(q[:, queries], k, weights[:, queries], **how).scores
        visible = ops.score.visible_keys(scores.shape[1], k.shape[1], self.plan.ratio, first, k.device)
        return scores.masked_fill_(ops.score.unseen_keys(visible, None, k.shape[1]), float("-inf"))

    def __call__(self, found: Tensor) -> Tensor:
        total = found.shape[1]
        block, shares = 512, []
        starts = range(0, total, block) if total <= 32768 else range(0, total, max(block, total // self.parts))
        for start in starts:
            some = slice(start, min(start + block, total))
            scores = self.scores(some)[0]
            right, _, whole = bench.hits(found[0, some], scores, self.top_k)
            shares.append((right.double() / whole)[~scores.isneginf().all(1)])
        return torch.cat(shares)


def _merged(scores: Tensor, top_k: int, tile: int, skip: bool = False) -> Tensor:
    """Tile by tile, as the chunked path; `skip`: without tiles that have fewer keys than are to be selected, and with
    -1 for what is missing then."""
    best, taken = ops.select.StreamingTopK(top_k), 0
    for start in range(0, scores.shape[-1], tile):
        some = scores[..., start : start + tile]
        if skip and some.shape[-1] < top_k:
            continue
        best.update(some, start)
        taken += some.shape[-1]
    if not taken:
        return torch.full((*scores.shape[:2], top_k), -1, device=scores.device)
    return best.result()[0]


ABLATIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "none": lambda scores, top_k: _merged(scores, top_k, TILE),
    "A1: tiles are not merged": lambda scores, top_k: ops.topk(scores[..., :TILE].contiguous(), top_k),
    "A2: small tiles are skipped": lambda scores, top_k: _merged(scores, top_k, SMALL_TILE, skip=True),
    "A2, control: they are not": lambda scores, top_k: _merged(scores, top_k, SMALL_TILE),
    "A3: scores in fp16": lambda scores, top_k: _merged(scores.half(), top_k, TILE),
}


def main(out: Path | None = None) -> None:
    """Measure every setting and ablation."""
    measure("indexer-study", run, Plan(), out, csa_tables.indexer_study)


if __name__ == "__main__":
    typer.run(main)

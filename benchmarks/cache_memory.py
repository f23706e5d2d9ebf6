"""Bytes of a cache while a prompt and its answer come, by method, and what of them is in host memory.

    python -m benchmarks.cache_memory benchmarks/results/cache-memory.jsonl --model DIR --device cpu
    python -m benchmarks.cache_memory benchmarks/results/cache-memory.jsonl --out docs/figures/cache-memory.png

The bytes follow from the model's shape and the method; CUDA graphs reserve up to 256 tokens more. Under
``offload`` a share of the pages stays on the device; where that is a CPU, both sides are host memory.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import foveate
from foveate.integrations.transformers.releases import CACHE
from foveate.io import circumstances, outfile
from foveate.lab.bench.models import ModelPlan, attach, generate
from foveate.lab.bench.plan import Row
from foveate.lab.report.markdown import made_with
from foveate.lab.report.plots import figure

KIND = "cache-memory"
METHODS = ("dense", "pages", "snapkv:top_k=0.25", "lte:score=key_norm,top_k=0.1")
OFFLOADED = "pages"
"""The method that is measured once more with its keys and values in host memory."""


@dataclasses.dataclass(frozen=True)
class Plan(ModelPlan):
    """What to measure: one prompt of random tokens, read in chunks, and an answer."""

    model: str
    methods: Sequence[str] = METHODS
    context: int = 2048
    new: int = 128
    chunk: int = 256
    hot: float = 0.3
    """Share of the pages that stay on the device."""
    dtype: str = "bfloat16"
    seed: int = 0
    device: str = "cuda"
    batches: Sequence[int] = (1,)

    @property
    def contexts(self) -> Sequence[int]:
        return (self.context,)

    @property
    def tokens(self) -> int:
        return self.new


@torch.inference_mode()
def run(plan: Plan) -> list[Row]:
    """A row for each method; its points are ``[tokens, bytes on the device, bytes in host memory]``.

    A pass of the prompt after which less is held than during it has two: the most that was held, then what is left.
    """
    plan.check()
    model = plan.load()
    ids = plan.prompts(model, 1, plan.context)
    rows = []
    for spec, offload in [*((spec, False) for spec in plan.specs()), (OFFLOADED, True)]:
        how: dict[str, Any] = {"offload": True, "gpu_budget": plan.hot} if offload else {"dense_below": 0}
        attach(model, plan, spec, **how)
        points: list[list[int]] = []

        def note(module: Any, args: Any, kwargs: Any, out: Any, points: list[list[int]] = points) -> None:
            cache, peak = getattr(out, CACHE), foveate.stats(model).summary().get("cache_peak_bytes") or 0
            held = [cache.get_seq_length(), cache.resident_bytes, cache.host_bytes]
            if peak > max([held[1], *(before for _, before, _ in points)]):
                points.append([held[0], peak, held[2]])
            points.append(held)

        hook = model.register_forward_hook(note, with_kwargs=True)
        try:
            generate(model, ids, plan.new, plan.chunk)
        finally:
            hook.remove()
            foveate.detach(model)
        case = plan.case(spec, plan.context, 1, new=plan.new, chunk=plan.chunk, hot=plan.hot if offload else None)
        rows.append({"kind": KIND, "case": case, "points": points, **circumstances.of(plan.device)})
    return rows


def draw(rows: Sequence[Row], out: Path) -> None:
    """A line for each method: bytes on the device against tokens, and of the offloaded cache those in host memory."""
    with figure.drawing(out, figure.height(1, len(rows) + 1)) as page:
        case = rows[0]["case"]
        facts = (
            f"{case['model']} · {case['context']:,} tokens of a prompt in chunks of {case['chunk']}, "
            f"then {case['new']} of the answer\n{made_with(rows)}; the bytes depend on shapes alone, not on the device"
        )
        figure.title(page, "Bytes of a cache while a prompt and its answer come", facts)
        (axis,) = figure.panels(page, 1)
        for row in rows:
            name = row["case"]["method"].partition(":")[0]
            tokens, device, host = zip(*row["points"], strict=True)
            color, offloaded = figure.look(name).color, row["case"]["hot"] is not None
            label = f"{name}, offloaded: on the device" if offloaded else name
            axis.plot(tokens, [x / 1e6 for x in device], color=color, ls="--" if offloaded else "-", label=label)
            if offloaded:
                axis.plot(tokens, [x / 1e6 for x in host], color=color, ls=":", label="and in host memory")
        axis.set_ylim(bottom=0)
        figure.name_axes([axis], "tokens", "MB")
        figure.legend(page, [axis])


def main(
    rows: Annotated[Path, typer.Argument(help="File of the rows.")],
    model: Annotated[str, typer.Option(help="Measure this folder, or shape, first.")] = "",
    device: str = Plan.device,
    out: Annotated[Path | None, typer.Option(help="Draw the rows (PNG).")] = None,
) -> None:
    """Measure what caches hold, or draw it."""
    if model:
        outfile.check(rows)
        measured = run(Plan(model=model, device=device))
        outfile.write(rows, "".join(f"{json.dumps(row)}\n" for row in measured).encode())
    if out:
        draw([json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()], out)


if __name__ == "__main__":
    typer.run(main)

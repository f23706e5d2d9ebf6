"""Tokens a second of a training step of hybrids: forward, backward and AdamW, as `foveate train` does them.

The tokens are random, and no data is read. Under torchrun every process has a GPU of its own, and they train together.
Rows are held against `transformer` of the same size.

    python -m benchmarks.hybrid_training --out benchmarks/results/hybrids-speed.jsonl
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

from benchmarks import cold_cache_timing as cold
from benchmarks import hybrid_tables
from foveate.hybrids.models import HybridConfig
from foveate.hybrids.ops.recur import rule_in_use
from foveate.hybrids.training import network
from foveate.hybrids.training.configuration import ModelSettings, OptimSettings
from foveate.hybrids.training.distributed import Parallel, Rank, joined
from foveate.hybrids.training.optim import adamw
from foveate.hybrids.training.sparsity import SparsityFeedback, SparsitySettings
from foveate.io import circumstances
from foveate.lab.bench import breakdown
from foveate.lab.bench.plan import Keep, Row, Say, measure
from foveate.lab.results.measurements import speed_row

BASELINE = "transformer"
TOKENS = {"tiny": 1024, "27M": 65536, "60M": 65536, "0.4B": 32768, "1.4B": 8192}
"""Tokens of a step of one device, by size: what fits into 80 GB."""
_WARM_UP = 5
_KERNELS = 25
"""Kernels that a profile lists."""
_NAME = 120
"""Characters of a kernel's name that are printed."""
_PEAKS = (  # dense bf16 FLOP/s by what the device's name contains
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("RTX 4090", 165e12),
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure: models as PRESET-SIZE."""

    models: Sequence[str] = (
        *("transformer-27M", "gdn_attn-27M", "gdn_swa-27M", "lalte-27M", "lansa-27M", "gdn-27M"),
        *("lalte-0.4B", "lalte-1.4B"),
    )
    tokens: int | None = None
    """Of a step of one device; by default what fits, by the size."""
    length: int = 2048
    steps: int = 10
    compile: bool = True
    profile: bool = False
    """List the kernels that a step spends most time in."""
    seed: int = 0
    device: str = "cuda"


def run(plan: Plan, say: Say = print, keep: Keep = lambda rows: None) -> list[Row]:
    """A row for each model; under torchrun the first process has them, and the others none."""
    rows: list[Row] = []
    with joined(plan.device) as place:
        for name in sorted(plan.models, key=lambda name: not name.startswith(f"{BASELINE}-")):
            tokens = plan.tokens or TOKENS[name.partition("-")[2]]
            measured = _measure(plan, name, tokens, place, say)
            if not place.first:
                continue
            row = _row(plan, name, tokens, place, measured, rows)
            say(
                f"{name}, {place.world} × {tokens:,} tokens a step: {row['tokens_per_s']:,.0f} tokens/s, "
                f"{row['ms']:,.1f} ms, peak {row['peak_bytes'] / 1e9:.1f} GB, delta rule by {row['gated_delta_rule']}"
            )
            keep([row])
            rows.append(row)
    return rows


def _measure(plan: Plan, name: str, tokens: int, place: Rank, say: Say) -> dict[str, Any]:
    preset, _, size = name.partition("-")
    torch.compiler.reset()
    cuda = place.device.type == "cuda"
    memory = circumstances.PeakMemory(str(place.device))
    memory.start()
    settings = ModelSettings(preset=preset, size=size)
    vocabulary = network.configuration(settings).vocab_size
    made = network.build(settings, vocabulary, 0, plan.length, plan.seed).to(place.device).train()
    parallel = Parallel(made, place)
    if plan.compile:
        made.compile()
    feedback = (
        SparsityFeedback(SparsitySettings(budget=made.config.lte_buffer)) if "lte" in made.config.mixers else None
    )
    generator = torch.Generator().manual_seed(plan.seed + place.rank)
    ids = torch.randint(vocabulary, (tokens // plan.length, plan.length), generator=generator).to(place.device)
    step = functools.partial(_step, parallel, adamw(made, OptimSettings()), feedback, ids)
    for _ in range(_WARM_UP):
        step()
    mark, between = cold.marks(str(place.device))
    moments = [mark()]
    for _ in range(plan.steps):  # the device is not waited for
        step()
        moments.append(mark())
    times = [between(start, end) for start, end in itertools.pairwise(moments)]
    peak = memory.peak()
    if plan.profile:
        stop, by = breakdown.watch(getattr(ProfilerActivity, "CUDA" if cuda else "CPU")), "device" if cuda else "cpu"
        step()
        table = stop().table(sort_by=f"self_{by}_time_total", row_limit=_KERNELS, max_name_column_width=_NAME)
        if place.first:
            say(table)
    mean = place.sum(torch.tensor(statistics.median(times), device=place.device)).item() / place.world
    return {
        "ms": mean,
        "ms_quartiles": statistics.quantiles(times, n=4) if len(times) > 1 else times * 3,
        "parameters": sum(parameter.numel() for parameter in made.parameters()),
        "multiplied": _multiplied(made),
        "gated_delta_rule": delta_rule(made.config, place.device, torch.bfloat16 if cuda else torch.float32),
        "peak_bytes": peak,
        "peak_counts": memory.kind,
    }


def _step(
    parallel: Parallel,
    optimizer: torch.optim.Optimizer,
    feedback: SparsityFeedback | None,
    ids: Tensor,
) -> None:
    """A step of the optimiser on one batch of each process; layers that evict have their penalty."""
    options = {"use_cache": False} | ({"output_retention": True} if feedback else {})
    with _autocast(parallel.network):
        made = parallel.model(input_ids=ids, labels=ids, **options)
    loss = made.loss
    if feedback:
        loss = loss + feedback.penalty(made.retention)
        feedback.observe(made.retention)
    loss.backward()
    parallel.clip(OptimSettings().clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if feedback:
        feedback.step()


def delta_rule(config: HybridConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """Which path runs a model's Gated DeltaNet; None without such layers."""
    if "gdn" not in config.mixers:
        return None
    return rule_in_use(device, config.gdn_heads, config.gdn_head_dim, config.gdn_head_dim, dtype)


def _autocast(model: nn.Module) -> contextlib.AbstractContextManager:
    """bf16 on a GPU, as `foveate train` has it by default."""
    kind = next(model.parameters()).device.type
    return torch.autocast(kind, torch.bfloat16) if kind == "cuda" else contextlib.nullcontext()


def _row(plan: Plan, name: str, tokens: int, place: Rank, measured: dict[str, Any], rows: Sequence[Row]) -> Row:
    preset, _, size = name.partition("-")
    ms = measured["ms"]
    together = 1000 * tokens * place.world / ms
    same = (row for row in rows if (row["case"]["preset"], row["case"]["size"]) == (BASELINE, size))
    base = next(same, None)
    base_rate = base["tokens_per_s"] if base else together
    flops = 6 * measured["multiplied"] * together
    peak = _peak_flops(place.device)
    cuda = place.device.type == "cuda"
    case = {
        "what": "training step",
        "phase": "training",
        "preset": preset,
        "size": size,
        "gpus": place.world * cuda,
        "processes": place.world,
        "tokens": tokens,
        "length": plan.length,
        "batch": tokens // plan.length,
        "compile": plan.compile,
        "dtype": "bfloat16" if cuda else "float32",
    }
    return speed_row(
        "hybrids",
        case | {"seed": plan.seed, "device": plan.device},
        str(place.device),
        baseline=(BASELINE if base or preset == BASELINE else preset, base["ms"] if base else ms),
        **measured,
        tokens_per_s=together,
        peak_share=flops / (peak * place.world) if peak else None,
        peak_share_counts="6 FLOP a multiplied weight and token, over the devices' dense bf16 FLOP/s",
        tflop_per_s=flops / 1e12,
    ) | {"speedup": together / base_rate, "speedup_counts": "tokens a second over those of the baseline"}


def _multiplied(network: nn.Module) -> int:
    """Weights that multiply each token: matrices, without the embedding unless it is the head as well."""
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    left_out = embedding.weight.numel() if head is None or head.weight is not embedding.weight else 0
    return sum(parameter.numel() for parameter in network.parameters() if parameter.ndim >= 2) - left_out


def _peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a device; None where they are not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in _PEAKS if part in name), None)


def main(
    train: Annotated[list[str], typer.Option(help="A model, such as lalte-27M; may be repeated.")] = Plan.models,
    profile: Annotated[
        bool, typer.Option("--profile", help="List the kernels that most of a step's time goes to.")
    ] = False,
    out: Path | None = None,
) -> None:
    """Measure training steps."""
    measure("hybrids", run, Plan(train, profile=profile), out, hybrid_tables.training)


if __name__ == "__main__":
    typer.run(main)

"""`foveate bench ...`: one command for each question."""

from __future__ import annotations

from pathlib import Path

import typer

from foveate.bench import options
from foveate.bench.running import Choice, Given, command, measure

app = typer.Typer(no_args_is_help=True, help="Measure speed, and what the scores of pages miss.")


@command(app, "cpu-decode", options.CpuDecode)
def cpu_decode(given: Given, out: Path | None) -> None:
    """Decode steps of a real model on the CPU: dense, sparse and Transformers' own path."""
    from foveate.bench import cpu_decode as bench

    measure(out, (bench.run, bench.Plan.of(given)))


PREFILL = Choice(
    "level",
    "kernel (attention of a layer) or model (time to the first token).",
    "kernel",
    {"kernel": options.Prefill, "model": options.PrefillModel},
)


@command(app, "prefill", PREFILL)
def prefill(given: Given, out: Path | None) -> None:
    """A prompt: its attention, beside the fastest dense there is, or a model's time to the first token."""
    from foveate.bench import prefill, prefill_model
    from foveate.report.tables.prefill import table

    bench = prefill_model if given["level"] == "model" else prefill
    measure(out, (bench.run, bench.Plan.of(given)), markdown=table)


DECODE = Choice(
    "level",
    "kernel, layer (as a model decodes, with its bookkeeping) or model.",
    "kernel",
    {"kernel": options.Decode, "layer": options.Decode, "model": options.DecodeModel},
)


@command(app, "decode", DECODE)
def decode(given: Given, out: Path | None) -> None:
    """A decode step: its attention, beside the fastest dense there is, or tokens a second of a model's generate."""
    from foveate.bench import decode, decode_model
    from foveate.report.tables.decode import table

    if given["level"] == "model":
        measure(out, (decode_model.run, decode_model.Plan.of(given)), markdown=table)
    else:
        measure(out, (decode.run, decode.Plan.of(given, level=given["level"])), markdown=table)


@command(app, "indexer", options.Indexer)
def indexer(given: Given, out: Path | None) -> None:
    """The lightning indexer of compressed sparse attention: time, arithmetic, memory, exactness."""
    from foveate.bench import indexer as bench

    measure(out, (bench.run, bench.Plan.of(given)))


@command(app, "indexer-study", options.IndexerStudy)
def indexer_study(given: Given, out: Path | None) -> None:
    """The indexer's settings and ablations: time, memory and recall (StreamIndex, tables 6 and 7)."""
    from foveate.bench import indexer_study as bench

    measure(out, (bench.run, bench.Plan.of(given)), markdown=bench.tables)


@command(app, "csa-model", options.CsaModel)
def csa_model(given: Given, out: Path | None) -> None:
    """DeepSeek-V4 with random weights and less width: long prompts in bounded memory, beside Transformers' own path."""
    from foveate.bench import csa_model as bench

    measure(out, (bench.run, bench.Plan.of(given)), markdown=bench.table)


@command(app, "csa", options.CsaLayer)
def csa(given: Given, out: Path | None) -> None:
    """A layer of compressed sparse attention: the indexer and the attention over what it selects."""
    from foveate.bench import csa_layer as bench

    measure(out, (bench.run, bench.Plan.of(given)))


HYBRIDS = Choice(
    "phase",
    "decode and prefill (attention of a layer), memory (a growing sequence's cache) or training (steps).",
    ("decode", "prefill"),
    {
        "decode": options.Hybrids,
        "prefill": options.Hybrids,
        "memory": options.HybridMemory,
        "training": options.HybridTraining,
    },
)


@command(app, "hybrids", HYBRIDS)
def hybrids(given: Given, out: Path | None) -> None:
    """Hybrids: attention of their layers beside a window and dense, caches over long sequences, training steps."""
    from foveate.bench import hybrid_memory, hybrid_training, hybrids

    runs = []
    if phases := tuple(name for name in given["phase"] if HYBRIDS.plans[name] is options.Hybrids):
        runs.append((hybrids.run, hybrids.Plan.of(given, phases=phases)))
    if "memory" in given["phase"]:
        runs.append((hybrid_memory.run, hybrid_memory.Plan.of(given)))
    if "training" in given["phase"]:
        runs.append((hybrid_training.run, hybrid_training.Plan.of(given)))
    for _, plan in runs:
        plan.check()
    measure(out, *runs)


@command(app, "page-scores", options.PageScores)
def page_scores(given: Given, out: Path | None) -> None:
    """Attention missed by each score of LuKA's pages at the same number of keys read."""
    from transformers.utils import logging

    from foveate.bench import page_scores as bench
    from foveate.report.tables.general import tables

    logging.disable_progress_bar()
    measure(out, (bench.run, bench.Plan.of(given)), markdown=tables)

"""`foveate bench ...`: one command for each question."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from foveate.bench.level_commands import decode, prefill
from foveate.bench.running import Methods, Model, Out, flag, kept, measure

app = typer.Typer(no_args_is_help=True, help="Measure speed, and what the scores of pages miss.")


@app.command("cpu-decode")
def cpu_decode(
    model: Model,
    data: Annotated[Path, typer.Option(help="Folder with books.", show_default=False)],
    context: Annotated[int, typer.Option(help="Prompt tokens.")] = 8000,
    steps: Annotated[int, typer.Option(help="Timed decode steps of each implementation.")] = 48,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
    method: Methods = None,
    out: Out = None,
) -> None:
    """Decode steps of a real model on the CPU: dense, sparse and Transformers' own path."""
    from foveate.bench import cpu_decode as bench

    measure(
        bench.BENCH,
        out,
        lambda say: bench.run(model, data, context, steps, method or bench.METHODS, threads, say),
    )


app.command("prefill")(prefill)
app.command("decode")(decode)


@app.command("indexer")
def indexer(
    tokens: Annotated[list[int] | None, typer.Option(help="Length of the context; may be given often.")] = None,
    impl: Annotated[
        list[str] | None,
        typer.Option(help="foveate, chunked, materialised or deepgemm+flashinfer (fp8); may be given often."),
    ] = None,
    heads: Annotated[int, typer.Option(help="Index heads.")] = 64,
    dim: Annotated[int, typer.Option(help="Dimensions of an index head.")] = 128,
    top_k: Annotated[int, typer.Option("--top-k", help="Keys a query.")] = 512,
    ratio: Annotated[int, typer.Option(help="Tokens a compressed key.")] = 4,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or float8_e4m3fn.")] = "bfloat16",
    repeats: Annotated[int, typer.Option(help="Timed runs.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    out: Out = None,
) -> None:
    """The lightning indexer of compressed sparse attention: time, arithmetic, memory, exactness."""
    from foveate.bench import indexer as bench

    lengths, names = tuple(tokens or bench.TOKENS), tuple(impl) if impl else None
    plan = bench.Plan(lengths, names, heads, dim, top_k, ratio, dtype, repeats, seed, device)
    measure(bench.BENCH, out, lambda say: bench.run(plan, say))


@app.command("indexer-study")
def indexer_study(
    tokens: Annotated[int, typer.Option(help="Length of the context for the fused path.")] = 262144,
    small: Annotated[int, typer.Option(help="The same for the chunked path and the ablations.")] = 16384,
    heads: Annotated[int, typer.Option(help="Index heads.")] = 64,
    dim: Annotated[int, typer.Option(help="Dimensions of an index head.")] = 128,
    top_k: Annotated[int, typer.Option("--top-k", help="Keys a query, where they are not what varies.")] = 512,
    ratio: Annotated[int, typer.Option(help="Tokens a compressed key.")] = 4,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or float8_e4m3fn.")] = "bfloat16",
    repeats: Annotated[int, typer.Option(help="Timed runs.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    out: Out = None,
) -> None:
    """The indexer's settings and ablations: time, memory and recall (StreamIndex, tables 6 and 7)."""
    from foveate.bench import indexer_study as bench

    plan = bench.Plan(tokens, small, heads, dim, top_k, ratio, dtype, repeats, seed, device)
    measure(bench.BENCH, out, lambda say: bench.run(plan, say), bench.tables)


@app.command("csa-model")
def csa_model(
    tokens: Annotated[list[int] | None, typer.Option(help="Prompt tokens; may be given often.")] = None,
    small: Annotated[int, typer.Option(help="Prompt tokens for both implementations; 0 for none.")] = 8192,
    chunk: Annotated[int, typer.Option(help="Prompt tokens of one forward.")] = 4096,
    layers: Annotated[int, typer.Option(help="Layers.")] = 43,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 1024,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 16,
    head_dim: Annotated[int, typer.Option(help="Dimensions of an attention head.")] = 512,
    experts: Annotated[int, typer.Option(help="Experts of a layer.")] = 16,
    index_heads: Annotated[int, typer.Option(help="Index heads.")] = 64,
    index_dim: Annotated[int, typer.Option(help="Dimensions of an index head.")] = 128,
    top_k: Annotated[int, typer.Option("--top-k", help="Entries a query.")] = 512,
    window: Annotated[int, typer.Option(help="Tokens of the window.")] = 128,
    steps: Annotated[int, typer.Option(help="Timed decode steps.")] = 16,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the prompt.")] = 0,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    out: Out = None,
) -> None:
    """DeepSeek-V4 with random weights and less width: long prompts in bounded memory, beside Transformers' own path."""
    from foveate.bench import csa_model as bench

    lengths = bench.TOKENS if tokens is None else tuple(tokens)
    plan = bench.Plan(
        tokens=lengths,
        small=small,
        chunk=chunk,
        layers=layers,
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        experts=experts,
        index_heads=index_heads,
        index_dim=index_dim,
        top_k=top_k,
        window=window,
        steps=steps,
        dtype=dtype,
        seed=seed,
        device=device,
    )
    measure(bench.BENCH, out, lambda say: bench.run(plan, say), bench.table)


@app.command("csa")
def csa(
    tokens: Annotated[list[int] | None, typer.Option(help="Length of the context; may be given often.")] = None,
    impl: Annotated[list[str] | None, typer.Option(help="foveate or reference; may be given often.")] = None,
    heads: Annotated[int, typer.Option(help="Query heads, which share one key head.")] = 64,
    dim: Annotated[int, typer.Option(help="Dimensions of a head.")] = 512,
    index_heads: Annotated[int, typer.Option(help="Index heads.")] = 64,
    index_dim: Annotated[int, typer.Option(help="Dimensions of an index head.")] = 128,
    top_k: Annotated[int, typer.Option("--top-k", help="Compressed keys a query.")] = 512,
    window: Annotated[int, typer.Option(help="Raw tokens a query sees, itself included.")] = 128,
    ratio: Annotated[int, typer.Option(help="Tokens a compressed key.")] = 4,
    chunk: Annotated[int, typer.Option(help="Queries at a time.")] = 16384,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    repeats: Annotated[int, typer.Option(help="Timed runs.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    out: Out = None,
) -> None:
    """A layer of compressed sparse attention: the indexer and the attention over what it selects."""
    from foveate.bench import csa_layer as bench

    lengths, names = tuple(tokens or bench.TOKENS), tuple(impl or bench.IMPLEMENTATIONS)
    settings = heads, dim, index_heads, index_dim, top_k, window, ratio, chunk, dtype, repeats, seed, device
    plan = bench.Plan(lengths, names, *settings)
    measure(bench.BENCH, out, lambda say: bench.run(plan, say))


@app.command("hybrids")
def hybrids(
    phase: Annotated[
        list[str] | None,
        typer.Option(
            help="decode and prefill (attention of a layer), memory (a growing sequence's cache) or training (steps); "
            "may be given often.",
            show_default="decode and prefill",
        ),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens of the prompt, and so far where native sparse decodes; may be given often (memory).",
            show_default="32768; in memory 4096 to 1048576, each four times the last",
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Sequences that decode; may be given often (decode).", show_default="32 and 64"),
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads (decode, prefill).", show_default="32")] = None,
    kv_heads: Annotated[
        int | None,
        typer.Option(help="KV heads of learned eviction and the window (decode, prefill).", show_default="8"),
    ] = None,
    nsa_kv_heads: Annotated[
        int | None, typer.Option(help="KV heads of native sparse attention (decode).", show_default="2")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Dimensions of a head (decode, prefill).", show_default="64")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            help="Tokens before its own that a query of learned eviction sees (decode, prefill).", show_default="768"
        ),
    ] = None,
    buffer: Annotated[
        int | None, typer.Option(help="Retained tokens per KV head (decode, prefill).", show_default="512")
    ] = None,
    half: Annotated[
        int | None, typer.Option(help="Retained tokens where the buffer is not full (decode).", show_default="256")
    ] = None,
    sliding: Annotated[
        int | None, typer.Option(help="Tokens of the sliding window (decode, prefill).", show_default="1024")
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(help="Tokens of a prompt that are offered to the buffer (prefill).", show_default="0.25"),
    ] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(help="A preset; may be given often (memory).", show_default="gdn_attn and lalte"),
    ] = None,
    size: Annotated[str | None, typer.Option(help="Size of the presets (memory).", show_default="27M")] = None,
    chunk: Annotated[
        int | None, typer.Option(help="Prompt tokens of one forward (memory).", show_default="4096")
    ] = None,
    train: Annotated[
        list[str] | None,
        typer.Option(
            help="A model to train, such as lalte-27M; may be given often (training).",
            show_default="six presets of 27M, lalte-0.4B and lalte-1.4B",
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of a step of one device (training).", show_default="by the size")
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a row (training).", show_default="2048")] = None,
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Compile the layers (training).", show_default="--compile"),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Generated tokens (memory) or timed steps (training).", show_default="16 and 10"),
    ] = None,
    profile: Annotated[
        bool | None,
        typer.Option("--profile", help="List the 25 kernels that a step spends most time in (training)."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, float16 or float32 (all but training).", show_default="bfloat16"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of inputs and weights.")] = 0,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    out: Out = None,
) -> None:
    """Hybrids: attention of their layers beside a window and dense, caches over long sequences, training steps."""
    from foveate.bench import hybrid_memory, hybrid_training
    from foveate.bench import hybrids as bench
    from foveate.results.errors import UserError, unknown

    phases = tuple(phase or bench.PHASES)
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "window": window, "buffer": buffer}
    shape |= {"sliding": sliding, "context": context, "dtype": dtype}
    of_memory = {"preset": preset, "size": size, "chunk": chunk, "context": context, "steps": steps, "dtype": dtype}
    of_training = {"train": train, "tokens": tokens, "length": length, "compile": compiled, "steps": steps}
    of_training |= {"profile": profile}
    own = {
        "decode": {**shape, "batch": batch, "nsa_kv_heads": nsa_kv_heads, "half": half},
        "prefill": {**shape, "share": share},
        hybrid_memory.PHASE: of_memory,
        hybrid_training.PHASE: of_training,
    }
    for name in phases:
        if name not in own:
            raise unknown("phase", name, own)
    used = {name for phase in phases for name in own[phase]}
    for name, value in {name: value for options in own.values() for name, value in options.items()}.items():
        if value is not None and name not in used:
            raise UserError(f"{flag(name)} does nothing in phase {' and '.join(phases)}")

    def plan(kind: Any, options: dict[str, Any]) -> Any:
        plurals = {"preset": "presets", "train": "models", "batch": "batches"}
        given = {plurals.get(name, name): value for name, value in options.items() if value is not None}
        return kind(**given, seed=seed, device=device)

    kernels = tuple(name for name in phases if name in bench.PHASES)
    plans = []
    if kernels:
        if len(context or ()) > 1:
            raise UserError(f"--context may be given often in phase {hybrid_memory.PHASE} alone")
        of_kernels = {**own["decode"], **own["prefill"], "context": context[0] if context else None, "phases": kernels}
        plans.append((bench.run, plan(bench.Plan, of_kernels)))
    if hybrid_memory.PHASE in phases:
        named = {("contexts" if name == "context" else name): value for name, value in of_memory.items()}
        plans.append((hybrid_memory.run, plan(hybrid_memory.Plan, named)))
    if hybrid_training.PHASE in phases:
        plans.append((hybrid_training.run, plan(hybrid_training.Plan, of_training)))
    for _, one in plans:
        one.check()
    keep = kept(out)

    def all_phases(say: Callable[[str], None]) -> list[dict[str, Any]]:
        return [row for run, one in plans for row in run(one, say, keep)]

    measure(bench.BENCH, out, all_phases)


@app.command("page-scores")
def page_scores(
    model: Model,
    data: Annotated[Path, typer.Option(help="Folder with the tasks' data.", show_default=False)],
    task: Annotated[
        list[str], typer.Option(help="Such as niah:split=multi,length=4096; may be given often.", show_default=False)
    ],
    page_size: Annotated[list[int] | None, typer.Option(help="Tokens of a page; may be given often.")] = None,
    budget: Annotated[list[float] | None, typer.Option(help="Share of the keys read; may be given often.")] = None,
    limit: Annotated[int, typer.Option(help="Items (wikisalad: examples of several questions) of each task.")] = 6,
    tokens: Annotated[int, typer.Option(help="Answer tokens looked at in each item.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the items and of the bootstrap.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    out: Out = None,
) -> None:
    """Attention missed by each score of LuKA's pages at the same number of keys read."""
    from transformers.utils import logging

    from foveate.bench import page_scores as bench
    from foveate.evaluation import tasks
    from foveate.report.tables.general import tables

    logging.disable_progress_bar()
    sizes, shares = tuple(page_size or bench.PAGE_SIZES), tuple(budget or bench.BUDGETS)
    chosen = tuple(tasks.parse(spec) for spec in task)
    plan = bench.Plan(model, data, chosen, sizes, shares, limit, tokens, seed, dtype, device)
    measure(bench.BENCH, out, lambda say: bench.run(plan, say), tables)

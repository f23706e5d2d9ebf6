"""`foveate bench ...`: one command for each question. torch is imported inside, so that help answers at once.

Attention of a layer alone is timed by `benchmarks/layer.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foveate.errors import UserError, unknown
from foveate.integrations.early import check_model
from foveate.io.outfile import announce

app = typer.Typer(no_args_is_help=True, help="Measure the speed of whole models.")

Out = Annotated[
    Path | None,
    typer.Option(help="File for the rows (JSON Lines), those of other cases stay in it.", callback=announce),
]
Methods = Annotated[list[str], typer.Option("--method", help="A method. May be repeated.")]
Contexts = Annotated[list[int], typer.Option("--context", min=1, help="Tokens so far. May be repeated.")]
Prompts = Annotated[list[int], typer.Option("--context", min=1, help="Prompt tokens. May be repeated.")]
Batches = Annotated[list[int], typer.Option("--batch", min=1, help="Sequences. May be repeated.")]
SHAPES = ("llama-3.1-8b", "qwen3-8b")
"""Models with random weights, by the names of their shapes (:mod:`foveate.lab.bench.models`)."""
Model = Annotated[str, typer.Option(help=f"Folder, or {' or '.join(SHAPES)} with random weights.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed runs.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the inputs.")]
Device = Annotated[str, typer.Option(help="cuda or cpu.")]


_DECODED = ("dense", "kascade", "luka")


@app.command("decode-model")
def decode_model(
    context: typer.Context,
    model: Model = "llama-3.1-8b",
    methods: Methods = _DECODED,
    contexts: Contexts = (32768,),
    batches: Batches = (1,),
    steps: Annotated[int, typer.Option(min=1, help="Timed tokens of a round.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="How often every method generates, one after the other.")] = 1,
    liger: Annotated[
        bool, typer.Option("--liger", help="Norms, rotations and MLPs by Liger's kernels, for all methods alike.")
    ] = False,
    dense_below: Annotated[
        str,
        typer.Option(help="Tokens of all sequences below which steps are dense, or auto: where methods are slower."),
    ] = "0",
    offload: Annotated[
        bool, typer.Option("--offload", help="Keys and values in host memory, beside Transformers' offloaded cache.")
    ] = False,
    memory: Annotated[str, typer.Option(help="With --offload, GPU memory to take at most, as 24GB.")] = "",
    gpu_budget: Annotated[str, typer.Option(help="With --offload, of the GPU for a cache: 4GB, or a share.")] = "",
    prompt_file: Annotated[
        str, typer.Option(help="With --offload, a text (.txt, .xz) to read; otherwise tokens are random.")
    ] = "",
    no_baseline: Annotated[
        bool, typer.Option("--no-baseline", help="Without Transformers' offloaded cache: 512K tokens take it minutes.")
    ] = False,
    dtype: Dtype = "bfloat16",
    seed: Seed = 0,
    device: Device = "cuda",
    out: Out = None,
) -> None:
    """Tokens a second of a model's generate, dense and sparse, beside Transformers' own path."""
    _check(model)
    if offload:
        from foveate.lab.bench import offloaded
        from foveate.lab.bench.plan import measure

        given = {name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"}
        unused = sorted(given & {"rounds", "liger", "dense_below"})
        if unused:
            raise UserError(f"--offload does not go with --{unused[0].replace('_', '-')}: leave it out")
        named = methods if "methods" in given else ("pages",)
        sizes = (model, named, contexts, batches, steps, memory, gpu_budget, prompt_file, no_baseline)
        plan = offloaded.Plan(*sizes, dtype, seed, device)
        measure(offloaded.BENCH, offloaded.run, plan, out, offloaded.table)
        return
    if memory or gpu_budget or prompt_file or no_baseline:
        raise UserError("memory, gpu-budget, prompt-file and no-baseline go with --offload")
    from foveate.lab.bench import decode_model as bench
    from foveate.lab.bench.plan import measure
    from foveate.lab.report.tables.decode import table

    below = int(dense_below) if dense_below.isdecimal() else dense_below
    plan = bench.Plan(model, methods, contexts, batches, steps, rounds, liger, below, dtype, seed, device)
    measure("decode", bench.run, plan, out, table)


@app.command("prefill-model")
def prefill_model(
    model: Model = "llama-3.1-8b",
    methods: Methods = (
        *("dense", "streaming", "kascade:decode_only=false", "kascade_paper"),
        *("tova", "snapkv", "h2o", "luka", "luka:compressor=attention", "mixed"),
    ),
    contexts: Prompts = (8192, 16384, 32768),
    chunks: Annotated[
        list[int],
        typer.Option("--chunk", min=0, help="Tokens of a prompt that are read at once, 0 for all. May be repeated."),
    ] = (0,),
    repeats: Repeats = 5,
    dtype: Dtype = "bfloat16",
    seed: Seed = 0,
    device: Device = "cuda",
    out: Out = None,
) -> None:
    """A model's time to the first token and its peak memory, dense and sparse."""
    _check(model)
    from foveate.lab.bench import prefill_model as bench
    from foveate.lab.bench.plan import measure
    from foveate.lab.report.tables.general import tables

    plan = bench.Plan(model, methods, contexts, chunks, repeats, dtype, seed, device)
    measure("prefill", bench.run, plan, out, tables)


def _check(model: str) -> None:
    """Refuses a name that is no shape and no folder, and a folder whose model cannot be attached to."""
    if model in SHAPES:
        return
    if not Path(model).is_dir():
        raise unknown("model", model, (*SHAPES, "a model folder"))
    check_model(Path(model), needs_weights=True)

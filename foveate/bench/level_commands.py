"""`foveate bench prefill` and `foveate bench decode`, which measure a layer's attention, a layer, or a whole model."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from foveate.bench.running import Methods, Out, flag, kept, measure

ModelName = Annotated[
    str | None,
    typer.Option(help="Folder, or llama-3.1-8b or qwen3-8b with random weights (model).", show_default="llama-3.1-8b"),
]
Dtype = Annotated[
    str | None, typer.Option(help="float16, bfloat16 or float32.", show_default="float16; at level model bfloat16")
]
Seed = Annotated[int, typer.Option(help="Seed of the inputs.")]
Device = Annotated[str, typer.Option(help="cuda or cpu.")]


def prefill(
    level: Annotated[
        str, typer.Option(help="kernel (attention of a layer) or model (time to the first token).")
    ] = "kernel",
    context: Annotated[
        list[int] | None,
        typer.Option(
            help="Prompt tokens; may be given often.",
            show_default="8192, 32768 and 131072; at level model 8192, 16384 and 32768",
        ),
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads (kernel).", show_default="32")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads (kernel).", show_default="8")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Dimensions of a head (kernel).", show_default="128")] = None,
    layers: Annotated[
        int | None, typer.Option(help="Layers, of which each kind is timed once (kernel).", show_default="32")
    ] = None,
    model: ModelName = None,
    chunk: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens of a prompt that are read at once, 0 for all; may be given often (model).", show_default="0"
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs.")] = 5,
    dtype: Dtype = None,
    seed: Seed = 0,
    device: Device = "cuda",
    method: Methods = None,
    out: Out = None,
) -> None:
    """A prompt: its attention, beside the fastest dense there is, or a model's time to the first token."""
    of_layers = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "layers": layers}
    of_model = {"model": model, "chunks": chunk}
    _check_level(level, {"kernel": of_layers, "model": of_model})

    from foveate.bench import prefill as bench
    from foveate.bench import prefill_model
    from foveate.report.tables.prefill import table

    lists = {"methods": method, "contexts": context}
    options = {**lists, **of_layers, **of_model, "repeats": repeats, "dtype": dtype, "seed": seed, "device": device}
    given = {name: value for name, value in options.items() if value is not None}
    if level == "model":
        of = prefill_model.Plan(**given)
        measure(bench.BENCH, out, lambda say: prefill_model.run(of, say, kept(out)), table)
    else:
        plan = bench.Plan(**given)
        measure(bench.BENCH, out, lambda say: bench.run(plan, say, kept(out)), table)


def decode(
    level: Annotated[str, typer.Option(help="kernel, layer (as a model decodes, with its bookkeeping) or model.")] = (
        "kernel"
    ),
    context: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens so far; may be given often.", show_default="8192, 32768 and 131072; at level model 32768"
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Sequences; may be given often.", show_default="1 and 32; at level model 1"),
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads (kernel, layer).", show_default="32")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads (kernel, layer).", show_default="8")] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Dimensions of a head (kernel, layer).", show_default="128")
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(help="Layers, of which each kind is timed once (kernel, layer).", show_default="32"),
    ] = None,
    model: ModelName = None,
    steps: Annotated[int | None, typer.Option(help="Timed tokens of a round (model).", show_default="64")] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="How often every method generates, one after the other (model).", show_default="1"),
    ] = None,
    liger: Annotated[
        bool | None,
        typer.Option(
            "--liger",
            help="Norms, rotations and MLPs by Liger's kernels, for all methods alike (model).",
            show_default=False,
        ),
    ] = None,
    dense_below: Annotated[
        str | None,
        typer.Option(
            help="Tokens of all sequences below which steps are dense, or auto: where methods are slower (model).",
            show_default="0",
        ),
    ] = None,
    dtype: Dtype = None,
    seed: Seed = 0,
    device: Device = "cuda",
    method: Methods = None,
    out: Out = None,
) -> None:
    """A decode step: its attention, beside the fastest dense there is, or tokens a second of a model's generate."""
    of_layers = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "layers": layers}
    below = int(dense_below) if dense_below is not None and dense_below.isdecimal() else dense_below
    of_model = {"model": model, "steps": steps, "rounds": rounds, "liger": liger, "dense_below": below}
    _check_level(level, {"kernel": of_layers, "layer": of_layers, "model": of_model})

    from foveate.bench import decode as bench
    from foveate.bench import decode_model
    from foveate.report.tables.decode import table

    lists = {"methods": method, "contexts": context, "batches": batch}
    options = {**lists, **of_layers, **of_model, "dtype": dtype, "seed": seed, "device": device}
    given = {name: value for name, value in options.items() if value is not None}
    if level == "model":
        of = decode_model.Plan(**given)
        measure(bench.BENCH, out, lambda say: decode_model.run(of, say, kept(out)), table)
    else:
        plan = bench.Plan(level=level, **given)
        measure(bench.BENCH, out, lambda say: bench.run(plan, say, kept(out)), table)


def _check_level(level: str, own: dict[str, dict[str, Any]]) -> None:
    """Refuses a level that there is not, and options that others have and it has not."""
    from foveate.results.errors import UserError, unknown

    if level not in own:
        raise unknown("level", level, own)
    for options in own.values():
        for name, value in options.items():
            if value is not None and name not in own[level]:
                allowed = ", ".join(map(flag, own[level]))
                raise UserError(f"{flag(name)} {value} does nothing at level {level}; of its own it has {allowed}")

"""Attention of a layer at a model's shape: a decode step's, or a prompt's, beside the fastest dense there is.

python -m benchmarks.layer decode|prefill --out FILE
"""

from __future__ import annotations

from typing import Annotated

import typer

from foveate.lab.bench.commands import Batches, Contexts, Device, Dtype, Methods, Out, Prompts, Repeats, Seed

app = typer.Typer(no_args_is_help=True)

Heads = Annotated[int, typer.Option(min=1, help="Query heads.")]
KVHeads = Annotated[int, typer.Option(min=1, help="KV heads.")]
HeadDim = Annotated[int, typer.Option(min=1, help="Dimensions of a head.")]
Layers = Annotated[int, typer.Option(min=1, help="Layers, of which each kind is timed once.")]


@app.command()
def decode(
    methods: Methods = (
        *("dense", "kascade", "luka:page_size=16,top_k=3,score=spread", "luka"),
        *("pages", "quest", "omnikv", "lessismore"),
    ),
    contexts: Contexts = (8192, 32768, 131072),
    batches: Batches = (1, 32),
    heads: Heads = 32,
    kv_heads: KVHeads = 8,
    head_dim: HeadDim = 128,
    layers: Layers = 32,
    level: Annotated[str, typer.Option(help="kernel, or layer: as a model decodes, with its bookkeeping.")] = "kernel",
    dtype: Dtype = "float16",
    seed: Seed = 0,
    device: Device = "cuda",
    out: Out = None,
) -> None:
    """A decode step's attention, beside the fastest dense there is; by default a layer of Llama-3.1-8B."""
    from benchmarks import decode as bench
    from benchmarks.layer_tables import decode_table
    from foveate.lab.bench.plan import measure

    plan = bench.Plan(methods, contexts, batches, heads, kv_heads, head_dim, layers, level, dtype, seed, device)
    measure("decode", bench.run, plan, out, decode_table)


@app.command()
def prefill(
    methods: Methods = (
        *("dense", "kascade:decode_only=false", "kascade_paper", "streaming", "snapkv", "tova", "h2o", "luka"),
    ),
    contexts: Prompts = (8192, 32768, 131072),
    heads: Heads = 32,
    kv_heads: KVHeads = 8,
    head_dim: HeadDim = 128,
    layers: Layers = 32,
    repeats: Repeats = 5,
    dtype: Dtype = "float16",
    seed: Seed = 0,
    device: Device = "cuda",
    out: Out = None,
) -> None:
    """A prompt's attention, beside the fastest dense there is; by default a layer of Llama-3.1-8B."""
    from benchmarks import prefill as bench
    from benchmarks.layer_tables import prefill_table
    from foveate.lab.bench.plan import measure

    plan = bench.Plan(methods, contexts, heads, kv_heads, head_dim, layers, repeats, dtype, seed, device)
    measure("prefill", bench.run, plan, out, prefill_table)


if __name__ == "__main__":
    app()

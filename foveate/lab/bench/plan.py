"""What all benches share: checks of a plan, the command that a row names, and how rows are kept and shown."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import typer

from foveate.errors import UserError, unknown
from foveate.lab.evaluation.runner import parse_method as parsed
from foveate.lab.results import measurements
from foveate.methods import parse

DTYPES = ("bfloat16", "float16", "float32")
Row = dict[str, Any]
Say = Callable[[str], None]  # receives progress, line by line
Keep = Callable[[list[Row]], None]  # receives rows as soon as they are complete

_FLAGS = {"methods": "method", "contexts": "context", "batches": "batch", "chunks": "chunk"}
"""Fields of plans with several values, and the options that give one each."""


def specs(methods: Sequence[str]) -> list[str]:
    """The methods as they are spelled out, `dense` first and each once."""
    return list(dict.fromkeys(["dense", *(parsed(spec).spec for spec in methods)]))


def check(plan: Any) -> None:
    """Raise UserError for an unknown method, dtype or device, a device that is missing, or uneven groups of heads."""
    for spec in plan.methods:
        parsed(spec)
    if plan.dtype not in DTYPES:
        raise unknown("dtype", plan.dtype, DTYPES)
    if plan.device not in ("cuda", "cpu"):
        raise unknown("device", plan.device, ("cuda", "cpu"))
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is here; --device cpu runs the references, at small sizes")
    if plan.heads % plan.kv_heads if hasattr(plan, "heads") else 0:
        raise UserError(f"heads must be a multiple of kv-heads, {plan.kv_heads}, not {plan.heads}")


def command(program: str, plan: Any) -> str:
    """The command line that makes a plan's rows; paths are shortened to their last names."""
    parts = [program]
    for field, value in vars(plan).items():
        flag = f"--{_FLAGS.get(field, field).replace('_', '-')}"
        if isinstance(value, bool):
            parts += [flag] * value
        else:
            several = value if isinstance(value, (list, tuple)) else (value,)
            paths = field in ("model", "prompt_file") and value
            words = (Path(one).resolve().name if paths else str(one) for one in several)
            parts += [f"{flag} {shlex.quote(word)}" for word in words]
    return " ".join(parts)


def share_of(spec: str) -> float | None:
    """The share of the keys that a method reads, if its budget is a share; None for Transformers' own attention."""
    top_k = None if spec.startswith("transformers-") else getattr(parse(spec), "top_k", None)
    return top_k if isinstance(top_k, float) else None


def measure(
    bench: str,
    run: Callable[[Any, Say, Keep], list[Row]],
    plan: Any,
    out: Path | None,
    table: Callable[[list[Row]], str],
) -> None:
    """Run a plan of a bench of this name, write its rows to `out` as they come, and print them as `table` makes them.

    An interrupted run keeps what it has measured. Raises `UserError` before anything is measured, if the file cannot be
    written or holds rows of another bench.
    """
    from foveate.cli.terminal import console

    if out is not None:
        measurements.check_out(out, bench)
    say = functools.partial(console(stderr=True).print, style="dim", markup=False)
    keep = functools.partial(measurements.write, out) if out is not None else lambda rows: None
    rows = run(plan, say, keep)
    if rows:  # of several processes, only the first has rows
        typer.echo(table(rows))

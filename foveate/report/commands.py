"""`foveate plot ...`: one command for each kind of plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from foveate.results.outfile import announce

app = typer.Typer(no_args_is_help=True, help="Draw rows of results, or an attention map, as PNG.")

Files = Annotated[list[Path], typer.Argument(help="Files of rows (JSON Lines).", show_default=False)]


Out = Annotated[Path, typer.Option(help="PNG file to write.", show_default=False, callback=announce)]
Where = Annotated[
    list[str] | None,
    typer.Option(
        help="Only rows with NAME=VALUE: a field, or a setting of task or method; may be repeated; of one NAME, any."
    ),
]
ToDense = Annotated[bool, typer.Option("--to-dense", help="Show the ratio to dense, paired on the same texts.")]


@app.command()
def frontier(
    files: Files,
    out: Out,
    along: Annotated[
        list[str] | None, typer.Option(help="A setting, beside the budgets, that may differ along a line.")
    ] = None,
    recommended: Annotated[str | None, typer.Option(help="Spec of the point that gets a star.")] = None,
    margin: Annotated[float | None, typer.Option(help="Draw a line so many points below dense.")] = None,
    over_splits: Annotated[
        bool, typer.Option("--over-splits", help="Show splits whose names differ in a last number as one.")
    ] = False,
    against: Annotated[
        str, typer.Option(help="keys_read_share, or kv_bytes_per_step: bytes of keys and values.")
    ] = "keys_read_share",
    where: Where = None,
) -> None:
    """Score against what decoding reads: a panel for each task, a line for each method."""
    from foveate.report.plots import frontier as plots

    how = (along or [], recommended, margin, over_splits, against)
    _say(out, plots.frontier(_rows(files, where), out, *how))


@app.command()
def perplexity(files: Files, out: Out, to_dense: ToDense = False, where: Where = None) -> None:
    """Perplexity against the share of pages refined: a line for each compressor, dashed without values."""
    from foveate.report.plots import frontier as plots

    _say(out, plots.perplexity(_rows(files, where), out, to_dense))


@app.command()
def modes(files: Files, out: Out, to_dense: ToDense = False, where: Where = None) -> None:
    """Perplexity of each method, beside dense."""
    from foveate.report.plots import frontier as plots

    _say(out, plots.modes(_rows(files, where), out, to_dense))


@app.command()
def indexer(files: Files, out: Out) -> None:
    """Time and memory of `foveate bench indexer` against the length of the context."""
    from foveate.report.plots import indexer as plots

    plots.lengths(_of_bench(files, "indexer"), out)
    _say(out)


@app.command("indexer-tiles")
def indexer_tiles(files: Files, out: Out) -> None:
    """Time and memory of `foveate bench indexer-study` against tiles and scores held."""
    from foveate.report.plots import indexer as plots

    plots.tiles(_of_bench(files, "indexer-study"), out)
    _say(out)


@app.command()
def decode(
    files: Files,
    out: Out,
    level: Annotated[str, typer.Option(help="kernel: a layer's kernels; model: a model's whole step.")] = "kernel",
) -> None:
    """What a decode step goes to, by method: kernels of `foveate bench decode`."""
    from foveate.report.plots import decode as plots

    plots.parts(_of_bench(files, "decode"), out, level)
    _say(out)


@app.command("hybrid-losses")
def hybrid_losses(files: Files, out: Out) -> None:
    """Training and held-out losses of hybrids, from rows of `benchmarks/hybrid_curves.py`."""
    from foveate.report.plots import hybrids as plots

    plots.losses(plots.read(files), out)
    _say(out)


@app.command("hybrid-retention")
def hybrid_retention(files: Files, out: Out) -> None:
    """Share of tokens that each head of each LTE layer retains, from rows of `benchmarks/hybrid_curves.py`."""
    from foveate.report.plots import hybrids as plots

    plots.retention(plots.read(files), out)
    _say(out)


@app.command()
def calibration(
    file: Annotated[Path, typer.Argument(help="File of `foveate calibrate`.", show_default=False)], out: Out
) -> None:
    """A calibration of Kascade: similarity of layers, their importance, attention on few keys by head."""
    from foveate.calibration import load
    from foveate.report.plots.calibration import draw

    draw(load(file), out)
    typer.echo(f"{out}: anchors of {file.name}")


@app.command("attention-map")
def attention_map(
    model: Annotated[Path, typer.Option(help="Folder of a Hugging Face model.", show_default=False)],
    out: Out,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
) -> None:
    """Attention of one head over interwoven topics: the one that joins segments of a topic most."""
    from transformers.utils import logging

    from foveate.inputs import loading, model_folder
    from foveate.report.plots import attention_map as maps
    from foveate.report.plots import figure
    from foveate.results import circumstances

    logging.disable_progress_bar()
    figure.check(out)
    cut = maps.segments(loading.load_tokenizer(model))
    model_folder.check_positions(len(cut.ids), model_folder.model_facts(model), "the text needs")
    place = loading.choose_device(device)
    form = loading.choose_dtype(dtype, model, place)
    found = maps.look(loading.load_model(model, form, place), cut)
    maps.draw(found, cut, f"{model.name} · {form} · {circumstances.device_name(place)}", out)
    _say(out, [f"layer {found.layer}, head {found.head}"])


def _rows(files: Sequence[Path], where: Sequence[str] | None) -> list[Mapping[str, Any]]:
    from foveate.report.rows import chosen, read

    return chosen(read(files), where or [])


def _of_bench(files: Sequence[Path], bench: str) -> list[Mapping[str, Any]]:
    from foveate.report.rows import read_bench

    return read_bench(files, bench)


def _say(out: Path, notes: Sequence[str] = ()) -> None:
    from foveate.report.terminal import console

    for note in [*notes, f"wrote {out}"]:
        console(stderr=True).print(note, style="dim", markup=False, soft_wrap=True)

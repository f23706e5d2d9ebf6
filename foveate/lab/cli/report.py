"""`foveate report`: rows of results as tables or a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foveate.cli.terminal import console
from foveate.io.outfile import announce


def report(
    files: Annotated[list[Path], typer.Argument(help="Files of rows (JSON Lines).")],
    out: Annotated[
        Path | None,
        typer.Option(help="Instead: an HTML page of the rows, and of lenses (.json) of generate.", callback=announce),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Instead: a table of the rows as CSV.", callback=announce)] = None,
) -> None:
    """Print rows of results as Markdown tables, and what comparisons show."""
    from foveate.errors import DataError, UserError
    from foveate.lab.report import rows
    from foveate.lab.report.tables.general import tables, verdicts
    from foveate.lab.results import lens

    if out is not None or csv is not None:
        from foveate.lab.report import frame, page

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
    if others := [str(file) for file in files if file.suffix == ".json"]:
        raise UserError(f"{', '.join(others)}: no rows (JSON Lines); foveate plot calibration draws a calibration")
    for file in files:
        found = rows.read_any(file)
        try:
            typer.echo("\n\n".join(filter(None, (tables(found), verdicts(found)))) + "\n")
        except (KeyError, TypeError) as error:
            raise DataError(f"{file}: rows that make no table ({error} is missing or malformed)") from None

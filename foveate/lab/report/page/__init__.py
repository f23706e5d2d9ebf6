"""A user's own rows and lenses as one HTML page that needs nothing else: no server, no network, no other file."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from foveate import outfile
from foveate.errors import DataError, UserError
from foveate.lab.report.markdown import made_with
from foveate.lab.report.page import charts
from foveate.lab.report.rows import Row, grouped, read_any, spelled
from foveate.lab.report.tables import general
from foveate.lab.results import lens

_EXTRA = "a page of rows needs plotly, which is not installed: pip install 'foveate[report]'"


def check(out: Path, files: Sequence[Path]) -> None:
    """Raises `UserError` if no page of these files can be written: no file can, its name is no page's, or rows are
    among them and a library is missing that draws these."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{out}: the report is a page, so --out must end in .html")
    outfile.check(out)
    if any(file.suffix != ".json" for file in files):
        try:
            import plotly  # noqa: F401
        except ImportError:
            raise UserError(_EXTRA) from None


def write(files: Sequence[Path], out: Path) -> None:
    """Write the page.

    Args:
        files: rows of `foveate compare` and `foveate bench` (JSON Lines), and lenses of `foveate generate` (.json).
        out: HTML file.

    Raises:
        UserError: as :func:`check` does; for files that are neither; and for two rows of one method on the same items
            that differ.
    """
    check(out, files)
    lenses = [lens.read(file) for file in files if file.suffix == ".json"]
    by_age = sorted((file for file in files if file.suffix != ".json"), key=lambda file: _changed(file))
    found = {file: read_any(file) for file in by_age}
    rows = [row if "bench" in row else spelled(row) for some in found.values() for row in some]
    asked = [row for row in rows if "bench" not in row]
    try:
        tables = _tables(asked, [row for row in rows if "bench" in row])
        data = {
            "frontier": charts.frontier(asked),
            "needles": charts.needles(asked),
            "steps": charts.steps([row for row in rows if row.get("bench") == "decode"]),
            "lenses": lenses,
            "states": lens.STATES,
        }
    except (KeyError, TypeError) as error:
        where = ", ".join(map(str, found))
        raise DataError(f"{where}: rows that make no page ({error} is missing or malformed)") from None
    names = ", ".join(file.name for file in files)
    facts = f"{len(rows):,} rows · {names} · {made_with(rows)}" if rows else names
    outfile.write(out, _page(data, facts=html.escape(facts), tables=tables).encode())


def _changed(file: Path) -> float:
    """When a file was changed; one that is not there is named by who reads it."""
    return file.stat().st_mtime if file.exists() else 0.0


def _tables(asked: Sequence[Row], timed: Sequence[Row]) -> str:
    """The tables of some rows, the newest comparison first, in a part for each task or bench that opens and closes."""
    from markdown_it import MarkdownIt

    parser, tables = MarkdownIt("js-default"), {}
    for title, some in charts.comparisons(asked):
        tables.setdefault(some[0]["task"], []).append(general.one_table(title, some))
    for name, some in grouped(timed, lambda row: f"bench {row['bench']}").items():
        tables[name] = [general.tables(some)]
    parts = []
    for name, written in tables.items():
        body = parser.render("\n\n".join(written))
        body = re.sub("<code>.*?</code>", lambda found: found[0].replace(",", ",<wbr>"), body)
        body = body.replace(
            "<table>", '<div class="wide" role="region" aria-label="table" tabindex="0"><table>'
        ).replace("</table>", "</table></div>")
        parts.append(f"<details><summary>{html.escape(name)}</summary>{body}</details>")
    return "\n".join(parts)


def _page(data: Mapping[str, Any], **parts: str) -> str:
    own = {
        name: resources.files(__name__).joinpath(f"page.{name}").read_text("utf-8") for name in ("html", "css", "js")
    }
    own["plotly"] = ""
    if data["frontier"]:  # nothing else needs its five megabytes
        from plotly.offline import get_plotlyjs

        own["plotly"] = get_plotlyjs()
    own["data"] = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return Template(own["html"]).substitute(own, **parts)

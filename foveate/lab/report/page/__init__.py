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

from foveate.errors import DataError, UserError, of_extra
from foveate.io import outfile
from foveate.lab.report.markdown import made_beside, made_with
from foveate.lab.report.page import charts
from foveate.lab.report.rows import Row, all_spelled, read_any
from foveate.lab.report.tables import general
from foveate.lab.results import lens


def check(out: Path, files: Sequence[Path]) -> None:
    """Raises `UserError` if no page of these files can be written: no file can, its name is no page's, it is one of the
    files, or rows are among them and a library is missing that draws these."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{out}: the report is a page, so --out must end in .html")
    outfile.check(out, inputs=files)
    if any(file.suffix != ".json" for file in files):
        of_extra("plotly", "report", "a page of rows needs")


def write(files: Sequence[Path], out: Path) -> None:
    """Write the page.

    Args:
        files: rows of `foveate compare` and `foveate bench` (JSON Lines), and lenses of `foveate generate` (.json).
        out: HTML file.

    Raises `UserError` as :func:`check` does; for files that are neither; and for two rows of one method on the same
    items that differ.
    """
    check(out, files)
    lenses = [lens.read(file) for file in files if file.suffix == ".json"]
    of_rows = [file for file in files if file.suffix != ".json"]
    by_age = sorted(of_rows, key=lambda file: file.stat().st_mtime if file.exists() else 0.0)  # who reads it names it
    found = {file: read_any(file) for file in by_age}
    rows = [row for some in found.values() for row in some]
    asked, timed = all_spelled(row for row in rows if "bench" not in row), [row for row in rows if "bench" in row]
    try:
        tables = _tables(asked, timed)
        data = {
            "frontier": charts.frontier(asked),
            "needles": charts.needles(asked),
            "steps": charts.steps([row for row in timed if row["bench"] == "decode"]),
            "most": charts.MOST_LINES,
            "lenses": lenses,
            "states": lens.STATES,
        }
    except (KeyError, TypeError) as error:
        where = ", ".join(map(str, found))
        raise DataError(f"{where}: rows that make no page ({error} is missing or malformed)") from None
    names = ", ".join(file.name for file in files)
    commits = {commit for row in rows for commit in row["commit"].split(", ")}
    made = made_with(rows, commits=len(commits) <= 3) + (f"; {len(commits)} commits" if len(commits) > 3 else "")
    facts = f"{len(rows):,} rows · {names} · {made}" if rows else names
    outfile.write(out, _page(data, facts=html.escape(facts), tables=tables).encode(errors="backslashreplace"))


def _tables(asked: Sequence[Row], timed: Sequence[Row]) -> str:
    """The tables of some rows, in a part for each task or bench that opens and closes, and in it one for each table.

    The newest come first and are open.
    """
    tables: dict[str, list[str]] = {}
    for title, some in [*charts.comparisons(asked), *general.alike(timed)]:
        name = f"bench {some[0]['bench']}" if "bench" in some[0] else some[0]["task"]
        own = tables.setdefault(name, [])
        own.append(_part(title, _table(title, some), not own))
    return "\n".join(_part(name, "\n".join(own), place == 0) for place, (name, own) in enumerate(tables.items()))


def _part(name: str, body: str, is_open: bool) -> str:
    return f"<details{' open' * is_open}><summary>{html.escape(name)}</summary>{body}</details>"


def _table(title: str, rows: Sequence[Row]) -> str:
    """A table of some rows, after what they were made with."""
    head, *body = general.lines(rows)
    tagged = [("th", head), *(("td", cells) for cells in body)]
    lines = [f"<tr>{''.join(f'<{tag}>{_cell(cell)}</{tag}>' for cell in cells)}</tr>" for tag, cells in tagged]
    facts = f'<p class="faint">{html.escape(made_beside(title, rows))}</p>'
    scrolled = '<div class="wide" role="region" aria-label="table" tabindex="0">'
    return "\n".join([facts, f"{scrolled}<table>", *lines, "</table></div>"])


def _cell(text: str) -> str:
    """A cell as HTML; code may be broken after the marks of a spec."""
    code = re.fullmatch("`(.*)`", text, re.DOTALL)
    if code is None:
        return html.escape(text)
    return f"<code>{'<wbr>'.join(map(html.escape, re.split('(?<=[,:=])', code[1])))}</code>"


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

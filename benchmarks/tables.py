"""Write the tables of the documentation from the result files: `python benchmarks/tables.py [--check]`.

A table stands between `<!-- report: FILE [CONTEXT] -->` and `<!-- end -->`; with CONTEXT only rows of that many tokens.
"""

import json
import re
import sys
from pathlib import Path

from foveate.report.markdown import tables

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"(<!-- report: (\S+)(?: (\d+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def written(text: str) -> str:
    """The text with every marked table made anew."""

    def table(match: re.Match[str]) -> str:
        rows = [json.loads(line) for line in (ROOT / match[2]).read_text(encoding="utf-8").splitlines()]
        if match[3]:
            rows = [row for row in rows if row["case"]["context"] == int(match[3])]
        return f"{match[1]}\n{tables(rows)}\n\n{match[4]}"

    return MARK.sub(table, text)


def main() -> int:
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        if text != written(text):
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(written(text), encoding="utf-8")
    print("\n".join(stale) or "all tables are as the result files say")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())

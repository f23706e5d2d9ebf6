"""Write the tables of the documentation from the result files: `python benchmarks/tables.py [--check]`.

A table stands between `<!-- report: FILE... [KIND] [NAME=VALUE]... -->` and `<!-- end -->`.
`foveate.report.tables.registry` lists the kinds. Conditions choose rows, or cases of benches, and their order, as
`foveate plot --where` does. `over-splits` makes one comparison of splits whose names differ in a last number.
Files that end in .json are calibrations, which are compared with each other.
"""

import re
import sys
from pathlib import Path

from foveate.report.tables import registry

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"(<!-- report: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def written(text: str) -> str:
    """The text with every marked table made anew."""
    return MARK.sub(lambda match: f"{match[1]}\n{_table(match[2])}\n\n{match[3]}", text)


def _table(mark: str) -> str:
    return registry.marked(mark.split(), ROOT, note=lambda line: print(line, file=sys.stderr))


def main() -> int:
    stale = []
    for path in [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        if text != written(text):
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(written(text), encoding="utf-8")
    print("\n".join(stale) or "all tables are as the result files say")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())

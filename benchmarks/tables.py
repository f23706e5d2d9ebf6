"""Write the tables of the documentation from the result files: `python benchmarks/tables.py [--check]`.

A table stands between `<!-- report: FILE... [KIND] [NAME=VALUE]... -->` and `<!-- end -->`. Kinds that make one table
of several comparisons: `summary`, `differences` and `least-keys`; those of the indexer's benches begin with the bench's
name (see `foveate.report`). Conditions choose rows and their order, as `foveate plot --where` does, or cases of
benches; `over-splits` makes one comparison of splits whose names differ in a last number. Files that end in .json are
calibrations, which go side by side.
"""

import json
import re
import sys
from pathlib import Path

from foveate.calibration import load
from foveate.report import calibrations, csa, decode, decode_goals, indexer, indexer_study, pooled
from foveate.report.beside_dense import differences, least_keys
from foveate.report.indexer_goals import goals
from foveate.report.lines import once
from foveate.report.markdown import tables
from foveate.report.rows import chosen, spelled
from foveate.report.summary import summary

ROOT = Path(__file__).resolve().parents[1]
KINDS = {
    "summary": summary,
    "differences": differences,
    "least-keys": least_keys,
    "indexer-goals": goals,
    "indexer-parity": indexer.parity,
    "indexer-lengths": indexer.lengths,
    "indexer-gpus": indexer.gpus,
    "indexer-settings": indexer_study.settings,
    "indexer-ablations": indexer_study.ablations,
    "csa-layer": csa.layer,
    "decode-goals": decode_goals.goals,
    "decode-table": decode.table,
    "dsa-model": csa.model,
}
MARK = re.compile(r"(<!-- report: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(words: list[str]) -> str:
    """The table that a mark asks for."""
    found = [load(ROOT / word) for word in words if word.endswith(".json")]
    if found:
        return calibrations.table(found)
    files = [word for word in words if word.endswith(".jsonl")]
    rows = [json.loads(line) for file in files for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
    conditions = [word for word in words if "=" in word]
    if "bench" in rows[0]:
        wanted = [condition.split("=", 1) for condition in conditions]
        rows = [row for row in rows if all(str(row["case"][name]) == value for name, value in wanted)]
    else:
        rows, _ = once(chosen([spelled(row) for row in rows], conditions))
        if "over-splits" in words:
            rows, notes = pooled.over_splits(rows)
            for note in notes:
                print(note, file=sys.stderr)
    (kind,) = [KINDS[word] for word in words if word in KINDS] or [tables]
    return kind(rows)


def written(text: str) -> str:
    """The text with every marked table made anew."""
    return MARK.sub(lambda match: f"{match[1]}\n{table(match[2].split())}\n\n{match[3]}", text)


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

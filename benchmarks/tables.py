"""Write the tables of the documentation from the result files: `python benchmarks/tables.py [--check]`.

A table stands between `<!-- report: FILE... [KIND] [NAME=VALUE]... -->` and `<!-- end -->`. Kinds that make one table
of several comparisons: `summary`, `differences`, `least-keys` and `hybrid-tasks`; `recheck` has cells measured again;
those of a bench begin with the bench's name (see `foveate.report`). Conditions choose rows, or cases of benches, and
their order, as `foveate plot --where` does; `over-splits` makes one comparison of splits whose names differ in a last
number.
Files that end in .json are calibrations, which go side by side.
"""

import json
import re
import sys
from pathlib import Path

from foveate.calibration import load
from foveate.report import (
    calibrations,
    csa,
    decode,
    hybrid_tasks,
    hybrids,
    indexer,
    indexer_study,
    pooled,
    prefill,
    recheck,
)
from foveate.report.beside_dense import differences, least_keys
from foveate.report.lines import once
from foveate.report.markdown import tables
from foveate.report.rows import chosen, of_cases, spelled
from foveate.report.summary import summary

ROOT = Path(__file__).resolve().parents[1]
KINDS = {
    "summary": summary,
    "differences": differences,
    "least-keys": least_keys,
    "indexer-parity": indexer.parity,
    "indexer-lengths": indexer.lengths,
    "indexer-gpus": indexer.gpus,
    "indexer-settings": indexer_study.settings,
    "indexer-ablations": indexer_study.ablations,
    "csa-layer": csa.layer,
    "decode-table": decode.table,
    "decode-models": decode.models,
    "decode-speedups": decode.speedups,
    "decode-kascade": decode.kascade,
    "decode-kinds": decode.kinds,
    "csa-model": csa.model,
    "hybrid-tasks": hybrid_tasks.table,
    "hybrids-speed": hybrids.speed,
    "hybrids-memory": hybrids.memory,
    "hybrids-training": hybrids.training,
    "prefill-lengths": prefill.lengths,
    "prefill-layers": prefill.layers,
    "recheck": recheck.table,
}
MARK = re.compile(r"(<!-- report: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(words: list[str]) -> str:
    """The table that a mark asks for.

    Raises:
        ValueError: for a kind that is not in `KINDS`, or more than one.
    """
    found = [load(ROOT / word) for word in words if word.endswith(".json")]
    if found:
        return calibrations.table(found)
    files = [word for word in words if word.endswith(".jsonl")]
    rows = [json.loads(line) for file in files for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
    conditions = [word for word in words if "=" in word]
    rest = [word for word in words if word not in (*files, *conditions, "over-splits")]
    if len(rest) > 1 or not set(rest) <= KINDS.keys():
        raise ValueError(f"a mark has one kind at most, of {', '.join(KINDS)}; found {', '.join(rest)}")
    if rest == ["recheck"]:  # lines about rows, not rows
        return recheck.table(rows)
    if "bench" in rows[0]:
        rows = of_cases(rows, conditions)
    else:
        rows, _ = once(chosen([spelled(row) for row in rows], conditions))
        if "over-splits" in words:
            rows, notes = pooled.over_splits(rows)
            for note in notes:
                print(note, file=sys.stderr)
    return (KINDS[rest[0]] if rest else tables)(rows)


def written(text: str) -> str:
    """The text with every marked table made anew."""
    return MARK.sub(lambda match: f"{match[1]}\n{table(match[2].split())}\n\n{match[3]}", text)


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

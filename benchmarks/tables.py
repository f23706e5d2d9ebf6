"""Make the documentation's tables from the result files: `make tables`; with --check, only say whether they are stale.

    python -m benchmarks.tables [--check]
    python -m benchmarks.tables FILE... [KIND] [NAME=VALUE]...  # prints one table

A table is marked by `<!-- report: FILE.jsonl [FILE.jsonl ...] [KIND] [NAME=VALUE ...] [over-splits] -->`; `KINDS` has
the kinds. Conditions choose rows, or cases of benches, and their order, as `foveate plot --where` does. `over-splits`
makes one comparison of splits whose names differ in a last number. Files that end in `.json` are calibrations, which
are compared with each other. `<!-- report: age -->` is the age of the rows, see `age.py`; `<!-- report: papers -->`
every table and figure of the papers, see `paper_table.py`; `plans` is what `foveate plan` answers to some cases, see
`plans_table.py`; `commands` and `settings` are the reference of the command line and of the methods, see
`reference_tables.py`. Tables that no reader of a page needs are in `benchmarks/tables/`.
"""

import functools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import (
    age,
    calibration_table,
    csa_tables,
    end_to_end_table,
    hybrid_tables,
    hybrid_task_tables,
    layer_tables,
    paper_table,
    plans_table,
    protocol,
    recheck,
    reference_tables,
    summary_table,
    table_kinds,
    transformers_table,
)
from foveate.calibration import load
from foveate.lab.report import pooled
from foveate.lab.report.lines import once
from foveate.lab.report.rows import Row, all_spelled, chosen, of_cases
from foveate.lab.report.tables.general import tables

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"(<!-- report: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
WHOLE: Mapping[str, Callable[[], str]] = {
    "papers": paper_table.table,
    "plans": plans_table.table,
    "hybrid-caches": hybrid_task_tables.caches,
    "commands": reference_tables.commands,
    "settings": reference_tables.settings,
}
"""Tables of no result file, by their marks."""
KINDS: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "summary": summary_table.summary,
    "end-to-end": end_to_end_table.table,
    "differences": table_kinds.differences,
    "paired": table_kinds.paired,
    "by-task": table_kinds.by_task,
    "memory-shares": table_kinds.memory_shares,
    "page-scores": table_kinds.page_scores,
    "serving": table_kinds.serving,
    "serving-lossless": table_kinds.serving_lossless,
    "serving-load": table_kinds.serving_load,
    "serving-ranks": table_kinds.serving_ranks,
    "lossless": table_kinds.lossless,
    "lossless-accepted": table_kinds.lossless_accepted,
    "serving-accuracy": table_kinds.serving_accuracy,
    "indexer-parity": csa_tables.indexer_parity,
    "indexer-lengths": csa_tables.indexer_lengths,
    "indexer-gpus": csa_tables.indexer_gpus,
    "indexer-settings": csa_tables.indexer_settings,
    "indexer-ablations": csa_tables.indexer_ablations,
    "csa-layer": csa_tables.csa_layer,
    "csa-model": csa_tables.csa_model,
    "decode-table": layer_tables.decode_table,
    "decode-models": table_kinds.decode_models,
    "decode-speedups": table_kinds.decode_speedups,
    "decode-kascade": csa_tables.decode_kascade,
    "decode-kinds": table_kinds.decode_kinds,
    "prefill-lengths": table_kinds.prefill_lengths,
    "prefill-layers": layer_tables.prefill_layers,
    "hybrid-tasks": hybrid_task_tables.table,
    "hybrid-recipe": hybrid_task_tables.recipe,
    "hybrid-seeds": hybrid_task_tables.by_seed,
    "hybrid-wordings": hybrid_task_tables.wordings,
    "hybrid-heads": hybrid_tables.heads,
    "hybrid-needles": table_kinds.hybrid_needles,
    "hybrids-speed": hybrid_tables.speed,
    "hybrids-layers": hybrid_tables.layers,
    "hybrids-memory": hybrid_tables.memory,
    "hybrids-training": hybrid_tables.training,
    "recheck": recheck.table,
    "transformers-tests": transformers_table.table,
}
"""A kind that begins with the name of a bench takes rows of that bench; the others take rows of `foveate compare`."""


def marked(words: Sequence[str], root: Path = ROOT) -> str:
    """The table that the words of a mark ask for, with files below ``root``.

    Raises:
        ValueError: for a kind that is not in :data:`KINDS`, or more than one.
    """
    found = [load(root / word) for word in words if word.endswith(".json")]
    if found:
        return calibration_table.table(found)
    files = [word for word in words if word.endswith(".jsonl")]
    rows = [row for file in files for row in _rows(root / file)]
    conditions = [word for word in words if "=" in word]
    kinds = [word for word in words if word not in (*files, *conditions, "over-splits")]
    if len(kinds) > 1 or not set(kinds) <= KINDS.keys():
        raise ValueError(f"a mark has one kind at most, of {', '.join(KINDS)}; found {', '.join(kinds)}")
    if "bench" in rows[0]:
        rows = of_cases(rows, conditions)
    elif "spec" in rows[0] and "cell" not in rows[0]:
        rows, notes = once(chosen(all_spelled(rows), conditions), ("batch_size",) if kinds == ["end-to-end"] else ())
        sys.stderr.writelines(f"{words[0]}: {line}\n" for line in notes)
        rows = protocol.checked(rows)
        if "over-splits" in words:
            rows, notes = pooled.over_splits(rows)
            sys.stderr.writelines(f"{line}\n" for line in notes)
    return (KINDS[kinds[0]] if kinds else tables)(rows)


@functools.cache
def _rows(file: Path) -> list[Row]:
    return list(map(json.loads, file.read_text(encoding="utf-8").splitlines()))


def written(text: str, check: bool = False) -> str:
    """The text with every marked table made anew.

    Args:
        check: whether a table of ages may count to the commit that it names, see :func:`benchmarks.age.kept`.
    """

    def made(match: re.Match[str]) -> str:
        try:
            if match[2] in WHOLE:
                table = WHOLE[match[2]]()
            elif match[2] != "age":
                table = marked(match[2].split())
            else:
                table = age.kept(ROOT, match[0]) if check else age.table(ROOT)
        except age.NoHistoryError as error:
            sys.stderr.write(f"the age of rows is not counted: {error}\n")
            return match[0]
        return f"{match[1]}\n{table}\n\n{match[3]}"

    return MARK.sub(made, text)


def main(words: Sequence[str]) -> int:
    if words and words != ["--check"]:
        print(marked(words, Path()))
        return 0
    stale = []
    for path in [
        ROOT / "README.md",
        *sorted((ROOT / "benchmarks").rglob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
    ]:
        text = path.read_text(encoding="utf-8")
        if text != (made := written(text, bool(words))):
            stale.append(path.name)
            if not words:
                path.write_text(made, encoding="utf-8")
    print("\n".join(stale) or "all tables are as the result files say")
    return int(bool(stale and words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

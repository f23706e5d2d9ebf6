"""The tables of the documentation by kind, and the table that a mark of a page asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from foveate.calibration import load
from foveate.report import pooled
from foveate.report.lines import once
from foveate.report.rows import Row, chosen, of_cases, spelled
from foveate.report.tables import calibrations, csa, decode, hybrid_tasks, hybrids, indexer, memory, prefill, recheck
from foveate.report.tables.beside_dense import differences, least_keys
from foveate.report.tables.general import tables
from foveate.report.tables.paired import paired
from foveate.report.tables.summary import summary

KINDS: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "summary": summary,
    "differences": differences,
    "paired": paired,
    "least-keys": least_keys,
    "indexer-parity": indexer.parity,
    "indexer-lengths": indexer.lengths,
    "indexer-gpus": indexer.gpus,
    "indexer-settings": indexer.settings,
    "indexer-ablations": indexer.ablations,
    "csa-layer": csa.layer,
    "decode-table": decode.table,
    "decode-models": decode.models,
    "decode-speedups": decode.speedups,
    "decode-kascade": decode.kascade,
    "decode-kinds": decode.kinds,
    "csa-model": csa.model,
    "hybrid-tasks": hybrid_tasks.table,
    "hybrid-caches": hybrid_tasks.caches,
    "hybrid-heads": hybrids.heads,
    "hybrids-speed": hybrids.speed,
    "hybrids-memory": hybrids.memory,
    "hybrids-training": hybrids.training,
    "memory-shares": memory.table,
    "prefill-lengths": prefill.lengths,
    "prefill-layers": prefill.layers,
    "recheck": recheck.table,
}
"""A kind that begins with the name of a bench takes rows of that bench; the others take rows of `foveate compare`."""


def marked(words: Sequence[str], root: Path, note: Callable[[str], None] = lambda line: None) -> str:
    """The table that a mark asks for.

    Args:
        words: ``FILE... [KIND] [NAME=VALUE]... [over-splits]``. Files that end in ``.json`` are calibrations, which are
            compared with each other; without a kind, rows are grouped by what they measure.
        root: folder that the files' names are relative to.
        note: called with a line for each row that was left out.

    Raises:
        ValueError: for a kind that is not in :data:`KINDS`, or more than one.
    """
    found = [load(root / word) for word in words if word.endswith(".json")]
    if found:
        return calibrations.table(found)
    files = [word for word in words if word.endswith(".jsonl")]
    rows = [json.loads(line) for file in files for line in (root / file).read_text(encoding="utf-8").splitlines()]
    conditions = [word for word in words if "=" in word]
    kinds = [word for word in words if word not in (*files, *conditions, "over-splits")]
    if len(kinds) > 1 or not set(kinds) <= KINDS.keys():
        raise ValueError(f"a mark has one kind at most, of {', '.join(KINDS)}; found {', '.join(kinds)}")
    if kinds in (["recheck"], ["hybrid-heads"]):  # rows of scripts in benchmarks/: no conditions apply
        return KINDS[kinds[0]](rows)
    if "bench" in rows[0]:
        rows = of_cases(rows, conditions)
    else:
        rows, _ = once(chosen([spelled(row) for row in rows], conditions))
        if "over-splits" in words:
            rows, notes = pooled.over_splits(rows)
            for line in notes:
                note(line)
    return (KINDS[kinds[0]] if kinds else tables)(rows)

"""Measure ten cells of the accuracy rows again with the code of now: `python -m benchmarks.recheck --help`.

    python -m benchmarks.recheck --model MODEL --data DATA --out runs/recheck

A cell is a method on one comparison of `results/*.jsonl`. It runs again through the runner of `foveate compare`, with
the settings, items, seed, number format and batch size of its row; other items or weights are an error. Items pair up,
so that a change of the code shows as a mean difference with its 95 % interval. The table has the old and the new score,
that difference, how many items changed, and whether the interval leaves out zero; if one does, the command ends with 1.

MODEL: the folder of Qwen2.5-Coder-0.5B-Instruct, which the cells are of; DATA: a folder with `ruler/`, `books/`,
`squad/` and `wikisalad/` (docs/data.md). OUT gets the new rows, one file a comparison, and `recheck.jsonl`, one line a
cell; a run of some cells leaves the lines of the others. Killed at any moment, the same command goes on where it
stopped.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from foveate.evaluation import tasks
from foveate.evaluation.metrics import paired_bootstrap
from foveate.evaluation.runner import Comparison, Prepared, parse_method, prepare, run
from foveate.methods import Method, recorded
from foveate.report.markdown import columns, interval, score
from foveate.report.rows import read
from foveate.results import circumstances
from foveate.results.errors import DataError, UserError, unknown

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A method on one comparison: the row of `spec` in `file`, by task, split and, where given, length and limit."""

    file: str
    task: str
    split: str
    spec: str
    length: int | None = None
    limit: int | None = None

    @property
    def name(self) -> str:
        """What `--cell` calls it."""
        return self.spec.partition(":")[0]

    def row(self, rows: Sequence[Mapping[str, Any]], model: str) -> Mapping[str, Any]:
        """The row of this cell and model. Raises `DataError` unless there is one."""
        found = [
            row
            for row in rows
            if (row["model"], row["task"], row["split"], row["spec"]) == (model, self.task, self.split, self.spec)
            and self.length in (None, row["task_settings"].get("length"))
            and self.limit in (None, row["limit"])
        ]
        if len(found) != 1:
            raise DataError(f"{self.file}: {len(found)} rows of {self.spec} on {self.task} {self.split} and {model}")
        return found[0]


CELLS = (
    Cell(
        "kascade-accuracy.jsonl",
        "ruler",
        "niah_multikey_2",
        'kascade:pool=layer,decode_only=true,calibration="divergence.json"',
        8192,
    ),
    Cell("kascade-accuracy.jsonl", "ruler", "niah_multikey_2", "quest", 8192),
    Cell("kascade-accuracy.jsonl", "ruler", "niah_multikey_2", "omnikv", 8192),
    Cell("kascade-accuracy.jsonl", "ruler", "niah_single_3", "lessismore", 8192),
    Cell("luka-niah.jsonl", "niah", "single", "tova:top_k=0.1", 8192),
    Cell("luka-niah.jsonl", "niah", "single", "streaming:window=0.25", 8192),
    Cell("luka-wikisalad.jsonl", "wikisalad_long", "test", "luka:score=spread", 4096),
    Cell("luka-wikisalad.jsonl", "wikisalad_long", "test", "h2o:top_k=0.25,window=64", 4096),
    Cell("luka-wikisalad.jsonl", "wikisalad_long", "test", "snapkv:top_k=0.1", 4096),
    Cell("luka-wikisalad.jsonl", "wikisalad", "very_hard", "luka_paper", limit=10),
)
"""Every kind of method once, at 2K to 8K tokens."""

Row = Mapping[str, Any]


def table(lines: Sequence[Row]) -> str:
    """A Markdown table of the comparisons of old rows with new ones."""
    return columns(
        lines,
        {
            "method": lambda line: f"`{line['spec']}`",
            "comparison": lambda line: f"{line['task']} {line['split']}, {line['length']:,} tokens",
            "old [95 %]": lambda line: score(line["old"]),
            "new [95 %]": lambda line: score(line["new"]),
            "new - old, paired [95 %]": lambda line: interval(line["change"], 1, "+"),
            "items changed": lambda line: f"{line['items_changed']} of {line['n']}",
            "differs": lambda line: "yes" if line["differs"] else "no",
        },
    )


def check(
    model: Path,
    data: Path,
    out: Path,
    cells: Sequence[Cell] = CELLS,
    results: Path = RESULTS,
    device: str = "auto",
    batch_size: int | None = None,
) -> list[dict[str, Any]]:
    """Runs the cells again, and returns a line for each: scores, paired difference, items that changed.

    `batch_size` stands for those of the rows.

    Raises:
        DataError: when a cell has no row, or the items are not those of its row.
        UserError: for what `foveate compare` refuses.
    """
    files = {cell.file: read([results / cell.file]) for cell in cells}
    old = [cell.row(files[cell.file], model.name) for cell in cells]
    lines: dict[str, dict[str, Any]] = {}
    for items in dict.fromkeys(row["run"]["items"] for row in old):
        together = [(cell, row) for cell, row in zip(cells, old) if row["run"]["items"] == items]
        plan = _plan(model, data, out, [row for _, row in together], results, device, batch_size)
        prepared = prepare(plan)
        _same_items(prepared, together[0])
        new = {row["spec"]: row for row in run(prepared)}
        for (cell, row), method in zip(together, plan.methods[1:]):
            lines[cell.name] = _line(cell, row, new[method.spec])
    ordered = [lines[cell.name] for cell in cells]
    _write(out / "recheck.jsonl", ordered)
    return ordered


def _write(path: Path, lines: Sequence[Row]) -> None:
    """Writes lines of cells; those of other cells that the file has stay."""
    texts = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    merged = {line["cell"]: line for line in (*map(json.loads, texts), *lines)}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in merged.values()), encoding="utf-8")


def _plan(
    model: Path, data: Path, out: Path, rows: Sequence[Row], results: Path, device: str, batch_size: int | None
) -> Comparison:
    first = rows[0]
    task = tasks.parse(first["task"], **first["task_settings"])
    return Comparison(
        model,
        task,
        data,
        (parse_method("dense"), *(_method(row, results / "calibrations" / model.name) for row in rows)),
        first["limit"],
        out / f"{'-'.join(str(part) for part in (first['task'], first['split'], first['length']))}.jsonl",
        batch_size or first["batch_size"],
        first["seed"],
        first["dtype"],
        device,
    )


def _method(row: Row, calibrations: Path) -> Method:
    """The method of a row; settings that are newer than the row are as they were before."""
    settings = dict(row["settings"])
    if settings.get("calibration"):  # which has anchors and heads
        settings["calibration"] = os.path.relpath(calibrations / settings["calibration"])
        for name in ("anchors", "heads"):
            del settings[name]
    return recorded(row["method"], **settings)


def _same_items(prepared: Prepared, first: tuple[Cell, Row]) -> None:
    cell, row = first
    for name in ("weights", "items"):
        if prepared.run[name] != row["run"][name]:
            raise DataError(
                f"{cell.file}: the {name} of {cell.task} {cell.split} are {row['run'][name]} there and "
                f"{prepared.run[name]} here; give the model and the data that the row was measured with"
            )


def _line(cell: Cell, old: Row, new: Row) -> dict[str, Any]:
    main = tasks.get(new["task"]).main
    aggregate = tasks.get(new["task"]).metrics[main]
    mine, theirs = ({name: np.array(row["item_values"][name]) for name in old["item_values"]} for row in (new, old))
    change = paired_bootstrap(aggregate, mine, theirs, new["seed"])
    changed = sum(any(mine[name][item] != theirs[name][item] for name in theirs) for item in range(new["n"]))
    return {
        "cell": cell.name,
        "spec": old["spec"],
        "model": new["model"],
        "task": new["task"],
        "split": new["split"],
        "length": new["length"],
        "n": new["n"],
        "old": {name: old[name] for name in ("score", "low", "high", "dense_score", "commit", "device", "batch_size")},
        "new": {name: new[name] for name in ("score", "low", "high", "dense_score", "commit", "device", "batch_size")},
        "change": dataclasses.asdict(change),
        "items_changed": changed,
        "differs": not change.low <= 0 <= change.high,
        "versions": new["versions"],
    }


def main(
    model: Annotated[Path, typer.Option(help="Folder of Qwen2.5-Coder-0.5B-Instruct.", show_default=False)],
    data: Annotated[Path, typer.Option(help="Folder with the tasks' data.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for the new rows.", show_default=False)],
    cell: Annotated[list[str] | None, typer.Option(help="A cell, by its method; repeatable. All if left out.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")] = "auto",
    batch_size: Annotated[int | None, typer.Option(help="Items answered at once; as in the rows if left out.")] = None,
) -> None:
    """Measure cells of the accuracy rows again, and compare."""
    names = [known.name for known in CELLS]
    try:
        for name in cell or ():
            if name not in names:
                raise unknown("cell", name, names)
        wanted = [known for known in CELLS if not cell or known.name in cell]
        lines = check(model.resolve(), data, out, wanted, device=device, batch_size=batch_size)
    except (DataError, UserError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(table(lines))
    typer.echo(f"commit {circumstances.commit()}; rows in {out}")
    if any(line["differs"] for line in lines):
        raise typer.Exit(1)


if __name__ == "__main__":
    sys.exit(typer.run(main))

"""Methods compared on a model in memory: `foveate compare` as a function of Python."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from foveate.errors import UserError, of_extra, unknown
from foveate.lab.evaluation import runner, tasks
from foveate.lab.evaluation.metrics import Interval
from foveate.lab.evaluation.paired import paired
from foveate.lab.evaluation.sources import InMemory
from foveate.lab.evaluation.tasks.base import Task
from foveate.lab.evaluation.tasks.fidelity import Fidelity
from foveate.lab.report.rows import all_spelled
from foveate.lab.results import resultfile
from foveate.methods import Method, make


class Asked(NamedTuple):
    """A task, and where its items come from."""

    task: Task
    data: Path


def task(spec: str, data: str | Path | None = None, **settings: Any) -> Asked:
    """A task of `foveate compare`.

    Args:
        spec: a name, or a name with settings, such as ``"niah:length=4096"``.
        data: the folder with its files (docs/guide/data.md); None: of a task that brings its own.
        settings: more of the task's settings.

    Raises:
        UserError: for an unknown task or setting, and where files are needed.
    """
    found = tasks.parse(spec, **settings)
    if (data := found.own_data if data is None else data) is None:
        raise UserError(f"task '{found.name}' reads files: give their folder as data (docs/guide/data.md)")
    return Asked(found, Path(data))


def documents(path: str | Path, **settings: Any) -> Asked:
    """Your own texts and questions: a file, or a folder of them, as task ``documents`` reads it."""
    return task("documents", path, **settings)


def sweep(method: str | Method, **settings: Any) -> list[str]:
    """The specs of a method under several values of its settings, as :func:`compare` takes them.

    >>> sweep("snapkv", top_k=[0.1, 0.25, 0.5])
    ['snapkv:top_k=0.1', 'snapkv:top_k=0.25', 'snapkv:top_k=0.5']

    Args:
        method: a name, a spec whose settings all of them have, or a method.
        settings: by name one value, or a list, range or NumPy array of values. With several lists there is a spec for
            each combination, in which the last setting varies fastest. A setting whose value is a list itself, such as
            ``anchors``, takes a tuple, or a list of tuples.

    Returns:
        Each spec once. Every one of them has been read as a method.

    Raises:
        UserError: for an unknown method or setting, a value that a setting does not take, and a list without values.
    """
    choices = {}
    for name, value in settings.items():
        values = list(value) if isinstance(value, (list, range, np.ndarray)) else [value]
        if not values:
            raise UserError(f"{name} must have at least one value to sweep, got {value!r}")
        choices[name] = values
    specs = []
    for values in itertools.product(*choices.values()):
        try:
            specs.append(make(method, **dict(zip(choices, values))).spec)
        except (TypeError, ValueError) as error:
            raise UserError(str(error)) from None
    return list(dict.fromkeys(specs))


def compare(
    model: Any,
    tokenizer: Any,
    asked: Asked,
    methods: Sequence[str | Method],
    *,
    limit: int = 100,
    batch_size: int = 1,
    seed: int = 0,
    share_prompt: bool = True,
    dense_below: int | str = 0,
    recall: int = 0,
    out: str | Path | None = None,
    progress: runner.Progress | None = None,
) -> Run:
    """Compare methods on the items of a task. Dense attention is always among them.

    Args:
        model: a model as :func:`foveate.attach` takes it: loaded, quantised, with an adapter of PEFT, or compiled. It
            must have no method.
        tokenizer: the model's tokenizer.
        asked: a result of :func:`task` or :func:`documents`. If documents hold no answers, methods are compared along
            the answers of dense attention.
        methods: specs or methods; :func:`sweep` makes the specs of several budgets.
        limit: largest number of items.
        batch_size: items answered at once.
        seed: seed of the items and of the intervals.
        share_prompt: whether each prompt is read once for all methods that read prompts densely.
        dense_below: see :func:`foveate.attach`. With 0, methods are as sparse in short contexts as in long ones. With
            "auto", steps are as `attach` and the server run them.
        recall: number of first items for which recall is measured, too: the share of exact attention, over all tokens
            so far, that the tokens read by a method hold. The task's answers must be generated. Prompts are read once
            more for each method, by PyTorch's references, and the first eight decoded tokens count. Rows have the mean
            over these items by layer, as `foveate compare --recall` writes it.
        out: a file for the rows, as `foveate compare` writes them. An interrupted comparison continues from it. None:
            no file.
        progress: called with a method's spec and the number of items that it has answered.

    Raises:
        UserError: for a method that does not exist or does not fit the model, before any item is answered; for data
            that are missing, items longer than the model, and a file of other rows.
    """
    if getattr(model, "foveate", None) is not None:
        raise UserError("the model has a method already: call foveate.detach(model) first")
    chosen, _ = runner.parse_methods([one if isinstance(one, str) else one.spec for one in methods])
    given = Fidelity(of=asked.task) if asked.task.needs_dense(asked.data) else asked.task
    loaded = InMemory(model, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl" if out is None else Path(out)
        plan = runner.Comparison(
            Path(loaded.name),
            given,
            asked.data,
            chosen,
            limit,
            path,
            batch_size,
            seed,
            share_prompt=share_prompt,
            dense_below=dense_below,
            recall=recall,
            loaded=loaded,
        )
        prepared, records = runner.prepare(plan), []
        rows = runner.run(prepared, progress or (lambda method, items: None), records)
    return Run(given, rows, [item.id for item in prepared.items], records)


def _mean(numbers: Iterable[float]) -> float:
    found = list(numbers)
    return sum(found) / len(found)


class Run:
    """A finished comparison.

    Args:
        task: with its metrics, by which methods are compared.
        rows: a row for each method, dense attention's first.
        ids: of the items, in order.
        records: of each method and batch that this call has answered.
    """

    def __init__(
        self,
        task: Task,
        rows: Sequence[Mapping[str, Any]],
        ids: Sequence[str],
        records: Sequence[Mapping[str, Any]],
    ):
        self.task, self.rows, self._ids, self._records = task, list(rows), list(ids), list(records)

    def row(self, method: str | Method) -> Mapping[str, Any]:
        """The row of a method, by its spec, or by its name where only one has that name.

        Raises:
            UserError: for a method that was not compared, or a name that several have.
        """
        given = method if isinstance(method, str) else method.spec
        found = [row for row in self.rows if row["spec"] == given] or [
            row for row in self.rows if given in (row["method"], row["spec"].partition(":")[0])
        ]
        if not found:
            found = [row for row in self.rows if row["spec"] == runner.parse_method(given).spec]
        if len(found) != 1:
            specs = ", ".join(row["spec"] for row in self.rows)
            raise UserError(f"{given} is {'not' if not found else 'more than one'} of what was compared: {specs}")
        return found[0]

    def difference(self, method: str | Method, other: str | Method = "dense", metric: str | None = None) -> Interval:
        """By how much a method scores above another on the same items, with the paired 95 % interval.

        Args:
            metric: one of the task's; None: its main one, in points.

        Raises:
            UserError: as :meth:`row`, and for an unknown metric.
        """
        name = metric or self.task.main
        if name not in self.task.metrics:
            raise UserError(f"metric must be one of {', '.join(self.task.metrics)}, not {name!r}")
        sides = ({key: np.array(one) for key, one in self.row(of)["item_values"].items()} for of in (method, other))
        return paired(self.task.metrics[name], *sides, seed=self.rows[0]["seed"])

    def items(self) -> list[dict[str, Any]]:
        """A line for each method and item that this call has answered: its id, the answer, what it scores and costs.

        Times, keys read and bytes are of the item's batch.
        """
        found = []
        for record in self._records:
            first = self._ids.index(record["first"])
            costs = {name: record[name] for name in ("prefill_ms", "decode_ms_per_token", "peak_bytes")}
            costs |= {name: record["stats"].get(name) for name in ("keys_read_share", "resident_bytes")}
            for place, (values, text) in enumerate(zip(record["values"], record["texts"])):
                found.append({"method": record["spec"], "item": self._ids[first + place], "answer": text})
                found[-1] |= values | costs
                layers = record.get("recall", ())[place : place + 1]
                found[-1] |= {"recall": _mean(layers[0].values())} if layers and layers[0] else {}
        return found

    def recall(self, method: str | Method) -> dict[int, float]:
        """By layer, which share of exact attention the tokens hold that a method reads: the mean over items, steps and
        KV heads, 0 to 1; see ``recall`` of :func:`compare`.

        Raises:
            UserError: as :meth:`row`, and where no recall was measured.
        """
        if not (found := self.row(method).get("recall")):
            raise UserError("no recall was measured: compare with recall=4, say, on a task whose answers are generated")
        return {int(layer): share for layer, share in found.items()}

    def plot(self, kind: str, out: str | Path, against: str | None = None) -> list[str]:
        """Draw the comparison as a PNG file; an existing file is replaced.

        Args:
            kind: ``"frontier"``: scores with their 95 % intervals against what decode steps read, in which a method
                has one colour, its budgets are joined, and dense attention is a level. ``"recall"``: :meth:`recall` of
                every method in every layer, in colours.
            out: the file, whose name ends in ``.png``.
            against: of a frontier, what scores are drawn against: ``"keys_read_share"`` (the default), in percent, or
                ``"kv_bytes_per_step"``, megabytes of keys and values that one sequence reads in all layers.

        Returns:
            A line for each method that is not in the picture, with the reason.

        Raises:
            UserError: for an unknown kind or ``against``, and for ``against`` of another kind; for a file of another
                suffix, or one that cannot be written; where there is nothing to draw; and where matplotlib is missing.
        """
        if kind not in _PLOTS:
            raise unknown("kind of plot", kind, _PLOTS, "run.plot")
        if kind != "frontier" and against is not None:
            raise UserError(f"against must be left out of a plot of kind {kind}, got {against}")
        return _PLOTS[kind](self, Path(out), **({} if against is None else {"against": against}))

    def _plot_frontier(self, out: Path, against: str = "keys_read_share") -> list[str]:
        from foveate.lab.report.plots.frontier import frontier

        return frontier(all_spelled(self.rows), out, against=against)

    def _plot_recall(self, out: Path) -> list[str]:
        from foveate.lab.report.plots.recall import recall

        return recall(self.rows, out)

    def frame(self) -> Any:
        """:meth:`items` as a pandas DataFrame. Raises `UserError` where pandas is missing."""
        return of_extra("pandas", "report", "data frames need").DataFrame(self.items())

    def save(self, path: str | Path) -> None:
        """Write the rows to a new file, as `foveate compare` does. Raises `UserError` where none can be written."""
        if (path := Path(path)).exists():
            raise UserError(f"{path}: is there already; choose another name")
        resultfile.write_rows(path, self.rows, keep_partial=False)

    def __str__(self) -> str:
        lines = [f"{self.task.name}, n = {self.rows[0]['n']}: {self.task.main} [95 %], difference from dense"]
        width = max(len(row["spec"]) for row in self.rows)
        for row in self.rows:
            score = f"{row['score']:6.1f} [{row['low']:.1f}, {row['high']:.1f}]"
            apart = f"{row['diff_to_dense']:+.1f} [{row['diff_low']:+.1f}, {row['diff_high']:+.1f}]"
            lines.append(f"{row['spec']:{width}}  {score}  {apart if row['method'] != 'dense' else ''}".rstrip())
        return "\n".join(lines)


_PLOTS = {"frontier": Run._plot_frontier, "recall": Run._plot_recall}
"""By their kind."""

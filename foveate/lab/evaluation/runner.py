"""Comparing methods on one task: the same items for every method, resumable, one row of results per method.

`prepare` does everything that can fail without the model's weights (names, data, lengths, earlier results); `run` loads
the model and works off what is missing. Items go in the outer loop and methods in the inner one, so that a machine that
slows down slows all methods alike. A batch's prompt is read once for all methods that are dense in prefill.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import foveate
from foveate.cli import imports
from foveate.errors import DataError, UserError, check_seed, check_text, require
from foveate.integrations.transformers import model_folder
from foveate.io import circumstances, outfile
from foveate.io.digest import digest
from foveate.lab.evaluation import costs, decoding, generation, lens
from foveate.lab.evaluation.metrics import Interval, columns, estimate
from foveate.lab.evaluation.native_model import NativeModel, applied, summary
from foveate.lab.evaluation.paired import paired
from foveate.lab.evaluation.sources import InFolder, InMemory
from foveate.lab.evaluation.tasks.base import Item, Option, Task, items_digest
from foveate.lab.results import resultfile
from foveate.lab.results.rows import ROW_SCHEMA, ordered
from foveate.runtime import check_dense_below

_EXAMPLES = 8  # items whose answers go into the rows
_EXAMPLE_CHARS = 200
_WARM_UP = 64  # prompt tokens of the unmeasured first call

Record = dict[str, Any]
Progress = Callable[[str, int], None]  # called with a method's spec and the number of items that it has just answered


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Options of a comparison. `dtype` and `device` may be "auto".

    `methods` are foveate methods, "dense" among them, or :class:`NativeModel` alone or among them.

    `share_prompt`: methods that are dense in prefill share one reading of each prompt; without it each reads the prompt
    itself, which times its prefill. Nothing else differs. `imports`: files that define methods, which have run
    (:func:`foveate.cli.imports.run`); rows of other versions of these files belong to another run. `dense_below`: see
    :func:`foveate.attach`; 0, so that short prompts show differences between methods, too, or "auto", so that steps are
    as in `attach` and the server.
    """

    model: Path
    task: Task
    data: Path
    methods: tuple[Any, ...]
    limit: int
    out: Path
    batch_size: int = 1
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    share_prompt: bool = True
    imports: tuple[Path, ...] = ()
    dense_below: int | str = 0
    recall: int = 0
    """On how many of the first items the recall of each method is measured, too; see :func:`lens.recall_of`."""
    loaded: InMemory | None = None
    """The model and its tokenizer in memory, which `model` only names; None: they are in the folder `model`."""

    @property
    def source(self) -> InFolder | InMemory:
        """Where the model comes from."""
        return self.loaded or InFolder(self.model)

    def command(self, method: Any) -> str:
        """The command line that makes the row of one method of these, paths shortened to their last names.

        Of a model in memory the call in Python.
        """
        if self.loaded is not None:
            specs = [other.spec for other in self.methods if other.name == "dense"] + [method.spec]
            settings = ",".join(f"{key}={value}" for key, value in self.task.settings().items())
            how = {"limit": self.limit, "batch_size": self.batch_size, "seed": self.seed}
            how |= {} if self.share_prompt else {"share_prompt": False}
            how |= {"dense_below": self.dense_below} if self.dense_below else {}
            how |= {"recall": self.recall} if self.recall else {}
            options = ", ".join(f"{name}={value!r}" for name, value in how.items())
            what = f"lab.task({f'{self.task.name}:{settings}'!r}, {self.data.name!r}), {list(dict.fromkeys(specs))!r}"
            return f"lab.compare(model, tokenizer, {what}, {options})"
        parts = ["foveate compare", *(f"--import {shlex.quote(file.name)}" for file in self.imports)]
        parts += [f"--model {self.model.name}", *self.task.arguments()]
        parts += [] if self.data == self.task.own_data else [f"--data {self.data.name}"]
        specs = [other.spec for other in self.methods if other.name == "dense"] + [method.spec]
        parts += [f"--method {shlex.quote(spec)}" for spec in dict.fromkeys(specs)]
        parts += [f"--limit {self.limit}", f"--batch-size {self.batch_size}", f"--seed {self.seed}"]
        parts += [f"--dtype {self.dtype}", f"--device {self.device}", f"--out {self.out.name}"]
        parts += [] if self.share_prompt else ["--no-share-prompt"]
        parts += [f"--dense-below {self.dense_below}"] if self.dense_below else []
        return " ".join(parts + ([f"--recall {self.recall}"] if self.recall else []))


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A checked comparison: its items, its fingerprint and what earlier runs have left of it."""

    plan: Comparison
    tokenizer: Any
    items: list[Item]
    run: dict[str, Any]
    rows: list[dict[str, Any]]
    records: list[Record]

    @property
    def missing(self) -> list[Any]:
        """The methods without a finished row."""
        done = {_row_key(row) for row in self.rows}
        return [method for method in self.plan.methods if _method_key(method) not in done]

    @property
    def kept(self) -> int:
        """Answers, items times methods, that an interrupted run has left."""
        keys = {_method_key(method) for method in self.missing}
        return sum(len(record["values"]) for record in self.records if record["key"] in keys)


def parse_method(spec: str) -> Any:
    """A method from its spec. Raises `UserError` for an unknown method or setting, naming the nearest."""
    try:
        return foveate.methods.parse(spec)
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from None


def parse_methods(specs: Sequence[str]) -> tuple[tuple[Any, ...], bool]:
    """Methods from their specs, "dense" first and repeated ones dropped; second: whether "dense" had to be added.

    The spec "own" is the model as it is, which alone is compared with nothing. Raises `UserError` for an unknown method
    or setting.
    """
    methods = [NativeModel() if spec.strip() == NativeModel.spec else parse_method(spec) for spec in specs]
    if methods and all(isinstance(method, NativeModel) for method in methods):
        return (NativeModel(),), False
    added = all(method.name != "dense" for method in methods)
    if added:
        methods.insert(0, parse_method("dense"))
    methods.sort(key=lambda method: method.name != "dense")
    unique = {_method_key(method): method for method in methods}
    return tuple(unique.values()), added


def prepare(plan: Comparison) -> Prepared:
    """Checks a comparison and makes its items; loads the tokenizer, no weights. Raises `UserError`."""
    for name in ("limit", "batch_size"):
        require(getattr(plan, name) >= 1, name.replace("_", "-"), "at least 1", getattr(plan, name))
    require(plan.recall >= 0, "recall", "a number of items, or 0", plan.recall)
    if plan.recall and any(isinstance(method, NativeModel) for method in plan.methods):
        raise UserError("recall cannot be measured of 'own', the model without a method: leave one of them out")
    check_seed(plan.seed)
    try:
        check_dense_below(plan.dense_below)
    except ValueError as error:
        raise UserError(str(error)) from None
    for method in plan.methods:
        check_text(plan.command(method), f"the command of method {method.name}, which its row holds,")
    outfile.check(plan.out)
    if plan.task.reads(plan.data, plan.out):
        raise UserError(f"{plan.out}: is within --data {plan.data}, whose files are documents; choose another --out")
    if plan.task.follows_dense_answers and all(method.name != "dense" for method in plan.methods):
        raise UserError(
            "--fidelity compares with dense attention, which is not among the methods; leave one of them out"
        )
    source = plan.source
    facts = source.facts()
    dtype, device = source.kind(plan.dtype, plan.device)
    path = plan.model if plan.loaded else plan.model.resolve()
    plan = dataclasses.replace(plan, model=path, device=device, dtype=dtype)
    methods = (one if isinstance(one, NativeModel) else source.settled(one) for one in plan.methods)
    plan = dataclasses.replace(plan, methods=tuple({_method_key(one): one for one in methods}.values()))
    files, settings = plan.task.files(plan.data), plan.task.settings()
    what = f"task '{plan.task.name}' (prompt and answer) needs"
    model_folder.check_positions(plan.task.least_positions(plan.data), facts, what)
    tokenizer = source.tokenizer()
    items = plan.task.items(plan.data, tokenizer, plan.limit, plan.seed)
    model_folder.check_positions(max(item.positions for item in items), facts, what)
    if plan.recall and all(item.texts for item in items[: plan.recall]):
        raise UserError(
            f"recall is measured on answers that are generated, and those of task '{plan.task.name}' are given; leave "
            "it out, or choose another task"
        )
    run = {
        "schema": ROW_SCHEMA,
        "task": plan.task.name,
        **settings,
        "limit": plan.limit,
        "seed": plan.seed,
        "model": plan.model.name,
        "weights": source.digest(),
        "data": digest(files),
        "items": items_digest(items),
        "dtype": plan.dtype,
        "device": device,
        "batch_size": plan.batch_size,
        **({"imports": list(map(imports.identity, plan.imports))} if plan.imports else {}),
        **({"dense_below": plan.dense_below} if plan.dense_below else {}),
        **({"recall": plan.recall} if plan.recall else {}),
    }
    rows = resultfile.read_rows(plan.out, run)
    kept = resultfile.read_partial(plan.out, run)
    sizes = {group[0].id: len(group) for group in generation.batches(items, plan.batch_size)}
    for record in kept:
        if (size := len(record["values"])) != sizes.get(record["first"]):
            wanted = sizes.get(record["first"], "no place in the run")
            raise DataError(
                f"{resultfile.partial_path(plan.out)}: {size} values of the batch of item {record['first']}, which has "
                f"{wanted}; remove the record, and the same command makes it again"
            )
    return Prepared(plan, tokenizer, items, run, rows, kept)


def run(
    prepared: Prepared, progress: Progress = lambda method, items: None, answered: list[Record] | None = None
) -> list[dict[str, Any]]:
    """Answers the missing items, writes the rows and returns them: the rows of earlier runs first, then the new rows.

    ``answered`` gets the records from which the new rows are made; they hold the answers.

    If it is killed at any moment, it loses at most the batch in flight. Raises `UserError` if a method cannot be
    applied to the model, before any item is answered, and for an item whose predictions are not finite.
    """
    plan, missing = prepared.plan, prepared.missing
    if not missing:
        return prepared.rows
    with resultfile.PartialFile(plan.out, prepared.run) as partial:
        records = {(record["key"], record["first"]): record for record in partial.records}
        groups = generation.batches(prepared.items, plan.batch_size)
        todo = []
        for group in groups:
            waiting = [method for method in missing if (_method_key(method), group[0].id) not in records]
            todo += [(waiting, group)] if waiting else []
            for method in missing:
                if method not in waiting:
                    progress(method.spec, len(group))
        if todo:
            needed = [method for method in missing if any(method in waiting for waiting, _ in todo)]
            examiner = _Examiner(prepared, needed)
            for record in itertools.chain.from_iterable(examiner.measure(*one) for one in todo):
                records[record["key"], record["first"]] = record
                partial.append(record)
                progress(record["spec"], len(record["values"]))
        rows = list(prepared.rows)
        for method in missing:
            own = [records[_method_key(method), group[0].id] for group in groups]
            if answered is not None:
                answered += own
            rows.append(_row(prepared, method, own, next((row for row in rows if row["method"] == "dense"), None)))
        finished = {_row_key(row) for row in rows}
        resultfile.write_rows(plan.out, rows, keep_partial=any(key not in finished for key, _ in records))
    return rows


class _Examiner:
    """The loaded model, every method tried on it once, ready to be measured."""

    def __init__(self, prepared: Prepared, methods: Sequence[Any]):
        plan = self._plan = prepared.plan
        self._dense = next((method for method in plan.methods if method.name == "dense"), None)
        self._tokenizer = prepared.tokenizer
        self._model = plan.source.model(plan.dtype, plan.device)
        self._memory = circumstances.PeakMemory(plan.device)
        self._commit = circumstances.commit()
        self._recalled = {item.id for item in prepared.items[: plan.recall]}
        item = prepared.items[0]
        context = min(item.context_tokens, _WARM_UP)
        question = item.prompt_ids[item.context_tokens :][: _WARM_UP if context else 0]
        cut = dataclasses.replace(
            item,
            prompt_ids=item.prompt_ids[:_WARM_UP] if not context else (*item.prompt_ids[:context], *question),
            context_tokens=context,
            target_ids=item.target_ids[:2],
            options=tuple(Option(one.prompt_ids[:_WARM_UP], one.target_ids[:2]) for one in item.options),
            max_new_tokens=min(2, item.max_new_tokens),
        )
        one_token = all(len(text.target_ids) < 2 for item in prepared.items for text in item.texts)
        for method in methods:
            try:
                with applied(self._model, method, plan.dense_below) as attachment:
                    generation.run_batch(self._model, self._tokenizer, [cut])
                if plan.recall:
                    lens.recall_of(self._model, self._tokenizer, method, cut, plan.dense_below)
                if item.texts and one_token and attachment is not None and attachment.decodes_alone:
                    raise UserError(
                        f"method '{method.spec}' would not act on task '{plan.task.name}': all of its answers are one "
                        "token, which the prompt decides, and the method is dense in prompts; leave it out, or choose "
                        "a method with sparse prompts or a task with longer answers"
                    )
            except UserError:
                raise
            except (ValueError, TypeError, NotImplementedError) as error:
                raise UserError(
                    f"method '{method.spec}' cannot be applied to {plan.model.name}: {error}; method 'own' alone runs "
                    "the model as it is"
                ) from error
        dense = [method for method in prepared.missing if not self._reads_prompts_itself(method)]
        self._sharing = dense if plan.share_prompt and len(dense) > 1 else []

    def measure(self, methods: Sequence[Any], items: Sequence[Item]) -> Iterator[Record]:
        """Each method on one batch: graded values, texts, times, memory and the method's own counters."""
        together = [method for method in methods if method in self._sharing]
        along, trace, prompt, peak = self._plan.task.follows_dense_answers, None, None, 0
        if together:
            readers = (self._dense, *(method for method in together if method != self._dense))
            with foveate.attached(self._model, foveate.methods.SharedPrompt(readers)):
                self._memory.start()
                prompt, peak = generation.read_prompt(self._model, self._tokenizer, items), self._memory.peak()
        if along:
            with foveate.attached(self._model, self._dense):
                read = prompt or generation.read_prompt(self._model, self._tokenizer, items)
                trace = read.trace(self._model, shared=prompt is not None)
            del read
        for method in together:
            yield self._answers(method, items, trace, prompt, peak)
        del prompt
        for method in methods:
            if method not in together:
                yield self._answers(method, items, trace)

    def _answers(
        self,
        method: Any,
        items: Sequence[Item],
        trace: decoding.Trace | None,
        prompt: generation.Prompt | None = None,
        peak: int = 0,
    ) -> Record:
        """What a method makes of a prompt that was read for several at once, with this peak, or that it reads."""
        torch.manual_seed(self._plan.seed)
        shared = prompt is not None
        with applied(self._model, method, self._plan.dense_below):
            self._memory.start()
            prompt = prompt or generation.read_prompt(self._model, self._tokenizer, items)
            batch = prompt.decode(self._model, shared=shared, along=trace)
            kind = self._memory.kind + (", dense's logits included" if self._plan.task.follows_dense_answers else "")
            kind += generation.SHARED if shared else ""
            record = self._record(method, items, batch, max(peak, self._memory.peak()), kind)
        if self._recalled:
            how = (self._model, self._tokenizer, method)
            below = self._plan.dense_below
            record["recall"] = [lens.recall_of(*how, item, below) for item in items if item.id in self._recalled]
        return record

    def _record(self, method: Any, items: Sequence[Item], batch: generation.Batch, peak: int, peak_kind: str) -> Record:
        values = [self._plan.task.grade(item, output) for item, output in zip(items, batch.outputs)]
        if not all(math.isfinite(value) for graded in values for value in graded.values()):
            raise ArithmeticError(f"method '{method.spec}' gave a value that is not a number on item {items[0].id}")
        return {
            "key": _method_key(method),
            "spec": method.spec,
            "first": items[0].id,
            "values": values,
            "texts": [self._plan.task.said(item, output) for item, output in zip(items, batch.outputs)],
            "prefill_ms": batch.prefill_ms,
            "decode_ms_per_token": batch.decode_ms_per_token,
            "request_ms": batch.request_ms,
            "timing": batch.timing,
            "peak_bytes": peak,
            "peak_kind": peak_kind,
            "stats": summary(self._model, method, batch),
            "commit": self._commit,
        }

    def _reads_prompts_itself(self, method: Any) -> bool:
        """Whether a method cannot go on from a prompt that dense attention has read."""
        if isinstance(method, NativeModel):
            return True
        with foveate.attached(self._model, method, dense_below=0) as attachment:
            return attachment.sparse_prompt


def _row(prepared: Prepared, method: Any, records: Sequence[Record], dense: dict[str, Any] | None) -> dict[str, Any]:
    """A finished row, made from a method's records, in the order of the items."""
    plan, task, items = prepared.plan, prepared.plan.task, prepared.items
    values = columns(value for record in records for value in record["values"])
    names = sorted(task.metrics, key=lambda name: name != task.main)  # the main one first
    metrics = {name: estimate(task.metrics[name], values, plan.seed) for name in names}
    main, aggregate = metrics[task.main], task.metrics[task.main]
    if dense is None:  # this row is dense itself, or the model's own
        difference, dense_score = Interval(0.0, 0.0, 0.0), main.value
    else:
        theirs = {key: np.array(column) for key, column in dense["item_values"].items()}
        difference, dense_score = paired(aggregate, values, theirs, plan.seed), dense["score"]
    texts = [text for record in records for text in record["texts"]]
    prompt_tokens = sum(len(item.prompt_ids) for item in items) / len(items)
    return ordered(
        {
            "method": method.name,
            "spec": method.spec,
            "settings": foveate.methods.settings_of(method),
            "model": plan.model.name,
            "architecture": plan.source.facts(),
            "task": task.name,
            "task_settings": task.settings(),
            "split": task.split,
            "length": getattr(task, "length", 0) or round(prompt_tokens),
            "n": len(items),
            "score": main.value,
            "low": main.low,
            "high": main.high,
            "metrics": {name: dataclasses.asdict(interval) for name, interval in metrics.items()},
            "ceiling": task.ceiling(items),
            "dense_score": dense_score,
            "diff_to_dense": difference.value,
            "diff_low": difference.low,
            "diff_high": difference.high,
            **costs.add_up(records),
            "batch_size": plan.batch_size,
            "dense_below": plan.dense_below,
            "dtype": plan.dtype,
            "device": circumstances.device_name(plan.device),
            "versions": circumstances.versions(),
            "limit": plan.limit,
            "seed": plan.seed,
            "command": plan.command(method),
            "run": prepared.run,
            "item_values": {key: array.tolist() for key, array in values.items()},
            "examples": [
                {"id": item.id, "gold": list(item.answers), "answer": text[:_EXAMPLE_CHARS]}
                for item, text in list(zip(items, texts))[:_EXAMPLES]
            ],
        }
    )


def _row_key(row: Mapping[str, Any]) -> str:
    return json.dumps([row["method"], row["settings"]], sort_keys=True)


def _method_key(method: Any) -> str:
    return _row_key({"method": method.name, "settings": foveate.methods.settings_of(method)})

"""Searching methods and budgets for the cheapest setting that keeps a model's answers on one's own data.

Settings are tried on the task's split `tune` and chosen there; what the best ones lose is then measured on `test`. Each
trial is a row of `compare`, so that a search which was interrupted goes on, and loses one trial at most.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from foveate.evaluation.runner import Comparison, Progress, parse_method, prepare, run
from foveate.evaluation.tasks.base import Task
from foveate.evaluation.tasks.fidelity import Fidelity
from foveate.methods.spec import SETTING, SETTING_SCHEMA
from foveate.results import outfile
from foveate.results.errors import UserError, unknown

OBJECTIVES = ("latency", "throughput", "memory")
KEEPING = {
    "pages": "pages:top_k={share}",
    "luka": "luka:top_k={share}",
    "quest": "quest:top_k={share}",
}
"""Methods that keep the whole cache and read a share of it."""
EVICTING = {
    "snapkv": "snapkv:top_k={share}",
    "adakv": "adakv:top_k={share}",
    "h2o": "h2o:top_k={share}",
    "tova": "tova:top_k={share}",
}
"""Methods that keep a share of the prompt."""
KASCADE = "kascade:top_k={share},pool=layer,pooling=sqrt,decode_only=true,calibration={file}"
_SHARES = (0.02, 0.5)
"""The least and the largest share of a context."""
_FIRST = 0.125
"""The share with which each method is tried first."""
_FAILURES = (UserError, ArithmeticError, NotImplementedError, torch.OutOfMemoryError)
"""What a setting may raise that cannot be applied to the model."""
_TOGETHER, _STALE, _CONFIRMED = 4, 8, 3
"""Trials of a run; those without a better one that end a search; and the best ones that are measured on held-back data
at most."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to search.

    Args:
        model: a model folder.
        task: with splits `tune` and `test`, such as `documents`.
        data: the task's data.
        out: the file for the setting; rows go beside it, to `.tune.jsonl` and `.test.jsonl`.
        max_loss: points of the task's score that a method may lose against dense attention, 0 to 100.
        objective: what is to be small: time of a token (latency), time of a token at `batch_size` over the batch
            (throughput), or what stays in memory (memory).
        calibration: a file of `foveate calibrate`, with which kascade is among the methods; None: it is not.
        limit: items of each split.
        minutes: no trial starts after so many, but for the first of each method. A few start together.
        trials: nor after so many trials.
    """

    model: Path
    task: Task
    data: Path
    out: Path
    max_loss: float = 1.0
    objective: str = OBJECTIVES[0]
    calibration: Path | None = None
    limit: int = 20
    minutes: float = 15.0
    trials: int = 40
    batch_size: int = 1
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise unknown("objective", self.objective, OBJECTIVES)
        if not 0 <= self.max_loss <= 100:
            raise UserError(f"max-loss must be points of a score, 0 to 100, got {self.max_loss}")
        if self.minutes <= 0 or self.trials < 1:
            raise UserError(f"minutes must be above 0 and trials at least 1, got {self.minutes} and {self.trials}")
        if self.objective == "throughput" and self.batch_size == 1:
            raise UserError("throughput is of several sequences: give as batch-size how many you serve at once")
        if not {"tune", "test"} <= set(self.task.splits):
            raise UserError(f"task '{self.task.name}' has no splits tune and test; use documents")

    def rows(self, split: str) -> Path:
        """The file of a split's rows."""
        return self.out.with_name(f"{self.out.stem}.{split}.jsonl")

    @property
    def methods(self) -> dict[str, str]:
        """The specs that are searched, by method, with places for the share and the file of a calibration."""
        found = EVICTING if self.objective == "memory" else KEEPING | EVICTING
        return found if self.calibration is None else found | {"kascade": KASCADE}


@dataclasses.dataclass(frozen=True)
class Trial:
    """A setting, what it costs and what it loses."""

    spec: str
    cost: float
    """In the objective's unit, see :func:`cost_of`."""
    loss: float
    """Points below dense attention."""
    row: Mapping[str, Any] = dataclasses.field(repr=False, default_factory=dict)


def search(plan: Plan, say: Callable[[str], None] = lambda text: None) -> Trial:
    """Searches, writes the best setting and returns it, as measured on the held-back split.

    Dense attention is the setting where nothing keeps what it may lose. Raises `UserError` as `compare` does, and if
    optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise UserError("foveate tune needs optuna: pip install 'foveate[tune]'") from None

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    outfile.check(plan.out)
    begun, tried, dense, best, stale, asked = time.monotonic(), {}, None, None, 0, 0
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=plan.seed, constant_liar=True))
    for name in plan.methods:
        study.enqueue_trial({"method": name, f"{name}_share": _FIRST})
    while asked < plan.trials:
        if stale >= _STALE:
            say(f"no better setting in {stale} trials")
            break
        if asked and time.monotonic() - begun > 60 * plan.minutes:
            say(f"{plan.minutes:g} minutes are over")
            break
        number = min(_TOGETHER if asked else len(plan.methods), plan.trials - asked)
        trials = [study.ask() for _ in range(number)]
        specs = [_suggested(plan, trial) for trial in trials]
        _together(plan, [spec for spec in dict.fromkeys(specs) if spec not in tried], say)
        if dense is None:
            dense = best = _measure(plan, "tune", "dense")
            say(f"dense: {_words(plan, dense)}")
        for trial, spec in zip(trials, specs, strict=True):
            known = spec in tried
            if not known:
                try:
                    tried[spec] = _measure(plan, "tune", spec)
                except _FAILURES as error:
                    tried[spec] = None
                    say(f"{spec}: {str(error).splitlines()[0]}")
            found = tried[spec]
            if found is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
                stale += 1
                continue
            over = found.loss - plan.max_loss  # one that loses too much is worse than dense
            study.tell(trial, found.cost / dense.cost if over <= 0 else 1 + over)
            better = found.loss <= plan.max_loss and found.cost < best.cost
            best, stale = (found, 0) if better else (best, stale + 1)
            if not known:
                say(f"{spec}: {_words(plan, found)}{', the best so far' if better else ''}")
        stale = stale if asked else 0  # the first of each method are only where the search begins
        asked += number
    chosen = _confirmed(plan, [one for one in tried.values() if one is not None and one.cost < dense.cost], say)
    _write(plan, chosen)
    return chosen


def _together(plan: Plan, specs: Sequence[str], say: Callable[[str], None]) -> None:
    """Measures settings in one run, which reads each prompt once for all that read prompts alike."""
    answered = 0

    def progress(spec: str, items: int) -> None:
        nonlocal answered
        if spec == parse_method(specs[0]).spec:
            answered += items
            say(f"{answered} of {plan.limit} items")

    if specs:
        say(f"together: dense, {', '.join(specs)}")
        with contextlib.suppress(*_FAILURES):  # ends the run; then each is measured alone, and the one that fails named
            _rows(plan, "tune", ["dense", *specs], progress)


def _suggested(plan: Plan, trial: Any) -> str:
    name = trial.suggest_categorical("method", list(plan.methods))
    return _spec(plan, name, trial.suggest_float(f"{name}_share", *_SHARES, log=True))


def _spec(plan: Plan, name: str, share: float) -> str:
    file = json.dumps(None if plan.calibration is None else str(plan.calibration.resolve()))
    return plan.methods[name].format(share=float(f"{share:.2g}"), file=file)


def _confirmed(plan: Plan, tried: list[Trial], say: Callable[[str], None]) -> Trial:
    """The cheapest of the best trials that keeps what it may lose on held-back data; dense if none does."""
    kept = sorted((one for one in tried if one.loss <= plan.max_loss), key=lambda one: one.cost)
    for one in kept[:_CONFIRMED]:
        again = _measure(plan, "test", one.spec)
        say(f"on held-back data {one.spec}: {_words(plan, again)}")
        if again.loss <= plan.max_loss:
            return again
    say("no setting keeps what it may lose on held-back data: dense attention it is")
    return _measure(plan, "test", "dense")


def _measure(plan: Plan, split: str, spec: str) -> Trial:
    """A setting's row, made now or by an earlier search."""
    row = _rows(plan, split, list(dict.fromkeys(("dense", spec))))[parse_method(spec).spec]
    return Trial(spec, cost_of(row, plan.objective), 0 - row["diff_to_dense"], row)


def _rows(
    plan: Plan, split: str, specs: Sequence[str], progress: Progress = lambda method, items: None
) -> dict[str, dict[str, Any]]:
    """The rows of a split by their specs, those of these settings among them."""
    task = dataclasses.replace(plan.task, split=split)
    if task.needs_dense(plan.data):
        task = Fidelity(of=task)
    methods = tuple(map(parse_method, specs))
    comparison = Comparison(
        plan.model,
        task,
        plan.data,
        methods,
        plan.limit,
        plan.rows(split),
        plan.batch_size,
        plan.seed,
        plan.dtype,
        plan.device,
    )
    return {row["spec"]: row for row in run(prepare(comparison), progress)}


def cost_of(row: Mapping[str, Any], objective: str) -> float:
    """What a row's method costs: bytes resident (memory); else milliseconds a token and sequence, or, where the row has
    no times (it goes along dense attention's answers), bytes of the cache that a step reads."""
    if objective == "memory":
        return float(row["resident_bytes"])
    measured = row["decode_ms_per_token"]
    return float(row["kv_bytes_per_step"] if measured is None else measured / row["batch_size"])


def _words(plan: Plan, trial: Trial) -> str:
    row = trial.row
    unit = "resident" if plan.objective == "memory" else "read a step"
    timed = plan.objective != "memory" and row["decode_ms_per_token"] is not None
    cost = f"{trial.cost:.1f} ms a token" if timed else f"{trial.cost / 1e6:.1f} MB {unit}"
    low, high, dense = 0 - row["diff_high"], 0 - row["diff_low"], row["dense_score"]
    return f"{cost}, loses {trial.loss:.1f} points [{low:.1f}, {high:.1f}] of {dense:.1f}"


def _write(plan: Plan, chosen: Trial) -> None:
    row = chosen.row
    kept = ("task", "split", "n", "score", "dense_score", "diff_to_dense", "diff_low", "diff_high", "keys_read_share")
    kept += ("decode_ms_per_token", "kv_bytes_per_step", "resident_bytes", "device", "dtype", "versions", "seed")
    found = {
        "kind": SETTING,
        "schema": SETTING_SCHEMA,
        "method": chosen.spec,
        "architecture": row["architecture"],
        "objective": plan.objective,
        "max_loss": plan.max_loss,
        "measured": {name: row[name] for name in kept},
    }
    outfile.write(plan.out, (json.dumps(found, indent=2) + "\n").encode())

"""Searching methods and budgets for the cheapest setting that keeps a model's answers on one's own data.

A method loses less the more it reads, so the least share that keeps the answers is bracketed for each; methods that can
no longer become the cheapest are left. Settings are tried on the task's split `tune` and chosen there; what the best
ones lose is then measured on `test`. Each trial is a row of `compare`, so that a search which was interrupted goes on.
What the held-back items do not show to be within the loss allowed, or what gains nothing, is not recommended.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from foveate.cli import imports
from foveate.errors import UserError, require, unknown
from foveate.io import outfile
from foveate.lab.evaluation import verdict
from foveate.lab.evaluation.paired import least_items, least_loss
from foveate.lab.evaluation.runner import Comparison, Progress, parse_method, prepare, run
from foveate.lab.evaluation.tasks.base import Task
from foveate.lab.evaluation.tasks.fidelity import Fidelity
from foveate.methods import REGISTRY, Method
from foveate.methods.spec import SETTING, SETTING_SCHEMA

OBJECTIVES = ("latency", "memory")
KEEPING = ("pages", "luka", "quest")  # methods that keep the whole cache and read a share of it
PRUNING = ("snapkv", "adakv")  # methods that keep a share of the prompt
EVICTING = (*PRUNING, "h2o", "tova")  # tried to save memory; the last two evict while they decode, too
KASCADE = "kascade:top_k={share},calibration={file}"
_LEAST, _FIRST, _MOST = 0.02, 0.12, 0.8
"""Shares of a context: the smallest share, the share with which each method is tried first, and the largest share."""
_CLOSE = 1.25  # a share is looked for no closer than within this factor
_FALLING = 0.7  # a loss falls about as this power of the share (measured with `pages` and `kascade` on novels)
_FAILURES = (ValueError, ArithmeticError, NotImplementedError, torch.OutOfMemoryError)
"""What a setting may raise that cannot be applied to the model; a user's own method may raise anything."""
_TOGETHER, _CONFIRMED = 4, 6
"""Number of trials that a run adds after the first, and the largest number of trials measured on held-back data. These
are the cheapest trials that keep the answers, and equally many trials that lose least: held-back data must show the
loss."""
_GAIN = 0.95
"""A setting that costs more than this share of dense attention's cost gains nothing: times differ by chance."""
_ITEMS, _TIMED = 20, 3
"""Usual items of a split whose answers are dense attention's, and batches that are answered for their times alone."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to search."""

    model: Path
    task: Task  # with splits `tune` and `test`, such as `documents`
    data: Path
    out: Path  # for the setting; rows go beside it, `.tune.jsonl` and `.test.jsonl`, times to `.tune-times.jsonl`, …
    max_loss: float = 1.0  # points of the task's score that may be lost against dense attention, 0 to 100
    objective: str = OBJECTIVES[0]  # is to be small: time of a token and sequence, or what stays in memory
    calibration: Path | None = None  # of `foveate calibrate`, with which kascade is among the methods
    limit: int | None = None
    """Items of each split at most. None: `tune` takes enough items that one of them is worth no more than `max_loss`,
    and `test` takes enough that its interval can be within it (:func:`foveate.lab.evaluation.paired.least_items`).
    Documents without answers take 20 each."""
    minutes: float = 15.0  # no trial starts later, except the first trial of each method
    batch_size: int = 1
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    imports: tuple[Path, ...] = ()  # files whose methods (:func:`foveate.cli.imports.run`) are searched by their top_k

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise unknown("objective", self.objective, OBJECTIVES)
        require(0 < self.max_loss <= 100, "max-loss", "points of a score, above 0 and at most 100", self.max_loss)
        require(self.limit is None or self.limit >= 1, "limit", "at least 1", self.limit)
        require(self.minutes > 0, "minutes", "above 0", self.minutes)
        if not {"tune", "test"} <= set(self.task.splits):
            raise UserError(f"task '{self.task.name}' has no splits tune and test; use documents")
        for method in self._imported:
            if "top_k" not in method.__dataclass_fields__:
                who = f"method '{method.name}' of {method.__module__}"
                raise UserError(f"{who} has no top_k, the share that is searched")

    def rows(self, split: str) -> Path:
        """The file of a split's rows."""
        return self.out.with_name(f"{self.out.stem}.{split}.jsonl")

    def items(self, split: str) -> int:
        """Items of a split at most."""
        if self.limit is not None:
            return self.limit
        if self.task.needs_dense(self.data):
            return _ITEMS
        return least_items(self.max_loss) if split == "test" else math.ceil(100 / self.max_loss)

    @property
    def methods(self) -> dict[str, str]:
        """The specs that are searched, by method, with places for the share and the file of a calibration."""
        memory = self.objective == "memory"
        names = [*(EVICTING if memory else (*KEEPING, *PRUNING)), *(method.name for method in self._imported)]
        found = {name: f"{name}:top_k={{share}}" for name in names}
        return found if memory or self.calibration is None else found | {"kascade": KASCADE}

    @property
    def _imported(self) -> list[type[Method]]:
        files = {str(file.resolve()) for file in self.imports}
        return [method for method in REGISTRY.values() if method.__module__ in files]


@dataclasses.dataclass(frozen=True)
class Trial:
    """A setting, what it costs and what it loses."""

    spec: str
    cost: float  # in the objective's unit, see :func:`cost_of`
    loss: float  # points below dense attention
    most: float  # the upper end of the loss's 95 % interval, which is what the items show
    row: Mapping[str, Any] = dataclasses.field(repr=False, default_factory=dict)


def search(plan: Plan, say: Callable[[str], None] = lambda text: None) -> Trial:
    """Searches, writes the best setting and returns it, as measured on the held-back split.

    Raises `UserError` where there is nothing to recommend: dense attention scores no more than may be lost, the items
    are too few to show the loss, or no setting that costs less than dense attention is shown to keep it; else as
    `compare`.
    """
    outfile.check(plan.out)
    if not plan.task.needs_dense(plan.data):
        for split in ("tune", "test"):
            _check_number(plan, len(prepare(_comparison(plan, split, ["dense"])).items), "items", split)
    begun, dense = time.monotonic(), None
    tried: dict[str, dict[float, Trial]] = {name: {} for name in plan.methods}
    failed: set[str] = set()
    shares = dict.fromkeys(plan.methods, _FIRST)
    while shares:
        specs = {name: _spec(plan, name, share) for name, share in shares.items()}
        _run_jointly(plan, "tune", list(specs.values()), say)
        if dense is None:
            dense = best = _dense(plan, "tune")
            say(f"dense: {_words(plan, dense)}")
        for name, spec in specs.items():
            try:
                found = tried[name][shares[name]] = _measure(plan, "tune", spec)
            except Exception as error:
                failed.add(name)
                say(f"{spec}: {_failure(error)}")
                continue
            better = found.loss <= plan.max_loss and found.cost < best.cost
            best = found if better else best
            say(f"{spec}: {_words(plan, found)}{', the best so far' if better else ''}")
        shares = _promising({name: tried[name] for name in tried if name not in failed}, plan.max_loss, dense, best)
        if shares and time.monotonic() - begun > 60 * plan.minutes:
            say(f"{plan.minutes:g} minutes are over")
            break
    measured = (one for of_method in tried.values() for one in of_method.values())
    chosen = _confirmed(plan, [one for one in measured if one.cost <= _GAIN * dense.cost], say)
    _write(plan, chosen)
    return chosen


def _dense(plan: Plan, split: str) -> Trial:
    """Dense attention on a split. Raises `UserError` if what may be lost cannot be told by these items."""
    found = _measure(plan, split, "dense")
    if nothing := verdict.nothing_to_lose(found.row, plan.max_loss):
        raise UserError(f"split '{split}': {nothing[0].lower()}{nothing[1:]}")
    if "tokens" in found.row["item_values"]:  # of dense attention's answers
        _check_number(plan, round(sum(found.row["item_values"]["tokens"])), "tokens of answers", split)
    return found


def _check_number(plan: Plan, number: int, what: str, split: str) -> None:
    """Raises `UserError` if nothing on a split can be told from a loss above the one allowed: on `tune`, where settings
    are chosen by what they lose, and on `test`, where the interval has to show it."""
    most = plan.max_loss
    if split == "test" and number < least_items(most):
        why = f"do not show a loss of at most {most:g} points, even where no answer differs"
        least, loss = least_items(most), least_loss(number)
    elif number * most < 100:
        why = f"do not tell a loss of {most:g} points: each is worth {100 / number:.3g}"
        least, loss = math.ceil(100 / most), 100 / number
    else:
        return
    raise UserError(
        f"{number} {what} of split '{split}' {why}; at least {least} do: give more documents, a larger --limit, or "
        f"--max-loss {math.ceil(10 * loss) / 10:g}"
    )


def _promising(
    tried: Mapping[str, Mapping[float, Trial]], max_loss: float, dense: Trial, best: Trial
) -> dict[str, float]:
    """The shares to try next, of the methods that may become cheaper than the best: the cheapest, if they are."""
    expected = []
    for name, trials in tried.items():
        wanted = next_share({share: one.loss for share, one in trials.items()}, max_loss)
        if wanted is not None:
            near, share = min(trials, key=lambda one: abs(one - wanted)), float(f"{min(wanted, _MOST):.2g}")
            slope = (dense.cost - trials[near].cost) / (1 - near)  # a part of a token's cost does not depend on shares
            costs = (trials[near].cost + (one - near) * slope for one in (wanted, share))
            expected.append((*costs, name, share))
    cheaper = sorted(one for one in expected if one[1] < best.cost)
    return {name: share for *_, name, share in cheaper[:_TOGETHER]}


def next_share(losses: Mapping[float, float], most: float) -> float | None:
    """The share at which a method is worth trying next; None where the least that keeps its answers is known.

    Args:
        losses: what it has lost, by the share; not empty.
        most: what it may lose.

    Returns a share; more than the largest where even that is not expected to do, and None where it did not.
    """
    enough = min((share for share, loss in losses.items() if loss <= most), default=None)
    less = max((share for share in losses if enough is None or share < enough), default=None)
    if enough is None:
        guess = less * (1.2 * losses[less] / max(most, 0.1)) ** (1 / _FALLING)
        return max(1.5 * less, guess) if less < _MOST else None
    if less is None:
        return max(_LEAST, enough / 3) if enough > _LEAST else None
    return math.sqrt(less * enough) if enough > _CLOSE * less else None


def _run_jointly(plan: Plan, split: str, specs: Sequence[str], say: Callable[[str], None]) -> None:
    """Measures settings in one run, which reads each prompt once for all that read prompts alike."""
    answered, first = 0, None

    def progress(spec: str, items: int) -> None:
        nonlocal answered, first
        first = first or spec  # the first that is not measured yet
        if spec == first:
            answered += items
            say(f"{answered} items")

    if specs:
        say(f"together: dense, {', '.join(specs)}")
        try:
            row = _rows(plan, split, ["dense", *specs], progress)["dense"]
            if _untimed(plan, row):
                _times(plan, split, ["dense", *specs])
        except Exception as error:  # ends the run; then each is measured alone, and the one that fails named
            _failure(error)


def _failure(error: Exception) -> str:
    """Why a setting cannot be applied, in a line. Raises an error that is neither a setting's nor a user's file's."""
    fault = imports.fault(error)
    if fault is None and not isinstance(error, _FAILURES):
        raise error
    return (fault or str(error)).splitlines()[0]


def _spec(plan: Plan, name: str, share: float) -> str:
    file = json.dumps(None if plan.calibration is None else str(plan.calibration.resolve()))
    return plan.methods[name].format(share=float(f"{share:.2g}"), file=file)


def _confirmed(plan: Plan, tried: list[Trial], say: Callable[[str], None]) -> Trial:
    """The cheapest of the best trials that held-back data show to keep what it may lose, and that gains there.

    Raises `UserError` where none does, with how near the nearest came and how many items would show it.
    """
    kept = sorted((one for one in tried if one.loss <= plan.max_loss), key=lambda one: one.cost)
    safest = sorted(kept[_CONFIRMED // 2 :], key=lambda one: one.loss)[: _CONFIRMED - _CONFIRMED // 2]
    kept = sorted([*kept[: _CONFIRMED // 2], *safest], key=lambda one: one.cost)
    _run_jointly(plan, "test", [one.spec for one in kept], say)
    dense = _dense(plan, "test") if kept else None
    gaining = []
    for one in kept:
        again = _measure(plan, "test", one.spec)
        say(f"on held-back data {one.spec}: {_words(plan, again)}")
        if again.cost <= _GAIN * dense.cost:
            if again.most <= plan.max_loss:
                return again
            gaining.append(again)
    words = f"no setting that costs at most {_GAIN:.0%} of dense attention loses no more than {plan.max_loss:g} points"
    open_ones = [one for one in gaining if one.loss < plan.max_loss]
    if not open_ones:
        raise UserError(f"nothing is gained: {words} on both halves; {plan.out} is not written")
    nearest = min(open_ones, key=lambda one: one.most)
    needed = verdict.compared(nearest.row, dense.row, plan.max_loss).needed
    raise UserError(
        f"nothing is shown: {words} on held-back data by its whole 95 % interval. {nearest.spec} is nearest, and loses "
        f"{nearest.loss:.1f} points or up to {nearest.most:.1f} (n = {nearest.row['n']}): give "
        f"{f'about {needed:,} items' if needed else 'more items'} to each split, or --max-loss "
        f"{math.ceil(10 * nearest.most) / 10:g}; {plan.out} is not written"
    )


def _measure(plan: Plan, split: str, spec: str) -> Trial:
    """A setting's row, made now or by an earlier search."""
    specs, name = list(dict.fromkeys(("dense", spec))), parse_method(spec).spec
    rows = _rows(plan, split, specs)
    row = rows[name]
    beside = None if spec == "dense" else verdict.compared(row, rows["dense"], plan.max_loss).difference
    if _untimed(plan, row):
        row = row | {"decode_ms_per_token": _times(plan, split, specs)[name]["decode_ms_per_token"]}
    if beside is not None:  # rows of an earlier version may hold another interval
        row = row | {"diff_low": beside.low, "diff_high": beside.high}
    return Trial(spec, cost_of(row, plan.objective), 0 - row["diff_to_dense"], 0 - row["diff_low"], row)


def _untimed(plan: Plan, row: Mapping[str, Any]) -> bool:
    return plan.objective != "memory" and row["decode_ms_per_token"] is None


def _times(plan: Plan, split: str, specs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Rows of a few items that methods answer by themselves: their times, where answers were dense attention's."""
    limit = min(plan.items(split), _TIMED * plan.batch_size)
    return _rows(dataclasses.replace(plan, limit=limit), split, specs, timed=True)


def _rows(
    plan: Plan, split: str, specs: Sequence[str], progress: Progress | None = None, timed: bool = False
) -> dict[str, dict[str, Any]]:
    """The rows of a split by their specs, including the rows of ``specs``, which are made if they are missing."""
    prepared = prepare(_comparison(plan, split, specs, timed))
    return {row["spec"]: row for row in (run(prepared, progress) if progress else run(prepared))}


def _comparison(plan: Plan, split: str, specs: Sequence[str], timed: bool = False) -> Comparison:
    """Settings on a split: their answers, or, where the data has none, how they follow dense attention's.

    `timed`: their answers in any case.
    """
    task = dataclasses.replace(plan.task, split=split)
    task = Fidelity(of=task) if not timed and task.needs_dense(plan.data) else task
    out, methods = plan.rows(f"{split}-times" if timed else split), tuple(map(parse_method, specs))
    how = (plan.batch_size, plan.seed, plan.dtype, plan.device)
    return Comparison(plan.model, task, plan.data, methods, plan.items(split), out, *how, imports=plan.imports)


def cost_of(row: Mapping[str, Any], objective: str) -> float:
    """What a row's method costs: bytes resident (memory); else milliseconds a token and sequence, or, where no time can
    be measured because answers are one token, bytes of the cache that a step reads."""
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

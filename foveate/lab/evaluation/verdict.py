"""What rows of one comparison show: which methods lose no more than is allowed, and which of them is the cheapest.

`foveate compare`, `foveate report`, `foveate tune` and the demo judge and phrase by this module alone. A method is
within a loss only if the lower end of the 95 % interval of its paired difference to dense attention is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from foveate.lab.evaluation.metrics import Interval, Mean
from foveate.lab.evaluation.paired import discordant, items_needed, least_loss, paired, spread, widened

Row = Mapping[str, Any]
_OTHER_SCORES = ("perplexity", "fidelity")  # tasks whose scores are not of answers
_NAMED = 3  # methods that a sentence names; more are counted
_ORDERS = {
    0: ("ties in score with", "tie in score with"),
    1: ("scores above", "score above"),
    -1: ("scores below", "score below"),
}
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class Judged:
    """A method beside dense attention.

    Attributes:
        row: of `foveate compare`.
        difference: of its score to dense attention's on the same items, in points, with its 95 % interval.
        shown: whether the interval's lower end is within the loss allowed.
        needed: roughly how many items would show it, if differences go on as measured; None where it is shown, or where
            the measured loss is not below the loss allowed.
    """

    row: Row
    difference: Interval
    shown: bool
    needed: int | None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the rows of one comparison show.

    Attributes:
        words: the verdict in sentences; empty where rows have no dense attention to compare with, or scores that are
            not of answers.
        best: the row of the cheapest method that is shown to be within the loss and is cheaper than dense attention;
            None if there is none.
        judged: all methods with a cost, the cheapest first; empty where nothing is compared.
    """

    words: str = ""
    best: Row | None = None
    judged: tuple[Judged, ...] = ()


def judge(rows: Sequence[Row], max_loss: float = 1.0, named: Callable[[Row], str] = lambda row: row["spec"]) -> Verdict:
    """The verdict on the rows of one comparison: one a method, on the same items, `dense` among them.

    Args:
        rows: of `foveate compare`. Methods without ``kv_bytes_per_step``, which is the cost, are left out.
        max_loss: points that may be lost against dense attention, above 0.
        named: gives the name by which sentences call a row's method.
    """
    dense = next((row for row in rows if row["method"] == "dense"), None)
    others = [row for row in rows if row["method"] != "dense" and row["kv_bytes_per_step"] is not None]
    if dense is None or not others or dense["task"] in _OTHER_SCORES:
        return Verdict()
    if nothing := nothing_to_lose(dense, max_loss):
        return Verdict(nothing)
    judged = [compared(row, dense, max_loss) for row in others]
    judged.sort(key=lambda one: (one.row["kv_bytes_per_step"], -one.difference.low, one.row["spec"]))
    shown, full = [one for one in judged if one.shown], dense["kv_bytes_per_step"]
    saving = [one for one in shown if full is None or one.row["kv_bytes_per_step"] < full]
    beside = f"{margin(max_loss)} of dense attention ({dense['score']:.1f}, n = {dense['n']:,})"
    if saving:
        parts = _recommended(saving, shown, judged, beside, named)
    elif shown:
        parts = [f"No method that is shown to be {beside} reads less than dense attention."]
    else:
        parts = _not_shown(judged, beside, max_loss, named)
    ceiling = min(dense.get("ceiling", 100.0), 100.0) - _ROUNDING
    if dense["score"] >= ceiling and all(row["score"] >= ceiling for row in others):
        parts.append("All methods answer all items that can be answered: a tie, which shows nothing of harder items.")
    return Verdict(" ".join(parts), saving[0].row if saving else None, tuple(judged))


def nothing_to_lose(dense: Row, max_loss: float) -> str:
    """Why nothing can be compared with dense attention, and what to do; empty where something can.

    Dense attention that scores no more than may be lost has nothing to compare: methods that answer nothing would pass.
    """
    if dense["score"] > max_loss:
        return ""
    advice = "take another task, shorter prompts or a larger model"
    if dense["score"] <= 0:
        return f"Dense attention answers none of {dense['n']:,} items, so they compare nothing: {advice}."
    return (
        f"Dense attention itself scores {dense['score']:.1f} of 100 points (n = {dense['n']:,}). Methods that answer "
        f"nothing would lose no more than the {max_loss:g} that may be lost, so nothing is compared: {advice}."
    )


def compared(row: Row, dense: Row, max_loss: float) -> Judged:
    """A method beside dense attention on the same items."""
    difference, squares = _difference(row, dense)
    shown = difference.low >= -max_loss - _ROUNDING
    return Judged(row, difference, shown, None if shown else items_needed(difference, row["n"], max_loss, squares))


def margin(max_loss: float) -> str:
    """The loss allowed in words, such as `within a point`."""
    return "within a point" if max_loss == 1 else f"within {max_loss:g} points"


def points(difference: Interval) -> str:
    """A difference with its interval, such as `-0.8 [-1.4, +0.2]`; ends are rounded outwards."""
    low, high = math.floor(10 * difference.low + 1e-6) / 10, math.ceil(10 * difference.high - 1e-6) / 10
    return f"{round(difference.value, 1) + 0.0:+.1f} [{low + 0.0:+.1f}, {high + 0.0:+.1f}]"


def _difference(row: Row, other: Row) -> tuple[Interval, float | None]:
    """By how much a row scores above another, and the mean square of its items' differences.

    The interval is exact where items are right or wrong, even if the row holds a bootstrap's. Otherwise it is the row's
    own, or between two methods the paired bootstrap's, widened where few items differ, or none.
    """
    ours, theirs = ({key: np.array(one) for key, one in side.get("item_values", {}).items()} for side in (row, other))
    main = next(iter(row.get("metrics", ())), None)
    held = Interval(row["diff_to_dense"], row["diff_low"], row["diff_high"])
    if main in ours and main in theirs:
        sides = Mean(main), ours, theirs
        if other["method"] != "dense" or discordant(*sides) is not None:
            return paired(*sides), spread(*sides)
        return widened(held, *sides), spread(*sides)
    if held.value or held.low or held.high:
        return held, None
    units = ours["tokens"].sum() if "agreed" in ours else row["n"]  # predicted tokens, or items: none of them differs
    return Interval(0.0, -least_loss(units), least_loss(units)), 0.0


def _recommended(
    saving: Sequence[Judged],
    shown: Sequence[Judged],
    judged: Sequence[Judged],
    beside: str,
    named: Callable[[Row], str],
) -> list[str]:
    """Sentences on the cheapest method that is shown to be within the loss, and on the methods beside it."""
    best = saving[0]
    cost, name = best.row["kv_bytes_per_step"], named(best.row)
    as_cheap = [one for one in saving[1:] if one.row["kv_bytes_per_step"] == cost]
    words = f"{beside[0].upper()}{beside[1:]}, {name} reads least: "
    words += f"{100 * best.row['keys_read_share']:.1f} % of the keys, {points(best.difference)} points."
    parts = [words]
    if as_cheap:
        parts.append(f"{_names(as_cheap, named)} {_verb(as_cheap, 'reads', 'read')} as much: a tie in cost.")
    more = {-1: [], 0: [], 1: []}
    for one in shown:
        if one is not best and one not in as_cheap:
            more[_order(one.row, best.row)].append(one)
    for order, (one, several) in _ORDERS.items():
        if some := more[order]:
            reads, scores = _verb(some, "reads", "read"), _verb(some, one, several)
            parts.append(f"{_names(some, named)} {reads} more and {scores} {name}.")
    open_ones = [one for one in judged if one.needed is not None and one.row["kv_bytes_per_step"] < cost]
    if open_ones:
        parts.append(f"Cheaper, but not shown to be within it: {_open(open_ones, named)}.")
    return parts


def _not_shown(judged: Sequence[Judged], beside: str, max_loss: float, named: Callable[[Row], str]) -> list[str]:
    """Sentences where no method is shown to be within the loss: the nearest, and how many items would decide."""
    nearest = max(judged, key=lambda one: (one.needed is not None, one.difference.low))
    alike = [one for one in judged if one.difference == nearest.difference]
    excluded = all(one.difference.high < -max_loss for one in judged)
    head = f"No method is {'' if excluded else 'shown to be '}{beside}."
    names, at = _names(alike, named), f"{points(nearest.difference)} points"
    text = f"{names} is nearest, at {at}" if len(alike) == 1 else f"{names} are nearest and tie, at {at}"
    if nearest.needed is not None:
        text += f"; about {nearest.needed:,} items would show it if differences go on so"
    return [head, f"{text}."]


def _open(judged: Sequence[Judged], named: Callable[[Row], str]) -> str:
    """Methods that may be within the loss, each with its difference and the number of items that would show it."""
    texts = [
        f"{named(one.row)}, {points(one.difference)} points (about {one.needed:,} items would show it)"
        for one in judged[:_NAMED]
    ]
    return "; ".join(texts + ([f"and {len(judged) - _NAMED} more"] if len(judged) > _NAMED else []))


def _order(row: Row, other: Row) -> int:
    """1 or -1 if a method is shown to score above or below another on the same items; 0: they tie."""
    ours, theirs = row.get("item_values"), other.get("item_values")
    if not ours or not theirs or next(iter(row["metrics"])) not in ours:
        return 0 if row["score"] == other["score"] else 1 if row["score"] > other["score"] else -1
    difference, _ = _difference(row, other)
    return 1 if difference.low > 0 else -1 if difference.high < 0 else 0


def _names(judged: Sequence[Judged], named: Callable[[Row], str]) -> str:
    """Names in a list; beyond three they are counted."""
    names = [named(one.row) for one in judged]
    if len(names) > _NAMED:
        names = [*names[: _NAMED - 1], f"{len(names) - _NAMED + 1} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _verb(judged: Sequence[Judged], one: str, several: str) -> str:
    return one if len(judged) == 1 else several

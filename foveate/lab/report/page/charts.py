"""What the page draws, as plain data: frontiers, maps of needles, and what decode steps go to."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Sequence
from typing import Any

from foveate.errors import UserError
from foveate.lab.evaluation import verdict
from foveate.lab.evaluation.tasks.niah import DEPTHS, depth_of
from foveate.lab.report import lines
from foveate.lab.report.markdown import context_length, made_beside, made_with, percent
from foveate.lab.report.plots.decode import COLORS, LEVELS, WORDS, of_step
from foveate.lab.report.plots.frontier import BUDGETS, is_dense
from foveate.lab.report.rows import Row, grouped
from foveate.lab.report.tables import general
from foveate.lab.report.tables.decode import how, mean_parts

AMOUNTS = ("keys_read_share", "kv_bytes_per_step")  # what a frontier can be drawn against: fields of the rows
MOST_LINES = 6  # lines of a panel, and maps of needles, that are drawn at first; the others are there to be chosen
_OF_POINTS = ("spec", "score", "low", "high", "n", *AMOUNTS)
_DEPTHS = 10  # rows of a map of needles


def comparisons(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Groups of rows of `foveate compare` that can be compared, each with a title that names its measurement. The
    group with the last row comes first.

    The rows of a group have the same items, model, number format, seed, device and versions. The title names the
    facts that distinguish the groups. Rows that repeat other rows are left out. Raises `UserError` for two rows of one
    method on the same items that differ.
    """
    alike: dict[str, list[list[Row]]] = {}
    place = {id(row): number for number, row in enumerate(rows)}
    for some in grouped(rows, lambda row: (lines.cell(row), *_circumstances(row))).values():
        alike.setdefault(general.what(some[0]), []).append(some)
    found = []
    for words, groups in alike.items():
        apart = [_circumstances(some[0]) for some in groups]
        telling = [len(set(values)) > 1 for values in zip(*apart)]
        for some, own in zip(groups, apart):
            title = ", ".join([words, *itertools.compress(own, telling)])
            kept: dict[str, Row] = {}
            for row in some:
                first = kept.setdefault(row["spec"], row)
                if any(first[name] != row[name] for name in ("item_values", "keys_read_share")):
                    commits = " and ".join(one["commit"] for one in (first, row))
                    raise UserError(f"two rows of {row['spec']} in {title} differ, of commit {commits}; leave one out")
            found.append((max(place[id(row)] for row in some), title, list(kept.values())))
    return [(title, some) for _, title, some in sorted(found, key=lambda one: -one[0])]


def _circumstances(row: Row) -> tuple[str, ...]:
    settings = ", ".join(f"{name}={value}" for name, value in row["task_settings"].items())
    return settings, f"seed {row['seed']}", f"items {row['run'].get('items')}"[:14], made_with([row], commits=False)


def frontier(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Score against what decoding reads: a panel for each comparison, a line for each method but dense."""
    panels = []
    for title, some in comparisons(rows):
        drawn = [row for row in some if not is_dense(row) and None not in (row[name] for name in AMOUNTS)]
        if not drawn:
            continue
        best, entries = _undominated(drawn), []
        names = lines.names(drawn, BUDGETS)
        for line, points in grouped(drawn, lambda row: lines.line(row, BUDGETS)).items():
            name = names[line]
            entry = {"name": name, "best": any(row["spec"] in best for row in points)}
            points.sort(key=lambda row: row[AMOUNTS[0]])
            entry["points"] = [{field: row[field] for field in _OF_POINTS} for row in points]
            entries.append(entry)
        entries.sort(key=lambda entry: not entry["best"])
        dense = next(filter(is_dense, some), None)
        panel = {"title": title, "metric": next(iter(some[0]["metrics"])), "dense_score": some[0]["dense_score"]}
        panel["verdict"] = _verdict(some)
        panel |= {"dense": None if dense is None else [dense["low"], dense["high"]], "lines": entries}
        panels.append(panel | {"commits": made_beside(title, some)})
    return panels


def _verdict(rows: Sequence[Row]) -> dict[str, Any]:
    """The verdict on a comparison as the page shows it: ``words``, and ``within`` for a table of all methods that may
    be within a point: spec, difference, keys read, and whether it is shown or how many items it needs."""
    found = verdict.judge(rows)
    within = [
        [
            one.row["spec"],
            verdict.points(one.difference),
            percent(one.row["keys_read_share"]),
            "yes" if one.shown else f"no: needs about {one.needed:,} items",
        ]
        for one in found.judged
        if one.shown or one.needed is not None
    ]
    return {"words": found.words, "within": within}


def _undominated(rows: Sequence[Row]) -> set[str]:
    """The specs of rows than which none reads less and scores as high."""
    found, best = set(), -math.inf
    for _, alike in sorted(grouped(rows, lambda row: row[AMOUNTS[0]]).items()):
        score = max(row["score"] for row in alike)
        if score > best:  # the best score of the rows that read less
            found |= {row["spec"] for row in alike if row["score"] == score}
            best = score
    return found


def needles(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Scores of `niah` by the needle's depth and the prompt's length: a map for each split, model and number format."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    of_length: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for _, some in comparisons([row for row in rows if row["task"] == "niah"]):
        row = some[0]
        settings = {name: value for name, value in row["task_settings"].items() if name != "length"}
        own = lines.split_of(row), row["model"], f"n = {row['n']}", row["dtype"]
        key = (*own, *_circumstances(row)[1::2], str(settings))
        number = of_length[(*key, row["length"])]  # of other items
        of_length[(*key, row["length"])] += 1
        groups.setdefault((*key, number), []).extend(some)
    found, parts = [], [min(depth_of(item) * _DEPTHS // 100, _DEPTHS - 1) for item in range(len(DEPTHS))]
    for key, group in groups.items():
        lengths = sorted({row["task_settings"]["length"] for row in group})
        maps: dict[str, list[list[Any]]] = {}
        for row in group:
            of_spec = maps.setdefault(row["spec"], [[None] * len(lengths) for _ in range(_DEPTHS)])
            by_depth: dict[int, list[float]] = {}
            values = row["item_values"][next(iter(row["metrics"]))]
            for part, value in zip(itertools.cycle(parts), values):
                by_depth.setdefault(part, []).append(value)
            for depth, values in by_depth.items():
                cell = [100 * sum(values) / len(values), len(values)]
                of_spec[depth][lengths.index(row["task_settings"]["length"])] = cell
        depths = [f"{100 * part // _DEPTHS} to {100 * (part + 1) // _DEPTHS} %" for part in range(_DEPTHS)]
        title = f"niah ({key[0]}), {', '.join(key[1:5])}{f', items {key[-1] + 1}' * (key[-1] > 0)}; {made_with(group)}"
        found.append({"title": title, "lengths": [*map(context_length, lengths)], "depths": depths, "maps": maps})
    return found


def steps(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What decode steps go to: a panel for each model or layer, number of sequences and length, a bar for each method.

    `rows`: of `foveate bench decode` and `decode-model`; those without a profile of their kernels are left out.
    """
    found, made = [], {made_with([row], commits=False) for row in rows}
    for level, (unit, scale) in LEVELS.items():
        parts_of = mean_parts if level == "kernel" else of_step
        profiled = [row for row in rows if row["case"]["level"] == level and parts_of(row)]
        groups = grouped(profiled, lambda row: (general.what(row) + how(row["case"]), made_with([row], commits=False)))
        for (title, _), group in groups.items():
            bars = []
            for row in group:
                parts = [[name, scale * value] for name, value in parts_of(row).items()]
                total = sum(value for _, value in parts)
                bars.append({"method": row["case"]["method"], "parts": parts, "total": total})
            title = title if len(made) == 1 else f"{title}; {made_with(group, commits=False)}"
            panel = {"title": title, "facts": made_with(group), "unit": unit, "bars": bars}
            found.append(panel | {"words": WORDS, "colors": COLORS})
    return found

"""Kinds of tables as declarations: which rows, how they are grouped, what the columns are; and those of accuracy."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.summary_table import heading
from foveate.errors import UserError
from foveate.lab.report import lines, pooled
from foveate.lab.report.markdown import (
    NONE,
    columns,
    context_length,
    difference,
    interval,
    made_with,
    markdown_table,
    number,
    percent,
    score,
    titled,
)
from foveate.lab.report.rows import Row, grouped
from foveate.lab.report.tables.decode import MODELS, PLACE, how, method, shape, speedup
from foveate.lab.report.terminal import size, time
from foveate.lab.results.measurements import PARTS

Cells = Mapping[str, Callable[[Any], str]]
"""Columns by their heads, with the cell of a row."""
_BUDGET = re.compile(r"(top_k|window|min_k|sinks|file)=[^,]*,?")
"""Settings that say how much is held, and not what."""


class Table(NamedTuple):
    """A table with a line for each row."""

    title: Callable[[Sequence[Row]], str]
    """What stands above it, before what the rows were made with."""
    cells: Cells
    rows: Callable[[Sequence[Row]], Iterable[Row]] = list
    """What of the rows is shown, such as those of one study, or a row for each kind of layers."""
    apart: Callable[[Row], Hashable] = lambda row: None
    """Rows for which this differs are tables of their own."""

    def __call__(self, rows: Sequence[Row]) -> str:
        groups = grouped(self.rows(rows), self.apart).values()
        return "\n\n".join(titled(self.title(some), some, columns(some, self.cells)) for some in groups)


def of_kinds(rows: Sequence[Row]) -> list[Row]:
    """A row for each kind of layers, with what its row has."""
    return [{**row, "kind": name, **kind} for row in rows for name, kind in (row["layers"] or {}).items()]


def pivot(head: Sequence[str], cells: Mapping[Hashable, Mapping[str, str]], names: Iterable[str]) -> str:
    """A Markdown table with a column for each name, after those of the head; a dash where a line has no such cell.

    Args:
        cells: of each line its first cells, a text or several, and by name the others.
    """
    found = list(names)
    body = [
        (*(line if isinstance(line, tuple) else (line,)), *(of.get(name, NONE) for name in found))
        for line, of in cells.items()
    ]
    return markdown_table([(*head, *found), *body])


def _by_model(rows: Sequence[Row], what: Callable[[str, str], str], table: Callable[[str, list[Row]], str]) -> str:
    """A table for each model and number format, of which `table` is given a name."""
    groups = grouped(rows, lambda row: f"{row['model']}, {row['dtype']}")
    return "\n\n".join(titled(what(name), own, table(name, own)) for name, own in groups.items())


def differences(rows: Sequence[Row]) -> str:
    """A line a method, a column a comparison: score, paired difference to dense with its 95 % interval, keys read."""

    def cell(row: Row) -> str:
        if row["method"] == "dense":
            return number(row["score"], 1)
        return f"{number(row['score'], 1)} / {difference(row)} / {percent(row['keys_read_share'])}"

    def table(_: str, own: list[Row]) -> str:
        comparisons = {f"{heading(some[0])}, n = {some[0]['n']}": some for some in lines.cells(own).values()}
        cells: dict[str, dict[str, str]] = {}
        for name, some in comparisons.items():
            for row in some:
                cells.setdefault(f"`{row['spec']}`", {})[name] = cell(row)
        if any(some[0]["ceiling"] < 100 for some in comparisons.values()):
            cells["evidence ceiling"] = {name: f"{some[0]['ceiling']:.1f}" for name, some in comparisons.items()}
        return pivot(["method"], cells, comparisons)

    return _by_model(
        rows, lambda name: f"{name}; score / difference to dense, points [95 %, paired] / keys read", table
    )


def paired(rows: Sequence[Row]) -> str:
    """What each method scores over the first one, pooled over the comparisons that both have; without `dense`.

    Raises:
        ValueError: for a metric that is no mean over items, or methods without a comparison in common.
    """
    if not all(map(pooled.averages, rows)):
        raise ValueError("a metric that is no mean over items, such as perplexity, has no pooled difference")

    def table(what: str, own: list[Row]) -> str:
        (base, theirs), *others = grouped(own, lambda row: row["spec"]).items()
        found = [("method", f"over `{base}`, points [95 %, paired]", "comparisons", "n")]
        for spec, ours in others:
            pairs = [(row, its) for row in ours for its in theirs if row["run"]["items"] == its["run"]["items"]]
            if not pairs:
                raise ValueError(f"{what}: {spec} and {base} have no comparison in common")
            mine, its = zip(*pairs)
            n = sum(row["n"] for row in mine)
            over = interval(vars(pooled.difference(mine, its)), 1, "+")
            found.append((f"`{spec}`", over, f"{len(mine)}", f"{n:,}"))
        return markdown_table(found)

    rows = [row for row in rows if row["method"] != "dense"]
    return _by_model(rows, lambda name: f"{name}, of the comparisons that both methods have", table)


def by_task(rows: Sequence[Row]) -> str:
    """A line a method, a column a task over all its lengths: the paired difference to dense; at the end of all items.

    Only methods that every comparison has are listed.

    Raises:
        ValueError: for a metric that is no mean over items, or a comparison without a row of `dense`.
    """
    if not all(map(pooled.averages, rows)):
        raise ValueError("a metric that is no mean over items, such as perplexity, has no pooled difference")

    def table(what: str, own: list[Row]) -> str:
        specs = {spec: {row["run"]["items"]: row for row in some} for spec, some in grouped(own, _spec).items()}
        dense = specs.pop("dense", {})
        if missing := {row["run"]["items"]: row for row in own}.keys() - dense.keys():
            raise ValueError(f"{what}: no row of dense on {', '.join(sorted(missing))}")
        by_name = grouped(dense.values(), lambda row: f"{row['task']} {lines.split_of(row)}")
        columns = {f"{task}, n = {sum(row['n'] for row in some):,}": some for task, some in by_name.items()}
        if len(columns) > 1:
            columns[f"all, n = {sum(row['n'] for row in dense.values()):,}"] = list(dense.values())
        cells: dict[str, dict[str, str]] = {}
        for spec, found in specs.items():
            if found.keys() >= dense.keys():
                shares = sorted({f"{100 * row['keys_read_share']:.0f}" for row in found.values()}, key=float)
                cells[f"`{spec}`"] = {"keys read": f"{'–'.join(dict.fromkeys((shares[0], shares[-1])))} %"} | {
                    column: interval(
                        vars(pooled.difference([found[row["run"]["items"]] for row in some], some)), 1, "+"
                    )
                    for column, some in columns.items()
                }
        return pivot(["method"], cells, ["keys read", *columns])

    return _by_model(rows, lambda name: f"{name}, difference to dense, points [95 %, paired]", table)


def _spec(row: Row) -> str:
    return row["spec"]


def memory_shares(rows: Sequence[Row]) -> str:
    """A table for each task and place of the question: a line for each method, a column for each share of the keys.

    A method is its spec without the settings of its budget. Its budgets are sorted by the share of the keys that it
    reads; a column's share is the median over the methods.

    Raises:
        UserError: for methods with other numbers of budgets on a task.
    """

    def asked(row: Row) -> tuple[str, str]:
        split = row["split"] if row["task"] == "ruler" else row["task"]
        return split, row["task_settings"].get("question", "with")

    def kind(row: Row) -> str:
        name, _, settings = row["spec"].partition(":")
        return ":".join(filter(None, (name, _BUDGET.sub("", settings).strip(","))))

    def table(split: str, question: str, own: Sequence[Row]) -> str:
        others = [row for row in own if row["method"] != "dense"]
        found = grouped(sorted(others, key=lambda row: row["keys_read_share"]), kind)
        counts = sorted({len(some) for some in found.values()})
        if len(counts) != 1:
            raise UserError(f"methods must have as many budgets each on {split}, not {counts}")
        budgets = list(zip(*found.values(), strict=True))
        shown = [["method", *(f"{statistics.median(row['keys_read_share'] for row in some):.0%}" for some in budgets)]]
        shown += [["dense", *[score(row)] * len(budgets)] for row in own if row["method"] == "dense"]
        shown += [[f"`{name}`", *map(score, found[name])] for name in dict.fromkeys(map(kind, others))]
        lengths = ", ".join(map(context_length, sorted({row["task_settings"]["length"] for row in own})))
        items = ", ".join(sorted({str(row["n"]) for row in own}))
        place = {"with": "in the prompt", "after": "after eviction"}[question]
        title = f"{split}, {lengths} tokens, question {place}, n = {items}, scores [95 %] at a share of the keys"
        return titled(title, own, markdown_table(shown))

    return "\n\n".join(table(*which, some) for which, some in grouped(rows, asked).items())


def page_scores(rows: Sequence[Row]) -> str:
    """Rows of `page_scores.py`: a line for each page size and score, a column a budget, tables by task and length.

    A dash where a budget does not pay for the summaries. A mark tells whether the error is less, or more, than the
    baseline's on every item: too few for an interval.
    """

    def what(row: Row) -> str:
        case, length = row["case"], context_length(row["case"]["context"])
        return (
            f"{row['bench']}, {case['model']}, {case['task']} ({case['split']}), {length} tokens, "
            f"n = {row['n']}, {case['dtype']}; attention missed / heads that miss most of theirs / error of the "
            f"output, by keys read, ▼ less error than `{row['baseline']}` on each of the {row['n']} items, ▲ more"
        )

    def cell(row: Row, baseline: Row | None) -> str:
        missed, lost = (100 * row[name]["value"] for name in ("missed_mass", "lost_heads"))
        mark = ""
        if baseline is not None and baseline is not row:
            ours, theirs = (one["item_values"]["output_error"] for one in (row, baseline))
            pairs = list(zip(ours, theirs, strict=True))
            mark = "▼" if all(a < b for a, b in pairs) else "▲" if all(a > b for a, b in pairs) else ""
        return f"{missed:.1f} % / {lost:.1f} % / {row['output_error']['value']:.3f}{mark}"

    def table(own: Sequence[Row]) -> str:
        cases = {(row["case"]["page_size"], row["case"]["budget"], row["case"]["score"]): row for row in own}
        budgets = sorted({budget for _, budget, _ in cases if budget is not None})
        limit = next((row["case"]["max_missed_mass"] for row in own if row["case"]["budget"] is None), None)
        certified = "" if limit is None else f"pages for ≤ {100 * limit:g} %"
        cells: dict[tuple[str, str], dict[str, str]] = {}
        for (page, budget, name), row in cases.items():
            line = cells.setdefault((str(page), f"`{name}`"), {certified: ""})
            if budget is None:
                line[certified] = f"{100 * row['refined_share']['value']:.1f} %"
            else:
                line[f"{100 * budget:g} %"] = cell(row, cases.get((page, budget, row["baseline"])))
        names = [*(f"{100 * budget:g} %" for budget in budgets), *([certified] if certified else [])]
        return pivot(["page", "score"], cells, names)

    groups = grouped(rows, lambda row: (what(row), made_with([row], commits=False)))
    return "\n\n".join(titled(title, some, table(some)) for (title, _), some in groups.items())


serving_accuracy = Table(
    lambda rows: f"{rows[0]['case']['model']} in vLLM, n = {rows[0]['n']}, scores [95 %]",
    {
        "task": lambda row: " ".join(
            (
                row["case"]["task"],
                row["case"]["settings"]["split"],
                f"{context_length(row['case']['settings']['length'])} tokens",
            )
        ),
        "method": lambda row: f"`{row['case']['method']}`",
        "keys read": lambda row: percent(row["keys_read_share"]),
        "score": score,
        "vLLM's own attention": lambda row: number(row["baseline_score"], 1),
        "difference": lambda row: interval(row, 1, "+", ("diff", "diff_low", "diff_high")),
        "same answers": lambda row: f"{row['same_answers']} of {row['n']}",
    },
    apart=lambda row: (row["case"]["model"], row["n"]),
)
"""What a method costs in answers where a server runs it."""


def _engine(case: Mapping[str, Any]) -> str:
    eight_bits = ", both with keys and values in fp8" if case["kv_cache_dtype"] == "fp8" else ""
    ranks = f", over {case['ranks']} GPUs" if "ranks" in case else ""
    bound = f", dense below {case['dense_below']:,} tokens" if "dense_below" in case else ""
    drafts = ""
    if {"rate", "lossless"} <= case.keys():  # under load; else a column has it
        drafts = f", lossless by drafts of {case['lossless']}, {_drafts(case)}"
    return f"model runner {case['runner'].upper()}{ranks}{eight_bits}{bound}{drafts}"


serving = Table(
    lambda rows: f"{rows[0]['case']['model']} in vLLM, {_engine(rows[0]['case'])}",
    {
        "requests": lambda row: f"{row['case']['batch']} × {context_length(row['case']['tokens'])} tokens",
        "method": lambda row: f"`{row['case']['method']}`",
        "keys read": lambda row: "" if row["keys_read_share"] is None else percent(row["keys_read_share"]),
        "ms a step": lambda row: number(row["ms"], 2),
        "vLLM's own": lambda row: number(row["baseline_ms"], 2),
        "times as fast": lambda row: f"{row['speedup']:.2f}",
        "first token, s": lambda row: number(row["first_token_ms"] / 1000, 2),
        "vLLM's": lambda row: number(row["baseline_first_token_ms"] / 1000, 2),
    },
    rows=lambda rows: [row for row in rows if "lossless" not in row["case"]],
    apart=lambda row: (row["case"]["model"], _engine(row["case"])),
)
"""What decoding by a method gives a server, beside its own attention."""

serving_lossless = Table(
    lambda rows: f"{rows[0]['case']['model']} in vLLM, {_engine(rows[0]['case'])}, {_drafts(rows[0]['case'])}",
    {
        "requests": lambda row: f"{row['case']['batch']} × {context_length(row['case']['tokens'])} tokens",
        "method": lambda row: f"`{row['case']['method']}`",
        "a draft": lambda row: str(row["case"]["lossless"]),
        "tokens a pass": lambda row: number(row["tokens_a_step"], 2),
        "a token, ms": lambda row: number(row["ms"], 2),
        "vLLM's own": lambda row: number(row["baseline_ms"], 2),
        "times as fast": lambda row: f"{row['speedup']:.2f}",
    },
    rows=lambda rows: [row for row in rows if "lossless" in row["case"]],
    apart=lambda row: (row["case"]["model"], _engine(row["case"]), _drafts(row["case"])),
)
"""What drafts that vLLM verifies give a server, beside its own attention."""


def _drafts(case: Mapping[str, Any]) -> str:
    if "accept" in case:
        return f"{percent(case['accept'])} of drafts accepted"
    return f"answers about {case['task']}" if "task" in case else "random prompts"


def _percentiles(kind: str, scale: float) -> Callable[[Row], str]:
    """The percentiles of a latency, and vLLM's own."""

    def ends(times: Sequence[float]) -> str:
        return ", ".join(number(time / scale, 2) for time in times)

    def cell(row: Row) -> str:
        return f"{ends(row[kind])} ({ends(row[f'baseline_{kind}'])})"

    return cell


serving_ranks = Table(
    lambda rows: f"An anchor of the 8B's shape, its heads on {rows[0]['case']['ranks']} GPUs",
    {
        "requests": lambda row: f"{row['case']['batch']} × {context_length(row['case']['tokens'])} tokens",
        "bytes summed": lambda row: f"{row['summed_bytes']:,}",
        "scoring and choosing, µs": lambda row: number(1000 * row["baseline_ms"], 0),
        "with the sum": lambda row: number(1000 * row["ms"], 0),
        "keys that one GPU chooses, too": lambda row: percent(row["agreement"]),
    },
)
"""What choosing together costs, and whether the ranks choose what one GPU chooses."""

lossless = Table(
    lambda rows: _lossless_model(rows[0]["case"]),
    {
        "rows": lambda row: f"{row['case']['rows']} × {context_length(row['case']['tokens'])} tokens",
        "task": lambda row: row["case"]["task"],
        "method": lambda row: f"`{row['case']['method']}`",
        "a draft": lambda row: row["case"]["draft"],
        "accepted in a pass": lambda row: number(row["accepted"], 1),
        "keys read": lambda row: percent(row["keys_read_share"]),
        "a token, ms": lambda row: number(row["ms"], 1),
        "dense, ms": lambda row: number(row["baseline_ms"], 1),
        "dense over lossless": speedup,
    },
    rows=lambda rows: [row for row in rows if row["case"]["draft"] != OF_ACCEPTANCE],
    apart=lambda row: _lossless_model(row["case"]),
)
"""What drafts are worth, and the time of a token beside dense decoding."""

OF_ACCEPTANCE = "8"
"""Drafts of this length show acceptance by task, context and method."""


def lossless_accepted(rows: Sequence[Row]) -> str:
    """Accepted drafts of a length, by task and context, with a column for each method; dense over lossless behind."""
    shown = [row for row in rows if row["case"]["draft"] == OF_ACCEPTANCE]

    def table(own: Sequence[Row]) -> str:
        cells: dict[tuple[str, str], dict[str, str]] = {}
        for row in own:
            case = row["case"]
            line = cells.setdefault((f"{case['rows']} × {context_length(case['tokens'])} tokens", case["task"]), {})
            line[f"`{case['method']}`"] = f"{number(row['accepted'], 1)} ({speedup(row)})"
        return pivot(["rows", "task"], cells, dict.fromkeys(name for line in cells.values() for name in line))

    groups = grouped(shown, lambda row: row["case"]["model"])
    title = f"accepted of drafts of {OF_ACCEPTANCE} tokens (dense over lossless)"
    return "\n\n".join(titled(f"{model}, {title}", own, table(own)) for model, own in groups.items())


def _lossless_model(case: Mapping[str, Any]) -> str:
    if "accept" not in case:
        return f"{case['model']}, real text" + (f", YaRN by {case['yarn']:g}" if "yarn" in case else "")
    return f"Random weights of the {case['model'].upper()}'s shape, {percent(case['accept'])} of drafts accepted"


serving_load = Table(
    lambda rows: (
        f"{rows[0]['case']['model']} in vLLM, {_engine(rows[0]['case'])}: 50th, 90th and 99th percentile (vLLM's own)"
    ),
    {
        "requests a second": lambda row: f"{row['case']['rate']:g}",
        "seed": lambda row: f"{row['case']['seed']}",
        "method": lambda row: f"`{row['case']['method']}`",
        "first token, s": _percentiles("first_token_ms", 1000),
        "a token, ms": _percentiles("token_ms", 1),
        "a request, s": _percentiles("request_ms", 1000),
        "failed": lambda row: f"{row['failed']} of {row['case']['requests']}",
    },
    apart=lambda row: (row["case"]["model"], _engine(row["case"])),
)
"""Latencies of a server to which requests come at random."""

# Speed

_LEVELS = {"kernel": "attention of a layer", "layer": "a layer with its cache"}

decode_kinds = Table(
    lambda rows: "ms",
    {
        **PLACE,
        "kind of layer": lambda one: one["kind"],
        "layers": lambda one: str(one["layers"]),
        "ms": lambda one: f"{one['ms']:.3f}",
        **{part: lambda one, part=part: f"{one['parts_ms'][part]:.3f}" for part in PARTS},
    },
    of_kinds,
)
"""What the kernels of each kind of layers take, as the Kascade paper's figure 8 splits it; rows need a profile."""


def _stats(row: Row, name: str, cell: Callable[[float], str]) -> str:
    return cell(row["stats"][name]) if row.get("stats") else ""  # Transformers' own path has none


decode_models = Table(
    lambda rows: f"{shape(rows[0])}, {rows[0]['case']['batch']} × {context_length(rows[0]['case']['context'])} tokens",
    {
        "method": method,
        "keys read": lambda row: _stats(row, "keys_read_share", percent),
        "ms a step": MODELS["ms a step"],
        "tokens/s": MODELS["tokens/s"],
        "over dense": speedup,
        "cache": lambda row: _stats(row, "resident_bytes", lambda count: f"{count / 1e9:.2f} GB"),
        "peak": MODELS["peak"],
    },
    rows=lambda rows: [row for row in rows if row["case"]["level"] == "model"],
    apart=lambda row: (shape(row), row["case"]["batch"], row["case"]["context"]),
)
"""What a whole model does, in short: keys read, tokens a second and memory."""


def decode_speedups(rows: Sequence[Row]) -> str:
    """A line for each case, a column for each method: how many times as fast as dense attention it decodes.

    Raises:
        UserError: for two rows of one method and case, such as of other heads.
    """
    cells: dict[tuple, dict[str, str]] = {}
    for row in rows:
        case = row["case"]
        order = list(_LEVELS).index(case["level"]) if case["level"] in _LEVELS else len(_LEVELS)
        what = _LEVELS.get(case["level"]) or f"{case['model']}, whole steps"
        found = cells.setdefault((order, what, case["batch"], case["context"], how(case)), {})
        if method(row) in found:
            raise UserError(
                f"{case['method']}: two rows of {what}, {case['batch']} × {context_length(case['context'])} tokens"
            )
        everything = (row.get("stats") or {}).get("keys_read_share") == 1
        found[method(row)] = f"{speedup(row)}{' (reads all)' if everything else ''}"
    named = {
        f"{what}, {batch} × {context_length(context)} tokens{runs}": cells[place]
        for place in sorted(cells)
        for _, what, batch, context, runs in [place]
    }
    table = pivot(["times as fast as dense attention"], named, dict.fromkeys(map(method, rows)))
    return f"{made_with(rows)}:\n\n{table}"


def prefill_lengths(rows: Sequence[Row]) -> str:
    """A line for each method or library: its mean layer at each length, and how often the fastest dense one fits in."""
    memory, contexts = "memory above inputs and output, longest", sorted({row["case"]["context"] for row in rows})
    cells: dict[str, dict[str, str]] = {}
    for row in sorted(rows, key=lambda row: row["case"]["context"]):
        line = cells.setdefault(method(row), {})
        line[f"{context_length(row['case']['context'])} tokens"] = f"{time(row['ms'])} ({speedup(row)})"
        line[memory] = size(row["peak_bytes"])
    case = rows[0]["case"]
    what = f"a layer of {case['heads']} query and {case['kv_heads']} KV heads of {case['head_dim']}, {case['dtype']}"
    names = [*(f"{context_length(context)} tokens" for context in contexts), memory]
    first = dict.fromkeys(map(method, rows))
    table = pivot(["attention"], {name: cells[name] for name in first}, names)
    return titled(f"{what}: mean time, over the fastest dense attention", rows, table)


def _needle(case: Row) -> str:
    worded = {"ruler": "", "taught": ", taught wordings", "untaught": ", untaught wordings"}[
        case.get("wording", "ruler")
    ]
    return f"{NEEDLES[case['split']]}, {case['length']:,} tokens{worded}"


hybrid_needles = Table(
    lambda rows: "needles that scores retain, in percent",
    {
        "model": lambda row: row["model"],
        "needle": lambda row: _needle(row["case"]),
        "n": lambda row: str(row["case"]["n"]),
        "answered": lambda row: number(row["answered"], 1),
        "answered with all tokens kept": lambda row: (
            number(row["answered_all_kept"], 1) if "answered_all_kept" in row else NONE
        ),
        "kept by a head": lambda row: number(row["kept"], 1),
        "of the heads keep it": lambda row: number(row["heads"], 1),
        "of all tokens a head keeps": lambda row: number(row["tokens"], 1),
    },
)
NEEDLES = {"niah_single_1": "in noise", "niah_single_2": "in novels"}

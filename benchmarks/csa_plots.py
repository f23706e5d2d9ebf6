"""The lightning indexer as plots: time and memory against length, and against tiles (StreamIndex, figures 2 and 3).

python -m benchmarks.csa_plots benchmarks/results/indexer.jsonl docs/figures/streamindex-lengths.png
python -m benchmarks.csa_plots benchmarks/results/indexer-study.jsonl docs/figures/streamindex-tiles.png
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer

from benchmarks.axes import log_if_wide
from benchmarks.csa_tables import PAPER
from foveate.lab.report.plots import figure
from foveate.lab.report.plots.figure import Look, Point
from foveate.lab.report.rows import Row, grouped, read_bench

_LOOKS = {
    "foveate": Look("#0072B2", "o"),
    "chunked": Look("#009E73", "^"),
    "materialised": Look(figure.INK, "s"),
    "deepgemm+flashinfer": Look("#D55E00", "D"),
}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8"}
_PAPER = "#CC79A7"
_MARKS = {"chunked": ((_PAPER, "x"), (_PAPER, "+")), "materialised": (("#882255", "P"), ("#882255", "P"))}
"""Colours and markers of the paper's values, by path and k."""


def lengths(rows: Sequence[Row], out: Path) -> None:
    """Time and peak memory against the length of the context: a line for each implementation, k, dtype and number of
    GPUs, and marks where the paper has a value. The upper panels have V4-Flash's case (k = 512, bf16), the lower ones
    the others.
    """
    series = grouped(rows, lambda row: (row["impl"], _named(row)))
    impls = [impl for impl, _ in series]
    paper = [
        (_flash(int(k), "bfloat16"), f"paper: {path}, k = {int(k):,}{beyond}", found, style)
        for path, beyond in (("chunked", ""), ("materialised", "; beyond out of memory"))
        for (k, found), style in zip(PAPER[path].items(), _MARKS[path])
    ]
    with figure.drawing(out, figure.height(4, len(series) + len(paper))) as page:
        axes = figure.panels(page, 4, sharex=True)
        for column, (field, words, value) in enumerate(
            (("ms", "ms", _ms), ("peak_bytes", "peak above the inputs, GB", _gb))
        ):
            above, below = axes[column], axes[2 + column]
            for index, ((impl, name), own) in enumerate(series.items()):
                axis = above if _flash(own[0]["case"]["top_k"], own[0]["case"]["dtype"]) else below
                look, variant = _LOOKS.get(impl, figure.look(impl)), impls[:index].count(impl)
                figure.line(axis, _points(own, _tokens, field), name, look, variant)
            for flash, name, found, style in paper:
                points = [(int(tokens), value(cost)) for tokens, cost in found.items()]
                _marks(above if flash else below, points, name, *style)
            for axis in (above, below):
                _lengths_axis(axis, {row["case"]["tokens"] for row in rows})
                _log_axis(axis)
                axis.set_ylabel(words)
            above.set_title("k = 512, bf16: V4-Flash")
            below.set_title("other k and number formats")
            below.set_xlabel("tokens of the context")
        figure.legend(page, axes)
        figure.title(page, "The lightning indexer against the length of the context", _facts(rows))


def tiles(rows: Sequence[Row], out: Path) -> None:
    """Time and peak memory of the chunked path against the keys of a tile, and of the fused one against the scores
    that it holds.
    """
    of_keys, of_held = ([row for row in rows if row["case"]["study"] == name] for name in _STUDIES)
    with figure.drawing(out, figure.height(4, 4)) as page:
        axes, columns = figure.panels(page, 4), (("ms", "ms", _ms), ("peak_bytes", "peak, GB", _gb))
        for column, (field, name, value) in enumerate(columns):
            above, below = axes[column], axes[2 + column]
            for variant, (tokens, own) in enumerate(grouped(of_keys, _tokens).items()):
                words = f"chunked, {tokens:,} tokens"
                figure.line(above, _points(own, _tile, field), words, _LOOKS["chunked"], variant)
            published = [(int(tile), value(cost)) for tile, cost in PAPER["settings"]["key_chunk"].items()]
            _marks(above, published, f"paper: chunked, {PAPER['settings_tokens']:,} tokens", _PAPER, "x")
            words = f"fused, {_tokens(of_held[0]):,} tokens"
            figure.line(below, _points(of_held, _tile, field), words, _LOOKS["foveate"], 0)
            places = {*map(_tile, of_keys), *(tile for tile, _ in published)}, set(map(_tile, of_held))
            for axis, words, ticks in zip((above, below), ("keys of a tile", "MB of scores held"), places):
                axis.set_xlabel(words)
                axis.set_ylabel(name)
                _lengths_axis(axis, ticks, axis is below)
            held = [point.y for point in _points(of_held, _tile, field)]
            both = [point.y for point in _points(of_keys, _tile, field)] + [y for _, y in published]
            log_if_wide(above.yaxis, above.set_yscale, both)
            log_if_wide(below.yaxis, below.set_yscale, held)
            if below.get_yscale() != "log":
                below.set_ylim(0, 1.1 * max(held))
        figure.legend(page, axes)
        figure.title(page, "What tiles cost: keys of a tile, and scores held", _facts(of_keys))


_STUDIES = ("key_chunk", "MB of scores held")


def _named(row: Row) -> str:
    case = row["case"]
    gpus = f", {case['gpus']} GPUs" if case.get("gpus", 1) > 1 else ""
    return f"{row['impl']}, k = {case['top_k']:,}, {_DTYPES[case['dtype']]}{gpus}"


def _flash(top_k: int, dtype: str) -> bool:
    return top_k == 512 and dtype == "bfloat16"


def _points(rows: Iterable[Row], place: Any, field: str) -> list[Point]:
    scale = 1e-9 if field == "peak_bytes" else 1.0
    return sorted(Point(place(row), *[scale * row[field]] * 3) for row in rows)


def _marks(axis: Any, points: Sequence[tuple[int, float]], name: str, color: str, marker: str) -> None:
    axis.plot(*zip(*points), linestyle="none", marker=marker, markersize=7, color=color, label=name)


def _lengths_axis(axis: Any, values: set[int], plain: bool = False) -> None:
    """Powers of two, with a number at those that were measured."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(values), [str(value) if plain else _short(value) for value in sorted(values)])
    axis.minorticks_off()


def _log_axis(axis: Any) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(lambda value, _: "")


def _short(value: int) -> str:
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if value % unit == 0:
            return f"{value // unit}{name}"
    return str(value)


def _facts(rows: Sequence[Row]) -> str:
    case = rows[0]["case"]
    devices = ", ".join(dict.fromkeys(row["device"] for row in rows))
    return f"{devices} · {case['heads']} heads of {case['dim']} · {case['ratio']} tokens a key"


def _tokens(row: Row) -> int:
    return row["case"]["tokens"]


def _tile(row: Row) -> int:
    return row["case"]["value"]


def _ms(cost: Sequence[float]) -> float:
    return cost[0]


def _gb(cost: Sequence[float]) -> float:
    """In GB of 10⁹ bytes, as ours are."""
    return cost[1] * (1 << 30) / 1e9


def main(file: Path, out: Path) -> None:
    """Draw the rows of `benchmarks.indexer`, or of `benchmarks.indexer_study`."""
    if '"bench": "indexer-study"' in file.read_text(encoding="utf-8"):
        tiles(read_bench([file], "indexer-study"), out)
    else:
        lengths(read_bench([file], "indexer"), out)


if __name__ == "__main__":
    typer.run(main)

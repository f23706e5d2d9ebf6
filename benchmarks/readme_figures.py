"""The pictures of README.md, in docs/figures, from the result files: `python -m benchmarks.readme_figures`.

They are SVG, and follow the reader's light or dark scheme by themselves.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foveate.lab.report.markdown import context_length

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "docs" / "figures"
STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2328; }
  .head { font-weight: 600; font-size: 15px; } .small { font-size: 12px; fill: #59636e; }
  .read { fill: #0969da; } .seen { fill: #9ec5f4; } .kept { fill: #d0d7de; }
  .gone { fill: none; stroke: #8c959f; stroke-dasharray: 2 2; } .tie { stroke: #0969da; stroke-dasharray: 2 2; }
  @media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; } .small { fill: #9198a1; } .read { fill: #4493f8; } .seen { fill: #1f4b85; }
  .kept { fill: #3d444d; } .gone { stroke: #6e7681; } .tie { stroke: #4493f8; }
  }
"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{html.escape(words)}</text>'


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    size = f'width="{width}" viewBox="0 0 {width} {height}"'  # no wider than its letters ask for
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([head, f"<title>{html.escape(title)}</title>", f"<style>{STYLE}</style>", *parts, "</svg>", ""])


# What is read

TOKENS = 32
CHOSEN = ((0, 1, 9, 10, 11, 22, 30, 31), (0, 1, 15, 16, 22, 23, 31, 32))
"""Tokens that a selecting method reads in two steps: an illustration, not a measurement."""
KEPT = (0, 1, 9, 10, 11, 15, 22, 26, 30, 31)
"""Tokens that an evicting method keeps when the prompt ends."""


def what_is_read() -> str:
    """Three ways to attend to a prompt in two successive decode steps: which tokens are read, kept, and gone."""
    left, cell, gap = 62, 12, 14
    ways: list[tuple[str, str, Callable[[int, int], str]]] = [
        ("dense", "reads everything", lambda step, token: "read"),
        ("selecting", "keeps everything, reads some", lambda step, token: "read" if token in CHOSEN[step] else "kept"),
        (
            "evicting",
            "keeps some, reads those",
            lambda step, token: "read" if token in KEPT or token >= TOKENS else "gone",
        ),
    ]
    parts = []
    for row, (name, does, kind) in enumerate(ways):
        top = 34 + 86 * row
        parts += [text(0, top - 14, name, "head"), text(left + 28, top - 14, does, "small")]
        for step in range(2):
            y = top + 22 * step
            parts.append(text(left - 10, y + 11, ("one step", "the next")[step], "small", "end"))
            for token in range(TOKENS + step):
                size = f'width="{cell}" height="{cell}" rx="2"'
                parts.append(f'<rect x="{left + gap * token}" y="{y}" {size} class="{kind(step, token)}"/>')
    for place, (kind, words) in enumerate((("read", "read"), ("kept", "in memory, not read"), ("gone", "gone"))):
        x = left + (0, 70, 260)[place]
        parts.append(f'<rect x="{x}" y="262" width="{cell}" height="{cell}" rx="2" class="{kind}"/>')
        parts.append(text(x + 22, 274, words))
    title = "What dense, selecting and evicting attention read of a prompt in two decode steps"
    return svg(left + gap * (TOKENS + 1), 286, title, parts)


# A whole model

Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A decode step of a whole model, by dense attention and by a method: ms."""

    tokens: int
    batch: int
    dense: float
    method: float


@dataclass(frozen=True)
class Panel:
    title: str
    facts: str
    points: Sequence[Point]


def rows(name: str) -> list[Row]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def points(found: Sequence[Row], tokens: str) -> list[Point]:
    """In order of batch and tokens.

    Raises:
        ValueError: for none, or for two rows of one place.
    """
    made = [
        Point(row["case"][tokens], row["case"]["batch"], row["baseline_ms"], row["ms"])
        for row in sorted(found, key=lambda row: (row["case"]["batch"], row["case"][tokens]))
    ]
    if not made or len({(point.tokens, point.batch) for point in made}) < len(made):
        raise ValueError(f"expected one row a place, not {made}")
    return made


def panels() -> list[Panel]:
    def of(file: str, model: str, method: str) -> list[Row]:
        steps = (row for row in rows(file) if row["bench"] == "decode" and row["case"]["level"] == "model")
        models = (row for row in steps if not row["case"]["liger"])
        return [row for row in models if (row["case"]["model"], row["case"]["method"]) == (model, method)]

    served = [
        row
        for row in rows("serving")
        if (row["case"]["method"], row["case"]["runner"]) == ("kascade:anchors=10", "v2")
        and row["case"]["kv_cache_dtype"] == "auto"
        and "ranks" not in row["case"]
    ]
    calibrated = 'kascade:calibration="shipped:qwen2.5-coder-1.5b-instruct"'
    return [
        Panel(
            "Llama-3.1-8B's shape in vLLM 0.26",
            "random weights, 8 KV heads, kascade:anchors=10; NVIDIA H200, November 2026",
            points(served, "tokens"),
        ),
        Panel(
            "Qwen2.5-Coder-1.5B in Transformers",
            "its own weights, 2 KV heads, kascade with its calibration; NVIDIA H200, November 2026",
            points(of("recommended-times", "qwen2.5-coder-1.5b-instruct", calibrated), "context"),
        ),
    ]


def whole_model() -> str:
    """A decode step's time, dense and by `kascade`: a pair of bars for each number of sequences and tokens."""
    left, wide, high, apart = 118, 330, 13, 40
    parts, y = [], 0
    for panel in panels():
        parts += [text(0, y + 16, panel.title, "head"), text(0, y + 36, panel.facts, "small")]
        y += 52
        most = max(max(point.dense, point.method) for point in panel.points)
        for point in panel.points:
            parts.append(text(left - 12, y + 17, f"{point.batch} × {context_length(point.tokens)}", "", "end"))
            for bar, (ms, kind) in enumerate(((point.dense, "kept"), (point.method, "read"))):
                top, length = y + bar * high, wide * ms / most
                parts.append(f'<rect x="{left}" y="{top}" width="{length:.1f}" height="{high - 1}" class="{kind}"/>')
            times = f"{point.dense:.1f} → {point.method:.1f} ms"
            parts.append(text(left + wide + 14, y + 17, times))
            parts.append(text(left + wide + 190, y + 17, f"{point.dense / point.method:.2f}×", "head", "end"))
            y += apart
        y += 14
    parts += [
        f'<rect x="{left}" y="{y}" width="{high}" height="{high}" class="kept"/>',
        text(left + 20, y + 11, "dense"),
    ]
    parts += [f'<rect x="{left + 90}" y="{y}" width="{high}" height="{high}" class="read"/>']
    parts += [
        text(left + 110, y + 11, "kascade"),
        text(left + 190, y + 11, "a decode step of the whole model", "small"),
    ]
    title = "Milliseconds of a decode step of a whole model, dense and by kascade, by sequences and tokens of each"
    return svg(left + wide + 200, y + 22, title, parts)


# How two methods work

LAYERS = (("layer 7", "anchor"), ("layer 8", ""), ("layer 9", ""), ("layer 10", "anchor"), ("layer 11", ""))
"""A piece of a model: illustrations, not measurements."""
OF_ANCHORS = ((0, 5, 6, 17, 26, 31), (0, 9, 17, 18, 25, 31))
PAGES, OF_PAGES = 8, (0, 3, 5, 7)


def how_kascade_works() -> str:
    """Anchor layers score all keys and choose; the layers after them read what was chosen."""
    left, cell, gap, tokens = 150, 12, 15, 32
    parts, chosen = [], -1
    for row, (name, kind) in enumerate(LAYERS):
        y = 10 + 40 * row
        chosen += kind == "anchor"
        parts += [text(0, y + 11, name), text(70, y + 11, kind, "small")]
        for token in range(tokens):
            read = token in OF_ANCHORS[chosen]
            shade = "read" if read else "seen" if kind else "kept"
            parts.append(
                f'<rect x="{left + gap * token}" y="{y}" width="{cell}" height="{cell}" rx="2" class="{shade}"/>'
            )
        if not kind:
            for token in OF_ANCHORS[chosen]:
                x = left + gap * token + cell / 2
                parts.append(f'<line x1="{x:g}" x2="{x:g}" y1="{y - 27}" y2="{y - 1}" class="tie"/>')
    y = 10 + 40 * len(LAYERS) + 6
    for x, shade, words in ((0, "seen", "scored"), (90, "read", "chosen and read"), (240, "kept", "not read")):
        parts += [f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" rx="2" class="{shade}"/>']
        parts.append(text(x + 20, y + 11, words))
    title = "kascade: an anchor layer scores all keys and chooses some, which the layers after it read"
    return svg(left + gap * tokens, y + 22, title, parts)


def how_pages_work() -> str:
    """Every layer scores summaries of pages, and reads the pages that promise most."""
    left, cell, gap, tokens = 150, 12, 15, 32
    each, parts = tokens // PAGES, []
    parts += [text(0, 27, "summaries"), text(0, 81, "keys and values")]
    for number in range(PAGES):
        x, wide = left + gap * each * number, gap * each - 3
        shade = "read" if number in OF_PAGES else "seen"
        parts.append(f'<rect x="{x}" y="16" width="{wide - 4}" height="{cell + 2}" rx="3" class="{shade}"/>')
        middle = x + wide / 2 - 2
        if number in OF_PAGES:
            parts.append(f'<line x1="{middle:g}" x2="{middle:g}" y1="34" y2="66" class="tie"/>')
    for token in range(tokens):
        shade = "read" if token // each in OF_PAGES else "kept"
        parts.append(f'<rect x="{left + gap * token}" y="70" width="{cell}" height="{cell}" rx="2" class="{shade}"/>')
    y = 106
    for x, shade, words in ((0, "seen", "scored"), (90, "read", "chosen and read"), (240, "kept", "not read")):
        parts += [f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" rx="2" class="{shade}"/>']
        parts.append(text(x + 20, y + 11, words))
    title = "pages: each layer scores a summary of every page, and reads the pages that promise most"
    return svg(left + gap * tokens, y + 22, title, parts)


PICTURES = {
    "what-is-read.svg": what_is_read,
    "whole-model.svg": whole_model,
    "how-kascade-works.svg": how_kascade_works,
    "how-pages-work.svg": how_pages_work,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (FIGURES / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()

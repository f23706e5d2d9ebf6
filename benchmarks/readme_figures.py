"""The pictures of README.md, in docs/figures, from the result files: `python -m benchmarks.readme_figures`.

They are SVG, and follow the reader's light or dark scheme by themselves.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "docs" / "figures"
LIGHT, DARK = ("#0969da", "#bc4c00", "#1a7f37", "#8250df"), ("#4493f8", "#f0883e", "#3fb950", "#ab7df8")
"""Colours of batches."""


def of_batches(colours: Sequence[str]) -> str:
    rule = "  .b{0} .line, .b{0} .dot {{ stroke: {1}; }} .b{0} .full, .b{0} text {{ fill: {1}; }}"
    return "\n".join(rule.format(*of) for of in enumerate(colours))


STYLE = f"""
  text {{ font: 13px system-ui, sans-serif; fill: #1f2328; }}
  .head {{ font-weight: 600; font-size: 15px; }} .small {{ font-size: 11px; fill: #59636e; }}
  .read {{ fill: #0969da; }} .kept {{ fill: #d0d7de; }} .gone {{ fill: none; stroke: #d0d7de; stroke-dasharray: 2 2; }}
  .grid {{ stroke: #d0d7de; }} .line {{ fill: none; stroke-width: 2; }} .dense {{ stroke-dasharray: 5 4; }}
  .dot {{ stroke-width: 2; }} .ring {{ fill: #ffffff; }}
{of_batches(LIGHT)}
  @media (prefers-color-scheme: dark) {{
  text {{ fill: #f0f6fc; }} .small {{ fill: #9198a1; }} .read {{ fill: #4493f8; }} .kept {{ fill: #3d444d; }}
  .gone {{ stroke: #3d444d; }} .grid {{ stroke: #2a313c; }} .ring {{ fill: #0d1117; }}
{of_batches(DARK)}
  }}
"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{html.escape(words)}</text>'


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    return "\n".join([head, f"<title>{html.escape(title)}</title>", f"<style>{STYLE}</style>", *parts, "</svg>", ""])


# What is read

TOKENS = 40
CHOSEN = ((0, 1, 9, 10, 11, 26, 38, 39), (0, 1, 17, 18, 26, 27, 39, 40))
"""Tokens that a selecting method reads in two steps: an illustration, not a measurement."""
KEPT = (0, 1, 9, 10, 11, 17, 26, 32, 38, 39)
"""Tokens that an evicting method keeps when the prompt ends."""


def what_is_read() -> str:
    """Three ways to attend to a prompt in two successive decode steps: which tokens are read, kept, and gone."""
    left, cell, gap = 236, 14, 16
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
        top = 18 + 74 * row
        parts += [text(0, top + 15, name, "head"), text(0, top + 34, does, "small")]
        for step in range(2):
            y = top + 22 * step
            parts.append(text(left - 10, y + 11, ("one step", "the next")[step], "small", "end"))
            for token in range(TOKENS + step):
                size = f'width="{cell}" height="{cell}" rx="2"'
                parts.append(f'<rect x="{left + gap * token}" y="{y}" {size} class="{kind(step, token)}"/>')
    for place, (kind, words) in enumerate((("read", "read"), ("kept", "in memory, not read"), ("gone", "gone"))):
        x = left + (0, 80, 240)[place]
        parts.append(f'<rect x="{x}" y="238" width="{cell}" height="{cell}" rx="2" class="{kind}"/>')
        parts.append(text(x + 22, 250, words))
    title = "What dense, selecting and evicting attention read of a prompt in two decode steps"
    return svg(left + gap * (TOKENS + 1), 262, title, parts)


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
        Panel("8B shape, vLLM, H200", "10 uncalibrated anchors, random weights", points(served, "tokens")),
        Panel(
            "8B shape, generate, H200",
            "10 uncalibrated anchors, random weights",
            points(of("recommended-times", "llama-3.1-8b", "kascade:anchors=10"), "context"),
        ),
        Panel(
            "1.5B, generate, H200",
            "10 calibrated anchors, 2 KV heads",
            points(of("recommended-times", "qwen2.5-coder-1.5b-instruct", calibrated), "context"),
        ),
    ]


def whole_model() -> str:
    """A decode step's time against the tokens of a sequence, dense (dashed) and by `kascade`, a colour a batch."""
    wide, high, top, apart = 236, 210, 62, 62
    found, parts = panels(), []
    batches = sorted({point.batch for panel in found for point in panel.points})
    colour = {1: 0, 4: 1, 8: 2, 16: 3, 32: 3}
    for place, panel in enumerate(found):
        left = 36 + place * (wide + apart)
        most = 5 * math.ceil(max(point.dense for point in panel.points) / 5)

        def at(tokens: int, ms: float, left: int = left, most: int = most) -> tuple[float, float]:
            x = left + wide * (math.log2(tokens) - 11) / 6  # 2K to 128K
            return x, top + high * (1 - ms / most)

        parts += [text(left, 18, panel.title, "head"), text(left, 38, panel.facts, "small")]
        for ms in range(0, most + 1, 5):
            _, y = at(2048, ms)
            parts.append(f'<line x1="{left}" x2="{left + wide}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            parts.append(text(left - 6, y + 4, str(ms), "small", "end"))
        for power in range(11, 18, 2):
            x, y = at(2**power, 0)
            parts.append(text(x, y + 18, f"{2 ** (power - 10)}K", "small", "middle"))
        for batch in batches:
            own = [point for point in panel.points if point.batch == batch]
            if not own:
                continue
            parts.append(f'<g class="b{colour[batch]}">')
            for name, kinds in (("dense", ("line dense", "dot ring")), ("method", ("line", "dot full"))):
                places = [at(point.tokens, getattr(point, name)) for point in own]
                parts.append(
                    f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}" class="{kinds[0]}"/>'
                )
                parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="{kinds[1]}"/>' for x, y in places]
            x, y = at(own[-1].tokens, own[-1].dense)
            words = f"{batch} sequence{'s' if batch > 1 else ''}"
            parts += [text(min(x, left + wide - 34), y - 10, words, "", "middle"), "</g>"]
    bottom = top + high + 44
    parts.append(text(36, bottom, "ms a decode step, whole model, against the tokens of each sequence"))
    parts += ['<g class="b0">', f'<line x1="520" x2="556" y1="{bottom - 4}" y2="{bottom - 4}" class="line dense"/>']
    parts += [f'<circle cx="538" cy="{bottom - 4}" r="3.5" class="dot ring"/>', "</g>", text(564, bottom, "dense")]
    parts += ['<g class="b0">', f'<line x1="640" x2="676" y1="{bottom - 4}" y2="{bottom - 4}" class="line"/>']
    parts += [f'<circle cx="658" cy="{bottom - 4}" r="3.5" class="dot full"/>', "</g>", text(684, bottom, "kascade")]
    return svg(36 + 3 * wide + 2 * apart + 16, bottom + 12, "A decode step's time, dense and by kascade", parts)


PICTURES = {"what-is-read.svg": what_is_read, "whole-model.svg": whole_model}


def main() -> None:
    for name, draw in PICTURES.items():
        (FIGURES / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()

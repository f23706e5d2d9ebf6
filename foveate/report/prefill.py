"""Rows of `foveate bench prefill` as Markdown: times beside dense attention, and those of each kind of layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foveate.bench.breakdown import PARTS
from foveate.report.markdown import markdown_table, tables

Row = Mapping[str, Any]


def table(rows: Sequence[Row]) -> str:
    """The rows of each case beside its baseline; and what each kind of layers takes, of rows that are of layers."""
    found = tables(rows)
    of_layers = [row for row in rows if row.get("layers")]
    return f"{found}\n\n{layers(of_layers)}" if of_layers else found


def layers(rows: Sequence[Row]) -> str:
    """A line for each kind of layers of a method: its time, and what that goes to.

    *Learning* and *prompt's end* are what a method adds to attention, and the surcharge is both of them, as a share of
    the fastest dense pass. Parts are of attention: kernels that weigh keys, choose some, attend, and PyTorch's others.
    *Recall* and *mass* are of approximate choices: the share of the exact choice that they have, and the attention that
    they keep relative to what it keeps.
    """
    head = (
        "method",
        "tokens",
        "layers",
        "of",
        "ms",
        *(f"{part}, ms" for part in PARTS),
        "learning, ms",
        "prompt's end, ms",
    )
    lines = [(*head, "surcharge", "memory above inputs and output", "recall", "mass")]
    for row in rows:
        case, above = row["case"], row["peak_kind"] == "above inputs and output"
        for name, kind in row["layers"].items():
            parts = kind["parts_ms"] or {}
            lines.append(
                (
                    f"`{case['method']}`",
                    f"{case['context']:,}",
                    str(kind["layers"]),
                    name,
                    f"{kind['ms']:.2f}",
                    *(f"{parts[part]:.2f}" if part in parts else "–" for part in PARTS),
                    f"{kind['learn_ms']:.2f}",
                    f"{kind['end_ms']:.2f}",
                    f"{100 * kind['surcharge']:.0f} %",
                    f"{kind['peak_bytes'] / 1e9:.2f} GB" if above else "–",
                    *(
                        f"{100 * kind['choice'][name]:.1f} %" if "choice" in kind else "–"
                        for name in ("recall", "mass")
                    ),
                )
            )
    return markdown_table(lines)

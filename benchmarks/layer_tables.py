"""Tables of the benches of a layer's attention: of decode steps, and of prompts, by kinds of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foveate.lab.report.markdown import NONE, columns, context_length, percent
from foveate.lab.report.rows import Row
from foveate.lab.report.tables import decode
from foveate.lab.report.tables.decode import PLACE, mean_parts, parts, speedup, time
from foveate.lab.report.tables.general import tables
from foveate.lab.results.measurements import PARTS


def decode_table(rows: Sequence[Row]) -> str:
    """Rows of `decode`, of layers and of whole models."""
    return decode.table(rows, decode_layers)


def decode_layers(rows: Sequence[Row]) -> str:
    def kinds(row: Row) -> str:
        found = row["layers"] or {}
        words = (f"{one['layers']} {name} {time(one, 3)}" for name, one in found.items())
        return "; ".join(words) if len(found) > 1 else ""

    cells: dict[str, Callable[[Row], str]] = {
        **PLACE,
        "ms": lambda row: time(row, 3),
        "floor, ms": lambda row: f"{row['floor_ms']:.3f}",
        "over the fastest dense": speedup,
        "kinds of layers, ms each": kinds,
    }
    # Upkeep is LuKA's making pages, its share a step.
    found = parts(rows, mean_parts, (*PARTS, "upkeep"), 3)
    return columns(rows, cells) + (f"\n\nKernels of the mean layer, ms:\n\n{found}" if found else "")


def prefill_table(rows: Sequence[Row]) -> str:
    """The rows of each case beside its baseline; and what each kind of layers takes, of rows that are of layers."""
    found = tables(rows)
    of_layers = [row for row in rows if row.get("layers")]
    return f"{found}\n\n{prefill_layers(of_layers)}" if of_layers else found


def prefill_layers(rows: Sequence[Row]) -> str:
    """A line for each kind of layers of a method: its time, and what that goes to.

    *Learning* and *prompt's end* are what a method adds to attention, and the surcharge is both of them, as a share of
    the fastest dense pass. Parts are of attention: kernels that weigh keys, choose some, attend, and PyTorch's others.
    *Recall* and *mass* are of approximate choices: the share of the exact choice that they have, and the attention that
    they keep relative to what it keeps.
    """
    of_kinds = [{**row, "kind": name, **kind} for row in rows for name, kind in row["layers"].items()]

    def part(name: str) -> Callable[[Row], str]:
        return lambda one: f"{one['parts_ms'][name]:.2f}" if one["parts_ms"] else NONE

    def choice(name: str) -> Callable[[Row], str]:
        return lambda one: percent(one["choice"][name] if "choice" in one else None)

    def memory(one: Row) -> str:
        return f"{one['peak_bytes'] / 1e9:.2f} GB" if one["peak_kind"] == "above inputs and output" else NONE

    cells = {
        "method": lambda one: f"`{one['case']['method']}`",
        "tokens": lambda one: context_length(one["case"]["context"]),
        "layers": lambda one: str(one["layers"]),
        "of": lambda one: one["kind"],
        "ms": lambda one: f"{one['ms']:.2f}",
        **{f"{name}, ms": part(name) for name in PARTS},
        "learning, ms": lambda one: f"{one['learn_ms']:.2f}",
        "prompt's end, ms": lambda one: f"{one['end_ms']:.2f}",
        "surcharge": lambda one: percent(one["surcharge"], 0),
        "memory above inputs and output": memory,
    }
    if any("choice" in one for one in of_kinds):
        cells |= {"recall": choice("recall"), "mass": choice("mass")}
    return columns(of_kinds, cells)

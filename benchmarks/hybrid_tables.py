"""Tables of hybrids: attention of layers, caches over long sequences, training steps, and what trained heads retain."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.table_kinds import Table, pivot
from foveate.lab.report.markdown import NONE, context_length, markdown_table, percent, titled
from foveate.lab.report.rows import Row, grouped
from foveate.lab.report.terminal import size, time

_HEADS = {"nsa": "dense of nsa's heads"}
"""Cases whose dense attention has heads of its own."""
"""Cases of older rows by their names of today."""
_PARTS = ("lte, scores of a step", "lte, selection of tokens")
"""Cases that are work beside attention."""


def speed(rows: Sequence[Row]) -> str:
    """A line for each kind of attention: time, time over a sliding window's, and factor over dense attention.

    Decode and prompts are tables of their own, for each context. Of several windows or dense libraries the fastest
    counts.
    """
    groups = grouped(rows, lambda row: (row["case"]["phase"], row["case"]["context"]))
    return "\n\n".join(map(_attention, groups.values()))


def _attention(rows: Sequence[Row]) -> str:
    case, by_batch = rows[0]["case"], {}
    for row in rows:
        by_batch.setdefault(row["case"]["batch"], {})[row["case"]["what"]] = row
    decode = case["phase"] == "decode"
    rate = ("gb_per_s", "GB/s") if decode else ("tflop_per_s", "TFLOP/s")
    head = ["attention"]
    for batch in by_batch:
        of = f", batch {batch}" if len(by_batch) > 1 else ""
        head += [f"time{of}", f"over the window{of}", f"faster than dense{of}", f"{rate[1]}{of}"]
    lines = [(*head, "error")]
    for what in dict.fromkeys(row["case"]["what"] for row in rows):
        cells, errors = [], []
        for found in by_batch.values():
            row = found[what]
            window = min((one["ms"] for name, one in found.items() if _is(name, "swa")), default=None)
            own = next((dense for name, dense in _HEADS.items() if what.startswith((name, dense))), "dense")
            dense = min(one["ms"] for name, one in found.items() if _is(name, own))
            heads = own == "dense" and not what.startswith("dense") and window is not None
            cells += [
                time(row["ms"]),
                f"{row['ms'] / window:.2f}×" if heads else NONE,
                NONE if what in _PARTS else f"{dense / row['ms']:.2f}×",
                NONE if row[rate[0]] is None else f"{row[rate[0]]:,.0f}",
            ]
            errors += [row["error"]] if row["error"] is not None else []
        lines.append((what, *cells, f"{max(errors):.1e}" if errors else NONE))
    heads = f"{case['heads']} query and {case['kv_heads']} KV heads of {case['head_dim']} (nsa {case['nsa_kv_heads']})"
    sizes = f"window {case['window']}, buffer {case['buffer']}, swa of {case['sliding']:,}"
    title = f"{case['phase']}, {context_length(case['context'])} tokens, {heads}, {sizes}, {case['dtype']}"
    return titled(title, rows, markdown_table(lines))


def _is(name: str, kind: str) -> bool:
    """Whether a case is one of a kind: ``swa`` and ``swa, LIBRARY`` are the same attention."""
    return name == kind or name.startswith(f"{kind}, ")


def memory(rows: Sequence[Row]) -> str:
    """A line for each context, and for each preset what its cache holds, its peak and its times."""
    cells: dict[str, dict[str, str]] = {}
    for row in sorted(rows, key=lambda row: row["case"]["context"]):
        found = {
            "cache": size(row["cache_bytes"]),
            "peak above the weights": size(row["peak_bytes"]),
            "last chunk": time(row["ms"]),
            "a generated token": time(row["decode_ms_per_token"]),
        }
        line = cells.setdefault(context_length(row["case"]["context"]), {})
        line |= {f"{row['case']['preset']}: {part}": cell for part, cell in found.items()}
    presets = dict.fromkeys(row["case"]["preset"] for row in rows)
    names = [f"{preset}: {part}" for preset in presets for part in found]
    case = rows[0]["case"]
    chunk = context_length(case["chunk"])
    title = f"{case['size']}, random weights, one sequence in chunks of {chunk} tokens, {case['dtype']}"
    return titled(title, rows, pivot(["tokens"], cells, names))


def layers(rows: Sequence[Row]) -> str:
    """A table for each run, told apart by its commit, with a line for each context and a column for each kind of layer:
    time, and over the window's; steps with their kernels.

    Args:
        rows: of `benchmarks/hybrid_layers.py`.
    """
    return "\n\n".join(map(_layers, grouped(rows, lambda row: row["commit"]).values()))


def _layers(rows: Sequence[Row]) -> str:
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        case = row["case"]
        found = f"{time(row['ms'])} ({row['ms'] / row['baseline_ms']:.2f}×)"
        if row.get("kernels_ms") is not None:
            found += f", kernels {time(row['kernels_ms'])}"
        if "without_scores_ms" in row:
            found += f", without scores {time(row['without_scores_ms'])}, {row['retained']:.0f} retained"
        line = case["phase"].removeprefix("layer "), context_length(case["context"])
        cells.setdefault(line, {})[case["what"]] = found
    names = dict.fromkeys(row["case"]["what"] for row in rows)
    title = f"layers of {rows[0]['case']['size']}, batch {rows[0]['case']['batch']}, {rows[0]['case']['dtype']}"
    return titled(title, rows, pivot(["phase", "tokens"], cells, names))


def heads(rows: Sequence[Row]) -> str:
    """A line for each trained model: answers at the end, near and far, and the state of its LTE heads.

    Args:
        rows: of `benchmarks/hybrid_curves.py`.
    """
    names = {"heads_silent": "silent heads", "heads_saturated": "saturated heads"}
    cells, asked = {}, {}
    for row in rows:
        line = cells[row["model"], f"{row['tokens'][-1] / 1e6:.0f}M"] = {}
        for kind, of in row["answers"][-1].items():
            for where in ("near", "far") if kind != "step" else ():
                asked[f"{kind}, {where}"] = None
                if one := of.get(where):
                    line[f"{kind}, {where}"] = f"{one['right']:.0f}" + (f" (n = {one['n']:,})" if "n" in one else "")
        if row["heads"]:
            last = row["heads"][-1]
            line |= {"retained": f"{last['retained_mean']:.0f}", "largest λ": f"{last['lambda_max']:.0e}"}
            line |= {words: f"{last[name]}" for name, words in names.items()}
    table = pivot(["model", "tokens"], cells, [*asked, "retained", *names.values(), "largest λ"])
    return titled("answers right in every token, percent, and LTE heads at the end", rows, table)


def training(rows: Sequence[Row]) -> str:
    """A table for each kind of GPU, with a line for each model, its size and number of GPUs.

    Tokens a second are compared with one GPU of the kind that computes the delta rule in the same way.
    """
    return "\n\n".join(map(_training, grouped(rows, lambda row: row["device"]).values()))


def _training(rows: Sequence[Row]) -> str:
    def of(row: Row) -> tuple[str, str]:
        return _model(row), row["gated_delta_rule"]

    alone = {of(row): row["tokens_per_s"] for row in rows if row["case"]["processes"] == 1}
    case = rows[0]["case"]
    title = f"rows of {context_length(case['length'])} tokens, {case['dtype']}{', compiled' if case['compile'] else ''}"
    cells = {
        "model": _model,
        "GPUs": lambda row: str(row["case"]["gpus"]),
        "tokens a step": lambda row: f"{row['case']['tokens'] * row['case']['processes']:,}",
        "tokens a second": lambda row: f"{row['tokens_per_s']:,.0f}",
        "over one GPU": lambda row: f"{row['tokens_per_s'] / alone[of(row)]:.2f}×" if of(row) in alone else NONE,
        "delta rule": lambda row: (row["gated_delta_rule"] or NONE).partition(" (")[0],
        "over the baseline": lambda row: (
            NONE if row["baseline"] == row["case"]["preset"] else f"{row['speedup']:.2f}× `{row['baseline']}`"
        ),
        "of the peak": lambda row: percent(row["peak_share"]),
        "memory": lambda row: size(row["peak_bytes"]),
    }
    return Table(lambda rows: title, cells)(rows)


def _model(row: Row) -> str:
    return f"{row['case']['preset']}-{row['case']['size']}"

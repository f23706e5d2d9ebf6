"""Speed rows in the terminal: names whole, times with their digits, a table for each phase."""

import io

from rich.console import Console

from foveate.report import terminal
from foveate.report.terminal import speeds

LONG = "dense of nsa's heads, flash-attention-3"


def row(what, phase, ms, baseline, gb_per_s=None, tflop_per_s=None, **case):
    return {
        "bench": "hybrids",
        "case": {"what": what, "phase": phase, "batch": 64, "context": 32768, **case},
        "ms": ms,
        "baseline": baseline,
        "speedup": 0.5,
        "gb_per_s": gb_per_s,
        "tflop_per_s": tflop_per_s,
        "peak_bytes": 933888,
        "device": "NVIDIA H100 80GB HBM3",
    }


ROWS = [
    row("lte, choice of what is retained", "decode", 0.0307, LONG, gb_per_s=2184.8),
    row(LONG, "decode", 0.376, LONG, gb_per_s=2856.3),
    row("lte", "prefill", 1.492, "swa", tflop_per_s=223.8, heads=32),
]


def printed(rows):
    stream = io.StringIO()
    Console(file=stream, width=terminal.WIDTH, highlight=False).print(speeds(rows))
    return stream.getvalue()


def test_words_stay_whole_within_100_columns():
    text = printed(ROWS)
    assert max(map(len, text.splitlines())) <= 100
    assert all(word in text for word in ("lte, choice of", "retained", "flash-attention-3", "30.7 µs", "1.49 ms"))
    assert "…" not in text


def test_phases_have_tables_of_their_own_without_empty_columns():
    decode, prefill = printed(ROWS).split("hybrids · phase prefill")
    assert ("GB/s" in decode, "TFLOP/s" in decode) == (True, False)
    assert ("GB/s" in prefill, "TFLOP/s" in prefill) == (False, True)
    assert "heads 32" in prefill
    assert "heads 32" not in decode

"""What the batches of a method cost together: the cost fields of its row."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def add_up(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The row's cost fields from the records of its batches.

    Shares and bytes a step are weighted by the decode steps, times are medians, memory is the largest.
    """
    read = dense = steps = counted = kv_bytes = 0.0
    for batch in batches:
        stats = batch["stats"]
        steps += stats["decode_steps"]
        if stats["keys_read_per_step"] is None:  # reads were not counted
            continue
        counted += stats["decode_steps"]
        keys = stats["keys_read_per_step"] * stats["decode_steps"]
        read += keys
        dense += keys / stats["keys_read_share"] if stats["keys_read_share"] else 0.0
        kv_bytes += stats["kv_bytes_per_step"] * stats["decode_steps"]
    return {
        "keys_read_share": read / dense if dense else None,
        "kv_bytes_per_step": kv_bytes / counted if counted else None,
        "resident_bytes": max(batch["stats"]["resident_bytes"] for batch in batches),
        "cache_peak_bytes": _largest(batch["stats"].get("cache_peak_bytes") for batch in batches),
        "decode_steps": int(steps),
        **{
            counter: sum(batch["stats"].get(counter, 0) for batch in batches)
            for counter in ("tokens_evicted", "pages_refined", "indices_reused")
        },
        "mass_read_share": _mean_share(batches),
        "notes": list(dict.fromkeys(note for batch in batches for note in batch["stats"]["notes"])),
        "prefill_ms": _median(batch["prefill_ms"] for batch in batches),
        "decode_ms_per_token": _median(batch["decode_ms_per_token"] for batch in batches),
        "timing": _joined(batch["timing"] for batch in batches),
        "peak_bytes": max(batch["peak_bytes"] for batch in batches),
        "peak_kind": _joined(batch["peak_kind"] for batch in batches),
        "commit": ", ".join(sorted({batch["commit"] for batch in batches})),
    }


def _mean_share(batches: Sequence[Mapping[str, Any]]) -> float | None:
    """The share of attention that the keys read hold by a method's own estimate; weighted by the decode steps."""
    shares = [(batch["stats"].get("mass_read_share"), batch["stats"]["decode_steps"]) for batch in batches]
    known = [(share, steps) for share, steps in shares if share is not None and steps]
    return sum(share * steps for share, steps in known) / sum(steps for _, steps in known) if known else None


def _largest(values: Iterable[int | None]) -> int | None:
    """The largest value; None where one is not known."""
    known = list(values)
    return None if None in known else max(known)


def _joined(values: Iterable[str]) -> str:
    """The different values, for rows whose batches were measured in different ways."""
    return " / ".join(dict.fromkeys(values))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None

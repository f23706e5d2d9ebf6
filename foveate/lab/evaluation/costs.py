"""What the batches of a method cost together: the cost fields of its row."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def add_up(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The row's cost fields from the records of its batches.

    Shares and bytes a step are weighted by the decode steps, times are medians, memory is the largest.
    """
    stats = [batch["stats"] for batch in batches]
    counted = [one for one in stats if one["keys_read_per_step"] is not None]
    steps = sum(one["decode_steps"] for one in counted)
    read = [one["keys_read_per_step"] * one["decode_steps"] for one in counted]
    dense = sum(keys / one["keys_read_share"] for keys, one in zip(read, counted) if one["keys_read_share"])
    kv_bytes = sum(one["kv_bytes_per_step"] * one["decode_steps"] for one in counted)
    peaks = [one.get("cache_peak_bytes") for one in stats]
    known = [one for one in stats if one.get("mass_read_share") is not None and one["decode_steps"]]
    mass = sum(one["mass_read_share"] * one["decode_steps"] for one in known)
    return {
        "keys_read_share": sum(read) / dense if dense else None,
        "kv_bytes_per_step": kv_bytes / steps if steps else None,
        "resident_bytes": max(one["resident_bytes"] for one in stats),
        "cache_peak_bytes": None if None in peaks else max(peaks),
        "decode_steps": int(sum(one["decode_steps"] for one in stats)),
        "dense_steps": int(sum(one.get("dense_steps", 0) for one in stats)),
        **{
            counter: sum(one.get(counter, 0) for one in stats)
            for counter in ("tokens_evicted", "pages_refined", "indices_reused")
        },
        "mass_read_share": mass / sum(one["decode_steps"] for one in known) if known else None,
        "recall": _by_layer([one for batch in batches for one in batch.get("recall", ()) if one]),
        "notes": list(dict.fromkeys(note for one in stats for note in one["notes"])),
        "prefill_ms": _median(batch["prefill_ms"] for batch in batches),
        "decode_ms_per_token": _median(batch["decode_ms_per_token"] for batch in batches),
        "request_ms": _median(batch.get("request_ms") for batch in batches),
        "timing": _joined(batch["timing"] for batch in batches),
        "peak_bytes": max(batch["peak_bytes"] for batch in batches),
        "peak_kind": _joined(batch["peak_kind"] for batch in batches),
        "commit": ", ".join(sorted({batch["commit"] for batch in batches})),
    }


def _by_layer(recalls: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    """The mean recall of each layer over the items; None where none was measured."""
    return {layer: statistics.fmean(one[layer] for one in recalls) for layer in recalls[0]} if recalls else None


def _joined(values: Iterable[str]) -> str:
    """The different values, for rows whose batches were measured in different ways."""
    return " / ".join(dict.fromkeys(values))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None

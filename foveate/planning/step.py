"""How long a decode step is estimated to take: bytes over bandwidth, plus launches.

The constants are fitted to rows of `benchmarks/results/`, measured on an H200: the parts of a step and its total in
`recommended-times.jsonl` (Transformers), and `serving.jsonl` (vLLM 0.26). `tests/planning/test_estimates.py` compares
the estimates with these rows, and with some that nothing was fitted to: of 16 sequences, and of an H100. On another GPU
the bandwidth of its data sheet is taken at the same efficiency, and launches take the same time. No A100, L40S or
RTX 4090 was measured, and no model with experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

EFFICIENCY = 0.9
"""Share of a data sheet's bandwidth at which dense attention reads keys and values, and matrix products read weights:
4.32 of 4.8 TB/s (H200, `memory_gb_per_s` of the rows). FlashAttention-3 reaches 3.05 of 3.35 TB/s on an H100."""
SELECTED = 0.75
"""Speed of reading selected keys and values, over the speed of reading all keys."""
SCORED_KEYS = 0.8
"""Speed of scoring keys exactly, over the same."""
SCORED_SUMMARIES = 0.53
"""Speed of scoring summaries of pages, over the same; their scores take more arithmetic a byte."""
EIGHT_BITS = 0.65
"""Speed of reading keys and values in fp8, which have to be unpacked, over the speed in bf16."""

LAUNCH = 14e-6
"""Seconds that a layer's attention takes beside its bytes."""
CHOOSE = {False: 32e-6, True: 16e-6}
"""Seconds that a layer takes more if it chooses: by its keys (False) or by summaries (True)."""
SORT = 0.24e-9
"""Seconds for each token of the longest sequence that a layer takes more if it chooses by summaries."""
EXCHANGE = 40e-6
"""Seconds that a layer takes more if it chooses keys together with other GPUs."""

SEQUENCE = 0.8e-6
"""Seconds for each sequence that a layer takes more."""


class Engine(NamedTuple):
    """What runs a model, and what a layer of its steps takes beside weights and attention."""

    name: str
    layer: float
    """Seconds of a layer's small kernels, with the pauses between them."""
    reduce: float
    """Seconds that a layer takes more if GPUs share it, which add up their outputs."""
    summaries: float
    """Seconds that a layer takes more if it chooses by summaries, which are in the engine's blocks."""


TRANSFORMERS = Engine("Transformers", 103e-6, 0.0, 0.0)
VLLM = Engine("vLLM", 29e-6, 25e-6, 45e-6)


class LayerBytes(NamedTuple):
    """What the attention of a layer reads in a decode step of all sequences, on one GPU."""

    attended: float
    """Bytes of the keys and values that are attended to."""
    scored: float = 0.0
    """Bytes of keys or summaries that are scored."""
    chooses: bool = False
    summaries: bool = False
    """Whether summaries are scored, instead of keys."""
    everything: bool = True
    """Whether all keys that the layer holds are attended to."""
    exchanges: bool = False
    """Whether the layer chooses together with other GPUs."""


def step_seconds(
    engine: Engine,
    bandwidth: float,
    weights: float,
    layers: Iterable[LayerBytes],
    *,
    number: int,
    sequences: int,
    longest: int,
    ranks: int = 1,
    eight_bits: bool = False,
) -> float:
    """Seconds that a decode step of all sequences is estimated to take.

    Args:
        bandwidth: bytes a second of a GPU's memory, by its data sheet.
        weights: bytes that one GPU reads of them.
        layers: those with attention.
        number: layers of the model, with attention or without.
        longest: tokens of the longest sequence.
        ranks: GPUs that share each layer.
        eight_bits: whether keys and values are in fp8.
    """
    rate = EFFICIENCY * bandwidth
    each = engine.layer + SEQUENCE * sequences + (engine.reduce if ranks > 1 else 0.0)
    seconds = weights / rate + number * each
    kept = rate * (EIGHT_BITS if eight_bits else 1.0)
    for one in layers:
        seconds += LAUNCH + one.attended / (kept * (1.0 if one.everything else SELECTED))
        seconds += one.scored / (rate * SCORED_SUMMARIES if one.summaries else kept * SCORED_KEYS)
        if one.chooses:
            seconds += CHOOSE[one.summaries]
            seconds += engine.summaries + SORT * longest if one.summaries else 0.0
        seconds += EXCHANGE * one.exchanges
    return seconds

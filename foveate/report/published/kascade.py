"""What the Kascade paper reports of decoding (arXiv:2512.16391, table 3; one H100, 5 anchors among 32 layers).

The table also has 524,288 tokens, with 32 sequences.
"""

from __future__ import annotations

from typing import NamedTuple

SHAPE = {"level": "kernel", "batch": 64, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "float16"}
"""The case of a row that the table can be compared with."""


class Decode(NamedTuple):
    """Milliseconds of attention in one decode step of a layer, and the speed-up over FlashAttention-3."""

    flash_attention_3: float
    first: float
    """Layer 0, which attends to everything and chooses."""
    choosing: float
    """Another anchor."""
    reading: float
    """A layer that reads what an anchor chose."""
    mean: float
    speedup: float


DECODE = {  # by tokens and share of the keys
    (8192, 0.1): Decode(0.7, 0.92, 0.82, 0.13, 0.24, 2.91),
    (16384, 0.1): Decode(1.4, 1.71, 1.45, 0.21, 0.41, 3.40),
    (32768, 0.1): Decode(2.93, 3.35, 2.71, 0.35, 0.74, 3.97),
    (65536, 0.1): Decode(5.85, 6.74, 5.39, 0.65, 1.43, 4.08),
    (131072, 0.1): Decode(11.68, 14.08, 10.78, 1.24, 2.83, 4.12),
    (262144, 0.1): Decode(21.77, 25.95, 20.63, 2.31, 5.34, 4.08),
    (8192, 0.2): Decode(0.7, 0.91, 0.89, 0.2, 0.31, 2.27),
    (16384, 0.2): Decode(1.4, 1.73, 1.61, 0.36, 0.56, 2.50),
    (32768, 0.2): Decode(2.93, 3.58, 3.22, 0.65, 1.06, 2.76),
    (65536, 0.2): Decode(5.85, 6.97, 6.22, 1.24, 2.04, 2.87),
    (131072, 0.2): Decode(11.68, 13.85, 12.25, 2.42, 4.01, 2.92),
    (262144, 0.2): Decode(21.77, 27.79, 24.39, 4.54, 7.75, 2.81),
    (8192, 0.3): Decode(0.7, 0.93, 0.98, 0.27, 0.38, 1.85),
    (16384, 0.3): Decode(1.4, 1.9, 1.93, 0.48, 0.71, 1.98),
    (32768, 0.3): Decode(2.93, 3.69, 3.66, 0.95, 1.37, 2.13),
    (65536, 0.3): Decode(5.85, 7.19, 7.06, 1.82, 2.64, 2.21),
    (131072, 0.3): Decode(11.68, 14.61, 15.1, 3.61, 5.39, 2.17),
    (262144, 0.3): Decode(21.77, 28.65, 27.63, 6.77, 10.06, 2.16),
}

"""What the StreamIndex paper reports (arXiv:2605.02568, section 6; one H200, bf16, 64 heads of 128, ratio 4).

Its GB are of 2³⁰ bytes: it has the fp32 products ``[32768, 64, 8192]`` at 64 GB.
"""

from __future__ import annotations

from typing import NamedTuple

GB = 1 << 30


class Cost(NamedTuple):
    """Milliseconds and peak GB (of the indexer without its inputs, of a pipeline with them)."""

    ms: float
    gb: float


MATERIALISED = {  # tables 3 and 4, by k and tokens; out of memory beyond
    512: {32768: Cost(317.0, 129.0)},
    1024: {32768: Cost(317.9, 129.0)},
}
CHUNKED = {  # the same; tiles of 2,048 queries and 8,192 keys
    512: {
        32768: Cost(31, 0.40),
        65536: Cost(122, 0.59),
        131072: Cost(485, 0.96),
        262144: Cost(1935, 1.71),
        524288: Cost(7730, 3.21),
        1048576: Cost(30900, 6.21),
    },
    1024: {
        32768: Cost(32, 0.64),
        65536: Cost(127, 1.02),
        131072: Cost(502, 1.77),
        262144: Cost(2004, 3.27),
        524288: Cost(7994, 6.27),
        1048576: Cost(31973, 12.27),
    },
}
PARITY = {2048: (1.0, 1.0), 4096: (1.0, 1.0), 8192: (1.0, 1.0)}
"""Table 2: mean and least recall of the chunked path, by tokens."""
PIPELINE = {  # table 5, by tokens: with TileLang's attention, over the materialised indexer (or None) and the chunked
    8192: (Cost(6.5, 0.58), Cost(7.5, 0.58)),
    32768: (Cost(42.6, 2.32), Cost(47.2, 2.32)),
    65536: (Cost(132.9, 4.64), Cost(152.3, 4.64)),
    131072: (Cost(460.4, 17.0), Cost(531.3, 9.28)),
    262144: (None, Cost(1968.8, 18.56)),
}
SETTINGS_TOKENS = 262144
SETTINGS = {  # table 6, by setting and value
    "query_chunk": {
        1024: Cost(4540, 1.61),
        4096: Cost(4165, 1.92),
        16384: Cost(4028, 3.19),
        65536: Cost(4030, 8.25),
        262144: Cost(4030, 28.50),
    },
    "key_chunk": {
        1024: Cost(9482, 1.58),
        4096: Cost(4999, 1.63),
        16384: Cost(3900, 1.87),
        65536: Cost(3377, 2.81),
        262144: Cost(1607, 2.81),
    },
    "top_k": {
        64: Cost(1754, 0.35),
        256: Cost(1881, 0.93),
        512: Cost(1934, 1.71),
        1024: Cost(1996, 3.27),
        2048: Cost(2217, 6.38),
    },
}
ABLATIONS = {  # table 7, at 16,384 tokens: mean recall, least, and the share of queries with all
    "none": (1.0, 0.9980, 0.9999),
    "A1: tiles are not merged": (0.5957, 0.1914, 0.2503),
    "A2: small tiles are skipped": (0.0002, 0.0, 0.0002),
    "A2, control: they are not": (1.0, 0.9980, 0.9999),
    "A3: scores in fp16": (0.9998, 0.9941, 0.9182),
}

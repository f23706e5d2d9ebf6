"""The five verbs every method is written in: score, select, attend, compress, retain.

Each verb is a folder with its reference in plain torch, which is the specification and runs on any device, and, where
one exists, a kernel beside it that is tested against the reference. A verb contains no policy.

Shapes, everywhere: ``q [B, Hq, Lq, D]``, ``k [B, Hkv, Lk, D]``, ``v [B, Hkv, Lk, Dv]`` with ``Hq`` a multiple of
``Hkv`` (grouped-query attention); softmax and log-sum-exp are computed in fp32.
"""

from foveate.ops.attend import (
    Attended,
    attend,
    attend_causal,
    attend_cover,
    attend_indices,
    attend_pages,
    attend_window,
    gather_pages,
    gather_slots,
    merge,
    page_slots,
    prompt_path,
    score_cover,
)
from foveate.ops.compress import page_importance, summarise_pages
from foveate.ops.retain import keep_best, weakest
from foveate.ops.score import column_mass, query_mass, tile_mass
from foveate.ops.select import StreamingTopK, topk, topk_rows

__all__ = [
    "Attended",
    "StreamingTopK",
    "attend",
    "attend_causal",
    "attend_cover",
    "attend_indices",
    "attend_pages",
    "attend_window",
    "column_mass",
    "gather_pages",
    "gather_slots",
    "keep_best",
    "merge",
    "page_importance",
    "page_slots",
    "prompt_path",
    "query_mass",
    "score_cover",
    "summarise_pages",
    "tile_mass",
    "topk",
    "topk_rows",
    "weakest",
]

"""The five verbs every method is written in: score, select, attend, compress, retain.

Each verb is a folder with its reference in plain torch, which is the specification and runs on any device, and, where
one exists, a kernel beside it that is tested against the reference. A verb contains no policy.

Shapes, everywhere: ``q [B, Hq, Lq, D]``, ``k [B, Hkv, Lk, D]``, ``v [B, Hkv, Lk, Dv]`` with ``Hq`` a multiple of
``Hkv`` (grouped-query attention); softmax and log-sum-exp are computed in fp32.
"""

from foveate.ops._math import fold_group
from foveate.ops.attend import (
    Attended,
    Part,
    attend,
    attend_causal,
    attend_cover,
    attend_indices,
    attend_pages,
    attend_selected,
    attend_tiles,
    attend_window,
    gather_fields,
    gather_pages,
    gather_slots,
    merge,
    page_slots,
    prompt_path,
    refine,
)
from foveate.ops.compress import (
    Nodes,
    divergence_ends,
    gaussian_ends,
    importance_weights,
    random_weights,
    root_weights,
    summarise,
)
from foveate.ops.retain import keep_best, weakest
from foveate.ops.score import (
    INDEXER_BLOCK,
    IndexerScores,
    attention_divergence,
    column_mass,
    free_energy,
    indexer_scores,
    key_logits,
    largest_logit,
    logit_deviation,
    logit_reach,
    query_mass,
    tile_logits,
    tile_mass,
    unseen_keys,
    visible_keys,
)
from foveate.ops.select import StreamingTopK, by_bound, by_mass, first_of, topk, topk_of_blocks, topk_rows

__all__ = [
    "INDEXER_BLOCK",
    "Attended",
    "IndexerScores",
    "Nodes",
    "Part",
    "StreamingTopK",
    "attend",
    "attend_causal",
    "attend_cover",
    "attend_indices",
    "attend_pages",
    "attend_selected",
    "attend_tiles",
    "attend_window",
    "attention_divergence",
    "by_bound",
    "by_mass",
    "column_mass",
    "divergence_ends",
    "first_of",
    "fold_group",
    "free_energy",
    "gather_fields",
    "gather_pages",
    "gather_slots",
    "gaussian_ends",
    "importance_weights",
    "indexer_scores",
    "keep_best",
    "key_logits",
    "largest_logit",
    "logit_deviation",
    "logit_reach",
    "merge",
    "page_slots",
    "prompt_path",
    "query_mass",
    "random_weights",
    "refine",
    "root_weights",
    "summarise",
    "tile_logits",
    "tile_mass",
    "topk",
    "topk_of_blocks",
    "topk_rows",
    "unseen_keys",
    "visible_keys",
    "weakest",
]

"""The five verbs every method is written in: score, select, attend, compress, retain.

Each verb is a folder with its reference in plain torch, which is the specification and runs on any device, and, where
one exists, a kernel beside it that is tested against the reference. A verb contains no policy. ``summaries`` holds the
one operation that fuses several verbs, LuKA's.

Shapes, everywhere: ``q [B, Hq, Lq, D]``, ``k [B, Hkv, Lk, D]``, ``v [B, Hkv, Lk, Dv]`` with ``Hq`` a multiple of
``Hkv`` (grouped-query attention); softmax and log-sum-exp are computed in fp32. Verbs that take a ``block_table`` read
keys and values in blocks that all rows share, ``k [N, Hkv, n, D]``, see :class:`BlockTable`.
"""

from foveate.ops import retain, score, select, summaries
from foveate.ops._math import first_keys, fold_group
from foveate.ops.attend import (
    Attended,
    PromptHeads,
    attend,
    attend_causal,
    attend_indices,
    attend_pages,
    attend_pooled,
    attend_tile_keys,
    attend_window,
    gather_slots,
    merge,
    with_sinks,
)
from foveate.ops.block_table import BlockTable
from foveate.ops.compress import (
    Nodes,
    PageRecord,
    bound_newest,
    channel_weights,
    compress_newest,
    compress_pages,
    compress_written,
    summarise,
)
from foveate.ops.logits import Logits
from foveate.ops.retain import keep_best, put_token
from foveate.ops.rotary import Rotary
from foveate.ops.score import (
    column_mass,
    key_logits,
    largest_logit,
    pooled_mass,
    pooled_mass_of_pages,
    pooled_mass_of_records,
    query_mass,
    tile_mass,
)
from foveate.ops.select import (
    TileKeys,
    keys_at_places,
    keys_of_pages,
    mass_of_pages,
    set_bits,
    topk,
    topk_rows,
    with_always_read,
)

__all__ = [
    "Attended",
    "BlockTable",
    "Logits",
    "Nodes",
    "PageRecord",
    "PromptHeads",
    "Rotary",
    "TileKeys",
    "attend",
    "attend_causal",
    "attend_indices",
    "attend_pages",
    "attend_pooled",
    "attend_tile_keys",
    "attend_window",
    "bound_newest",
    "channel_weights",
    "column_mass",
    "compress_newest",
    "compress_pages",
    "compress_written",
    "first_keys",
    "fold_group",
    "gather_slots",
    "keep_best",
    "key_logits",
    "keys_at_places",
    "keys_of_pages",
    "largest_logit",
    "mass_of_pages",
    "merge",
    "pooled_mass",
    "pooled_mass_of_pages",
    "pooled_mass_of_records",
    "put_token",
    "query_mass",
    "retain",
    "score",
    "select",
    "set_bits",
    "summaries",
    "summarise",
    "tile_mass",
    "topk",
    "topk_rows",
    "with_always_read",
    "with_sinks",
]

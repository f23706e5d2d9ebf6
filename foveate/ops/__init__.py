"""The five verbs every method is written in: score, select, attend, compress, retain.

Each verb is a folder with its reference in plain torch, which is the specification and runs on any device, and, where
one exists, a kernel beside it that is tested against the reference. A verb contains no policy. ``summaries`` holds the
one operation that fuses several verbs, LuKA's.

Shapes, everywhere: ``q [B, Hq, Lq, D]``, ``k [B, Hkv, Lk, D]``, ``v [B, Hkv, Lk, Dv]`` with ``Hq`` a multiple of
``Hkv`` (grouped-query attention); softmax and log-sum-exp are computed in fp32. A verb takes keys and values as one
operand, :class:`KV`: in one piece, or in blocks that all rows share, ``k [N, Hkv, n, D]``, with a :class:`BlockTable`.
"""

from foveate.ops import retain as retain
from foveate.ops import score as score
from foveate.ops import select as select
from foveate.ops import summaries as summaries
from foveate.ops._math import first_keys as first_keys
from foveate.ops._math import fold_group as fold_group
from foveate.ops.attend import Attended as Attended
from foveate.ops.attend import PromptHeads as PromptHeads
from foveate.ops.attend import attend as attend
from foveate.ops.attend import attend_causal as attend_causal
from foveate.ops.attend import attend_indices as attend_indices
from foveate.ops.attend import attend_newest as attend_newest
from foveate.ops.attend import attend_pages as attend_pages
from foveate.ops.attend import attend_pooled as attend_pooled
from foveate.ops.attend import attend_tile_keys as attend_tile_keys
from foveate.ops.attend import attend_window as attend_window
from foveate.ops.attend import gather_slots as gather_slots
from foveate.ops.attend import merge as merge
from foveate.ops.attend import merge_means as merge_means
from foveate.ops.attend import with_sinks as with_sinks
from foveate.ops.block_table import BlockTable as BlockTable
from foveate.ops.choice import Choice as Choice
from foveate.ops.choice import Cover as Cover
from foveate.ops.choice import Pooling as Pooling
from foveate.ops.choice import Rest as Rest
from foveate.ops.compress import Nodes as Nodes
from foveate.ops.compress import PageRecord as PageRecord
from foveate.ops.compress import Records as Records
from foveate.ops.compress import TileMeans as TileMeans
from foveate.ops.compress import bound_newest as bound_newest
from foveate.ops.compress import channel_weights as channel_weights
from foveate.ops.compress import compress_newest as compress_newest
from foveate.ops.compress import compress_pages as compress_pages
from foveate.ops.compress import compress_written as compress_written
from foveate.ops.compress import summarise as summarise
from foveate.ops.compress import unchosen_means as unchosen_means
from foveate.ops.kv import KV as KV
from foveate.ops.logits import Logits as Logits
from foveate.ops.retain import keep_best as keep_best
from foveate.ops.retain import put_token as put_token
from foveate.ops.rotary import Rotary as Rotary
from foveate.ops.score import column_mass as column_mass
from foveate.ops.score import key_logits as key_logits
from foveate.ops.score import largest_logit as largest_logit
from foveate.ops.score import pooled_mass as pooled_mass
from foveate.ops.score import pooled_mass_of_pages as pooled_mass_of_pages
from foveate.ops.score import pooled_mass_of_records as pooled_mass_of_records
from foveate.ops.score import query_mass as query_mass
from foveate.ops.score import tile_mass as tile_mass
from foveate.ops.select import TileKeys as TileKeys
from foveate.ops.select import keys_at_places as keys_at_places
from foveate.ops.select import keys_of_pages as keys_of_pages
from foveate.ops.select import mass_of_pages as mass_of_pages
from foveate.ops.select import set_bits as set_bits
from foveate.ops.select import topk as topk
from foveate.ops.select import topk_rows as topk_rows
from foveate.ops.select import with_always_read as with_always_read

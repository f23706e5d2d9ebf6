"""attend: exact softmax attention over chosen keys, with log-sum-exp; partial results merge exactly."""

from foveate.ops.attend import decode, pooled, selected, window
from foveate.ops.attend.attended import Attended
from foveate.ops.attend.causal import attend_causal, prompt_path
from foveate.ops.attend.chosen import attend_tile_keys, attend_tiles
from foveate.ops.attend.gather import gather_fields, gather_pages, gather_slots, page_slots
from foveate.ops.attend.library import PromptHeads, dense_obstacles
from foveate.ops.attend.partials import merge, with_sinks
from foveate.ops.attend.ranges import attend_prefix, attend_recent
from foveate.ops.dispatch import dispatch

attend = dispatch(decode.attend, "foveate.ops.attend.decode_kernel", decode.check_attend)
attend_indices = dispatch(decode.attend_indices, "foveate.ops.attend.decode_kernel", decode.check_indices)
attend_pages = dispatch(decode.attend_pages, "foveate.ops.attend.decode_kernel", decode.check_pages)
attend_pooled = dispatch(pooled.attend_pooled, "foveate.ops.attend.decode_kernel", decode.check_attend)
attend_selected = dispatch(selected.attend_selected, "foveate.ops.attend.selected_kernel")
attend_window = dispatch(window.attend_window, "foveate.ops.attend.window_kernel", window.check_window)

__all__ = [
    "Attended",
    "PromptHeads",
    "attend",
    "attend_causal",
    "attend_indices",
    "attend_pages",
    "attend_pooled",
    "attend_prefix",
    "attend_recent",
    "attend_selected",
    "attend_tile_keys",
    "attend_tiles",
    "attend_window",
    "dense_obstacles",
    "gather_fields",
    "gather_pages",
    "gather_slots",
    "merge",
    "page_slots",
    "prompt_path",
    "with_sinks",
]

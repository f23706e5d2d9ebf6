"""attend: exact softmax attention over chosen keys, with log-sum-exp; partial results merge exactly."""

from foveate.ops.attend import decode, newest, pooled, selected, window
from foveate.ops.attend.attended import Attended as Attended
from foveate.ops.attend.causal import attend_causal as attend_causal
from foveate.ops.attend.causal import prompt_path as prompt_path
from foveate.ops.attend.chosen import attend_tile_keys as attend_tile_keys
from foveate.ops.attend.chosen import attend_tiles as attend_tiles
from foveate.ops.attend.chosen import merge_means as merge_means
from foveate.ops.attend.gather import gather_fields as gather_fields
from foveate.ops.attend.gather import gather_pages as gather_pages
from foveate.ops.attend.gather import gather_slots as gather_slots
from foveate.ops.attend.gather import page_slots as page_slots
from foveate.ops.attend.library import PromptHeads as PromptHeads
from foveate.ops.attend.library import dense_obstacles as dense_obstacles
from foveate.ops.attend.partials import merge as merge
from foveate.ops.attend.partials import with_sinks as with_sinks
from foveate.ops.attend.ranges import attend_prefix as attend_prefix
from foveate.ops.attend.ranges import attend_recent as attend_recent
from foveate.ops.dispatch import dispatch

attend = dispatch(decode.attend, "foveate.ops.attend.decode_kernel", decode.check_attend)
attend_indices = dispatch(decode.attend_indices, "foveate.ops.attend.decode_kernel", decode.check_indices)
attend_newest = dispatch(newest.attend_newest, "foveate.ops.attend.decode_kernel", newest.check_newest)
attend_pages = dispatch(decode.attend_pages, "foveate.ops.attend.decode_kernel", decode.check_pages)
attend_pooled = dispatch(pooled.attend_pooled, "foveate.ops.attend.decode_kernel", decode.check_attend)
attend_selected = dispatch(selected.attend_selected, "foveate.ops.attend.selected_kernel")
attend_window = dispatch(window.attend_window, "foveate.ops.attend.window_kernel", window.check_window)

"""compress: summaries of a page or group of keys."""

from foveate.ops.compress import boxes, low_rank, means
from foveate.ops.compress.low_rank import PageRecord as PageRecord
from foveate.ops.compress.low_rank import channel_weights as channel_weights
from foveate.ops.compress.means import TileMeans as TileMeans
from foveate.ops.compress.records import Records as Records
from foveate.ops.compress.reference import Nodes as Nodes
from foveate.ops.compress.reference import summarise as summarise
from foveate.ops.dispatch import dispatch

bound_newest = dispatch(boxes.bound_newest, "foveate.ops.compress.boxes_kernel")
compress_newest = dispatch(low_rank.compress_newest, "foveate.ops.compress.low_rank_kernel")
compress_pages = dispatch(low_rank.compress_pages, "foveate.ops.compress.low_rank_kernel")
compress_written = dispatch(low_rank.compress_written, "foveate.ops.compress.low_rank_kernel")
unchosen_means = dispatch(means.unchosen_means, "foveate.ops.compress.means_kernel", means.check_means)

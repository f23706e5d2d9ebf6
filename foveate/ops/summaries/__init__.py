"""LuKA's fused operation :func:`attend_summaries`: scores a tree of summaries, selects among them and attends.

Terms, used throughout the folder:

- *node*: a summary (key and value) of a page of tokens or, on higher levels, of the nodes below it; *under* a node are
  its children, and at last raw tokens. The nodes of level 0, the finest, summarise pages.
- *refine*: replace a node by its children. The *cover* is what attention reads in the end: sinks and tail, nodes that
  are not refined, and the tokens of refined pages; it stands for every token once.
- *visited* nodes of a level: all of the top level; below it the children of refined nodes. A *place* is an index among
  the visited nodes of a row and KV head: child c of the i-th refined node is at place ``i * branch + c``. Arrays of
  places have a capacity; a place without a node is unused.
- *log-weight*: the logit of an entry of the softmax, bias included. *rank*: the logarithm of the estimated mass by
  which nodes are chosen, where it differs from the log-weight. Kernels keep both to the base 2.
- *part*: the attention output over some entries, normalised by itself, with its log-sum-exp; parts are merged exactly,
  as in FlashDecoding.

``reference`` is the specification; ``cover`` and ``masses`` are parts of it. ``launch`` is the host side of the
kernels, ``plan`` divides the work among programs, and ``workspace`` allocates intermediates. The kernels do not support
all options of the paper; the reference runs the others. The kernels are ``score`` (which also attends to raw tokens),
``select``, ``attend``, and ``masses`` (running averages).
"""

from foveate.ops.dispatch import dispatch
from foveate.ops.summaries import reference
from foveate.ops.summaries.cover import Part as Part
from foveate.ops.summaries.cover import attend_cover as attend_cover
from foveate.ops.summaries.cover import refine as refine
from foveate.ops.summaries.fetched import attend_summaries_fetched as attend_summaries_fetched
from foveate.ops.summaries.tree import Level as Level
from foveate.ops.summaries.tree import Rows as Rows
from foveate.ops.summaries.tree import Tree as Tree
from foveate.ops.summaries.types import Covered as Covered
from foveate.ops.summaries.types import Refinement as Refinement
from foveate.ops.summaries.types import Sums as Sums

attend_summaries = dispatch(reference.attend_summaries, "foveate.ops.summaries.launch", reference.check)

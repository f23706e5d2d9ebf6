"""LuKA: attention over summaries of pages; the pages that matter most to the query are read raw.

A *page* is a run of consecutive tokens that a *summary*, one key and value, stands for. Summaries may be summarised in
turn: a *node* is a summary on any *level* of this tree, level 0 being the pages. A decode step scores the nodes of the
top level and *refines* some: replaces each by its children, at last by the tokens of its page, which are then read raw.
What it attends to in the end, the *cover*, stands for every token once. The first tokens (*sinks*) and the newest ones
(the *tail*) have no summary and are always read raw.
"""

from foveate.methods.luka.paper import LuKAPaper
from foveate.methods.luka.policy import LuKA

__all__ = ["LuKA", "LuKAPaper"]

"""LuKA: attention over summaries of pages, of which those that matter to the query are read raw."""

from foveate.methods.luka.paper import LuKAPaper
from foveate.methods.luka.policy import LuKA

__all__ = ["LuKA", "LuKAPaper"]

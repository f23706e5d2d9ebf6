"""LuKA under the settings of its paper."""

from __future__ import annotations

from typing import Any, ClassVar

from foveate.methods.base import register, setting
from foveate.methods.luka.policy import LuKA


@register
class LuKAPaper(LuKA):
    """LuKA as in the paper: equation 3, attention-weighted summaries, the top 3 pages of a layer.

    The settings repeated here keep their defaults when those of :class:`LuKA` change.
    """

    name: ClassVar[str] = "luka_paper"
    source: ClassVar[str] = "LuKA, Fei et al. 2025, sections 3.2 and 4.2"
    full_budget: ClassVar[dict] = {"top_k": 1.0, "mass": "exact"}

    page_size: Any = setting(16, "tokens of a page; several, each a multiple of the one before, for several levels")
    sinks: int = setting(0, "first tokens that stay raw")
    compressor: str = setting("attention", "what stands for a page: its mean, or an average weighted by attention")
    top_k: int | float = setting(3, "pages refined: a number (0: none), or a share of the pages")
    expand: int | float = setting(0.25, "nodes refined on each level above the pages")
    pool: str = setting("layer", "who chooses pages: each kv_head, or the whole layer (by the largest mass)")
    score: str = setting(
        "summary",
        "mass of a page: as seen from its summary, with the spread of its keys, or by a low-rank summary of its keys "
        "(lowrank)",
    )
    prior: float = setting(0.0, "share of recent attention in the mass by which pages are chosen, below 1")
    window: int = setting(64, "queries over which recent attention is averaged")
    mass: str = setting("preserve", "mass of a refined page: exact (its children's own) or preserve (its summary's)")
    bias: str = setting("none", "added to a summary's logit: none, log (of its tokens) or entropy")

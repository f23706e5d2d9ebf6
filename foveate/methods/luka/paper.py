"""LuKA under the settings of its paper."""

from __future__ import annotations

from typing import Any, ClassVar

from foveate.methods.base import About, redefined, register
from foveate.methods.luka.policy import LuKA


@register
class LuKAPaper(LuKA):
    """LuKA as in the paper: equation 3, attention-weighted summaries, the top 3 pages of a layer.

    The settings repeated here do not change when the defaults of :class:`LuKA` change.
    """

    name: ClassVar[str] = "luka_paper"
    about: ClassVar[About] = About(
        "LuKA, Fei et al. 2025, sections 3.2 and 4.2", full_budget={"top_k": 1.0, "mass": "exact"}
    )

    page_size: Any = redefined(LuKA, "page_size", 16)
    sinks: int = redefined(LuKA, "sinks", 0)
    compressor: str = redefined(LuKA, "compressor", "attention")
    top_k: int | float = redefined(LuKA, "top_k", 3)
    expand: int | float = redefined(LuKA, "expand", 0.25)
    pool: str = redefined(LuKA, "pool", "layer")
    score: str = redefined(LuKA, "score", "summary")
    prior: float = redefined(LuKA, "prior", 0.0)
    window: int = redefined(LuKA, "window", 64)
    mass: str = redefined(LuKA, "mass", "preserve")
    bias: str = redefined(LuKA, "bias", "none")

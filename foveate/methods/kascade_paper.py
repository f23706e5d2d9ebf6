"""Kascade under the settings of its paper."""

from __future__ import annotations

from typing import ClassVar

from foveate.methods.base import About, redefined, register
from foveate.methods.kascade import Kascade


@register
class KascadePaper(Kascade):
    """Kascade as in the paper: each KV head chooses keys by mean attention, and prompts are sparse, in anchors too.

    `foveate calibrate --by similarity` chooses its anchors as the paper does. The settings repeated here do not change
    when the defaults of :class:`~foveate.methods.kascade.Kascade` change.
    """

    name: ClassVar[str] = "kascade_paper"
    about: ClassVar[About] = About("Kascade, Deshmukh et al. 2025, sections 3.3 to 3.5")

    pool: str = redefined(Kascade, "pool", "kv_head")
    pooling: str = redefined(Kascade, "pooling", "post_softmax")
    decode_only: bool = redefined(Kascade, "decode_only", False)
    dense_anchor_prefill: bool = redefined(Kascade, "dense_anchor_prefill", False)

"""How long a context a model's configuration allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HYBRID = "foveate_hybrid"
"""The type of the models of :mod:`foveate.hybrids.models`. They read on beyond the length that they were trained on,
and warn once."""


def max_positions(config: Mapping[str, Any]) -> int:
    """Most tokens that a model has positions for, from its configuration as a dict; 0 when it does not say.

    Scaled rotary embeddings (YaRN and its kin) reach ``factor`` times the original length, also where
    ``max_position_embeddings`` was left at that length.
    """
    if config.get("model_type") == HYBRID:
        return 0
    stated = config.get("max_position_embeddings") or 0
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor = rope.get("factor") if isinstance(rope, Mapping) else None
    if not stated or not factor or rope.get("rope_type", rope.get("type")) in (None, "default"):
        return stated
    return max(stated, int(factor * (rope.get("original_max_position_embeddings") or 0)))

"""What a model's configuration says of positions: how long a context it allows, and what its rotations depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foveate.integrations.early import HYBRID


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


def length_kinds(config: Any) -> dict[str, int]:
    """The kinds of a decoder's rotary positions whose keys depend on the length of the whole context, and not on their
    positions alone, each with the number of tokens up to which they do not (``dynamic``, ``longrope``).

    This is the one declaration of it. Whoever reads a context in parts, or goes on from one that was read, asks
    :func:`rotated_otherwise`; CUDA graphs, which would keep one rotation for all lengths, are not recorded. vLLM keeps
    one rotation for all lengths.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    of_layers = [one for one in rope.values() if isinstance(one, Mapping)] or [rope]
    found: dict[str, int] = {}
    for one in of_layers:
        kind, most = one.get("rope_type") or "", getattr(config, "max_position_embeddings", 0)
        if kind == "longrope":
            original = getattr(config, "original_max_position_embeddings", None)
            found[kind] = one.get("original_max_position_embeddings") or original or most
        elif "dynamic" in kind:
            found[kind] = most
    return found


def rotated_otherwise(config: Any, first: int, then: int) -> str:
    """Why keys of a pass that ends after ``first`` tokens are rotated otherwise than in one that ends after ``then``;
    empty where they are rotated alike.

    LongRoPE (arXiv:2402.13753) has one rotation for short and one for long contexts, as Transformers computes it.
    Dynamic NTK has one up to the original length, and another for each length beyond it.
    """
    for kind, most in length_kinds(config).items():
        longer = max(first, then) > most
        if longer and (min(first, then) <= most or (kind != "longrope" and first != then)):
            return (
                f"{kind} rotary positions depend on the length of the whole beyond {most:,} tokens, so the keys of the "
                f"first {first:,} tokens are not those in a context of {then:,}"
            )
    return ""

"""The models of paper laLTE/laNSA by name, in its sizes and in smaller ones that train in minutes."""

from __future__ import annotations

from typing import Any

from foveate.hybrids.models.configuration import HybridConfig

PRESETS: dict[str, dict[str, Any]] = {
    "transformer": {"mixers": ["attn"]},
    "gdn": {"mixers": ["gdn"]},
    "gdn_swa": {"mixers": ["gdn", "swa"]},
    "lalte": {"mixers": ["gdn", "lte"]},
    "lansa": {"mixers": ["gdn", "nsa"]},
    "gdn_attn": {"mixers": ["gdn", "attn"]},
    "nsa": {"mixers": ["nsa"]},
    "lte_mlp": {"mixers": ["gdn", "lte"], "lte_scores": "mlp"},
    "pure_lte": {"mixers": ["lte"]},
}
"""Layer patterns: table 2's models, GDN+SWA, laLTE, laNSA, GDN+Attn., LTE-MLP and Pure LTE among them."""

_SMALL = {
    "gdn_head_dim": 128,
    "head_dim": 64,
    "sliding_window": 384,
    "lte_window": 256,
    "lte_buffer": 128,
    "nsa_head_dim": 64,
    "nsa_block": 32,
    "nsa_blocks": 8,
    "nsa_window": 128,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "vocab_size": 16384,
}
"""Memories in proportion to a sequence of 2,048 tokens: 384 slots in every mixer of constant memory."""

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "gdn_heads": 2,
        "gdn_head_dim": 32,
        "sliding_window": 48,
        "lte_window": 32,
        "lte_buffer": 16,
        "nsa_heads": 4,
        "nsa_kv_heads": 2,
        "nsa_head_dim": 16,
        "nsa_block": 8,
        "nsa_blocks": 4,
        "nsa_window": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.05,
    },
    "27M": {
        **_SMALL,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "gdn_heads": 3,
        "nsa_heads": 6,
        "nsa_kv_heads": 2,
    },
    "60M": {
        **_SMALL,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "gdn_heads": 4,
        "nsa_heads": 8,
        "nsa_kv_heads": 2,
    },
    "0.4B": {},
    "1.4B": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "gdn_head_dim": 256,
        "tie_word_embeddings": False,
    },
}
"""Shapes of models. 0.4B and 1.4B are the appendix's; the configuration's defaults are the shape of 0.4B."""


def make_config(preset: str, size: str, **changes: Any) -> HybridConfig:
    """The configuration of a preset.

    Args:
        preset: of :data:`PRESETS`.
        size: of :data:`SIZES`.
        changes: fields of the configuration instead of the preset's.

    Raises:
        ValueError: for an unknown preset, size or field.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, not {preset!r}")
    if size not in SIZES:
        raise ValueError(f"size must be one of {', '.join(SIZES)}, not {size!r}")
    known = HybridConfig().to_dict()
    unknown = [name for name in changes if name not in known]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no field of a hybrid's configuration")
    return HybridConfig(**(SIZES[size] | PRESETS[preset] | changes))

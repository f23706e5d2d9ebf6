"""The configuration of a hybrid: which mixer each layer has, and the mixers' shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from foveate.hybrids.models.cache import MemoryLayer
from foveate.hybrids.state import BlockMemory, RecurrentMemory, RetainedMemory

MIXERS = {
    "gdn": "linear_attention",
    "attn": "full_attention",
    "swa": "linear_attention",
    "lte": "linear_attention",
    "nsa": "linear_attention",
}
"""Transformers' name for each kind of layer. Transformers calls layers with a memory of their own "linear"."""


class HybridConfig(PreTrainedConfig):
    """Shapes of a hybrid model (laLTE/laNSA, appendix A).

    Args:
        mixers: the mixer of each layer, of :data:`MIXERS`; or a pattern that is repeated over all layers.
        vocab_size, hidden_size, intermediate_size, num_hidden_layers: of the model.
        num_attention_heads, num_key_value_heads, head_dim: of attn, swa and lte layers.
        gdn_heads, gdn_head_dim: of gdn layers, Gated DeltaNet.
        sliding_window: tokens that a query sees in a swa layer, its own included.
        lte_window, lte_buffer, lte_sinks: of lte layers; the window is that before a query's own token.
        lte_scores: "conv" or "mlp".
        lte_dropout, lte_dropout_at: of the scores, see :class:`foveate.hybrids.layers.RetentionScores`.
        lte_cap: see :class:`foveate.hybrids.layers.RetentionScores`.
        lte_whole_prompt, lte_gradient: see :class:`foveate.hybrids.layers.LearnedEviction`.
        nsa_heads, nsa_kv_heads, nsa_head_dim, nsa_block, nsa_blocks, nsa_window, nsa_compression: of nsa layers.
        rope_base: of the positions.
        max_position_embeddings: tokens of a sequence in training; longer ones are read, with a warning.
        rms_norm_eps, initializer_range: as in other models.

    Raises:
        ValueError: for an unknown mixer, or a pattern that does not fit the number of layers.
    """

    model_type = "foveate_hybrid"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    mixers: Sequence[str] = ("gdn", "lte")
    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int = 64
    gdn_heads: int = 8
    gdn_head_dim: int = 128
    sliding_window: int = 1024
    lte_window: int = 768
    lte_buffer: int = 512
    lte_sinks: int = 4
    lte_scores: str = "conv"
    lte_dropout: float = 0.1
    lte_dropout_at: str = "input"
    lte_cap: float | None = None
    lte_whole_prompt: bool = False
    lte_gradient: str = "value"
    nsa_heads: int = 32
    nsa_kv_heads: int = 2
    nsa_head_dim: int = 64
    nsa_block: int = 64
    nsa_blocks: int = 16
    nsa_window: int = 512
    nsa_compression: str = "mean"
    rope_base: float = 10000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.006
    max_position_embeddings: int = 4096
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any):
        pairs = {
            "num_attention_heads": (self.num_attention_heads, self.num_key_value_heads),
            "nsa_heads": (self.nsa_heads, self.nsa_kv_heads),
        }
        for name, (heads, kv_heads) in pairs.items():
            if heads % kv_heads:
                raise ValueError(f"{name} must be a multiple of its {kv_heads} KV heads, not {heads}")
        self.mixers = _pattern(self.mixers, self.num_hidden_layers)
        kwargs.pop("layer_types", None)
        self.layer_types = [MIXERS[mixer] for mixer in self.mixers]
        super().__post_init__(**kwargs)

    def cache_layers(self) -> list[CacheLayerMixin]:
        """What a cache holds of each layer before the first token."""
        memories = {
            "swa": lambda: RetainedMemory(self.sliding_window - 1, 0),
            "lte": lambda: RetainedMemory(self.lte_window, self.lte_buffer),
            "nsa": lambda: BlockMemory(self.nsa_block),
            "gdn": RecurrentMemory,
        }
        return [DynamicLayer() if mixer == "attn" else MemoryLayer(memories[mixer]()) for mixer in self.mixers]


def _pattern(mixers: Sequence[str], layers: int) -> list[str]:
    """The mixer of each layer."""
    if isinstance(mixers, str):
        raise ValueError(f"mixers must be a list of {', '.join(MIXERS)}, not the string {mixers!r}")
    mixers = list(mixers)
    unknown = [mixer for mixer in mixers if mixer not in MIXERS]
    if unknown or not mixers:
        raise ValueError(f"mixers must be of {', '.join(MIXERS)}, not {unknown[0] if unknown else 'empty'!r}")
    if layers % len(mixers):
        raise ValueError(f"mixers has {len(mixers)} entries, which do not repeat evenly over {layers} layers")
    return mixers * (layers // len(mixers))

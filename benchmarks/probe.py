"""Looking at the queries, keys and values of every layer while a model runs with plain attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "foveate_probe"


@dataclass(frozen=True)
class Seen:
    """What one attention layer was given: ``q [B, Hq, L, D]``, ``k [B, Hkv, L, D]``, rotated, ``v [B, Hkv, L, Dv]``."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    """bool ``[B, 1, L, L]``: which keys a query may see; None: those up to its own."""
    scaling: float

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    def weights(self, head: int) -> Tensor:
        """Post-softmax attention of one query head of the first sequence, fp32 ``[L, L]``."""
        group = self.heads // self.k.shape[1]
        logits = self.q[0, head].float() @ self.k[0, head // group].float().T * self.scaling
        allowed = torch.ones_like(logits, dtype=torch.bool).tril() if self.mask is None else self.mask[0, 0]
        return logits.masked_fill(~allowed, float("-inf")).softmax(-1)


@contextmanager
def watched(model: PreTrainedModel, look: Callable[[Seen], None]) -> Iterator[None]:
    """Within the block, ``look`` is called by every attention layer of the model with what it attends to.

    Raises:
        ValueError: when the model's attention cannot be watched; in the block, when a layer does more than softmax.
    """
    if not getattr(type(model), "_supports_attention_backend", False):
        raise ValueError(f"{type(model).__name__}: its attention does not go through Transformers' AttentionInterface")

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        for name in ("softcap", "s_aux", "position_bias"):
            if kwargs.get(name) is not None:
                raise ValueError(f"layer {module.layer_idx} passes {name} to its attention, which is not shown")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        look(Seen(module.layer_idx, query, key, value, attention_mask, scaling))
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)

"""Indexers of tokens (DeepSeek-V3.2 and kin): the model's projections, and a selection in bounded memory."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from foveate import csa
from foveate.integrations.transformers import releases
from foveate.integrations.transformers.csa.selection import SelectionCounts


class Select:
    """The forward of DeepSeek-V3.2's indexer; subclasses hold what other models do differently."""

    replaces = "indexer"
    """Name of the submodule of an attention layer whose forward this replaces."""
    rotation = "apply_rotary_pos_emb"
    """Function of the modeling file that rotates queries and keys."""
    rotated_last = False
    """Whether the rotated dimensions are the last ones of a head."""

    def __init__(self, own: nn.Module, layer_idx: int, seen: dict[int, SelectionCounts], modeling: ModuleType):
        self.own, self.layer_idx, self.seen = own, layer_idx, seen
        self.rotate = getattr(modeling, self.rotation)

    @releases.newest_names
    @torch.no_grad()
    def __call__(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        q = self.own.wq_b(q_resid).unflatten(-1, (self.own.n_heads, self.own.head_dim))
        return self.select(hidden_states, q, position_embeddings, attention_mask, cache)

    def select(
        self,
        hidden_states: Tensor,
        q: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor,
        cache: Any,
    ) -> Tensor:
        """The selection int32 ``[B, S, K]`` of queries ``[B, S, H, D]``.

        Queries and keys are rotated here, unless ``position_embeddings`` is None.
        """
        own = self.own
        k = own.k_norm(own.wk(hidden_states).to(own.k_norm.weight.dtype)).to(hidden_states.dtype)[:, :, None]
        if position_embeddings is not None:
            q, k = self.rotated(q, k, *position_embeddings)
        k = k[:, :, 0]
        if cache is not None:
            if cache.layers[own.layer_idx].is_compileable:
                raise ValueError("a cache of fixed size is not supported with sparse attention; use a dynamic one")
            k = cache.update_indexer(k, own.layer_idx)
        weights = own.weights_proj(hidden_states.to(own.weights_proj.weight.dtype)).float()
        weights = weights * (own.n_heads * own.head_dim) ** -0.5
        queries, keys = q.shape[1], k.shape[1]
        starts = (-attention_mask[:, 0, 0].to(q.device)).expand(len(q))  # the position of key 0 is minus the padding
        seen = self.seen[self.layer_idx]
        how = {"offset": keys - queries, "starts": starts.contiguous(), "lost": seen.counter(q.device)}
        selected = csa.lightning_indexer(q, k, weights, min(own.index_topk, keys), **how)
        seen.count(queries, selected.shape[2], keys)
        return selected

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rope, rest = self.own.qk_rope_head_dim, self.own.head_dim - self.own.qk_rope_head_dim
        parts, which = ((rest, rope), 1) if self.rotated_last else ((rope, rest), 0)
        q, k = list(q.split(parts, -1)), list(k.split(parts, -1))
        q[which], k[which] = self.rotate(q[which], k[which], cos, sin, unsqueeze_dim=2)
        return torch.cat(q, -1), torch.cat(k, -1)


class Interleaved(Select):
    """GLM-MoE-DSA, dots3.note."""

    rotation = "apply_rotary_pos_emb_interleave"


class RotatedLast(Select):
    """Hunyuan V4."""

    rotated_last = True


class FromHidden(Interleaved):
    """Mistral Large 4: queries from the hidden states, scaled by position; layers without a rotation."""

    @releases.newest_names
    @torch.no_grad()
    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Tensor,
        cache: Any = None,
    ) -> Tensor:
        own = self.own
        q = own.wq_b(own.q_input_norm(hidden_states)).unflatten(-1, (own.n_heads, own.head_dim))
        q = own.softmax_scaling(q, position_ids, head_dim_first=False)
        rotation = position_embeddings if own.use_rope else None
        return self.select(hidden_states, q, rotation, attention_mask, cache)

"""DeepSeek-V3.2's and GLM's sparse attention as they were trained, without a tensor of queries by keys.

Transformers scores all keys at once, ``[B, S, H, T]``, and turns the selection into masks ``[B, S, T]``. Here the
indexer's ``forward`` is replaced by one with the same projections that selects in bounded memory; the attention reads
what it selected; and instead of a mask the layers are handed the first real position of each row. This is the one place
where a forward of a model is replaced. A model of the same kind is added by naming its rotation in :data:`ROTATIONS`.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from foveate import csa, ops
from foveate.integrations.transformers.stats import LayerStats, Stats

IMPLEMENTATION = "foveate-dsa"
ROTATIONS = {"deepseek_v32": "apply_rotary_pos_emb", "glm_moe_dsa": "apply_rotary_pos_emb_interleave"}
"""By model type, the function of the model's module that rotates the queries and keys of its indexer."""


@dataclass
class Selection:
    """What one layer selected since it was attached, or its counters were reset; a pass over one token is a step."""

    prompt_tokens: int = 0
    steps: int = 0
    read: int = 0
    available: int = 0


@dataclass
class SparseAttachment:
    """What :func:`attach` put on a model with sparse attention of its own."""

    layers: dict[int, Selection] = field(default_factory=dict)
    _undo: list[tuple[nn.Module, transformers.PreTrainedConfig]] = field(default_factory=list)

    def stats(self, reset: bool) -> Stats:
        """See :func:`foveate.stats`; bytes are not counted."""
        rows = [
            LayerStats(
                layer=index,
                method="csa",
                prompt_tokens=seen.prompt_tokens,
                decode_steps=seen.steps,
                keys_read_per_step=seen.read / max(seen.steps, 1),
                keys_available_per_step=seen.available / max(seen.steps, 1),
            )
            for index, seen in sorted(self.layers.items())
        ]
        if reset:
            self.layers.update((index, Selection()) for index in self.layers)
        return Stats(rows, 0)

    def undo(self, model: nn.Module) -> None:
        """Give the model back what was replaced."""
        for module, config in self._undo:
            module.config = config
        for module in model.modules():
            if isinstance(module.__dict__.get("forward"), _Select):
                del module.forward


class _Select:
    """The forward of an indexer: the model's projections, and a selection in bounded memory."""

    def __init__(self, indexer: nn.Module, rotate: Callable[..., tuple[Tensor, Tensor]], attachment: SparseAttachment):
        self.indexer, self.rotate, self.attachment = indexer, rotate, attachment

    @torch.no_grad()
    def __call__(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
    ) -> Tensor:
        own, (cos, sin) = self.indexer, position_embeddings
        q = own.wq_b(q_resid).unflatten(-1, (own.n_heads, own.head_dim))
        k = own.k_norm(own.wk(hidden_states))[:, :, None]
        parts = own.qk_rope_head_dim, own.head_dim - own.qk_rope_head_dim
        (q, q_rest), (k, k_rest) = q.split(parts, -1), k.split(parts, -1)
        q, k = self.rotate(q, k, cos, sin, unsqueeze_dim=2)
        q, k = torch.cat([q, q_rest], -1), torch.cat([k, k_rest], -1)[:, :, 0]
        if past_key_values is not None:
            k = past_key_values.update_indexer(k, own.layer_idx)
            if int(past_key_values.get_seq_length(own.layer_idx)) != k.shape[1]:
                raise ValueError("a cache of fixed size is not supported with sparse attention; use a dynamic one")
        weights = own.weights_proj(hidden_states.to(own.weights_proj.weight.dtype)).float()
        weights = weights * (own.n_heads * own.head_dim) ** -0.5
        queries, keys = q.shape[1], k.shape[1]
        starts = attention_mask[:, 0, 0].to(q.device).expand(len(q))
        selected = csa.lightning_indexer(
            q, k, weights, min(own.index_topk, keys), offset=keys - queries, starts=starts.contiguous()
        )
        seen = self.attachment.layers[own.layer_idx]
        if queries == 1 and keys > 1:
            seen.steps, seen.read, seen.available = seen.steps + 1, seen.read + selected.shape[2], seen.available + keys
        else:
            seen.prompt_tokens += queries
        return selected


def check(model: nn.Module, decoder: nn.Module) -> None:
    """Raises ValueError for models without indexers that are known."""
    if decoder.config.get_text_config(decoder=True).model_type not in ROTATIONS:
        raise ValueError(f"{type(model).__name__} has no sparse attention of its own that is known: name a method")


def attach(model: nn.Module, decoder: nn.Module) -> SparseAttachment:
    """Replace what the indexers and the attention of a model compute with; the weights stay as they are."""
    kind = decoder.config.get_text_config(decoder=True).model_type
    rotate = getattr(importlib.import_module(type(decoder).__module__), ROTATIONS[kind])
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, first_positions)
    attachment, memo = SparseAttachment(), {}
    for module in {id(m): m for m in (model, *decoder.modules())}.values():
        own = module.__dict__.get("config")
        if isinstance(own, transformers.PreTrainedConfig):
            attachment._undo.append((module, own))
            module.config = copy.deepcopy(own, memo)
            module.config._attn_implementation_internal = IMPLEMENTATION
    for module in decoder.modules():
        indexer = getattr(module, "indexer", None)
        if isinstance(indexer, nn.Module):
            attachment.layers[indexer.layer_idx] = Selection()
            indexer.forward = _Select(indexer, rotate, attachment)
    return attachment


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over what the indexer selected: ``query [B, H, S, D]`` to ``[B, S, H, Dv]``."""
    if indices is None or dropout > 0 or kwargs.get("output_attentions"):
        raise ValueError("sparse attention needs the indexer's selection, no dropout, and holds no attention weights")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = ops.attend_selected(query, key, value, indices, scaling=scaling).out
    return out.transpose(1, 2).contiguous(), None


def first_positions(
    batch_size: int,
    q_length: int,
    *_: Any,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **__: Any,
) -> Tensor:
    """In place of a mask of pairs: the first real position of each row, int64 ``[B, 1, 1, 1]``.

    What is padding behind a real token is refused with the prompt: a decode step does not wait to look for it.
    """
    if attention_mask is None:
        return torch.zeros(batch_size, 1, 1, 1, dtype=torch.int64, device=device)
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask must be [B, T] with sparse attention, not {list(attention_mask.shape)}")
    real = attention_mask.bool()
    if q_length > 1 and bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise ValueError("attention_mask has padding behind real tokens; with sparse attention it must be on the left")
    return (~real).cumprod(-1).sum(-1)[:, None, None, None]

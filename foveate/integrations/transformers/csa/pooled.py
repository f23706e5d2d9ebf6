"""Indexers of pools of tokens (GLM-5.3): they select the tokens of the best pools and of the incomplete last pool."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate import csa
from foveate.integrations.transformers import releases
from foveate.integrations.transformers.csa.attention import first_real
from foveate.integrations.transformers.csa.selection import SelectionCounts

_BLOCK = 65536
"""Tokens pooled at once, in fp32."""


class SelectPools:
    """The forward of the indexer.

    Pools begin at each row's first real token. Rows of a padded batch are therefore computed one by one, and a decode
    step of such a batch synchronises with the device to find where rows begin.

    A query without a complete pool reads the incomplete one if the model always selects it, and otherwise nothing; in
    Transformers it reads all keys.
    """

    replaces = "indexer"

    def __init__(self, own: nn.Module, layer_idx: int, seen: dict[int, SelectionCounts], modeling: ModuleType):
        self.own, self.layer_idx, self.seen = own, layer_idx, seen

    @releases.newest_names
    @torch.no_grad()
    def __call__(self, hidden_states: Tensor, q_resid: Tensor, attention_mask: Tensor, cache: Any = None) -> Tensor:
        own, length = self.own, hidden_states.shape[1]
        q = own.wq_b(q_resid).unflatten(-1, (own.n_heads, own.head_dim))
        gates = F.linear(hidden_states, own.index_kpool_compress_gate)
        states = torch.cat([own.k_norm(own.wk(hidden_states)), gates, attention_mask.to(gates.dtype)[..., None]], -1)
        layer = None if cache is None else cache.layers[own.layer_idx]
        if layer is not None:
            if layer.is_compileable:
                raise ValueError("a cache of fixed size is not supported with sparse attention; use a dynamic one")
            states = cache.update_indexer(states, own.layer_idx)
        weights = own.weights_proj(hidden_states.to(own.weights_proj.weight.dtype)).float()
        weights = weights * (own.n_heads * own.head_dim) ** -0.5
        starts = self._starts(states[..., -1] > 0, length, layer)
        if starts is None:
            selected = self._selected(q, states, weights, 0)
        else:
            rows = [slice(b, b + 1) for b in range(len(q))]
            selected = torch.cat([self._selected(q[b], states[b], weights[b], s) for b, s in zip(rows, starts)])
        number, size = states.shape[1], own.index_kpool
        tail = number % size if own.index_kpool_always_select_tail else 0
        self.seen[self.layer_idx].count(length, min(own.index_topk, number) // size * size + tail, number)
        return selected

    def _starts(self, real: Tensor, length: int, layer: Any) -> list[int] | None:
        """The first real token of each row; None without padding, which a prompt records in the cache layer."""
        if length == 1 and layer is not None and not getattr(layer, "foveate_padded", True):
            return None
        starts = first_real(real, check=length > 1).tolist()
        if layer is not None:
            layer.foveate_padded = any(starts)
        return starts if any(starts) else None

    def _selected(self, q: Tensor, states: Tensor, weights: Tensor, start: int) -> Tensor:
        """The selection int32 ``[B, S, K]`` of queries ``[B, S, H, D]`` in rows that begin at ``start``."""
        own, size = self.own, self.own.index_kpool
        before, padding = states.shape[1] - q.shape[1] - start, 0
        if before < 0:  # some of these queries are padding
            before, padding = 0, min(-before, q.shape[1])
        keys, gates, _ = states[:, start:].split((own.head_dim, own.head_dim, 1), -1)
        pools = self._pools(keys, gates)
        top_k = own.index_topk // size
        how = {"ratio": size, "offset": before, "lost": self.seen[self.layer_idx].counter(q.device)}
        found = csa.lightning_indexer(q[:, padding:], pools, weights[:, padding:], top_k, **how)
        places = torch.arange(size, dtype=torch.int32, device=q.device)
        chosen = (found[..., None] * size + places + start).masked_fill(found[..., None] < 0, -1).flatten(-2)
        if own.index_kpool_always_select_tail:
            ends = torch.arange(before + 1, before + 1 + chosen.shape[1], dtype=torch.int32, device=q.device)[:, None]
            tail = ends - ends % size + places[:-1]
            tail = (tail + start).masked_fill(tail >= ends, -1)
            chosen = torch.cat([chosen, tail.expand(len(chosen), -1, -1)], -1)
        return F.pad(chosen, (0, 0, padding, 0), value=-1)

    def _pools(self, keys: Tensor, gates: Tensor) -> Tensor:
        """Pools ``[B, T / size, D]``, computed in blocks of tokens, and all again at every call, as in Transformers."""
        bias, carry, made = self.own.index_kpool_compress_ape.float(), None, []
        for some in zip(keys.split(_BLOCK, 1), gates.split(_BLOCK, 1)):
            pools, carry = csa.compress_tokens(some[0], some[1].float(), bias, overlap=False, carry=carry)
            made.append(pools)
        return torch.cat(made, 1)


def as_selected(topk_indices: Tensor, query_states: Tensor, kv_length: int) -> Tensor:
    """Replaces ``build_attention_mask_from_topk`` of an attention module: our attention function takes the indices."""
    return topk_indices

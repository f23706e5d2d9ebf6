"""DeepSeek-V4's compressors: an entry for each window of tokens, and a selection of entries in bounded memory.

In Transformers the windows of all rows begin at the same slots. Left padding then shifts the tokens of a row within its
windows: entries mix padding with tokens, and outputs depend on the length of the longest row. Here the windows of a
padded row begin at its own first token, and the row has its own compressor state. Its outputs equal its outputs without
padding.
"""

from __future__ import annotations

import copy
import threading
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from foveate import csa
from foveate.integrations.transformers import releases
from foveate.integrations.transformers.csa.attention import clear, first_real, post
from foveate.integrations.transformers.csa.selection import SelectionCounts

_forward = threading.local()
_ROWS = "rows"


class RowStates:
    """Compressor states, one per row of a padded batch. A cache layer stores and reorders them as it does its own."""

    def __init__(self, layers: list[Any]):
        self.layers = layers

    @property
    def device(self) -> str:
        return "cpu"

    def index_select(self, _: int, rows: Tensor) -> RowStates:
        return RowStates([_twin(self.layers[row]) for row in rows.tolist()])


def _twin(layer: Any) -> Any:
    """A copy of a state that can diverge from it. Tensors are shared, because states replace and never write them."""
    twin = copy.copy(layer)
    vars(twin).update({name: dict(states) for name, states in vars(layer).items() if isinstance(states, dict)})
    return twin


class Compress:
    """The forward of a compressor: it computes the entries and, in sparse layers, the indexer's selection.

    It posts both for the layer's attention. To the model it returns no entries to append to the window.
    """

    replaces = "compressor"

    def __init__(self, own: nn.Module, layer_idx: int, seen: dict[int, SelectionCounts], modeling: ModuleType):
        self.own, self.layer_idx, self.seen = own, layer_idx, seen
        self.rotate = modeling.apply_rotary_pos_emb
        self.indexer = getattr(own, "indexer", None)

    @releases.newest_names
    def __call__(
        self, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, cache: Any, layer_idx: int
    ) -> tuple[Tensor, None]:
        layer = None if cache is None else cache.layers[layer_idx]
        if layer is not None and not hasattr(layer, "store_compression_weights"):
            raise ValueError(
                f"the cache has a {type(layer).__name__} for layer {layer_idx}, which compresses; it must be a "
                "DynamicCache(config=model.config)"
            )
        given = hidden_states, q_residual, position_ids.expand(len(hidden_states), -1)
        rows = self._rows(layer, given[2])
        if rows is None:
            entries, indices, before = self._made(*given, layer)
        else:
            entries, indices, before = self._by_row(given, rows)
        own, length = self.own, hidden_states.shape[1]
        post(own, entries, indices, own.compress_rate, padded=rows is not None)
        tokens, read = before + length, entries.shape[1] if indices is None else indices.shape[2]
        self.seen[self.layer_idx].count(length, read + min(own.rotary_emb.config.sliding_window, tokens), tokens)
        return entries[:, None, :0], None

    def _rows(self, layer: Any, position_ids: Tensor) -> list[tuple[Any, int]] | None:
        """Each row's state and number of real tokens in this call; None without padding: the layer is the state."""
        (batch, length), real = position_ids.shape, getattr(_forward, "real", None)
        rows = None if layer is None else layer.compressed_kv.get(_ROWS)
        if rows is None and real is None:
            return None
        if layer is None:
            return [(None, number) for number in real]
        if rows is None:
            if _tokens(layer):
                raise ValueError("the cache holds padded rows that were compressed without foveate: begin anew")
            config = self.own.rotary_emb.config
            rows = layer.compressed_kv[_ROWS] = RowStates([type(layer)(config) for _ in range(batch)])
            # so that a forward without foveate fails instead of reading states that are out of date
            for states in (layer.buffer_kv, layer.entry_count):
                del states["compressor"]
        if real is None:
            waiting = [not _tokens(row) and bool(position_ids[b, -1] < 0) for b, row in enumerate(rows.layers)]
            real = [0 if waits else length for waits in waiting]
        return list(zip(rows.layers, real, strict=True))

    def _by_row(
        self, given: tuple[Tensor, Tensor, Tensor], rows: list[tuple[Any, int]]
    ) -> tuple[Tensor, Tensor | None, int]:
        """Compute rows one by one. Padding selects -1, and the entries of shorter rows are padded with zeros."""
        length, made = given[0].shape[1], []
        for b, (state, number) in enumerate(rows):
            made.append(self._made(*(x[b : b + 1, length - number :] for x in given), state))
        longest = max(entries.shape[1] for entries, *_ in made)
        entries = torch.cat([nn.functional.pad(one, (0, 0, 0, longest - one.shape[1])) for one, *_ in made])
        if self.indexer is None or not longest:
            return entries, None, max(before for *_, before in made)
        width = max(indices.shape[2] for _, indices, _ in made if indices is not None)
        selected = torch.full((len(made), length, width), -1, dtype=torch.int32, device=entries.device)
        for b, (_, indices, _) in enumerate(made):
            if indices is not None:
                selected[b, length - indices.shape[1] :, : indices.shape[2]] = indices[0]
        return entries, selected, max(before for *_, before in made)

    def _made(
        self, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, layer: Any
    ) -> tuple[Tensor, Tensor | None, int]:
        """Entries ``[B, T, D]``, their selection int32 ``[B, S, K]`` (None without an indexer or entries), and
        the number of tokens before this call."""
        before = 0 if layer is None else _tokens(layer)
        overlap = self.indexer is not None
        entries = self._entries(self.own, "compressor", hidden_states, layer, overlap)
        if self.indexer is None:
            return entries, None, before
        own = self.indexer
        keys = self._entries(own, "indexer", hidden_states, layer, overlap)
        if not keys.shape[1]:
            return entries, None, before
        with torch.no_grad():
            q = own.q_b_proj(q_residual).unflatten(-1, (own.num_heads, own.head_dim))
            cos, sin = own.rotary_emb(hidden_states, position_ids=position_ids, layer_type=own.rope_layer_type)
            q, scorer = self.rotate(q, cos, sin, unsqueeze_dim=2), own.scorer
            weights = scorer.weights_proj(hidden_states).float() * (scorer.weights_scaling * scorer.softmax_scale)
            top_k, lost = min(own.index_topk, keys.shape[1]), self.seen[self.layer_idx].counter(q.device)
            how = {"ratio": own.compress_rate, "offset": before, "lost": lost}
            indices = csa.lightning_indexer(q, keys, weights, top_k, **how)
        return entries, indices, before

    def _entries(self, own: nn.Module, name: str, hidden_states: Tensor, layer: Any, overlap: bool) -> Tensor:
        """All entries ``[B, T, D]`` so far, with the states of Transformers' cache layer updated."""
        kv, gate = own.kv_proj(hidden_states), own.gate_proj(hidden_states)
        ratio, first = own.compress_rate, 0
        if layer is None:
            usable = kv.shape[1] // ratio * ratio
            kv, gate = kv[:, :usable], gate[:, :usable]
        else:
            kv, gate, first = layer.store_compression_weights(name, kv, gate)
            for buffer in (layer.buffer_kv, layer.buffer_gate):
                buffer[name] = buffer[name].clone()  # a view would keep all tokens of the call alive
        carry, count = None, kv.shape[1] // ratio
        if overlap and layer is not None and count:
            last = kv[:, None, -ratio:], gate[:, None, -ratio:] + own.position_bias
            prior = layer.update_overlap_state(name, *last, own.head_dim)
            if prior[0] is not None:
                carry = csa.Carry(kv[:, :0], gate[:, :0], prior)
        entries, _ = csa.compress_tokens(kv, gate, own.position_bias, overlap=overlap, carry=carry)
        if count:
            positions = (first + ratio * torch.arange(count, device=kv.device)).expand(len(kv), -1)
            entries = own.kv_norm(entries)
            cos, sin = own.rotary_emb(entries, position_ids=positions, layer_type=own.rope_layer_type)
            entries = self.rotate(entries[:, None], cos, sin)[:, 0]
        return entries if layer is None else layer.update_compressor_states(name, entries)


def _tokens(layer: Any) -> int:
    """Number of tokens that the compressor of a cache layer has seen."""
    buffered = layer.buffer_kv["compressor"]
    held = 0 if buffered is None else buffered.shape[1]
    return layer.entry_count["compressor"] * layer.compress_rate + held


def before_forward(decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Pre-hook of a decoder with compressors: count positions from the first real token of each row."""
    kwargs = releases.arguments(decoder, args, kwargs)
    inputs = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    if inputs is None:
        return (), releases.for_module(decoder, kwargs)  # the model raises its own error
    cache, mask, given = (kwargs.get(name) for name in ("cache", "attention_mask", "position_ids"))
    past, (batch, length) = 0 if cache is None else int(cache.get_seq_length()), inputs.shape[:2]
    positions = torch.arange(past, past + length, device=inputs.device).expand(batch, -1)
    _forward.real, prompt = None, length > 1 or past == 0
    clear()
    if mask is None and any(_ROWS in getattr(layer, "compressed_kv", ()) for layer in getattr(cache, "layers", ())):
        raise ValueError("attention_mask is missing: the cache holds rows with padding")
    if mask is not None:
        if isinstance(mask, dict):
            raise ValueError("attention_mask must be [B, T] with sparse attention, not a dict of masks")
        starts = first_real(mask, check=length > 1).to(inputs.device)
        if mask.shape[1] != past + length:
            raise ValueError(
                f"attention_mask must be [B, {past + length}] with sparse attention, not {list(mask.shape)}"
            )
        positions = positions - starts[:, None]
        if prompt and bool(starts.any()):
            if getattr(decoder, "gradient_checkpointing", False) and decoder.training:
                raise ValueError("attention_mask has padding, which is not supported with gradient checkpointing")
            _forward.real = [min(length, max(0, past + length - start)) for start in starts.tolist()]
    if prompt and given is not None and bool(((given != positions) & (positions >= 0)).any()):
        raise ValueError(
            "position_ids must count the tokens of each row from its first real one with sparse attention: "
            "the windows of the compressors follow them"
        )
    return (), releases.for_module(decoder, kwargs | {"position_ids": positions})

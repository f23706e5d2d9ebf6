"""What later queries take of each token of a frozen model, and what its keys looked like before their rotation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foveate import ops
from foveate.errors import UserError
from foveate.integrations.transformers.attach import attached
from foveate.integrations.transformers.rotary import rotary_of_layers
from foveate.integrations.transformers.support import attention_modules, decoder_of
from foveate.methods import Method, Observation
from foveate.state import SlotCache

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
"""Rotary positions whose frequencies do not depend on how long the context is."""
_QUERIES = 256
_PROJECTIONS = ("o_proj", "out_proj", "dense")


class Seen(NamedTuple):
    """A layer's tokens: keys after rotation and values ``[B, Hkv, L, D(v)]``, and fp32 ``[B, Hkv, L]`` their worth."""

    k: Tensor
    v: Tensor
    worth: Tensor


@dataclass(frozen=True)
class Reader(Method):
    """Dense attention that notes, for every token of a prompt, what queries beyond the window took of it."""

    window: int = 32

    def for_layer(self, layer: int, num_layers: int, among: Sequence[int] | None = None) -> Reader:
        own = Reader(self.window)
        own.__dict__.update(layer=layer, grams=self.grams, found=self.found)
        return own

    @property
    def observation(self) -> Observation:
        return Observation(self, needs_lse=True)

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        k, v = cache.keys, cache.values
        worth = largest_share(q, k, attended.lse, cache.logits(scaling), self.window)
        worth = worth + log_length(v, self.grams[self.layer]).flatten(1, 2)
        self.found[self.layer] = Seen(k, v, worth.unflatten(1, (k.shape[1], -1)).amax(2))

    def choose(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Choice | None:
        raise NotImplementedError("prompts alone are read")


class FrozenModel:
    """A model that reads sequences and shows what their tokens were worth. Its weights do not change.

    Args:
        model: a Transformers model with softmax attention.
        window: queries within this many tokens of a token do not count.

    Raises:
        UserError: for rotary positions that change with the context's length, or that are not rotated by halves, and
            for attention without a known output projection.
    """

    def __init__(self, model: nn.Module, window: int):
        self._model, self._reader = model, Reader(window)
        decoder = decoder_of(model)
        self._config = decoder.config.get_text_config(decoder=True)
        self.modules, _ = attention_modules(model, decoder, self._config)
        self.layers = tuple(sorted(self.modules))
        grams = {layer: _gram(layer, module, self._config) for layer, module in self.modules.items()}
        self._reader.__dict__.update(grams=grams, found={})
        self.inv_freq, self.rotary_scaling = self._rotary(model, decoder)

    @torch.no_grad()
    def read(self, ids: Tensor) -> dict[int, Seen]:
        """What a sequence ``[1, L]`` shows, by layer."""
        return self._forward(ids)[0]

    @torch.no_grad()
    def read_with_lengths(self, ids: Tensor) -> tuple[dict[int, Seen], dict[int, Tensor]]:
        """As :meth:`read`, and the logarithm of each token's length in the residual stream, fp32 ``[L]`` by layer."""
        found, hidden = self._forward(ids, output_hidden_states=True)
        return found, {layer: hidden[layer][0].float().norm(dim=-1).log() for layer in self.layers}

    def _forward(self, ids: Tensor, **options: Any) -> tuple[dict[int, Seen], Any]:
        self._reader.found.clear()
        with attached(self._model, self._reader, dense_below=0, cuda_graph=False):
            out = self._model(ids, use_cache=True, logits_to_keep=1, **options)
        found = dict(self._reader.found)
        self._reader.found.clear()
        return found, getattr(out, "hidden_states", None)

    def _rotary(self, model: nn.Module, decoder: nn.Module) -> tuple[Tensor, Tensor]:
        """Inverse frequencies ``[layers, R / 2]`` and factors ``[layers]``; 0 and 1 of layers that rotate nothing."""
        try:
            found = rotary_of_layers(model, decoder, self._config, self.layers)
        except ValueError as error:
            raise UserError(f"LTE cannot undo the model's rotary positions: {error}") from None
        for layer, one in found.items():
            if one.kind not in ROPE_KINDS:
                raise UserError(
                    f"layer {layer} has rotary positions of kind {one.kind!r}, whose frequencies change with the "
                    f"context's length, so keys in the cache cannot be rotated back; known are {', '.join(ROPE_KINDS)}"
                )
            if one.neighbours:
                raise UserError(f"layer {layer} rotates keys in another way than by halves, and LTE cannot undo it")
        rows = [one() for one in found.values()]
        widths = {len(row.inv_freq) for row in rows} - {0}
        if len(widths) != 1:
            raise UserError(
                "the layers of this model rotate different numbers of dimensions"
                if widths
                else "this model has no rotary positions as Transformers' decoders keep them"
            )
        rotated = [row.inv_freq.detach().float().cpu() if len(row.inv_freq) else torch.zeros(*widths) for row in rows]
        return torch.stack(rotated), torch.tensor([row.factor for row in rows])


def largest_share(q: Tensor, k: Tensor, lse: Tensor, logits: ops.Logits, window: int) -> Tensor:
    """Logarithm of the largest probability that a query gives to each key before its window: fp32 ``[B, Hq, L]``.

    Queries are taken in blocks, so that no ``L x L`` tensor exists. -inf for keys without a later query.

    Args:
        q: ``[B, Hq, L, D]``.
        k: ``[B, Hkv, L, D]``.
        lse: fp32 ``[B, Hq, L]``: log-sum-exp of each query's logits, made as ``logits`` says.
        window: query i counts for key j where ``i - j >= window``.
    """
    length, group, softcap = q.shape[2], q.shape[1] // k.shape[1], logits.softcap
    keys = k.float().transpose(-1, -2)
    best = torch.full(q.shape[:3], float("-inf"), device=q.device)
    for first in range(window, length, _QUERIES):
        last = min(first + _QUERIES, length)
        seen, sure = last - window, first - window + 1  # keys that some query, and that every query counts for
        rows = q[:, :, first:last].float().mul(logits.scaling).unflatten(1, (-1, group)).flatten(2, 3)
        shares = (rows @ keys[..., :seen]).unflatten(2, (group, -1)).flatten(1, 2)
        shares = shares if softcap is None else softcap * (shares / softcap).tanh()
        shares -= lse[:, :, first:last, None]
        late = torch.arange(sure, seen, device=q.device) > torch.arange(first, last, device=q.device)[:, None] - window
        shares[..., sure:].masked_fill_(late, float("-inf"))
        best[:, :, :seen] = best[:, :, :seen].maximum(shares.amax(2))
    return best


def log_length(v: Tensor, gram: Tensor) -> Tensor:
    """Logarithm of the length of each value in the layer's output, by query head: fp32 ``[B, Hkv, G, L]``.

    Args:
        v: ``[B, Hkv, L, Dv]``.
        gram: fp32 ``[Hkv, G, Dv, Dv]``: ``W^T W`` of each head's part W of the output projection.
    """
    v = v.float()
    squared = torch.einsum("bhld,hgde,bhle->bhgl", v, gram, v)
    return squared.clamp_min(1e-20).log() / 2


def _gram(layer: int, module: nn.Module, config: Any) -> Tensor:
    projection = next((getattr(module, name) for name in _PROJECTIONS if hasattr(module, name)), None)
    weight = getattr(projection, "weight", None)
    if weight is None or not weight.is_floating_point():
        raise UserError(
            f"layer {layer} has no output projection with floating-point weights under any of the names "
            f"{', '.join(_PROJECTIONS)}"
        )
    heads, group = config.num_attention_heads, module.num_key_value_groups
    parts = weight.detach().float().unflatten(1, (heads // group, group, -1))  # [hidden, Hkv, G, Dv]
    return torch.einsum("nhgd,nhge->hgde", parts, parts)

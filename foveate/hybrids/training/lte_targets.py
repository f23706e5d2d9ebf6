"""What later queries take of each token of a frozen model, and what its keys looked like before their rotation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foveate import ops
from foveate.calibration.eviction_scores import unrotate
from foveate.errors import UserError
from foveate.integrations.transformers.attach import attached
from foveate.integrations.transformers.support import attention_modules, decoder_of
from foveate.methods import Method, Observation
from foveate.state import SlotCache

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
"""Rotary positions whose frequencies do not depend on how long the context is."""
_QUERIES = 256
_SHIFT = 1021
_TOLERANCE = 0.5
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

    def decode(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        raise NotImplementedError("prompts alone are read")


class FrozenModel:
    """A model that reads sequences and shows what its tokens were worth; its weights stay as they are.

    Args:
        model: a Transformers model with softmax attention.
        window: queries within so many tokens do not count.

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
        self.inv_freq, self.rotary_scaling = self._rotary(decoder)

    @torch.no_grad()
    def read(self, ids: Tensor, positions: Tensor | None = None) -> dict[int, Seen]:
        """What a sequence ``[1, L]`` shows, by layer."""
        return self._forward(ids, positions)[0]

    @torch.no_grad()
    def read_with_lengths(self, ids: Tensor) -> tuple[dict[int, Seen], dict[int, Tensor]]:
        """As :meth:`read`, and the logarithm of each token's length in the residual stream, fp32 ``[L]`` by layer."""
        found, hidden = self._forward(ids, None, output_hidden_states=True)
        return found, {layer: hidden[layer][0].float().norm(dim=-1).log() for layer in self.layers}

    def _forward(self, ids: Tensor, positions: Tensor | None, **options: Any) -> tuple[dict[int, Seen], Any]:
        self._reader.found.clear()
        given = {} if positions is None else {"position_ids": positions}
        with attached(self._model, self._reader, dense_below=0, cuda_graph=False):
            out = self._model(ids, use_cache=True, logits_to_keep=1, **given, **options)
        found = dict(self._reader.found)
        self._reader.found.clear()
        return found, getattr(out, "hidden_states", None)

    def _rotary(self, decoder: nn.Module) -> tuple[Tensor, Tensor]:
        """Inverse frequencies ``[layers, R / 2]`` and factors ``[layers]``, proved on the model's own keys."""
        rows = [_frequencies(layer, decoder, self._config) for layer in self.layers]
        if len({len(frequencies) for frequencies, _ in rows}) > 1:
            raise UserError("the layers of this model rotate different numbers of dimensions")
        ids = torch.arange(3, 27, device=self._model.device)[None] % self._config.vocab_size
        limit = getattr(self._config, "max_position_embeddings", None) or 2 * _SHIFT
        at = torch.arange(ids.shape[1], device=ids.device)[None]
        shifted = at + min(_SHIFT, limit - ids.shape[1] - 1)
        seen = [(self.read(ids, positions), positions) for positions in (at, shifted)]
        for index, layer in enumerate(self.layers):
            frequencies, factor = rows[index]
            for tried in (frequencies, torch.zeros_like(frequencies)):  # some layers rotate nothing
                keys = [unrotate(found[layer].k.float(), to[:, None], tried, factor) for found, to in seen]
                if _same(*keys, pairs=len(frequencies)):
                    rows[index] = tried, factor if tried is frequencies else 1.0
                    break
            else:
                raise UserError(
                    f"layer {layer}: keys rotated back differ from position to position; this model rotates keys in "
                    "another way than by halves, and LTE cannot undo it"
                )
        return torch.stack([row[0].cpu() for row in rows]), torch.tensor([float(row[1]) for row in rows])


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


def _frequencies(layer: int, decoder: nn.Module, config: Any) -> tuple[Tensor, float]:
    """Inverse frequencies ``[R / 2]`` of a layer, and the factor of what they rotate."""
    settings: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    kind = (getattr(config, "layer_types", None) or {layer: ""})[layer]
    by_type = isinstance(settings.get(kind), Mapping)
    settings = settings[kind] if by_type else settings
    rope, prefix = settings.get("rope_type", "default"), f"{kind}_" if by_type else ""
    if rope not in ROPE_KINDS:
        raise UserError(
            f"layer {layer} has rotary positions of kind {rope!r}, whose frequencies may change with the context's "
            f"length, so keys in the cache cannot be rotated back; known are {', '.join(ROPE_KINDS)}"
        )
    rotary = getattr(decoder, "rotary_emb", None)
    frequencies = getattr(rotary, f"{prefix}inv_freq", None)
    if frequencies is None:
        raise UserError(f"layer {layer}: this model has no rotary positions as Transformers' decoders keep them")
    return frequencies.detach().float(), float(getattr(rotary, f"{prefix}attention_scaling", 1.0))


def _same(a: Tensor, b: Tensor, pairs: int) -> bool:
    """Whether nearly all of the pairs of dimensions that are rotated together agree, rounding apart."""
    pick = lambda x: torch.stack([x[..., :pairs], x[..., pairs : 2 * pairs]], -1)  # noqa: E731
    a, b = pick(a), pick(b)
    error = (a - b).norm(dim=-1).mean((0, 2)) / a.norm(dim=-1).mean((0, 2)).clamp_min(1e-6)
    return bool(error.flatten().quantile(0.9) < _TOLERANCE)

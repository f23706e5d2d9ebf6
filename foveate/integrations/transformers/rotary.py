"""How a model's layers rotate queries and keys: read from its rotary module, and proved on its own queries and keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foveate.integrations.transformers import releases
from foveate.integrations.transformers.configurations import Configurations
from foveate.integrations.transformers.support import around
from foveate.ops import Rotary

_NAME = "foveate_rotary"
_TOKEN = 3
"""Whose queries and keys are looked at."""
_POSITIONS = (0, 1, 29)
"""Of the tokens on which rotations are proved."""


@dataclass(eq=False)
class LayerRotary:
    """Where the rotary positions of a layer are in its model, which may change them from pass to pass (LongRoPE)."""

    module: nn.Module | None
    """None: the layer rotates nothing."""
    prefix: str = ""
    """Before the names of the module's attributes, where these differ by type of layer."""
    kind: str = "default"
    neighbours: bool = False
    later: tuple[int, Tensor] | None = None
    """See :class:`foveate.ops.Rotary`."""
    _made: Rotary | None = None

    def __call__(self) -> Rotary:
        """The rotary positions of the present pass."""
        frequencies = torch.zeros(0) if self.module is None else getattr(self.module, f"{self.prefix}inv_freq")
        if self._made is None or (self.module is not None and self._made.inv_freq is not frequencies):
            factor = float(getattr(self.module, f"{self.prefix}attention_scaling", 1.0))
            self._made = Rotary(frequencies, factor, self.neighbours, self.later)
        return self._made


def rotary_of_layers(
    model: nn.Module, decoder: nn.Module, config: transformers.PreTrainedConfig, layers: Iterable[int]
) -> dict[int, LayerRotary]:
    """The rotary positions of layers, by layer. Runs the decoder once on three rows of one token each.

    A token that attends to itself alone has the same hidden state at every position. So the queries and keys of these
    rows differ by their rotation alone.

    Raises:
        ValueError: for positions that this module does not know, or that the model does not rotate as its module says.
    """
    if not releases.takes(decoder, "position_ids"):
        raise ValueError(f"{type(decoder).__name__} takes no position_ids")
    found = {layer: _described(layer, decoder, config) for layer in layers}
    for layer, (q, k) in _queries_and_keys(model, decoder, found).items():
        if not (q.any() and k.any()):
            raise ValueError(f"layer {layer}: the queries or keys of token {_TOKEN} are zero, which shows no rotation")
        known = found[layer]
        tried = known, dataclasses.replace(known, neighbours=True), LayerRotary(None)
        found[layer] = next((one for one in tried if _rotates(one(), q) and _rotates(one(), k)), None)
        if found[layer] is None:
            raise ValueError(
                f"layer {layer}: queries and keys differ from position to position otherwise than by a rotation of "
                "halves, or of neighbours, with the frequencies of the model's rotary_emb"
            )
    return found


def _described(layer: int, decoder: nn.Module, config: transformers.PreTrainedConfig) -> LayerRotary:
    """What the configuration and the rotary module say of a layer."""
    settings: Any = getattr(config, "rope_parameters", None) or {}
    of_type = (getattr(config, "layer_types", None) or {layer: ""})[layer]
    by_type = isinstance(settings.get(of_type), dict)
    settings, prefix = (settings[of_type], f"{of_type}_") if by_type else (settings, "")
    kind, module, later = settings.get("rope_type", "default"), getattr(decoder, "rotary_emb", None), None
    if "dynamic" in kind:
        raise ValueError(
            f"layer {layer} has rotary positions of kind {kind!r}, whose frequencies change with the context's length"
        )
    if getattr(module, f"{prefix}inv_freq", None) is None:
        return LayerRotary(None)
    if kind == "longrope":
        first = settings.get("original_max_position_embeddings") or config.original_max_position_embeddings
        own = {"layer_type": of_type} if by_type else {}
        later = first, ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=first + 1, **own)[0].float()
    return LayerRotary(module, prefix, kind, later=later)


def _queries_and_keys(model: nn.Module, decoder: nn.Module, layers: Iterable[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """One token's queries and keys at :data:`_POSITIONS`, ``[3, H, 1, D]``, by layer."""
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def attention(module, query, key, value, attention_mask, **kwargs):
        found[module.layer_idx] = query, key
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None

    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    configurations, parts = Configurations(), around(model, decoder)
    training = [module for module in decoder.modules() if module.training]  # dropout would tell the rows apart
    configurations.replace(parts, _NAME)
    try:
        decoder.eval()
        positions = torch.tensor(_POSITIONS, device=model.device)[:, None]
        with torch.no_grad():
            decoder(input_ids=torch.full_like(positions, _TOKEN), position_ids=positions, use_cache=False)
    finally:
        configurations.restore(parts)
        for module in training:
            module.training = True
    return {layer: found[layer] for layer in layers}


def _rotates(rotary: Rotary, x: Tensor) -> bool:
    """Whether the vectors ``[3, H, 1, D]`` of one token are its first one rotated to their positions."""
    positions = torch.tensor(_POSITIONS, device=x.device)[:, None, None]
    if 2 * len(rotary.inv_freq) > x.shape[-1]:
        return False
    if not bool(x.isfinite().all()):
        return True  # which the first prompt reports
    expected = rotary.apply(rotary.remove(x[:1], positions[:1]), positions)
    allowed = 1e-3 if x.dtype in (torch.float32, torch.float64) else 3e-2
    return bool(((expected - x.float()).norm(dim=-1) <= allowed * expected.norm(dim=-1)).all())

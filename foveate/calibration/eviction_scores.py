"""What the tokens of a frozen model are worth to later queries: learned scores of every full-attention layer, one file.

A score is a prediction of ``log(max a * ||W_o v||)``: the largest attention probability that a query beyond the window
gives to the token, times the length of its value in the layer's output, as a share of the residual stream's length.
Scores are therefore comparable across heads and layers, and one threshold for all of them gives every head a budget.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from foveate.calibration import check_facts
from foveate.calibration.retention_scores import RetentionScores
from foveate.io import infile, outfile
from foveate.io.json_text import parse_json
from foveate.ops import Rotary

SCHEMA = 1
LEVELS = 513
"""Quantiles that are kept of a head's scores."""
_KIND = "foveate.eviction_scores"
_AGAIN = "`foveate train lte --model DIR --text DIR --out FILE` makes one for this model"
_PIECE = 8192  # tokens scored at once


class EvictionScores(nn.Module):
    """Retention scores of the tokens of a frozen model, from the keys and values in its cache.

    Args:
        model: what :func:`foveate.integrations.transformers.facts.model_facts` says of the model, and ``rope``, its
            rotary settings.
        layers: numbers of the layers that are scored, ascending.
        num_kv_heads, head_dim, value_dim: shapes of these layers.
        inv_freq: fp32 ``[layers, R / 2]``: inverse frequencies of the first R dimensions of a key, which are rotated by
            halves; the others are not.
        rotary_scaling: fp32 ``[layers]``: factor of the rotated dimensions (YaRN's).
        window: tokens beyond which attention was learned.
        length: tokens of the sequences on which the scores were learned.
    """

    def __init__(
        self,
        model: Mapping[str, Any],
        layers: Sequence[int],
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        inv_freq: Tensor,
        rotary_scaling: Tensor,
        window: int,
        length: int,
    ):
        super().__init__()
        self.model, self.layers = dict(model), tuple(layers)
        self.num_kv_heads, self.head_dim, self.value_dim = num_kv_heads, head_dim, value_dim
        self.window, self.length = window, length
        self.source = ""
        """The file that the scores were read from."""
        dim, heads = head_dim + value_dim, (len(self.layers), num_kv_heads)
        self.scorers = nn.ModuleList(RetentionScores(num_kv_heads, dim, dropout=0.0) for _ in self.layers)
        for name, value in (
            ("inv_freq", inv_freq.float()),
            ("rotary_scaling", rotary_scaling.float()),
            ("centre", torch.zeros(*heads, dim)),  # of the inputs, which have very different scales in frozen models
            ("spread", torch.ones(*heads, dim)),
            ("offset", torch.zeros(heads)),  # mean and, as scale, deviation of the values that the scores predict
            ("scale", torch.ones(heads)),
            ("quantiles", torch.zeros(*heads, LEVELS)),
        ):
            self.register_buffer(name, value.clone())
        self._moved: dict[torch.device, EvictionScores] = {}  # frozen copies, by the device of the keys

    @property
    def reach(self) -> int:
        """A token's score depends on this many tokens after it and on equally many before it."""
        return self.scorers[0].reach

    def features(self, index: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys rotated back and values, each dimension brought to mean 0 and deviation 1: fp32.

        Args:
            index: which of `layers`.
            k, v: ``[B, Hkv, L, D(v)]`` as in the cache.
            positions: int ``[B, Hkv or 1, L]``.
        """
        k = Rotary(self.inv_freq[index], self.rotary_scaling[index]).remove(k, positions)
        centre, spread = (
            x[index][:, None].split([self.head_dim, self.value_dim], -1) for x in (self.centre, self.spread)
        )
        return (k - centre[0]) / spread[0], (v.float() - centre[1]) / spread[1]

    def standard(self, index: int, k: Tensor, v: Tensor, real: Tensor | None = None) -> Tensor:
        """Scores of :meth:`features` less `offset` and over `scale`, fp32 ``[B, Hkv, L]``; what is trained.

        Args:
            real: bool ``[B, L]``: where there is a token.
        """
        return self.scorers[index].logits(k, v, real)

    @torch.no_grad()
    def score(self, layer: int, k: Tensor, v: Tensor, positions: Tensor, real: Tensor | None = None) -> Tensor:
        """Scores of tokens in their order, fp32 ``[B, Hkv, L]``; the last `reach` of them lack followers.

        Args:
            layer: number of the layer in the model.
            k, v: ``[B, Hkv, L, D(v)]`` as in the cache: keys after rotation.
            positions: int ``[B, Hkv or 1, L]``, consecutive.
            real: bool ``[B, L]``: where there is a token; None: everywhere.
        """
        own, index = self._on(k.device), self.layers.index(layer)
        scale, offset = own.scale[index][:, None], own.offset[index][:, None]
        parts = []
        for first in range(0, k.shape[2], _PIECE):  # each with the neighbours that its scores depend on
            low, high = max(0, first - self.reach), min(first + _PIECE + self.reach, k.shape[2])
            there = None if real is None else real[:, low:high]
            part = own.standard(index, *own.features(index, *(x[:, :, low:high] for x in (k, v, positions))), there)
            parts.append(part[:, :, first - low : first - low + _PIECE])
        return (torch.cat(parts, 2) if len(parts) > 1 else parts[0]) * scale + offset

    def shares(self, share: float, among: Sequence[int]) -> Tensor:
        """The share of its tokens that each head keeps when all heads together keep `share`: fp64 ``[layers, Hkv]``.

        A token stays if its score exceeds a threshold that is the same for all heads; how many of a head's tokens do is
        known from the text on which `quantiles` were taken.

        Args:
            share: in (0, 1].
            among: numbers of the layers that share the budget; rows of the result follow them.
        """
        return _shares(self._rows(among), share)

    def _rows(self, among: Sequence[int]) -> Tensor:
        return self.quantiles[[self.layers.index(layer) for layer in among]].double().cpu()

    def _on(self, device: torch.device) -> EvictionScores:
        if self.inv_freq.device == device:
            return self
        if device not in self._moved:
            with torch.inference_mode(False):  # parameters made in inference mode could not be moved
                moved = copy.deepcopy(self)
                moved._moved = {}
                self._moved[device] = moved.to(device)
        return self._moved[device]

    # The file

    def check_model(self, facts: Mapping[str, Any]) -> None:
        """Raises `ValueError` if the scores were learned on another model than the one that `facts` are of.

        Args:
            facts: as `model`.
        """
        what = f"LTE file {self.source!r}"
        check_facts(self.model, facts, what, _AGAIN)
        if self.model.get("rope") != facts.get("rope"):
            raise ValueError(
                f"{what} is for a model with rotary positions {self.model.get('rope')!r}, and this one has "
                f"{facts.get('rope')!r}; {_AGAIN}"
            )

    def content(self) -> bytes:
        """The file: safetensors with schema version, shapes and the model's facts."""
        facts = {
            "schema": SCHEMA,
            "model": self.model,
            "layers": list(self.layers),
            **{name: getattr(self, name) for name in _SHAPES},
        }
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        return save(tensors, {_KIND: json.dumps(facts | {"digest": _digest(facts, tensors)})})

    def save(self, path: str | Path) -> None:
        """Write the file in one step. Raises ValueError if it cannot be written."""
        outfile.write(outfile.named(path), self.content())

    @classmethod
    def load(cls, path: str | Path) -> EvictionScores:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: when the file is missing, damaged, of another schema, or something else.
        """
        try:
            with infile.plainly_named(path) as name, safe_open(name, "pt") as file:
                facts = parse_json((file.metadata() or {})[_KIND])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            schema, digest = facts["schema"], facts.pop("digest", None)
        except FileNotFoundError:
            raise ValueError(f"{path}: no such LTE file; {_AGAIN}") from None
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not an LTE file ({error}); {_AGAIN}") from None
        if schema != SCHEMA:
            raise ValueError(f"{path}: schema {schema!r}, and this version reads {SCHEMA}; {_AGAIN}")
        if digest not in (None, _digest(facts, tensors)):  # files of earlier versions have none
            raise ValueError(f"{path}: a damaged LTE file (its digest is not that of its content); {_AGAIN}")
        try:
            rotary = {name: tensors[name] for name in ("inv_freq", "rotary_scaling")}
            loaded = cls(facts["model"], facts["layers"], **{name: facts[name] for name in _SHAPES}, **rotary)
            loaded.load_state_dict(tensors)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path}: a damaged LTE file ({str(error).splitlines()[0]}); {_AGAIN}") from None
        if fault := loaded._fault():
            raise ValueError(f"{path}: a damaged LTE file ({fault}); {_AGAIN}")
        loaded.source = str(path)
        return loaded.eval().requires_grad_(False)

    def _fault(self) -> str:
        """What no training leaves, in words; empty if there is nothing of the kind."""
        for name in ("window", "length"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                return f"{name} must be an integer of at least 1, not {value!r}"
        if any(type(layer) is not int for layer in self.layers) or list(self.layers) != sorted({*self.layers}):
            return f"layers must be ascending numbers, not {list(self.layers)!r}"
        if not all(bool(tensor.isfinite().all()) for tensor in self.state_dict().values()):
            return "it holds numbers that are not finite"
        for name in ("spread", "scale", "rotary_scaling"):
            if bool((getattr(self, name) <= 0).any()):
                return f"{name} must be above 0"
        steps = self.quantiles.diff(dim=-1)
        if bool((steps < -_ROUNDING * self.quantiles.abs().amax(-1, keepdim=True)).any()):
            return "quantiles must not descend"
        if bool((self.quantiles[..., 0] == self.quantiles[..., -1]).any()):
            return "quantiles of a head must not all be the same"
        return ""


def _digest(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Of a file's description and tensors, 32 hexadecimal digits."""
    found = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


_ROUNDING = 1e-5
_SHAPES = ("num_kv_heads", "head_dim", "value_dim", "window", "length")


@functools.lru_cache(maxsize=4)
def _read(path: Path, state: tuple[int, int] | None) -> EvictionScores:
    return EvictionScores.load(path)


def read(path: str | Path) -> EvictionScores:
    """As :meth:`EvictionScores.load`, but a file that has not changed is read once for all layers."""
    path = Path(path)
    state = (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None
    return _read(path, state)


def _shares(quantiles: Tensor, share: float) -> Tensor:
    """Shares of scores above the one threshold above which `share` of all are, by bisection: fp64 ``[..., H]``.

    Args:
        quantiles: fp64 ``[..., H, levels]``, rising, at equal distances from the least to the largest.
    """
    if share >= 1.0:
        return torch.ones(quantiles.shape[:-1], dtype=torch.float64)
    low, high = quantiles.min() - 1.0, quantiles.max() + 1.0
    for _ in range(60):
        middle = (low + high) / 2
        above = _above(quantiles, middle)
        low, high = (middle, high) if above.mean() > share else (low, middle)
    above = _above(quantiles, high)
    return (above * (share / above.mean().clamp_min(1e-12))).clamp_max(1.0)


def _above(quantiles: Tensor, threshold: Tensor) -> Tensor:
    """The share of a distribution above a threshold, linear between quantiles."""
    last = quantiles.shape[-1] - 1
    below = (quantiles <= threshold).sum(-1)
    left = (below - 1).clamp(0, last - 1)
    a, b = (quantiles.gather(-1, at[..., None]).squeeze(-1) for at in (left, left + 1))
    inside = ((threshold - a) / (b - a).clamp_min(1e-12)).clamp(0.0, 1.0)
    return torch.where(below == 0, 1.0, torch.where(below > last, 0.0, 1.0 - (left + inside) / last))

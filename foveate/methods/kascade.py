"""Kascade: exact top-k keys in a few anchor layers, read again in later layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.calibration import Calibration, known, load, say_once
from foveate.methods._anchored import anchor_role, dense_role, layer_numbers, nearest, reader_role
from foveate.methods._kept_scores import AT, KeptScores, check_every, every_setting, kept_from_token_to_token
from foveate.methods._settings import spelled_value
from foveate.methods._top_k_by_mass import TopKByMass
from foveate.methods.base import About, Method, Role, redefined, register, setting
from foveate.state import Channel, Geometry, SlotCache

_ANCHORS = 5
"""The number of evenly spaced anchors, where neither a setting nor a calibration gives the anchors."""
CALIBRATED_SETTINGS = ("pool", "pooling", "decode_only")
"""The settings on which a choice of anchors depends; a calibration records them."""


@register
class Kascade(TopKByMass):
    """Anchor layers compute the attention mass of all keys and choose; the layers after an anchor read its choice.

    Layer 0 is dense; if it is an anchor, it chooses for the layers up to the next anchor. Layers before the first
    anchor are dense, too. All heads of a layer share their keys, and prompts are dense, which is more accurate than the
    paper's setting (:class:`~foveate.methods.kascade_paper.KascadePaper`).

    With ``decode_only=false`` prompts are sparse. The queries of a tile choose together among the keys before the tile,
    and see the tile's own keys causally. Tiles begin at multiples of their length from a row's first token. Where a
    chunk of the prompt ends inside a tile, both parts of the tile choose separately.
    """

    name: ClassVar[str] = "kascade"
    about: ClassVar[About] = About(
        "Kascade, Deshmukh et al. 2025, arXiv:2512.16391",
        full_budget={"top_k": 1.0, "anchors": 1},
        small_budget={"top_k": 9, "tile": 1, "anchors": 1},
    )

    pool: str = redefined(TopKByMass, "pool", "layer")
    pooling: str = redefined(TopKByMass, "pooling", "sqrt")
    decode_only: bool = redefined(TopKByMass, "decode_only", True)

    anchors: Any = setting(
        None,
        "anchor layers: their numbers, or how many, evenly spaced from layer 0 on; null: the anchors of a calibration, "
        f"else {_ANCHORS}",
    )
    heads: Any = setting(
        None,
        'by reading layer, with pool=kv_head, the anchor\'s head whose choice each KV head reads: {"3": [0, 0], ...}',
    )
    calibration: str = setting(
        "",
        "file of `foveate calibrate` with both; left out: the one kept or shipped for the model, if any",
    )

    dense_anchor_prefill: bool = setting(
        True,
        "in sparse prompts anchors return dense attention; false: they read what they chose",
    )
    every: int = every_setting("the keys of anchors that do not read all of them")

    def __post_init__(self):
        super().__post_init__()
        self._check("dense_anchor_prefill", isinstance(self.dense_anchor_prefill, bool), "true or false")
        if self.decode_only:  # all layers read all keys of a prompt
            object.__setattr__(self, "dense_anchor_prefill", type(self).dense_anchor_prefill)
        check_every(self)
        self._check("calibration", isinstance(self.calibration, str), "a file of `foveate calibrate`")
        if self.calibration and (not isinstance(self.anchors, (list, tuple)) or self.heads is None):
            self._read_calibration()
        if isinstance(self.anchors, (list, tuple)):
            self._check_layers("anchors")
        elif self.anchors is not None:
            self._check_count("anchors", 1)
        if self.heads is not None:
            maps = isinstance(self.heads, dict) and all(
                str(layer).isdecimal()
                and isinstance(heads, (list, tuple))
                and all(isinstance(head, int) and not isinstance(head, bool) for head in heads)
                for layer, heads in self.heads.items()
            )
            self._check("heads", maps, "lists of KV heads by layer")
            used = not self.heads or not self.pools_layer or self.calibration != ""  # whose file has heads anyway
            self._check("heads", used, "left out with pool=layer, under which all heads of a layer read the same keys")
            object.__setattr__(self, "heads", {str(int(layer)): list(heads) for layer, heads in self.heads.items()})

    def _read_calibration(self) -> None:
        """Set anchors and heads from the file. A method that has both already does not read the file again, and keeps
        the file's contents at the time of that reading."""
        self._check("anchors", self.anchors is None, "left out beside a calibration, which has them")
        self._check("heads", self.heads is None, "left out beside a calibration, which has them")
        try:
            artefact = load(self.calibration)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        self.__dict__["_artefact"] = artefact
        object.__setattr__(self, "anchors", list(artefact.anchors))
        object.__setattr__(self, "heads", dict(artefact.heads))

    def __hash__(self):
        return hash(self.spec)

    @functools.cached_property
    def spec(self) -> str:
        """A calibration stands for its anchors and heads."""
        if not self.calibration:
            return super().spec
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return self._spell(values | {"anchors": None, "heads": None})

    def _settings(self) -> dict[str, Any]:
        """See :meth:`Method._settings`; leaves out `dense_anchor_prefill` under `decode_only`, where it has no
        effect."""
        return {
            key: x for key, x in super()._settings().items() if not (self.decode_only and key == "dense_anchor_prefill")
        }

    def _changed(self, **settings: Any) -> Method:
        own = {"anchors": None, "heads": None} if self.calibration else {}
        return super()._changed(**own | settings)

    def for_model(self, facts: Callable[[], Mapping[str, Any]]) -> Method:
        """The method with the anchors and heads of a calibration for the model's weights, which a user has kept or
        foveate ships; without such a calibration, with evenly spaced anchors.

        A calibration that was made under this method's settings is preferred. Given anchors or heads are kept. Without
        facts of the model the method is unchanged.
        """
        if self.anchors is not None:
            self._say_what_differs()
            self._warn_if_evenly_spaced(facts)
            return self
        of_model = facts()
        if not of_model:  # as within another method, whose layers are not known yet
            return self
        layers = len(of_model.get("weights") or ())  # the layers that the method is applied to, if known
        evenly = self._changed(anchors=min(_ANCHORS, layers or _ANCHORS))
        if self.heads is not None:
            evenly._warn_if_evenly_spaced(facts)
            return evenly
        found = known(of_model)
        best = sorted(found.calibrations, key=lambda one: len(self.differing(one)))
        if not best:
            for obstacle in found.obstacles:
                say_once(f"{self.name}: {obstacle}")
            evenly._warn_if_evenly_spaced(facts)
            return evenly
        first = best[0]
        what = f"{len(first.anchors)} anchors of calibration {first.source!r}, which {first.origin} for these weights"
        say_once(f"{self.name}: {what}; anchors={evenly.anchors} spaces {evenly.anchors} evenly")
        own = self._changed(calibration=first.source)
        own._say_what_differs()
        return own

    def _warn_if_evenly_spaced(self, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Say once what evenly spaced anchors lose, where a model is known."""
        if not isinstance(self.anchors, (list, tuple)) and self.top_k != 1.0 and facts():
            say_once(
                f"{self.name} without a calibration: evenly spaced anchors lose what is hard to look up; "
                "`foveate calibrate --model DIR` chooses them (docs/guide/calibrate.md)"
            )

    def differing(self, calibration: Calibration) -> list[str]:
        """The settings that differ between the calibration and this method."""
        theirs = calibration.settings
        return [name for name in CALIBRATED_SETTINGS if name in theirs and theirs[name] != getattr(self, name)]

    def _say_what_differs(self) -> None:
        if self._artefact is None or not (names := self.differing(self._artefact)):
            return
        theirs, ours = (
            ", ".join(f"{name}={spelled_value(of(name))}" for name in names)
            for of in (self._artefact.settings.get, functools.partial(getattr, self))
        )
        say_once(
            f"{self.name}: the anchors of calibration {self.calibration!r} were chosen under {theirs}, and may lose "
            f"more under {ours} (docs/guide/calibrate.md)"
        )

    def for_layer(self, layer: int, num_layers: int, among: Sequence[int] | None = None) -> Method:
        if self.calibration:
            if self._artefact is None:  # as in a row of results, which names a file that need not be here
                raise ValueError(
                    f"{self.name}: anchors and heads must be left out beside a calibration, which has them"
                )
            self._artefact.check_layers(num_layers)
        own = super().for_layer(layer, num_layers, among)
        own.__dict__["_artefact"] = self._artefact
        return own

    def role_of(self, layer: int, among: Sequence[int]) -> Role:
        if not isinstance(self.anchors, (list, tuple)):
            layers = len(among)
            number = self.anchors or min(_ANCHORS, layers)
            if number > layers:
                raise ValueError(
                    f"{self.name}: anchors must be at most {layers}, the layers that it is applied to, not {number}"
                )
            anchors = [among[round(index * layers / number)] for index in range(number)]
        else:
            anchors = layer_numbers(self, "anchors", among)
        readers = [other for other in among if other > anchors[0] and other not in anchors]
        strange = [key for key in self.heads or {} if int(key) not in readers]
        if strange:
            raise ValueError(
                f"{self.name}: heads must be of layers that read an anchor's choice, {readers}, "
                f"not of layer {strange[0]}"
            )
        anchor = nearest(anchors, layer)
        if anchor is None:
            return dense_role(layer)
        if anchor == layer:
            return anchor_role(layer, dense=layer == 0)
        heads = None if self.pools_layer else (self.heads or {}).get(str(layer))  # a layer's heads choose alike
        return reader_role(layer, anchor, heads)

    # Scores that are kept from token to token

    @property
    def keeps_scores(self) -> bool:
        """Whether this layer scores keys at every few decoded tokens alone."""
        return self.every > 1 and self.role.chooses and not self.role.reads_all

    @property
    def per_request(self) -> str:  # type: ignore[override]
        return kept_from_token_to_token(self.every)

    @property
    def scored_at(self) -> str:  # type: ignore[override]
        return AT if self.keeps_scores else ""

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        return KeptScores(self.every).channels() if self.keeps_scores else {}

    def select(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """By kept scores, if there are any, newer keys first."""
        if not self.keeps_scores:
            return super().select(cache, q, scaling)
        lengths, heads = cache.plan["counts"], 1 if self.pools_layer else cache.geometry.num_kv_heads

        def mass(due: Tensor) -> Tensor:
            kv = cache.view(lengths.where(due, 0))
            found = ops.pooled_mass(q, kv, **self._pooling(cache, scaling))
            return found if found.shape[1] == heads else found.mean(1, keepdim=True)

        scores, at = KeptScores(self.every).renew(cache, heads, cache.used, mass)
        newer = torch.arange(cache.used, device=q.device) - at[:, None, None]
        return self._chosen(cache, torch.where(newer < 0, scores, 1e30 * (1 + newer)), lengths)

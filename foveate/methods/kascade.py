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
from foveate.methods._page_summaries import KeepsSummaries, LowRankPages, check_records
from foveate.methods._settings import spelled_value
from foveate.methods._top_k_by_mass import TopKByMass
from foveate.methods.base import About, Fetches, Method, Role, redefined, register, setting
from foveate.methods.budgets import Number, clamp
from foveate.state import Channel, Geometry, SlotCache

_PAGE_SIZE = 8
"""Tokens of a page under score_keys=pages."""
ONE_PAGE_IN = 3
"""Of how many pages the keys of one are scored under score_keys=pages, where top_k needs no more."""
_ANCHORS = 5
"""Evenly spaced, where nothing says which."""
CALIBRATED_SETTINGS = ("pool", "pooling", "decode_only")
"""Settings that a choice of anchors is valid for; a calibration records them."""


@register
class Kascade(KeepsSummaries, TopKByMass):
    """Anchor layers compute the attention mass of all keys and choose; the layers after an anchor read its choice.

    Layer 0 is dense; where it is an anchor, it chooses for the layers up to the next one. Layers before the first
    anchor are dense, too. All heads of a layer share their keys, and prompts are dense, which is more accurate than the
    paper's setting (:class:`~foveate.methods.kascade_paper.KascadePaper`).

    With ``decode_only=false`` prompts are sparse: tiles of queries choose together among the keys before them, and see
    those of their own tile causally; tiles begin at multiples of their length from a row's first token, and a tile that
    a chunk of the prompt ends in is chosen for in two parts.

    With ``score_keys=pages`` anchors keep low-rank summaries of pages (``page_size``) and choose in two
    steps, which is approximate: the third of the pages that hold most of the attention by their summaries, the
    newest page among them, and then keys by their exact attention within these pages. With ``first_layer=pages`` layer
    0 does the same for its readers, and its own decoded tokens attend to all keys of that third instead of to all keys.
    """

    name: ClassVar[str] = "kascade"
    about: ClassVar[About] = About(
        "Kascade, Deshmukh et al. 2025, arXiv:2512.16391",
        full_budget={"top_k": 1.0, "anchors": 1},
        small_budget={"top_k": 9, "tile": 1, "anchors": 1},
        estimates=lambda method: method.score_keys == "pages",
    )
    rank: ClassVar[int] = 2
    """Directions of a page's summary."""

    pool: str = redefined(TopKByMass, "pool", "layer")
    pooling: str = redefined(TopKByMass, "pooling", "sqrt")
    decode_only: bool = redefined(TopKByMass, "decode_only", True)

    anchors: Any = setting(
        None,
        "anchor layers: their numbers, or how many, evenly spaced from layer 0 on; null: those of a calibration, else "
        f"{_ANCHORS}",
    )
    heads: Any = setting(
        None, 'by reading layer, the anchor\'s head whose choice each KV head reads: {"3": [0, 0], ...}'
    )
    calibration: str = setting(
        "",
        "file of `foveate calibrate` with both; left out: the one kept or shipped for the model, if any",
    )

    dense_anchor_prefill: bool = setting(
        True,
        "in sparse prompts anchors return dense attention; false: they read what they chose",
    )
    score_keys: str = setting(
        "exact",
        "what anchors score for a decoded token: the keys (exact); or, approximate, summaries of pages and then the "
        "keys of the best third (pages)",
    )
    first_layer: str = setting(
        "dense",
        "what a decoded token reads in layer 0: all keys (dense); or, approximate, under score_keys=pages those of the "
        "best third of the pages (pages)",
    )
    page_size: int = setting(_PAGE_SIZE, "under score_keys=pages, tokens of a page")
    weighted: bool = setting(
        True,
        "under score_keys=pages, weigh the channels of keys, before they are rounded, by a prompt's last queries",
    )
    every: int = every_setting("the keys of anchors that do not read all of them")

    def __post_init__(self):
        super().__post_init__()
        self._check("dense_anchor_prefill", isinstance(self.dense_anchor_prefill, bool), "true or false")
        if self.decode_only:  # all layers read all keys of a prompt
            object.__setattr__(self, "dense_anchor_prefill", type(self).dense_anchor_prefill)
        self._check_choice("score_keys", "exact", "pages")
        self._check_choice("first_layer", "dense", "pages")
        pages = self.score_keys == "pages"
        self._check("first_layer", pages or self.first_layer == "dense", "dense without score_keys=pages")
        check_records(self)
        self._check("page_size", pages or self.page_size == _PAGE_SIZE, f"{_PAGE_SIZE} without score_keys=pages")
        self._check("weighted", isinstance(self.weighted, bool), "true or false")
        self._check("weighted", pages or self.weighted, "true without score_keys=pages")
        check_every(self)
        self._check("every", self.every == 1 or not pages, "1 under score_keys=pages")
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
            object.__setattr__(self, "heads", {str(int(layer)): list(heads) for layer, heads in self.heads.items()})

    def _read_calibration(self) -> None:
        """Anchors and heads from the file; a method that has both already is as the file was when they were read."""
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
        """As of any method; without `dense_anchor_prefill` under `decode_only`, which makes it idle, and with the size
        of pages where there are any."""
        found = {
            key: x for key, x in super()._settings().items() if not (self.decode_only and key == "dense_anchor_prefill")
        }
        return found | ({"page_size": self.page_size} if self.score_keys == "pages" else {})

    def _changed(self, **settings: Any) -> Method:
        own = {"anchors": None, "heads": None} if self.calibration else {}
        return super()._changed(**own | settings)

    def for_model(self, facts: Callable[[], Mapping[str, Any]]) -> Method:
        """With anchors of a calibration that is kept, or comes with foveate, for the model's weights; else evenly
        spaced. One that was chosen under this method's settings comes before others."""
        if self.anchors is not None:
            self._say_what_differs()
            self._warn_if_evenly_spaced(facts)
            return self
        of_model = facts()
        layers = len(of_model.get("weights") or ())  # those that the method is applied to, where they are known
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
        """The settings under which a calibration was chosen and that this method has otherwise."""
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
        if own.reads_pages:
            name = "pages, choosing" if own.role.has_readers else "pages"
            own.__dict__["role"] = own.role._replace(name=name, chooses=True, reads_all=False)
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

    @property
    def reads_prompt_whole(self) -> bool:
        return self.reads_pages or super().reads_prompt_whole

    @property
    def keeps_scores(self) -> bool:
        """Whether this layer scores keys at every few decoded tokens alone."""
        return self.every > 1 and self.role.chooses and not self.role.reads_all

    # Approximate scores

    @functools.cached_property
    def summaries(self) -> LowRankPages:
        """What is kept of pages under ``score_keys=pages``."""
        return LowRankPages(self.page_size, self.rank, self.weighted)

    @property
    def scores_summaries(self) -> bool:
        """Whether this layer keeps summaries of pages, by which it chooses whose keys it scores or reads."""
        return self.reads_pages or (self.score_keys == "pages" and self.role.chooses and not self.role.reads_all)

    @property
    def reads_pages(self) -> bool:
        """Whether a decoded token reads all keys of the best pages: in layer 0, whether it is an anchor or not."""
        return self.first_layer == "pages" and self.role.layer == 0

    @property
    def scores_keys_of_pages(self) -> bool:
        """Whether this layer scores the keys of the best pages: to read some of them, or in layer 0 for its readers."""
        return self.role.has_readers if self.reads_pages else self.scores_summaries

    @property
    def needs_prompt_end(self) -> bool:  # type: ignore[override]
        return self.reads_pages or super().needs_prompt_end

    @property
    def counters(self) -> tuple[str, ...]:  # type: ignore[override]
        """Where layer 0 reads pages also the share of the attention that they hold by their summaries, 0 to 1."""
        return (*super().counters, "mass_read") if self.reads_pages else super().counters

    @property
    def per_request(self) -> str:  # type: ignore[override]
        return kept_from_token_to_token(self.every) or super().per_request

    @property
    def scored_at(self) -> str:  # type: ignore[override]
        return AT if self.keeps_scores else ""

    @property
    def kept(self) -> LowRankPages | None:
        return self.summaries if self.scores_summaries else None

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        return KeptScores(self.every).channels() if self.keeps_scores else super().channels(geometry)

    def note_newest(self, cache: SlotCache, q: Tensor) -> None:
        if self.scores_summaries:
            self.summaries.write_newest(cache)

    def learn(self, cache: SlotCache, choice: ops.Choice, attended: ops.Attended) -> None:
        if choice.reads_all and self.reads_pages:
            cache.count("mass_read", 1.0)

    def choose(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Choice | None:
        return self._choose_pages(cache, q, scaling) if self.reads_pages else super().choose(cache, q, scaling)

    def _choose_pages(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Choice:
        """All keys of the best pages; an anchor chooses among these for its readers."""
        pages, plan = self._best_pages(cache, q, scaling), cache.plan
        readers = None
        if self.scores_keys_of_pages:
            readers = self._choice(cache, self._select_in(cache, q, pages, scaling))
        pages = pages.expand(-1, cache.geometry.num_kv_heads, -1)
        return ops.Choice(
            pages=pages,
            page_size=self.page_size,
            counts=plan.for_sparse_rows(self.scored_pages),
            read=plan.per_row(self.page_keys)[:, None],
            readers=readers,
            fetched=True,
        )

    def _selected(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Choice:
        return super()._selected(cache, q, scaling)._replace(fetched=self.scores_summaries)

    def select(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """By kept scores, newer keys first; or by summaries: keys by their share of the attention to the best pages."""
        if self.keeps_scores:
            return self._select_by_kept_scores(cache, q, scaling)
        if not self.scores_summaries:
            return super().select(cache, q, scaling)
        return self._select_in(cache, q, self._best_pages(cache, q, scaling), scaling)

    def _select_by_kept_scores(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        lengths, heads = cache.plan["counts"], 1 if self.pools_layer else cache.geometry.num_kv_heads

        def mass(due: Tensor) -> Tensor:
            kv = cache.view(lengths.where(due, 0))
            found = ops.pooled_mass(q, kv, **self._pooling(cache, scaling))
            return found if found.shape[1] == heads else found.mean(1, keepdim=True)

        scores, at = KeptScores(self.every).renew(cache, heads, cache.used, mass)
        newer = torch.arange(cache.used, device=q.device) - at[:, None, None]
        return self._chosen(cache, torch.where(newer < 0, scores, 1e30 * (1 + newer)), lengths)

    def _select_in(self, cache: SlotCache, q: Tensor, pages: Tensor, scaling: float) -> Tensor:
        """The keys of some pages that hold most of the attention to these."""
        plan = cache.plan
        if cache.offloaded:  # a copy of the pages alone, in their order
            keys, scored = self._hot_keys(cache, pages)
            kv = ops.KV(keys, lengths=plan.per_row(self.page_keys))
        else:
            kv, scored = cache.view(plan["lengths"]), pages
        counts = plan.for_sparse_rows(self.scored_pages)
        how = self._pooling(cache, scaling)
        mass = ops.pooled_mass_of_pages(q, kv, scored, self.page_size, counts=counts, **how)
        there = plan.for_sparse_rows(self.places)
        places = self._chosen(cache, mass, there)[:, : pages.shape[1]]
        return ops.keys_at_places(places, pages, self.page_size).expand(-1, cache.geometry.num_kv_heads, -1)

    def _hot_keys(self, cache: SlotCache, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Of a cache in host memory, the keys of pages ``[B, Hkv or 1, P]`` that are on the device, copied to
        ``[B, Hkv, P * page_size, D]``; and the pages as those of this copy."""
        hot, heads = cache.hot(), cache.geometry.num_kv_heads
        rows = pages.expand(-1, heads, -1).flatten(0, 1)
        blocks = hot.block_table.table.gather(1, rows.clamp_min(0).long()).clamp_min(0).long()
        keys = hot.k[blocks, 0].flatten(1, 2).unflatten(0, (-1, heads))
        places = torch.arange(pages.shape[2], dtype=pages.dtype, device=pages.device)
        return keys, places.where(pages >= 0, -1)

    def _best_pages(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """The pages that hold most of the attention to full pages, by their summaries; the newest is one of them.
        int32 ``[B, Hkv, P]``, or ``[B, 1, P]`` of the layer."""
        mass = self.summaries.mass(cache, q, scaling, self.pooling, self.pool)
        mass, plan = cache.mean_over_ranks(mass) if self.pools_layer else mass, cache.plan
        ends = plan.for_sparse_rows(self.summaries.pages)
        scores = ops.with_always_read(mass, 0, plan.per_row(self.summaries.newest), ends)
        counts, most = plan.per_row(self.scored_pages), self.scored_pages(cache.used)
        pages = ops.topk_rows(scores, counts, most, lengths=ends, dtype=torch.int32)
        if self.reads_pages:
            if self.pooling == "sqrt":  # its scores are not shares of the attention
                mass = self.summaries.mass(cache, q, scaling, "post_softmax", self.pool)
            cache.count("mass_read", ops.mass_of_pages(mass, pages))
        if cache.offloaded:
            cache.fetch(pages.expand(-1, cache.geometry.num_kv_heads, -1))
        return pages

    @property
    def fetches(self) -> Fetches | None:  # type: ignore[override]
        """Of an anchor the pages whose keys it scores, of other layers those with a key that is read."""
        return None if self.role.reads_all or self.score_keys != "pages" else Fetches(self.page_size, self.scored_pages)

    def scored_pages(self, length: Number) -> Number:
        """Pages of a row of this length whose keys are scored, or read in layer 0: enough for ``top_k`` keys."""
        pages, least = self.summaries.pages(length), (self.count(length) + self.page_size - 2) // self.page_size + 1
        return clamp(-(-pages // ONE_PAGE_IN), least, pages)

    def places(self, length: Number) -> Number:
        """Places of keys in these pages."""
        return self.page_size * self.scored_pages(length)

    def page_keys(self, length: Number) -> Number:
        """Keys of these pages, of which the newest may be open."""
        return self.places(length) - self.page_size * self.summaries.pages(length) + length

    def attended_keys(self, tokens: int) -> int | None:
        return self.page_keys(tokens) if self.reads_pages else super().attended_keys(tokens)

    def scored(self, tokens: Number, geometry: Geometry, dtype: torch.dtype) -> float | Tensor:
        """Under score_keys=pages the summaries of all pages, and the keys of some."""
        if not self.scores_summaries:
            return super().scored(tokens, geometry, dtype)
        keys = self.page_keys(tokens) if self.scores_keys_of_pages else 0
        return self.summaries.scored(tokens, geometry, dtype) + geometry.key_share * keys

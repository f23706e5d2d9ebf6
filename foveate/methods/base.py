"""What a method is: a policy over the five verbs, per layer, in prefill and in decode."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import operator
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from foveate import ops
from foveate.state import Channel, Geometry, SlotCache

Number = TypeVar("Number", int, Tensor)

REGISTRY: dict[str, type[Method]] = {}


def setting(default: Any, help: str, later: bool = False, before: Any = None) -> Any:
    """A documented field of a method.

    `before`: it has come since results were recorded, when the method did what it does with this value.
    `later`: the same, with the default where `before` is None; with that value it is not among
    :meth:`Method.settings`, so that these results stay the method's own.
    """
    before = default if later and before is None else before
    return dataclasses.field(default=default, metadata={"help": help, "later": later, "before": before})


@dataclass(frozen=True)
class Method:
    """A policy for one attention layer. Subclasses are frozen dataclasses whose fields are the settings.

    A subclass with a ``name`` registers itself. The hooks are called with packed, unpadded caches: in a prompt every
    row that the hook sees has the same length (rows of a padded batch are handed over one at a time); in decode rows
    may differ, and :meth:`SlotCache.holes` says which slots are empty. The new tokens are already in the cache.
    """

    name: ClassVar[str] = ""
    """Registered name."""
    source: ClassVar[str] = ""
    """Paper that the method comes from."""
    evicts: ClassVar[bool] = False
    """Whether slots are given up for good."""
    stateful: ClassVar[bool] = True
    """Whether decoding a token changes more than the keys and values stored."""
    decodes_in_blocks: ClassVar[bool] = False
    """Whether several decoded tokens may be attended to at once, as those of a prompt are."""
    dense_at_full_budget: ClassVar[bool] = True
    """Whether a budget of the whole context gives dense attention."""
    causal_granularity: ClassVar[int] = 1
    """A later token may change outputs up to this many tokens before it."""
    needs_prompt_end: ClassVar[bool] = False
    """Whether the state after a prompt depends on where the prompt ended."""
    whole_prompt: ClassVar[bool] = False
    """Whether the prompt must come in one piece, and only one prompt."""
    stands_in: ClassVar[bool] = False
    """Whether a decode step may read everything instead, see :meth:`stand_in`."""
    pays_from: ClassVar[int] = 16384
    """Tokens, of all sequences together, from which decoding on a GPU is faster than dense (docs/decode.md)."""
    graphs: ClassVar[bool] = False
    """Whether a decode step can be captured in a CUDA graph: it asks for numbers of rows by their rules alone, see
    :class:`~foveate.state.row_numbers.RowNumbers`, and for nothing else that changes from step to step."""
    retired: ClassVar[Mapping[str, Any]] = {}
    """Removed settings that older rows record, each with the value under which it had no effect."""
    full_budget: ClassVar[dict[str, Any]] = {}
    """Settings under which nothing of any context is left out."""
    small_budget: ClassVar[dict[str, Any]] = {}
    """Settings under which a context of some sixty tokens is already sparse."""

    uneven: ClassVar[bool] = False
    """Whether the KV heads of a layer may hold different numbers of tokens."""

    artefact: ClassVar[Any] = None
    """What was made for one model, with ``check_model(facts, source)``, which :func:`foveate.attach` calls."""

    @property
    def artefact_file(self) -> str:
        """The file that :attr:`artefact` was read from."""
        return getattr(self, "calibration", "")

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            REGISTRY[cls.name] = cls

    def __deepcopy__(self, memo):
        return self

    # Policy

    def for_layer(self, layer: int, num_layers: int, among: Sequence[int] | None = None) -> Method:
        """The method of one layer; composed methods differ from layer to layer.

        Args:
            among: the layers that the method is applied to, ascending; None for all.
        """
        return self

    def prompt_tile(self, group: int) -> int:
        """Tokens of a prompt that choose what they read together, counted from a row's first token.

        Pieces of a prompt that end between tiles give what one piece gives; others need not. 1: any pieces do.

        Args:
            group: query heads of a KV head.
        """
        return 1

    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        """State to keep beside the keys, by name."""
        return {}

    def prompt(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Attended:
        """Attention of prompt queries ``q [B, Hq, n, D]``, the last n slots' tokens: dense unless overridden."""
        how = {"offset": cache.used - q.shape[2], "sink_logits": cache.sink_logits, "softcap": cache.softcap}
        return ops.attend_causal(q, cache.keys, cache.values, scaling=scaling, need_lse=self.observes, **how)

    @property
    def sparse_prompt(self) -> bool:
        """Whether prompt queries look at less than everything."""
        return type(self).prompt is not Method.prompt

    @property
    def reads_other_layers(self) -> bool:
        """Whether prompt queries look at what an earlier layer of the same forward pass has chosen."""
        return False

    @property
    def observes(self) -> bool:
        """Whether :meth:`observe` wants the log-sum-exp of prompt queries."""
        return False

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        """Learn from prompt queries; called after :meth:`prompt`, chunk by chunk, when there is a cache.

        Fills channels and changes nothing else, so that several methods can learn from one prompt.
        """

    @property
    def observation(self) -> Hashable | None:
        """What :meth:`observe` does, as a key: methods with equal keys fill channels of the same names alike.

        None: nothing.
        """
        return None if type(self).observe is Method.observe else self

    def prompt_end(self, cache: SlotCache, scaling: float) -> Tensor | None:
        """The prompt is complete: slots to keep, int64 ``[B, Hkv, K]`` ascending, or None for all."""
        return None

    def decode(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """Attention of one token per row, ``q [B, Hq, 1, D] -> [B, Hq, 1, Dv]``, and whatever follows from it."""
        raise NotImplementedError

    def scored_share(self, geometry: Geometry, dtype: torch.dtype) -> float:
        """Share of each key that a decode step of this layer scores, in bytes of the key and its value.

        0: the layer scores no keys. Any other share is that of every key in the cache. Keys that are read whole count
        on their own: a key that is scored and then read counts ``scored_share + 1``. A key without its value is
        ``geometry.key_share``, and r of its dimensions, as SparQ scores them, are
        ``r / (geometry.head_dim + geometry.value_dim)``. A copy of the keys in fewer bits counts by its own bytes, and
        the keys of a page share the bytes of a vector that stands for the page. ``decode`` counts all this with
        ``count_scored`` of ``_common.py``.

        Args:
            dtype: of the keys and values in the cache.
        """
        return 0.0

    def scored(self, tokens: Number, geometry: Geometry, dtype: torch.dtype) -> float | Tensor:
        """What a decode step scores of ``tokens`` keys, in keys with their values.

        A method overrides it where keys differ in their share. Layers of the same spec and share score alike.

        Args:
            tokens: an int; or tokens of each row as whole numbers in fp64, ``[B]``, for a result ``[B]``.
        """
        return tokens * self.scored_share(geometry, dtype)

    def stand_in(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """As :meth:`decode`, with dense attention, and what later steps need from this one: for contexts so short that
        nothing is faster. Later steps may differ a little from those behind :meth:`decode`, where attention is looked
        back on."""
        raise NotImplementedError

    @property
    def graph_obstacle(self) -> str:
        """Why no decode step can be captured; empty when it can."""
        return "" if self.graphs else f"a decode step of {self.name} asks the host for numbers that change"

    def pauses(self, decoded: int) -> bool:
        """Whether more is done after the step of a row's ``decoded``-th token since its prompt, see :meth:`keep_up`.

        Such a step is left out of graphs, and must be rare, unless :attr:`records_pauses`.
        """
        return False

    records_pauses: ClassVar[bool] = False
    """Whether that can be captured in a graph of its own."""

    def keep_up(self, cache: SlotCache) -> None:
        """What some steps are followed by; outside of replayed ones :meth:`decode` does it itself."""
        raise NotImplementedError

    def numbers_after(self, rows: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """Numbers of the rows that a recorded :meth:`keep_up` changes, as it leaves them."""
        return {}

    # Settings

    def settings(self) -> dict[str, Any]:
        """The settings as JSON-able values, without those that came later and change nothing, see :func:`setting`."""
        values = {field: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            field.name: value
            for field, value in values.items()
            if not (field.metadata.get("later") and value == field.metadata["before"])
        }

    @functools.cached_property
    def spec(self) -> str:
        """The method in one string that :func:`parse` reads back: only settings that differ from the defaults."""
        return self._spell({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @classmethod
    def _spell(cls, settings: dict[str, Any]) -> str:
        changed = [
            f"{field.name}={_format(settings[field.name])}"
            for field in dataclasses.fields(cls)
            if field.name in settings
            and _format(settings[field.name]) != _format(field.default)  # 1 is a number, 1.0 a share
        ]
        return cls.name + (":" + ",".join(changed) if changed else "")

    def changed(self, **settings: Any) -> Method:
        """The method with some settings replaced."""
        return dataclasses.replace(self, **settings)

    # Checks for subclasses

    def _check(self, name: str, allowed: bool, rule: str) -> None:
        if not allowed:
            raise ValueError(f"{self.name}: {name} must be {rule}, not {getattr(self, name)!r}")

    def _check_count(self, name: str, least: int = 0) -> None:
        value = getattr(self, name)
        ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
        self._check(name, ok, f"an integer of at least {least}")

    def _check_budget(self, name: str, least: int = 1) -> None:
        value = getattr(self, name)
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
        share = isinstance(value, float) and 0.0 < value <= 1.0
        self._check(name, whole or share, f"an integer of at least {least} (a number) or a float in (0, 1] (a share)")

    def _check_choice(self, name: str, *choices: str) -> None:
        self._check(name, getattr(self, name) in choices, "one of " + ", ".join(choices))


def budget(value: int | float, length: Number, least: int = 0) -> int | Number:
    """What a budget comes to in a context of ``length``: an int is itself, a float is a share, never below ``least``.

    An int64 tensor of lengths gives, on its device, the same numbers as its elements one by one. Raises nothing: values
    are checked when a method is made.
    """
    if not isinstance(value, float):
        return value
    if isinstance(length, Tensor):
        return (value * length.double() + 1e-9).floor().long().clamp_min(least)
    return max(math.floor(value * length + 1e-9), least)


def names() -> list[str]:
    """Registered methods, sorted."""
    return sorted(REGISTRY)


def get(name: str) -> type[Method]:
    """The class of a method.

    Raises:
        ValueError: when the name is unknown; names the nearest.
    """
    if name not in REGISTRY:
        raise ValueError(f"unknown method {name!r}{_nearest(name, names())}; known are {', '.join(names())}")
    return REGISTRY[name]


def make(method: str | Method, **settings: Any) -> Method:
    """A method from its name or spec string and settings, or a method itself with settings replaced.

    Raises:
        ValueError: for an unknown method or setting (the nearest is named) or a value out of range.
    """
    if isinstance(method, Method):
        _check_known(type(method), settings)
        return method.changed(**settings) if settings else method
    if not isinstance(method, str):
        raise ValueError(f"method must be a name, a spec string or a Method, not {type(method).__name__}")
    cls, given = _read(method)
    _check_known(cls, settings)
    return cls(**(given | settings))


def recorded(method: str, **settings: Any) -> Method:
    """The method of :meth:`Method.settings` on record: what is not among them is as it was before it came.

    Raises:
        ValueError: as :func:`make`.
    """
    return make(method, **complete(method, settings))


def complete(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a row in terms of the present ones, in methods within settings as well.

    Settings added since the row was written get the value that the method had before. Retired settings are left out if
    they have the value of :attr:`Method.retired`; another value stays, so that :func:`make` refuses it.
    """
    cls = get(method)
    since = {field.name: field.metadata.get("before") for field in dataclasses.fields(cls)}
    present = {
        name: _completed(value)
        for name, value in settings.items()
        if name not in cls.retired or value != cls.retired[name]
    }
    return {name: value for name, value in since.items() if value is not None} | present


def _completed(value: Any) -> Any:
    """A recorded value, in which every method written as ``{"method": name, ...}`` has its present settings."""
    if not isinstance(value, Mapping):
        return value
    if isinstance(value.get("method"), str):
        inner = {name: setting for name, setting in value.items() if name != "method"}
        return {"method": value["method"], **complete(value["method"], inner)}
    return {name: _completed(inner) for name, inner in value.items()}


def parse(spec: str) -> Method:
    """A method from ``name`` or ``name:setting=value,...``; inverse of :attr:`Method.spec`."""
    return make(spec)


def spelled(spec: str) -> str:
    """A spec in the order of :attr:`Method.spec` and without defaults; a file that it names need not be there.

    Raises:
        ValueError: for an unknown method or setting (the nearest is named).
    """
    cls, given = _read(spec)
    return cls._spell(given)


def _read(spec: str) -> tuple[type[Method], dict[str, Any]]:
    """The class that a spec names, and the settings that it gives."""
    name, _, rest = spec.partition(":")
    cls = get(name.strip())
    given = _split(rest, spec)
    _check_known(cls, given)
    return cls, given


def _split(text: str, spec: str) -> dict[str, Any]:
    pairs: list[tuple[str, Any]] = []
    for piece in re.findall(r"""(?:"(?:\\.|[^"])*"|\{[^}]*\}|\[[^]]*\]|[^,])+""", text):
        if not piece.strip():
            continue
        key, equals, value = piece.partition("=")
        if not equals:
            hint = f" (write lists in brackets: {pairs[-1][0]}=[...])" if pairs and piece.strip().isdigit() else ""
            raise ValueError(f"{spec!r}: expected setting=value, found {piece.strip()!r}{hint}")
        try:
            read = json.loads(value, object_pairs_hook=functools.partial(_each_once, spec))
        except json.JSONDecodeError:
            read = {"True": True, "False": False, "None": None}.get(value.strip(), value.strip())
        pairs.append((key.strip(), read))
    return _each_once(spec, pairs)


def _each_once(spec: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Settings, or a JSON object within one, of which a spec may give none twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{spec!r}: {key} is given twice, as {_format(found[key])} and as {_format(value)}")
        found[key] = value
    return found


def _format(value: Any) -> str:
    return value if isinstance(value, str) and value.isidentifier() else json.dumps(value)


def _check_known(cls: type[Method], settings: dict[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(cls)]
    for key in settings:
        if key not in known:
            raise ValueError(
                f"{cls.name} has no setting {key!r}{_nearest(key, known)}; "
                + (f"it has {', '.join(known)}" if known else "it has none")
            )


def _nearest(word: str, words: list[str]) -> str:
    near = difflib.get_close_matches(word, words, 1, 0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def clamp(number: int | Number, low: int, high: Number) -> Number:
    """At least ``low`` and, above all, at most ``high``; of ints, or of each in an int64 tensor."""
    if isinstance(number, Tensor):
        number = number.clamp_min(low)
        return number.minimum(high) if isinstance(high, Tensor) else number.clamp_max(high)
    number = max(number, low)
    return high.clamp_max(number) if isinstance(high, Tensor) else min(number, high)


def recent(cache: SlotCache, window: int) -> Tensor:
    """bool ``[B, Hkv or 1, used]``: the slots whose tokens are among the last ``window`` of their row."""
    return cache.positions >= cache.each_row(operator.sub, window)[:, None, None]

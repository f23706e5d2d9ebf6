"""The base class of methods. A method decides, for one attention layer, what a query reads and what the cache keeps.

It is a policy built from the verbs of :mod:`foveate.ops` (score, select, attend, compress, retain). The engine calls
its hooks in prefill (``prompt``, ``observe``, ``prompt_end``) and in decode (``note_newest``, ``choose``, ``learn``,
``evict``), and adapts to the facts that the class declares.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._declared import check_names
from foveate.methods._facts import About, Fetches, Observation, Replay, Role
from foveate.methods._settings import Settings
from foveate.methods._settings import redefined as redefined
from foveate.methods._settings import setting as setting
from foveate.methods.budgets import Number
from foveate.state import Channel, Evicts, Geometry, RowNumber, SlotCache

REGISTRY: dict[str, type[Method]] = {}

SPARSE_FROM_TOKENS = 32768
"""Usual :attr:`Method.sparse_from_tokens` (docs/guide/speed.md)."""
NEVER_FASTER = 1 << 40
""":attr:`Method.sparse_from_tokens` of a method that is slower than dense attention at every length: a GPU decodes
densely unless a user asks otherwise."""

_LOGITS = 1 << 26
"""Logits that a later turn of a prompt computes at once beside empty slots."""


@dataclass(frozen=True)
class Method(Settings):
    """A policy for one attention layer. Subclasses are frozen dataclasses whose fields are the settings.

    A subclass with a ``name`` is known by it once :func:`register` decorates it. Hooks get caches without padding that
    already hold the new tokens. In prefill all rows that a hook sees have the same length: rows of a padded batch come
    one at a time. In decode rows may differ, and :meth:`SlotCache.stored` says which slots hold tokens.

    Declared facts: the class attributes below tell the cache and the engine what they may do. The engine reads them
    from the layer's instance, which :meth:`for_layer` returns. A fact marked *per class* is a ClassVar, the same under
    all settings and in all layers. One marked *per settings* may also be a property that depends on the settings or on
    the layer. ``tests/matrix.py`` tests most declarations.
    """

    about: ClassVar[About] = About("", "", {}, {}, False)
    """What the method is, for people and tests. Per class."""

    # What the cache may assume

    evicts: ClassVar[Evicts] = Evicts.NEVER
    """When the method removes tokens from the cache: at the end of a prompt alone, or in decode steps too. The latter
    excludes channels per page, and keys in blocks. Per class; :attr:`Evicts.UNEVENLY` may depend on the
    settings."""
    stateful: ClassVar[bool] = True
    """Whether a decoded token changes more than cropping the cache undoes, such as channels without ``recomputed`` or
    evicted slots. Undoing tokens then needs snapshots. Per class."""

    fetches: ClassVar[Fetches | None] = None
    """What decode steps read by :meth:`SlotCache.fetch`, so that keys and values may be in host memory; None: they
    read them otherwise. Per settings."""

    # What outputs depend on

    needs_prompt_end: ClassVar[bool] = False
    """Whether outputs of later tokens depend on where the prompt ended. True of every method that treats decoded tokens
    otherwise than prompt tokens, such as all with dense prefill and sparse decode, also without state. If False, the
    engine calls :meth:`prompt_end` after each chunk of a prompt, not only at its end. Per settings: a layer that is
    dense, or that treats all tokens alike, declares False."""

    allows_eviction: ClassVar[Evicts] = Evicts.NEVER
    """Of a method that selects: which evictions of another method its hooks allow, so that a composition ``A+B`` can
    have it as B. Under :attr:`Evicts.AT_PROMPT_END` hooks number slots by the row numbers ``counts``, and not by
    ``lengths``, and :meth:`rebuild` fills channels anew. Under :attr:`Evicts.IN_DECODE` they also hold for slots
    without order, of which some are empty (``positions`` -1). :attr:`Evicts.UNEVENLY` beside one of the two: KV heads
    may hold different numbers of tokens. Per settings."""
    prompt_evicts_every: ClassVar[int] = 0
    """Prompt tokens after which :meth:`prompt_end` evicts although more of the prompt is to come, counted from the
    prompt's first token in each row; 0: at its end alone. Per settings."""
    needs_rotary: ClassVar[bool] = False
    """Whether hooks read :attr:`SlotCache.rotary`, the layer's rotary positions. An engine gives them, or refuses the
    model. Per settings."""

    # How decode steps may be run

    sparse_from_tokens: ClassVar[int | None] = None
    """Tokens, of all sequences together, from which sparse decoding on a GPU is faster than reading all keys, where a
    layer has eight KV heads of 128; see :meth:`Geometry.at_least`. 0: decoding is sparse at any length unless a user
    asks otherwise, as of a method whose speed nobody knows. None: every decode step is sparse. Per settings."""
    needs_mass: ClassVar[bool] = False
    """Whether :meth:`learn` needs the mass of the attention where all keys are read. Per settings."""
    scored_at: ClassVar[str] = ""
    """Of a method that keeps scores for several steps, the channel ``[B]`` that has the length at which each row was
    last scored: a step counts :meth:`scored` of the rows that it scores. Empty: each step scores every row. Per
    settings."""
    replay: ClassVar[Replay | None] = None
    """How decode steps are captured in CUDA graphs; None: never, because a step reads row numbers on the host. Whether
    it is None is per class; a property of the settings returns a :class:`Replay`, with an ``obstacle`` if need be."""
    per_request: ClassVar[str] = ""
    """Why requests that share an engine's blocks of keys cannot be decoded together, and the remedy, such as "weighs
    channels of keys by a request's queries: add weighted=false"; empty when they can. Per settings."""
    dense_prompts_by: ClassVar[str] = ""
    """The setting that makes prompts dense, such as "decode_only=true", for errors; empty when there is none. Per
    class."""
    pools_layer_by: ClassVar[str] = ""
    """The setting that makes :attr:`pools_layer` true, for errors; empty when there is none. Per class."""
    pools_layer: ClassVar[bool] = False
    """Whether all heads of a layer share what they read. Over the ranks of an engine's tensor parallelism they choose
    it together: :meth:`SlotCache.mean_over_ranks`, :meth:`SlotCache.of_all_heads`. Per settings."""
    counters: ClassVar[tuple[str, ...]] = ()
    """The method's own counters, to which hooks add with :meth:`SlotCache.count`. Decode steps add to
    two of them themselves, where they are declared: "indices_reused" counts steps in which a layer reads another's
    choice, "pages_refined" the refined pages of a cover. Per settings."""

    # What the layer gets from elsewhere

    _artefact: ClassVar[Any] = None
    """Data made for one model, such as a calibration. Set on the layer's instance by :meth:`for_layer`."""

    @functools.cached_property
    def role(self) -> Role:
        """What this layer does with a decoded token; measurements group layers by its name."""
        return Role(self.name, chooses=type(self).choose is not Method.choose)

    def __init_subclass__(cls, **kwargs: Any):
        """Raises ValueError for a name that cannot be in a spec, and for a misspelt hook."""
        super().__init_subclass__(**kwargs)
        check_names(cls, Method)
        if "about" in vars(cls):
            cls.about = cls.about.completed_by(super(cls, cls).about)

    @property
    def parts(self) -> tuple[Method, ...]:
        """The methods whose hooks a layer runs: itself, or those of a composition."""
        return (self,)

    def with_full_budget(self) -> Method | None:
        """A method of this class that leaves nothing out, by :attr:`About.full_budget`; None: none is declared."""
        declared = self.about.full_budget
        return None if declared is None else type(self)(**declared)

    # Hooks

    def for_model(self, facts: Callable[[], Mapping[str, Any]]) -> Method:
        """The method for one model, by default the same for all; called before :meth:`for_layer`. It may warn of what a
        user should know before relying on these settings, and refuse a model that a file of the method is not for.

        Args:
            facts: gives what tells the model from others, as :meth:`foveate.calibration.Calibration.check_model` takes.
        """
        return self

    def for_layer(self, layer: int, num_layers: int, among: Sequence[int] | None = None) -> Method:
        """The method of one layer, by default the same for all.

        Args:
            layer: index of the layer.
            num_layers: layers of the model.
            among: the layers that the method is applied to, ascending; None: all.
        """
        return self

    def for_shared_blocks(self) -> Method:
        """The method where nobody has set anything and an engine's requests share blocks of keys; by default itself."""
        return self

    def channels(self, geometry: Geometry) -> Mapping[str, Channel | RowNumber]:
        """The state that the cache keeps for the method, by name: tensors, and numbers of each row."""
        return {}

    def prompt(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Attended:
        """Attention of prompt queries ``q [B, Hq, n, D]``, whose tokens are in the last n slots; dense by default.

        Slots that are empty because KV heads hold different numbers of tokens are left out.
        """
        need_lse = self.observation is not None and self.observation.needs_lse
        offset, k, v = cache.used - q.shape[2], cache.keys, cache.values
        logits = cache.logits(scaling)
        if not (cache.uneven and offset):
            return ops.attend_causal(q, ops.KV(k, v), logits=logits, offset=offset, need_lse=need_lse)
        how = {"logits": logits.without_sinks(), "need_lse": True}
        own = ops.attend_causal(q, ops.KV(k[:, :, offset:], v[:, :, offset:]), **how)
        before = ops.KV(k[:, :, :offset], v[:, :, :offset])
        there = cache.positions[:, :, None, :offset] >= 0
        step = max(1, _LOGITS // (q.shape[0] * q.shape[1] * offset))
        parts = [ops.attend(part, before, mask=there, **how) for part in q.split(step, 2)]
        held = ops.Attended(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))
        return ops.with_sinks(ops.merge([held, own]), logits.sinks)

    def prompt_tile(self, group: int) -> int | None:
        """Size in tokens of the tiles whose queries share one selection in prefill, counted from a row's first token.

        A token may change outputs of earlier tokens in its own tile. A prompt in chunks that end between tiles gives
        the outputs of the same prompt in one piece; other chunks need not. 1: outputs are strictly causal, and any
        chunks do. 0: the prompt is dense: every token reads all earlier ones, and any chunks do. None: the prompt is
        one tile, must come in one chunk, and the cache takes no second prompt. By default 1 where :meth:`prompt` is
        overridden, else 0.

        Args:
            group: query heads of a KV head.
        """
        return 0 if type(self).prompt is Method.prompt else 1

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        """Fill channels from prompt queries; called after :meth:`prompt` for each chunk, when there is a cache.

        It must change nothing else, so that several methods can observe one prompt.

        Args:
            q: ``[B, Hq, n, D]``, whose tokens are in the last n slots.
            attended: result of :meth:`prompt`; its log-sum-exp is there if the :attr:`observation` needs it.
        """

    @property
    def observation(self) -> Observation | None:
        """What :meth:`observe` computes; None: nothing. See :class:`~foveate.methods.SharedPrompt`."""
        return None if type(self).observe is Method.observe else Observation(self)

    def prompt_end(self, cache: SlotCache, scaling: float) -> Tensor | None:
        """Called when the prompt is complete: returns the slots to keep, int64 ``[B, Hkv, K]`` or, for all rows and
        heads, ``[K]``; None: all.

        A method that evicts :attr:`~Evicts.UNEVENLY` may give -1 for none, and other numbers of slots to each KV head.
        """
        return None

    def prompt_packed(self, cache: SlotCache) -> None:
        """Called after :meth:`prompt_end`, when the kept tokens fill the first slots: fill channels per page."""

    def rebuild(self, cache: SlotCache) -> None:
        """Called in place of :meth:`prompt_end` and :meth:`prompt_packed` where another method decides what is kept
        (:attr:`allows_eviction`): fill channels that stand for keys anew, for the tokens in the first ``cache.used``
        slots. Channels with an entry for each slot have moved with the tokens, those for each page are 0."""

    def note_newest(self, cache: SlotCache, q: Tensor) -> None:
        """Called first in each decode step, also in a dense one, when keys and values are written: bring channels up to
        date with the token, whose queries are ``q [B, Hq, 1, D]``."""

    def choose(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Choice | Tensor | None:
        """What one token a row reads, ``q [B, Hq, 1, D]``: a bool mask, broadcastable to ``[B, Hkv, used]``, in which
        empty slots may be True; or a :class:`~foveate.ops.Choice`; None: all keys that the cache holds, the default.

        It is not called in the steps of a layer that reads the choice of an earlier one (:attr:`role`), nor while the
        context is too short for sparsity to pay.
        """
        return None

    def choose_by(self, cache: SlotCache, scores: Tensor) -> ops.Choice:
        """What later layers read, by the ``scores`` that this layer's :attr:`Choice.scores` has asked for."""
        raise NotImplementedError

    def learn(self, cache: SlotCache, choice: ops.Choice, attended: ops.Attended) -> None:
        """Called after the attention of each decode step: update what later steps need of it.

        Args:
            choice: what was read.
            attended: its ``mass`` is there where :attr:`needs_mass` or ``choice.need_mass`` has asked for it; of a
                choice with ``scores`` it has these.
        """

    def evict(self, cache: SlotCache, scaling: float) -> None:
        """Called last in each decode step of a method that evicts :attr:`~Evicts.IN_DECODE`: call
        :meth:`SlotCache.evict` for what leaves."""
        raise NotImplementedError

    def attended_keys(self, tokens: int) -> int | None:
        """Keys that a sparse decode step attends to in each KV head, of so many ``tokens``; None, the default of layers
        that do not read all: not known before the step. :meth:`scored` comes on top."""
        return tokens if self.role.reads_all else None

    def scored(self, tokens: Number, geometry: Geometry, dtype: torch.dtype) -> float | Tensor:
        """Bytes that a decode step reads to score ``tokens`` keys, in units of a key and its value; 0 by default.

        Reading the selected keys counts separately: a whole key that is scored and then read counts
        ``geometry.key_share + 1``. SparQ, which scores r dimensions of each key, declares
        ``tokens * r / (geometry.head_dim + geometry.value_dim)``. A quantized copy of the keys counts by its own bytes,
        and a page's summary by its bytes over those of the page's keys and values. Every step in which :meth:`choose`
        names keys or pages counts this. Layers of equal spec and role that score keys must score alike.

        Args:
            tokens: an int; or tokens of each row as whole numbers in fp64, ``[B]``, for a result ``[B]``.
            dtype: of the keys and values in the cache.
        """
        return tokens * 0.0


Registered = TypeVar("Registered", bound=type[Method])


def register(cls: Registered | None = None, /, *, replaces: bool = False) -> Any:
    """Decorate a class of methods: make it a frozen dataclass, and known by its name.

    A setting that the class inherits and sets as a plain attribute, such as ``sinks = 0``, is no setting of the class.

    Args:
        replaces: whether the class may take the name of a method that is defined elsewhere.

    Raises:
        ValueError: for a name that belongs to another class, and for a class without a name of its own.
    """
    if cls is None:
        return functools.partial(register, replaces=replaces)
    if "name" not in cls.__dict__:
        raise ValueError(f"{cls.__qualname__} of {cls.__module__} has no name: write name = '...' in its body")
    fixed = {field.name for field in dataclasses.fields(cls)} & cls.__dict__.keys() - cls.__annotations__.keys()
    cls.__annotations__ = {**cls.__annotations__, **dict.fromkeys(fixed, ClassVar[Any])}
    made = dataclass(frozen=True)(cls)
    for there in REGISTRY.values():
        same = (there.__module__, there.__qualname__) == (made.__module__, made.__qualname__)  # defined once more
        taken = made.name == there.name and not same
        if taken and not replaces:
            raise ValueError(
                f"{made.__qualname__} of {made.__module__}: the name {made.name!r} belongs to {there.__qualname__} of "
                f"{there.__module__}; choose another, or write @register(replaces=True)"
            )
    REGISTRY[made.name] = made
    return made


def check_artefacts(methods: Iterable[Method], facts: Callable[[], Mapping[str, Any]]) -> None:
    """Check calibrations, and files of learned scores, of layers' methods.

    Args:
        facts: of the model, as :meth:`foveate.calibration.Calibration.check_model` takes; called where there are any.

    Raises:
        ValueError: for those of another model.
    """
    artefacts = {id(method._artefact): method._artefact for method in methods if method._artefact is not None}
    of_model = facts() if artefacts else {}
    for artefact in artefacts.values():
        artefact.check_model(of_model)


def sparse_prompt(method: Method) -> bool:
    """Whether prompt tokens do not read all earlier ones."""
    return method.prompt_evicts_every > 0 or method.prompt_tile(1) != 0


def replay_obstacle(method: Method) -> str:
    """Why no decode step of a method can be captured; empty when steps can."""
    if method.replay is None:
        name = next((one.name for one in method.parts if one.replay is None), method.name)
        return f"a decode step of {name} reads numbers on the host that change from step to step"
    return method.replay.obstacle

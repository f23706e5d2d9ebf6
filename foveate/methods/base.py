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
"""The value of :attr:`Method.sparse_from_tokens` for a method that is slower than dense attention at every length. A
GPU then decodes densely unless a user asks otherwise."""

_LOGITS = 1 << 26
"""The largest number of logits that a later turn of a prompt computes at once when KV heads have empty slots."""


@dataclass(frozen=True)
class Method(Settings):
    """A policy for one attention layer. Subclasses are frozen dataclasses whose fields are the settings.

    :func:`register` makes a subclass known by its ``name``. Hooks get caches without padding that already hold the new
    tokens. In prefill all rows that a hook sees have the same length; the rows of a padded batch come one at a time. In
    a decode step rows may have different lengths, and :meth:`SlotCache.stored` returns the slots that hold tokens.

    Declared facts: the class attributes below tell the cache and the engine what they may do. The engine reads them
    from the layer's instance, which :meth:`for_layer` returns. A fact marked *per class* is a ClassVar, the same under
    all settings and in all layers. One marked *per settings* may also be a property that depends on the settings or on
    the layer. ``tests/matrix.py`` tests most declarations.
    """

    about: ClassVar[About] = About("", "", {}, {}, False)
    """What the method is, for people and tests. Per class."""

    # What the cache may assume

    evicts: ClassVar[Evicts] = Evicts.NEVER
    """When the method removes tokens from the cache: at the end of a prompt alone, or in decode steps, too. A method
    that evicts in decode steps can have neither channels per page nor keys in blocks. Per class;
    :attr:`Evicts.UNEVENLY` may depend on the settings."""
    stateful: ClassVar[bool] = True
    """Whether a decoded token changes state that cropping the cache cannot restore, such as evicted slots or channels
    without ``recomputed``. Undoing tokens then needs snapshots. Per class."""

    fetches: ClassVar[Fetches | None] = None
    """The pages that decode steps read by :meth:`SlotCache.fetch`, which lets keys and values be in host memory.
    None: decode steps read keys and values in another way. Per settings."""

    # What outputs depend on

    needs_prompt_end: ClassVar[bool] = False
    """Whether outputs of later tokens depend on where the prompt ended. This is True of every method that treats
    decoded tokens otherwise than prompt tokens, such as all methods with dense prefill and sparse decode, even without
    state. If it is False, the engine calls :meth:`prompt_end` after each chunk of a prompt, not only at its end. Per
    settings: a layer that is dense, or that treats all tokens alike, declares False."""

    allows_eviction: ClassVar[Evicts] = Evicts.NEVER
    """The evictions of another method that the hooks of this method, which selects, allow. A composition ``A+B`` can
    have this method as B only if A evicts in a way that is allowed here. Under :attr:`Evicts.AT_PROMPT_END` hooks
    number slots by the row numbers ``counts``, not by ``lengths``, and :meth:`rebuild` fills channels anew. Under
    :attr:`Evicts.IN_DECODE` hooks also work with slots in any order and with empty slots (``positions`` -1). With
    :attr:`Evicts.UNEVENLY` beside one of the two, KV heads may hold different numbers of tokens. Per settings."""
    prompt_evicts_every: ClassVar[int] = 0
    """Number of prompt tokens after which :meth:`prompt_end` evicts although more of the prompt is to come, counted
    from the prompt's first token in each row. 0: it evicts at the prompt's end alone. Per settings."""
    needs_rotary: ClassVar[bool] = False
    """Whether hooks read :attr:`SlotCache.rotary`, the layer's rotary positions. An engine provides them, or refuses
    the model. Per settings."""

    # How decode steps may be run

    sparse_from_tokens: ClassVar[int | None] = None
    """Tokens of all sequences together from which sparse decoding on a GPU is faster than reading all keys, in a layer
    with eight KV heads of 128 dimensions; see :meth:`Geometry.at_least`. Shorter contexts decode densely. 0: nobody has
    measured the method's speed, and decoding is sparse at any length unless a user asks otherwise. None: every decode
    step is sparse. Per settings."""
    needs_mass: ClassVar[bool] = False
    """Whether :meth:`learn` needs the attention mass of steps that read all keys. Per settings."""
    scored_at: ClassVar[str] = ""
    """Name of the channel ``[B]`` with the length at which each row was last scored, in a method that keeps scores for
    several steps. A step then counts :meth:`scored` only for the rows that it scores. Empty: each step scores every
    row. Per settings."""
    replay: ClassVar[Replay | None] = None
    """How decode steps are captured in CUDA graphs. None: never, because a step reads row numbers on the host. Whether
    it is None is per class; a property of the settings returns a :class:`Replay`, with an ``obstacle`` where it has
    one."""
    per_request: ClassVar[str] = ""
    """Why requests that share an engine's blocks of keys cannot be decoded together, and the remedy, such as "weighs
    channels of keys by a request's queries: add weighted=false"; empty when they can. Per settings."""
    dense_prompts_by: ClassVar[str] = ""
    """The setting that makes prompts dense, such as "decode_only=true", for errors; empty when there is none. Per
    class."""
    pools_layer_by: ClassVar[str] = ""
    """The setting that makes :attr:`pools_layer` true, for errors; empty when there is none. Per class."""
    pools_layer: ClassVar[bool] = False
    """Whether all heads of a layer read the same keys. The ranks of an engine's tensor parallelism then choose the keys
    together, by :meth:`SlotCache.mean_over_ranks` and :meth:`SlotCache.of_all_heads`. Per settings."""
    counters: ClassVar[tuple[str, ...]] = ()
    """The method's own counters, to which hooks add with :meth:`SlotCache.count`. A decode step itself adds to two
    counters if they are declared: to "indices_reused" when a layer reads another layer's choice, and to "pages_refined"
    the refined pages of a cover. Per settings."""

    # What the layer gets from elsewhere

    _artefact: ClassVar[Any] = None
    """Data made for one model, such as a calibration. :meth:`for_layer` sets it on the layer's instance."""

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
        """The methods whose hooks a layer runs: this method, or in a composition the two methods that it joins."""
        return (self,)

    def with_full_budget(self) -> Method | None:
        """A method of this class that leaves nothing out, by :attr:`About.full_budget`; None if it declares none."""
        declared = self.about.full_budget
        return None if declared is None else type(self)(**declared)

    # Hooks

    def for_model(self, facts: Callable[[], Mapping[str, Any]]) -> Method:
        """The method for one model, by default this method. It is called before :meth:`for_layer`.

        An override may warn about consequences of the settings for this model. It may refuse a model for which one of
        the method's files, such as a calibration, was not made, by a ValueError.

        Args:
            facts: returns the facts that identify a model, as :meth:`foveate.calibration.Calibration.check_model` takes
                them.
        """
        return self

    def for_layer(self, layer: int, num_layers: int, among: Sequence[int] | None = None) -> Method:
        """The method of one layer, by default this method for every layer.

        Args:
            layer: index of the layer.
            num_layers: layers of the model.
            among: the layers that the method is applied to, ascending; None: all.
        """
        return self

    def for_shared_blocks(self) -> Method:
        """The method for an engine whose requests share blocks of keys, when the user has changed no setting; by
        default this method."""
        return self

    def channels(self, geometry: Geometry) -> Mapping[str, Channel | RowNumber]:
        """The state that the cache keeps for the method, by name: tensors, and numbers of each row."""
        return {}

    def prompt(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Attended:
        """Attention of prompt queries ``q [B, Hq, n, D]``, whose tokens are in the last n slots; dense by default.

        It leaves out slots that are empty because KV heads hold different numbers of tokens.
        """
        need_lse = self.observation is not None and self.observation.needs_lse
        offset, kv, logits = cache.used - q.shape[2], cache.view(), cache.logits(scaling)
        if not (cache.uneven and offset):
            return ops.attend_causal(q, kv, logits=logits, offset=offset, need_lse=need_lse)
        how = {"logits": logits.without_sinks(), "need_lse": True}
        own = ops.attend_causal(q, ops.KV(kv.k[:, :, offset:], kv.v[:, :, offset:]), **how)
        before = ops.KV(kv.k[:, :, :offset], kv.v[:, :, :offset])
        there = cache.positions[:, :, None, :offset] >= 0
        step = max(1, _LOGITS // (q.shape[0] * q.shape[1] * offset))
        parts = [ops.attend(part, before, mask=there, **how) for part in q.split(step, 2)]
        held = ops.Attended(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))
        return ops.with_sinks(ops.merge([held, own]), logits.sinks)

    def prompt_tile(self, group: int) -> int | None:
        """Size in tokens of the tiles whose queries share one selection in prefill, counted from a row's first token.

        A token may change outputs of earlier tokens in its own tile. If each chunk of a prompt ends between tiles, the
        outputs equal the outputs for the prompt in one piece; with other chunks they may differ. By default 1 where
        :meth:`prompt` is overridden, else 0.

        Args:
            group: query heads of a KV head.

        Returns:
            The size; 1: outputs are strictly causal, and chunks may have any size. 0: the prompt is dense, every token
            reads all earlier tokens, and chunks may have any size. None: the prompt is one tile and must come in one
            chunk, and the cache takes no second prompt.
        """
        return 0 if type(self).prompt is Method.prompt else 1

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        """Fill channels from prompt queries. It is called after :meth:`prompt` for each chunk when there is a cache.

        It must change nothing else, so that several methods can observe one prompt.

        Args:
            q: ``[B, Hq, n, D]``; the queries' tokens are in the last n slots.
            attended: result of :meth:`prompt`. It has a log-sum-exp if the :attr:`observation` needs one.
        """

    @property
    def observation(self) -> Observation | None:
        """What :meth:`observe` computes; None: it computes nothing. See :class:`~foveate.methods.SharedPrompt`."""
        return None if type(self).observe is Method.observe else Observation(self)

    def prompt_end(self, cache: SlotCache, scaling: float) -> Tensor | None:
        """Called when the prompt is complete. Returns the slots to keep: int64 ``[B, Hkv, K]``, or ``[K]`` for all rows
        and heads; None: all slots.

        A method that evicts :attr:`~Evicts.UNEVENLY` may keep different numbers of slots in the KV heads; -1 then fills
        the places that a head does not need.
        """
        return None

    def prompt_packed(self, cache: SlotCache) -> None:
        """Called after :meth:`prompt_end`, when the kept tokens are in the first slots, to fill channels per page."""

    def rebuild(self, cache: SlotCache) -> None:
        """Called in place of :meth:`prompt_end` and :meth:`prompt_packed` when another method decides what is kept
        (:attr:`allows_eviction`). It fills the channels that are computed from keys anew, for the tokens in the first
        ``cache.used`` slots. Channels with an entry per slot have moved with the tokens; channels per page are 0."""

    def note_newest(self, cache: SlotCache, q: Tensor) -> None:
        """Called first in each decode step, also in a dense step, after the keys and values are written. It updates
        channels for the new token, whose queries are ``q [B, Hq, 1, D]``."""

    def choose(self, cache: SlotCache, q: Tensor, scaling: float) -> ops.Choice | Tensor | None:
        """The keys that one token a row reads, given its queries ``q [B, Hq, 1, D]``.

        It is called neither in a layer that reads the choice of an earlier layer (:attr:`role`) nor while the context
        is too short for sparsity to pay.

        Returns:
            A bool mask that broadcasts to ``[B, Hkv, used]``, in which empty slots may be True; or a
            :class:`~foveate.ops.Choice`; or None, the default, for all keys that the cache holds.
        """
        return None

    def choose_by(self, cache: SlotCache, scores: Tensor) -> ops.Choice:
        """The keys that later layers read, chosen by the ``scores`` for which this layer's choice asked by
        :attr:`Choice.scores`."""
        raise NotImplementedError

    def learn(self, cache: SlotCache, choice: ops.Choice, attended: ops.Attended) -> None:
        """Called after the attention of each decode step, to update what later steps need.

        Args:
            choice: the keys that were read.
            attended: the result. It has a ``mass`` if :attr:`needs_mass` or ``choice.need_mass`` asks for one, and the
                scores if the choice asks for ``scores``.
        """

    def evict(self, cache: SlotCache, scaling: float) -> None:
        """Called last in each decode step of a method that evicts :attr:`~Evicts.IN_DECODE`. It calls
        :meth:`SlotCache.evict` for the token that leaves."""
        raise NotImplementedError

    def attended_keys(self, tokens: int) -> int | None:
        """The number of keys to which a sparse decode step attends in each KV head when a row holds ``tokens`` tokens.

        None means that the number is not known before the step; it is the default of layers that do not read all keys.
        Keys that are read to be scored are not included; see :meth:`scored`.
        """
        return tokens if self.role.reads_all else None

    def scored(self, tokens: Number, geometry: Geometry, dtype: torch.dtype) -> float | Tensor:
        """What a decode step reads to score ``tokens`` keys, in units of the bytes of a key and its value; 0 by
        default.

        Reading the selected keys counts separately: a whole key that is scored and then read counts
        ``geometry.key_share + 1``. SparQ, which scores r dimensions of each key, declares
        ``tokens * r / (geometry.head_dim + geometry.value_dim)``. A quantized copy of the keys counts by its own bytes.
        A page's summary counts by its bytes divided by the bytes of the page's keys and values. Every step in which
        :meth:`choose` names keys or pages adds this number. Layers of equal spec and role that score keys must score
        alike.

        Args:
            tokens: an int; or the tokens of each row as whole numbers in fp64, ``[B]``, for a result ``[B]``.
            dtype: dtype of the keys and values in the cache.
        """
        return tokens * 0.0


Registered = TypeVar("Registered", bound=type[Method])


def register(cls: Registered | None = None, /, *, replaces: bool = False) -> Any:
    """Decorate a class of methods: make it a frozen dataclass, and register it by its name.

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
    """Check that the calibrations and files of learned scores that layers' methods use were made for the model.

    Args:
        facts: returns the model's facts, as :meth:`foveate.calibration.Calibration.check_model` takes them. It is
            called only if a method has such an artefact.

    Raises:
        ValueError: for an artefact of another model.
    """
    artefacts = {id(method._artefact): method._artefact for method in methods if method._artefact is not None}
    of_model = facts() if artefacts else {}
    for artefact in artefacts.values():
        artefact.check_model(of_model)


def sparse_prompt(method: Method) -> bool:
    """Whether some prompt tokens do not read all earlier tokens."""
    return method.prompt_evicts_every > 0 or method.prompt_tile(1) != 0


def replay_obstacle(method: Method) -> str:
    """Why no decode step of a method can be captured; empty when steps can be captured."""
    if method.replay is None:
        name = next((one.name for one in method.parts if one.replay is None), method.name)
        return f"a decode step of {name} reads numbers on the host that change from step to step"
    return method.replay.obstacle

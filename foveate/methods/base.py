"""What a method is: a policy over the five verbs, per layer, in prefill and in decode."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._settings import Settings
from foveate.methods._settings import setting as setting
from foveate.methods.budgets import Number
from foveate.state import Channel, Geometry, SlotCache

REGISTRY: dict[str, type[Method]] = {}


class Replay:
    """Decode steps that can be captured as CUDA graphs and replayed, with nothing to be done between two steps.

    A method declares one as :attr:`Method.replay`. Its ``decode`` asks for numbers of rows by their rules alone, see
    :class:`~foveate.state.row_numbers.RowNumbers`, and for nothing else that changes from step to step. A subclass
    declares maintenance: work that follows some steps, such as LuKA's new pages. ``decode`` does it itself, except in
    captured steps, whose caller runs :meth:`maintain`.

    Args:
        obstacle: why no step can be captured under the method's settings; empty when steps can.
    """

    maintains: ClassVar[bool] = False
    """Whether maintenance follows some steps."""
    captures_maintenance: bool = False
    """Whether maintenance can be captured in a graph of its own. If not, the steps that it follows are not replayed,
    and must be rare."""

    def __init__(self, obstacle: str = ""):
        self.obstacle = obstacle

    def maintenance_due(self, decoded: int) -> bool:
        """Whether maintenance follows the step of a row's ``decoded``-th token since its prompt."""
        return False

    def maintain(self, cache: SlotCache) -> None:
        """Do the maintenance of one layer, for all rows of its cache."""
        raise NotImplementedError

    def rows_after_maintenance(self, rows: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """The rows' numbers that captured maintenance changes on the device, as it leaves them."""
        return {}


@dataclass(frozen=True)
class Method(Settings):
    """A policy for one attention layer. Subclasses are frozen dataclasses whose fields are the settings.

    A subclass with a ``name`` registers itself. The hooks get packed caches without padding. In a prompt every row that
    a hook sees has the same length: rows of a padded batch arrive one at a time. In decode rows may differ, and
    :meth:`SlotCache.holes` says which slots are empty. The new tokens are already in the cache.
    """

    source: ClassVar[str] = ""
    """Paper that the method comes from."""
    full_budget: ClassVar[dict[str, Any]] = {}
    """Settings under which nothing of any context is left out."""
    small_budget: ClassVar[dict[str, Any]] = {}
    """Settings under which a context of some sixty tokens is already sparse."""

    # What the cache and the engine have to know

    evicts: ClassVar[bool] = False
    """Whether slots are given up for good."""
    uneven: ClassVar[bool] = False
    """Whether the KV heads of a layer may hold different numbers of tokens."""
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
    estimates_mass: ClassVar[bool] = False
    """Whether a decode step counts ``mass_read``, see :class:`~foveate.state.Counters`."""
    can_decode_dense: ClassVar[bool] = False
    """Whether a decode step may read everything instead, see :meth:`decode_dense`."""
    sparse_from_tokens: ClassVar[int] = 16384
    """Tokens, of all sequences together, from which sparse decoding on a GPU is faster than dense (docs/decode.md)."""
    replay: ClassVar[Replay | None] = None
    """How decode steps are captured in CUDA graphs; None: a step asks the host for numbers that change."""

    self_calibrating: ClassVar[bool] = False
    """Whether the first long prompt decides what the method's layers do."""
    artefact: ClassVar[Any] = None
    """What was made for one model, with ``check_model(facts, source)``, which :func:`foveate.attach` calls."""
    artefact_file: ClassVar[str] = ""
    """The file that :attr:`artefact` was read from."""

    @property
    def role(self) -> str:
        """What this layer does with a decoded token, in a word by which measurements name it."""
        return self.name

    reads_choice_of: ClassVar[int | None] = None
    """The earlier layer whose choice of keys this layer reads; None: no other layer's."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            REGISTRY[cls.name] = cls

    # Policy

    def for_layer(self, layer: int, num_layers: int, among: Sequence[int] | None = None) -> Method:
        """The method of one layer; composed methods differ from layer to layer.

        Args:
            among: the layers that the method is applied to, ascending; None for all.
        """
        return self

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

    def prompt_tile(self, group: int) -> int:
        """Tokens of a prompt that choose what they read together, counted from a row's first token.

        Pieces of a prompt that end between tiles give what one piece gives; others need not. 1: any pieces do.

        Args:
            group: query heads of a KV head.
        """
        return 1

    def observe(self, cache: SlotCache, q: Tensor, attended: ops.Attended, scaling: float) -> None:
        """Learn from prompt queries; called after :meth:`prompt`, chunk by chunk, when there is a cache.

        Fills channels and changes nothing else, so that several methods can learn from one prompt.
        """

    @property
    def observes(self) -> bool:
        """Whether :meth:`observe` wants the log-sum-exp of prompt queries."""
        return False

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

    def decode_dense(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """Decode densely and update what later sparse steps need; used while the context is too short for sparsity to
        pay.

        Shapes as for :meth:`decode`. Where a method looks back on attention, later steps may differ a little from those
        after :meth:`decode`.
        """
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


def replay_obstacle(method: Method) -> str:
    """Why no decode step of a method can be captured; empty when steps can."""
    if method.replay is None:
        return f"a decode step of {method.name} asks the host for numbers that change"
    return method.replay.obstacle

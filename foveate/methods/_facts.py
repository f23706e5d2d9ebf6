"""What methods declare beside numbers and flags: how steps are captured, what a layer does, what it fetches or sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from foveate.state import SlotCache


class Replay:
    """Declares that a method's decode steps can be captured in a CUDA graph and replayed; see :attr:`Method.replay`.

    In a captured step no hook may read row numbers on the host, nor anything else that changes from step to step; see
    :class:`~foveate.state.row_numbers.RowNumbers`. A subclass declares maintenance: work after some steps, such as
    making LuKA's pages, for which :meth:`maintain` is called.

    Args:
        obstacle: why no step can be captured under the method's settings; empty when steps can.
        copies_keys: whether a step copies all keys of its rows. One that is captured for the longest rows that an
            engine takes would then keep room for as many in every row.
    """

    maintains: ClassVar[bool] = False
    """Whether maintenance follows some steps; it is captured in a graph of its own. Per class."""

    def __init__(self, obstacle: str = "", copies_keys: bool = False):
        self.obstacle, self.copies_keys = obstacle, copies_keys

    def maintenance_due(self, decoded: int) -> bool:
        """Whether maintenance follows the step that decodes the ``decoded``-th token after the prompt."""
        return False

    def maintain(self, cache: SlotCache) -> None:
        """Do the maintenance of one layer, for all rows of its cache."""
        raise NotImplementedError

    def maintain_captured(self, cache: SlotCache) -> None:
        """Do the same by the row numbers on the device alone: what it launches is captured, and replayed later."""
        raise NotImplementedError

    def rows_after_maintenance(self, rows: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """The row numbers that captured maintenance changes on the device, computed on the host from those before it.

        Args:
            rows: a list ``[B]`` for each name.
        """
        return {}


class Role(NamedTuple):
    """What a layer does with a decoded token."""

    name: str
    """What measurements group layers by, such as "dense" or "reading"."""
    reads_choice_of: int | None = None
    """Index of the earlier layer whose selected keys it reads; None: it reads no other layer's."""
    heads: tuple[int, ...] | None = None
    """By KV head, the head of that layer whose keys it reads; None: its own."""
    chooses: bool = False
    """Whether the layer chooses keys, for itself or for later layers."""
    reads_all: bool = False
    """Whether it reads all keys that it holds, whether or not it chooses some for others."""
    layer: int | None = None
    """Its index, of a layer that hands its choice on or reads another's."""
    has_readers: bool = False
    """Whether later layers read its choice."""
    remapped: bool = False
    """Whether one of their heads reads the choice of a head of another number."""
    before: int | None = None
    """The layer before this one whose choice others read; where this layer chooses, all of them have done so."""


class Fetches(NamedTuple):
    """The pages that a method's decode steps read from host memory."""

    page_size: int
    """Tokens of a page."""
    most: Callable[[int], int]
    """Gives, for the length of the longest row, the number of pages that a step fetches at most for each KV head."""


@dataclass(frozen=True)
class Observation:
    """What a method learns from prompt queries, see :meth:`Method.observe`.

    Args:
        key: methods with equal keys fill channels of the same names alike.
        needs_lse: whether the log-sum-exp of prompt queries is needed.
    """

    key: Hashable
    needs_lse: bool = False


@dataclass(frozen=True)
class About:
    """What a class of methods is, for people and tests. A field that is not given is inherited from the base class."""

    source: str | None = None
    """Paper that the method comes from."""
    example: str | None = None
    """A spec to begin with, of a method that needs more than its name."""
    full_budget: Mapping[str, Any] | None = None
    """Settings under which every token of any context is read or kept, so that outputs equal dense attention's."""
    small_budget: Mapping[str, Any] | None = None
    """Settings under which a context of about sixty tokens is already sparse, for tests."""
    estimates: bool | Callable[[Any], bool] | None = None
    """Whether keys are chosen by something else than their logits, such as a summary, a copy in fewer bits or a learned
    score, which a cap of the logits changes in another way; a function of the method where settings decide."""

    def chooses_by_estimates(self, method: Any) -> bool:
        """What :attr:`estimates` says of a method."""
        return bool(self.estimates(method) if callable(self.estimates) else self.estimates)

    def completed_by(self, base: About) -> About:
        """A copy that has from ``base`` what is left out here."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return dataclasses.replace(base, **given)

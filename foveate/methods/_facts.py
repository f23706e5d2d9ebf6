"""What methods declare beside numbers and flags: capture, the role of a layer, the pages that steps fetch,
observations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from foveate.state import SlotCache


class Replay:
    """Declares that a method's decode steps can be captured in a CUDA graph and replayed; see :attr:`Method.replay`.

    In a captured step no hook may read row numbers on the host, or anything else that changes from step to step; see
    :class:`~foveate.state.row_numbers.RowNumbers`. A subclass declares maintenance: work that follows some steps, such
    as making LuKA's pages. :meth:`maintain` does this work.

    Args:
        obstacle: why no step can be captured under the method's settings; empty when steps can be captured.
        copies_keys: whether a step copies all keys of its rows. A step captured for the longest rows that an engine
            takes would then reserve memory for a copy of that length in every row.
    """

    maintains: ClassVar[bool] = False
    """Whether maintenance follows some steps. Maintenance is captured in a graph of its own. Per class."""

    def __init__(self, obstacle: str = "", copies_keys: bool = False):
        self.obstacle, self.copies_keys = obstacle, copies_keys

    @staticmethod
    def of_all(replays: Sequence[Replay | None]) -> Replay | None:
        """What holds of steps in which several methods take part; None if those of one method cannot be captured."""
        if None in replays:
            return None
        obstacle = next(filter(None, (one.obstacle for one in replays)), "")
        return Replay(obstacle, any(one.copies_keys for one in replays))

    def maintenance_due(self, decoded: int) -> bool:
        """Whether maintenance follows the step that decodes the ``decoded``-th token after the prompt."""
        return False

    def maintain(self, cache: SlotCache) -> None:
        """Do the maintenance of one layer, for all rows of its cache."""
        raise NotImplementedError

    def maintain_captured(self, cache: SlotCache) -> None:
        """Do the work of :meth:`maintain` by row numbers on the device alone. Its launches are captured and
        replayed."""
        raise NotImplementedError

    def rows_after_maintenance(self, rows: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """The row numbers that captured maintenance changes on the device, computed on the host from the earlier ones.

        Args:
            rows: a list ``[B]`` for each name.
        """
        return {}


class Role(NamedTuple):
    """What a layer does with a decoded token."""

    name: str
    """The name by which measurements group layers, such as "dense" or "reading"."""
    reads_choice_of: int | None = None
    """Index of the earlier layer whose chosen keys this layer reads; None: it reads no other layer's keys."""
    heads: tuple[int, ...] | None = None
    """For each KV head of this layer, the head of the earlier layer whose keys it reads; None: the same head."""
    chooses: bool = False
    """Whether the layer chooses keys, for itself or for later layers."""
    reads_all: bool = False
    """Whether the layer reads all keys that it holds, even if it chooses keys for other layers."""
    layer: int | None = None
    """Index of this layer, if it hands its choice on or reads another layer's choice."""
    has_readers: bool = False
    """Whether later layers read this layer's choice."""
    remapped: bool = False
    """Whether a head of a reading layer reads the choice of a head with another number."""
    before: int | None = None
    """The last layer before this one whose choice other layers read. All its readers have run when this layer
    chooses."""


class Fetches(NamedTuple):
    """The pages that a method's decode steps read from host memory."""

    page_size: int
    """Tokens of a page."""
    most: Callable[[int], int]
    """Given the length of the longest row, the largest number of pages that a step fetches for each KV head."""


@dataclass(frozen=True)
class Observation:
    """What a method learns from prompt queries, see :meth:`Method.observe`.

    Args:
        key: methods with equal keys fill channels of the same names with the same values.
        needs_lse: whether :meth:`Method.observe` needs the log-sum-exp of the prompt queries.
    """

    key: Hashable
    needs_lse: bool = False


@dataclass(frozen=True)
class About:
    """What a class of methods is, for people and tests. A class inherits the fields that it does not give."""

    source: str | None = None
    """Paper that the method comes from."""
    example: str | None = None
    """A spec to begin with, for a method that needs settings beside its name."""
    full_budget: Mapping[str, Any] | None = None
    """Settings under which every token of any context is read or kept, so that outputs equal dense attention's."""
    small_budget: Mapping[str, Any] | None = None
    """Settings under which a context of about sixty tokens is already sparse, for tests."""
    estimates: bool | Callable[[Any], bool] | None = None
    """Whether the method chooses keys by something other than their logits: a summary, a copy in fewer bits or a
    learned score. A cap of the logits changes these in another way. A function of the method where settings decide."""

    def chooses_by_estimates(self, method: Any) -> bool:
        """Evaluate :attr:`estimates` for a method."""
        return bool(self.estimates(method) if callable(self.estimates) else self.estimates)

    def completed_by(self, base: About) -> About:
        """A copy in which the fields that are None here have the values of ``base``."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return dataclasses.replace(base, **given)

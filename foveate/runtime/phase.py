"""State shared by the layers of one cache: where the prompt ends, which columns are padding, what has not ended."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from foveate.methods import Method
from foveate.runtime.offload import Offload
from foveate.state import BytesInUse
from foveate.state.contiguous import Contiguous
from foveate.state.host_pages import HostPages
from foveate.state.store import MakeStore, class_of


@dataclass
class Phase:
    """Which columns of the batch are prompt and which are decoded, and which are padding, for all layers of one cache.

    A column is one position of the padded batch, as the engine counts them.
    """

    prompt_end: int | None = None
    """Columns before the first decoded column, including all columns of earlier turns; None until the first forward
    pass."""
    prompt_end_guessed: bool = False
    """Whether :attr:`prompt_end` was guessed, as the end of the first forward pass, because nobody has set it."""
    prompt_end_known: bool = False
    """Whether the engine has set :attr:`prompt_end`; if so, a single token after it is real in every row."""
    assistant: bool = False
    """Whether this is the draft model's cache in assisted decoding, which may be cropped by one token more."""
    draft: int | None = None
    """In lossless decoding, the number of the token of a draft that the pass in progress reads, from 0; else None."""
    verifying: bool = False
    """Whether the pass in progress verifies a draft: only its last token is new, and each token reads all keys before
    it."""
    layout: tuple[Tensor, dict[tuple[int, int], list[Tensor] | None]] | None = None
    """The mask of the last call of :meth:`rows`, and what was read from it, for the other layers."""
    forward: dict[Hashable, Any] = field(default_factory=dict)
    """Shared by the layers of the current forward pass, see :meth:`SlotCache.shared_key`."""
    held: BytesInUse = field(default_factory=BytesInUse)
    """The bytes that the layers hold together."""
    offload: Offload | None = None
    """Where keys and values are in host memory, what the layers share; None: they are elsewhere."""
    make_store: MakeStore = Contiguous
    """Makes the stores of the layers, see :meth:`store_for`."""
    changing: bool = False
    """Whether a change of the cache (a forward pass, a crop) has begun and not ended. It stays True after an exception
    or an interrupt, also in copies and pickles: such a cache is refused."""
    unusable: str = ""
    """Why nothing can go on from the cache, though no change of it was interrupted; empty where something can."""
    written: bool = False
    """Whether the change in progress has written to a layer."""
    within_step: bool = False
    """Whether the pass in progress is part of a step that :class:`~foveate.runtime.ReplayedSteps` begins and ends."""

    def keep_in_host(self, offload: Offload) -> None:
        """Have the layers keep keys and values in host memory; before the first of them has a store."""
        self.offload, self.make_store = offload, functools.partial(HostPages, room=offload)

    def store_for(self, method: Method) -> MakeStore:
        """Makes the store of a layer with a method: a layer whose method fetches nothing reads all keys in each step,
        which stay on the device where the others are fetched."""
        return Contiguous if class_of(self.make_store).fetches and method.fetches is None else self.make_store

    def check_whole(self) -> None:
        """Raises ValueError if a change of the cache has begun and not ended, or nothing can go on from it."""
        if self.unusable:
            raise ValueError(self.unusable)
        if self.changing:
            raise ValueError(
                "a forward pass on this cache, or another change of it, was interrupted, so its layers may hold "
                "different tokens; start a new cache"
            )

    def begin_change(self) -> None:
        """Begin a change of the cache, which is refused until :meth:`end_change`.

        Raises:
            ValueError: when an earlier change has not ended.
        """
        if not self.within_step:
            self.check_whole()
            self.changing, self.written = True, False

    def end_change(self) -> None:
        """End the change: the cache is whole again."""
        if not self.within_step:
            self.changing = False

    @contextmanager
    def change(self) -> Iterator[None]:
        """A change that ends with the block, unless an exception leaves it."""
        self.begin_change()
        yield
        self.end_change()

    @contextmanager
    def step(self) -> Iterator[None]:
        """A block within a change, in which forward passes are parts of that change."""
        before, self.within_step = self.within_step, True
        try:
            yield
        finally:
            self.within_step = before

    def rows(self, mask: Tensor | None, first: int, n: int) -> list[Tensor] | None:
        """The real tokens of each row among the columns ``first .. first + n - 1``; None when all are real.

        Int64 ``[tokens]`` each, counted from the first of these columns.

        The first layer of a forward pass reads the mask from the device (a host sync), the others reuse the result.

        Args:
            mask: ``[B, >= first + n]``, nonzero for real tokens; None: all are real.

        Raises:
            ValueError: for a mask that is not 2-D, or that covers fewer columns.
        """
        if mask is None:
            return None
        if self.layout is None or self.layout[0] is not mask:
            self.layout = (mask, {})
        known = self.layout[1]
        if (first, n) not in known:
            if mask.dim() != 2:
                raise ValueError(
                    f"attention_mask has shape {tuple(mask.shape)}; foveate's cache takes a 2-D mask of real tokens, "
                    "not one of pairs of tokens (images whose tokens see later ones, and packing, are not supported "
                    "with a cache)"
                )
            if mask.shape[1] < first + n:
                raise ValueError(
                    f"attention_mask covers {mask.shape[1]} tokens, but the cache holds {first} and {n} are new: "
                    "pass a mask over all of them"
                )
            columns = mask[:, first : first + n].bool()
            rows = None
            if not bool(columns.all()):
                rows = [row.nonzero()[:, 0] for row in columns]
            known[first, n] = rows
        return known[first, n]

"""The base classes of the state of a hybrid model's layer: tensors with the batch first, reordering, and undo.

Assisted decoding undoes tokens (``crop``). A KV cache just drops them; a recurrent state or an eviction buffer cannot
be rolled back. :class:`StagedMemory` therefore keeps tokens that may be undone beside its state, and applies them to
the state only when they have become final.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNDONE = 64
"""Tokens at the end of a prompt that can be undone under ``record_past``; assisted decoding drafts fewer."""


class Packing:
    """Moves the real tokens of a padded batch to the front of each row, and back.

    After packing, padding follows a row's tokens. It changes no memory and, since layers are causal, no token's output.

    Args:
        mask: bool ``[B, n]``, True where a column holds a token.
    """

    def __init__(self, mask: Tensor):
        self.counts = mask.sum(1)
        """Tokens of each row, int64 ``[B]``."""
        self.numbers: list[int] = self.counts.tolist()
        """The same on the host."""
        self.order = mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, : max(1, *self.numbers)]
        self.real = torch.arange(self.order.shape[1], device=mask.device) < self.counts[:, None]
        self._columns = mask.shape[1]

    @classmethod
    def of(cls, mask: Tensor | None, columns: int) -> Packing | None:
        """The packing of the last ``columns`` columns of a mask ``[B, >= columns]``; None when all hold tokens."""
        if mask is None:
            return None
        mask = mask[:, mask.shape[1] - columns :].bool()
        return None if bool(mask.all()) else cls(mask)

    def pack(self, x: Tensor) -> Tensor:
        """``[B, n, ...]`` to ``[B, tokens of the longest row, ...]``; padding becomes 0."""
        index = self.order.view(*self.order.shape, *[1] * (x.dim() - 2))
        packed = x.gather(1, index.expand(-1, -1, *x.shape[2:]))
        return packed * self.real.view(index.shape)

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`pack`; padding becomes 0."""
        index = self.order.view(*self.order.shape, *[1] * (x.dim() - 2))
        out = x.new_zeros(x.shape[0], self._columns, *x.shape[2:])
        return out.scatter(1, index.expand(x.shape), x * self.real.view(index.shape))


class Memory:
    """The memory of one layer for a batch of sequences; a subclass defines its ``tensors``.

    Every tensor has the batch first, so that rows can be repeated, chosen and reordered. ``lengths`` counts each row's
    tokens, padding left out.
    """

    def __init__(self):
        self.tensors: dict[str, Tensor] = {}
        self.lengths: list[int] = []
        self.record_past = False
        """Whether the last tokens may be undone, as in assisted decoding."""

    @property
    def batch_size(self) -> int:
        """Rows held; 0 before the first token."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._all_tensors())

    def _all_tensors(self) -> list[Tensor]:
        return list(self.tensors.values())

    def lengths_on(self, device: torch.device) -> Tensor:
        """Tokens of each row, int64 ``[B]``."""
        if len(set(self.lengths)) == 1:
            return torch.full((self.batch_size,), self.lengths[0], device=device)
        return torch.tensor(self.lengths, device=device)

    def advance(self, columns: int, packing: Packing | None) -> None:
        """Count ``columns`` new columns of every row. ``packing`` has the number of tokens among them; None: all
        are."""
        numbers = [columns] * self.batch_size if packing is None else packing.numbers
        self.lengths = [length + number for length, number in zip(self.lengths, numbers)]

    def take_rows(self, index: Tensor) -> None:
        """Replace the batch by its rows ``index``, int64 ``[B']`` (beam search, repeats, selection)."""
        if not self.batch_size:
            return
        with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be changed later
            index = index.clone()
            self.tensors = {name: x.index_select(0, index.to(x.device)) for name, x in self.tensors.items()}
        self.lengths = [self.lengths[b] for b in index.tolist()]

    def emptied(self) -> Memory:
        """A new, empty memory of the same kind and settings."""
        return type(self)()

    def check_crop(self, tokens: int) -> None:
        """Raise ValueError when the last ``tokens`` tokens cannot be undone."""
        raise NotImplementedError

    def crop(self, tokens: int) -> None:
        """Undo the last tokens of every row, and make the others final.

        Raises:
            ValueError: as :meth:`check_crop`.
        """
        self.check_crop(tokens)
        if tokens:
            self.lengths = [length - tokens for length in self.lengths]


class StagedMemory(Memory):
    """A memory that cannot be rolled back. Under ``record_past`` it stages new tokens and applies them when final.

    In each forward pass the layer first applies the tokens that :meth:`settled` returns to its state. It then processes
    the new tokens. The new tokens that may still be undone it passes to :meth:`stage`, as tensors ``[B, n, ...]`` under
    names of its own.
    """

    def __init__(self):
        super().__init__()
        self._staged: dict[str, Tensor] = {}
        """Inputs of tokens that are not yet applied, ``[B, n, ...]``."""
        self._final = True
        """Whether the staged tokens can no longer be undone."""

    def settled(self) -> dict[str, Tensor]:
        """Take the staged tokens that are to be applied now, possibly none.

        These are all staged tokens if they are final or ``record_past`` is off. Otherwise they are all but the last
        ``UNDONE`` tokens if more than twice ``UNDONE`` are staged, and else none.
        """
        if not self._staged:
            return {}
        keep = 0
        if self.record_past and not self._final:
            count = self._count
            keep = UNDONE if count > 2 * UNDONE else count
        staged = {name: x[:, : x.shape[1] - keep] for name, x in self._staged.items()}
        self._staged = {name: x[:, x.shape[1] - keep :] for name, x in self._staged.items()} if keep else {}
        return staged if next(iter(staged.values())).shape[1] else {}

    @property
    def staged(self) -> dict[str, Tensor]:
        """Inputs of the tokens that are not yet applied, by name, ``[B, n, ...]``."""
        return self._staged

    def final_part(self, columns: int, packing: Packing | None) -> int:
        """How many of ``columns`` new tokens can be applied at once, without staging.

        None after staged tokens; otherwise all, but under ``record_past`` all but the last ``UNDONE`` of an unpadded
        batch.

        Raises:
            ValueError: for a padded batch after staged tokens.
        """
        if self._staged:
            if packing is not None:
                raise ValueError("padded tokens cannot follow tokens that may be undone; crop the cache first")
            return 0
        return max(columns - UNDONE, 0) if self.record_past and packing is None else columns

    def stage(self, new: dict[str, Tensor]) -> None:
        """Add tokens that may be undone."""
        self._staged = {name: torch.cat([self._staged[name], x], 1) for name, x in new.items()} if self._staged else new
        self._final = False

    def take_rows(self, index: Tensor) -> None:
        super().take_rows(index)
        self._staged = {name: x.index_select(0, index.to(x.device)) for name, x in self._staged.items()}

    def check_crop(self, tokens: int) -> None:
        if tokens > self._undoable:
            raise ValueError(
                f"{tokens} tokens cannot be undone: {self._undoable} are not final; call "
                "cache.activate_past_recording() before tokens that may be removed"
            )

    def crop(self, tokens: int) -> None:
        super().crop(tokens)
        left = self._undoable - tokens
        if tokens:
            self._staged = {name: x[:, :left] for name, x in self._staged.items()} if left else {}
        self._final = True

    @property
    def _count(self) -> int:
        """Staged tokens."""
        return next(iter(self._staged.values())).shape[1] if self._staged else 0

    @property
    def _undoable(self) -> int:
        return 0 if self._final else self._count

    def _all_tensors(self) -> list[Tensor]:
        return [*super()._all_tensors(), *self._staged.values()]

"""What every memory of a layer can do: hold tensors batch first, take rows anew, and undo its last tokens."""

from __future__ import annotations

import torch
from torch import Tensor

UNDONE = 64
"""The last tokens of a prompt that can be undone while recording; assisted decoding drafts fewer."""


class Packing:
    """Which columns of a padded batch hold tokens; they are moved to the front of each row, without holes.

    What follows a row's tokens is padding that changes no memory. Since attention and recurrence are causal, it changes
    no output of a token either.

    Args:
        mask: bool ``[B, n]``, True where a column holds a token.
    """

    def __init__(self, mask: Tensor):
        self.counts = mask.sum(1)
        self.numbers: list[int] = self.counts.tolist()
        self.order = mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, : max(1, *self.numbers)]
        self.real = torch.arange(self.order.shape[1], device=mask.device) < self.counts[:, None]
        self._columns = mask.shape[1]

    @classmethod
    def of(cls, mask: Tensor | None, columns: int) -> Packing | None:
        """That of the last columns of a mask of all columns so far, ``[B, >= columns]``; None when all hold tokens."""
        if mask is None:
            return None
        mask = mask[:, mask.shape[1] - columns :].bool()
        return None if bool(mask.all()) else cls(mask)

    def pack(self, x: Tensor) -> Tensor:
        """``[B, n, ...]`` to ``[B, longest, ...]``, zero after a row's tokens."""
        index = self.order.view(*self.order.shape, *[1] * (x.dim() - 2))
        packed = x.gather(1, index.expand(-1, -1, *x.shape[2:]))
        return packed * self.real.view(index.shape)

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`pack`; padding becomes 0."""
        index = self.order.view(*self.order.shape, *[1] * (x.dim() - 2))
        out = x.new_zeros(x.shape[0], self._columns, *x.shape[2:])
        return out.scatter(1, index.expand(x.shape), x * self.real.view(index.shape))


class Memory:
    """The memory of one layer for a batch of sequences; subclasses say what it holds.

    Every tensor has the batch first, so rows can be repeated, chosen and reordered without knowing what they are.
    ``lengths`` counts each row's tokens, padding left out.
    """

    def __init__(self):
        self.tensors: dict[str, Tensor] = {}
        self.lengths: list[int] = []
        self.recording = False
        """Whether the last tokens may be undone, as assisted decoding does."""

    @property
    def batch_size(self) -> int:
        """Rows held; 0 before the first token."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._held())

    def _held(self) -> list[Tensor]:
        return list(self.tensors.values())

    def lengths_on(self, device: torch.device) -> Tensor:
        """Tokens of each row, int64 ``[B]``."""
        if len(set(self.lengths)) == 1:
            return torch.full((self.batch_size,), self.lengths[0], device=device)
        return torch.tensor(self.lengths, device=device)

    def advance(self, columns: int, packing: Packing | None) -> None:
        """Count new tokens of every row."""
        numbers = [columns] * self.batch_size if packing is None else packing.numbers
        self.lengths = [length + number for length, number in zip(self.lengths, numbers)]

    def take_rows(self, index: Tensor) -> None:
        """Rows of the batch anew: ``index`` int64 ``[B']`` (beam search, repeats, selection)."""
        if not self.batch_size:
            return
        with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode could not be changed later
            index = index.clone()
            self.tensors = {name: x.index_select(0, index.to(x.device)) for name, x in self.tensors.items()}
        self.lengths = [self.lengths[b] for b in index.tolist()]

    def emptied(self) -> Memory:
        """A new memory of the same kind."""
        return type(self)()

    def check_crop(self, tokens: int) -> None:
        """Raise ValueError when so many tokens cannot be undone."""
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
    """A memory that cannot be undone: while recording it keeps new tokens beside it and takes them in later.

    The layer hands over what it is to remember of new tokens, tensors ``[B, n, ...]``, with :meth:`stage`, and takes in
    what :meth:`settled` returns before it looks at the next ones.
    """

    def __init__(self):
        super().__init__()
        self._staged: dict[str, Tensor] = {}
        self._final = True

    def settled(self) -> dict[str, Tensor]:
        """Staged tokens to be taken in now: those that have become final, and of many the first ones."""
        if not self._staged:
            return {}
        keep = 0
        if self.recording and not self._final:
            count = self._count
            keep = UNDONE if count > 2 * UNDONE else count
        staged = {name: x[:, : x.shape[1] - keep] for name, x in self._staged.items()}
        self._staged = {name: x[:, x.shape[1] - keep :] for name, x in self._staged.items()} if keep else {}
        return staged if next(iter(staged.values())).shape[1] else {}

    @property
    def staged(self) -> dict[str, Tensor]:
        """Tokens after those that have been taken in, which may be undone."""
        return self._staged

    def final_part(self, columns: int, packing: Packing | None) -> int:
        """How many of so many new tokens are final at once: all unless recording, and of a long prompt the first ones.

        Raises:
            ValueError: for a padded batch after tokens that may be undone.
        """
        if self._staged:
            if packing is not None:
                raise ValueError("padded tokens cannot follow tokens that may be undone; crop the cache first")
            return 0
        return max(columns - UNDONE, 0) if self.recording and packing is None else columns

    def stage(self, new: dict[str, Tensor]) -> None:
        """Keep new tokens beside the memory."""
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
        return next(iter(self._staged.values())).shape[1] if self._staged else 0

    @property
    def _undoable(self) -> int:
        return 0 if self._final else self._count

    def _held(self) -> list[Tensor]:
        return [*super()._held(), *self._staged.values()]

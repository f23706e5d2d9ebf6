"""Which tokens a cache has read, so that it is not asked about others."""

from __future__ import annotations

import torch
from torch import Tensor

UNKNOWN = -1
"""Stands for a token that was given as an embedding."""


class TokenIds:
    """The ids of the tokens that a cache has read, by column of its batch; padding has ids, too."""

    def __init__(self):
        self._ids: Tensor | None = None
        """int64 ``[B, capacity]``."""
        self.columns = 0
        """How many columns are known."""

    def write(self, first: int, ids: Tensor) -> None:
        """Note the ids of columns ``first .. first + n - 1``.

        Args:
            ids: ``[B, n]``; of another dtype than an integer one: embeddings ``[B, n, any]``, whose ids are unknown.

        Raises:
            ValueError: see :meth:`check_rows`; nothing is noted then.
        """
        rows, n = ids.shape[:2]
        self.check_rows(rows, first)
        end = first + n
        if self._ids is None or len(self._ids) != rows or end > self._ids.shape[1]:
            with torch.inference_mode(False):
                grown = torch.full((rows, end + max(64, end // 8)), UNKNOWN, device=ids.device)
            if self._ids is not None and len(self._ids) == rows:
                grown[:, : self._ids.shape[1]] = self._ids
            self._ids = grown
        self._ids[:, first:end] = UNKNOWN if ids.is_floating_point() else ids
        self.columns = end

    def check_rows(self, rows: int, first: int) -> None:
        """Raises ValueError for another number of rows than before, at a column ``first`` beyond the beginning."""
        if first and self._ids is not None and len(self._ids) != rows:
            raise ValueError(f"the cache holds {len(self._ids)} sequences, but the batch has {rows}")

    def restore(self, ids: Tensor) -> None:
        """Know these ids and no other, int64 ``[B, columns]``."""
        self._ids, self.columns = ids, ids.shape[1]

    def read(self, columns: int) -> Tensor | None:
        """The ids of the first columns, int64 ``[B, columns]``; None where nothing was noted."""
        return None if self._ids is None or self.columns < columns else self._ids[:, :columns]

    def take_rows(self, index: Tensor) -> None:
        """Replace the batch by its rows ``index``, int64 ``[B']``."""
        if self._ids is not None:
            with torch.inference_mode(False):
                self._ids = self._ids.index_select(0, index.to(self._ids.device).clone())

    def check(self, ids: Tensor, columns: int, mask: Tensor | None) -> None:
        """Refuse a conversation that does not begin with the tokens that the cache has read.

        Args:
            ids: ids of all tokens of the conversation, int64 ``[B, >= columns]``.
            columns: number of tokens in the cache.
            mask: ``[B, >= columns]``, 0 for padding, which is not compared; None: all tokens are real.

        Raises:
            ValueError: naming the first token that differs.
        """
        read = self.read(columns)
        if read is None or len(read) != len(ids):
            return
        differ = (read != ids[:, :columns].to(read.device)) & (read != UNKNOWN)
        if mask is not None:
            differ &= mask[:, :columns].to(read.device) != 0
        if bool(differ.any()):
            row, column = differ.nonzero()[0].tolist()
            raise ValueError(
                f"the cache has read other tokens than input_ids begin with: token {column} of row {row} was "
                f"{int(read[row, column])}, and is {int(ids[row, column])}; pass the conversation that the cache "
                "holds, or start a new cache"
            )

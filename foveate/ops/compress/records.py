"""The low-rank summaries that a verb reads, with all that says where they are and how many there are."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from foveate.ops.block_table import BlockTable, in_one_piece, number_of_keys
from foveate.ops.compress.low_rank import PageRecord


@dataclass(frozen=True, eq=False, slots=True)
class Records:
    """Low-rank summaries of a batch's pages, in one piece or in blocks that all rows share (see :class:`KV`).

    Args:
        memory: uint8 ``[B, Hkv, P, form.bytes]`` of :func:`~foveate.ops.compress_pages`; with a block table ``[N, Hkv,
            n, form.bytes]``, N physical blocks of n records. Read through its strides. It does not hold its form:
            records of another form with the same number of bytes give wrong results.
        form: the format of a record.
        weights: fp32 ``[B, Hkv, D]``, powers of two: what the keys were multiplied by, and queries are divided by.
        block_table: which blocks hold the records of each row: it counts records in place of keys. None: in one piece.
        lengths: int ``[B]`` or ``[B, Hkv]``: only the first so many pages of a row are there, the others may hold
            anything; None: all are there.
    """

    memory: Tensor
    form: PageRecord
    weights: Tensor | None = None
    block_table: BlockTable | None = None
    lengths: Tensor | None = None
    number: int = field(init=False)
    """How many pages the longest row has, P."""

    def __post_init__(self):
        object.__setattr__(self, "number", number_of_keys(self.memory, self.block_table))

    def check_queries(self, rows: Tensor) -> None:
        """Raise ValueError unless ``rows [B, Hkv, G, D]`` are queries that records of this form and weights fit."""
        self.form.check(self.memory, rows, self.weights, self.block_table, of_records=True)

    def in_one_piece(self, rows: Tensor) -> Tensor:
        """The records ``[B, Hkv, P, form.bytes]``: as they are, or copied from their blocks for the rows of queries."""
        return in_one_piece(rows, self.block_table, self.memory)[0]

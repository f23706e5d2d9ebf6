"""The low-rank summaries that a verb reads, with their form, their weights, their block table and their numbers."""

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
            n, form.bytes]``, N physical blocks of n records. It is read through its strides. It does not record its
            form: a form with the same number of bytes passes the checks and gives wrong results.
        form: the format of a record.
        weights: fp32 ``[B, Hkv, D]``, powers of two by which keys were multiplied and queries are divided; None: 1.
        block_table: the blocks that hold each row's records; it counts records in place of keys. None: the records are
            in one piece.
        lengths: int ``[B]`` or ``[B, Hkv]``: the number of pages of a row; later records may hold anything. None: every
            row has P pages.
    """

    memory: Tensor
    form: PageRecord
    weights: Tensor | None = None
    block_table: BlockTable | None = None
    lengths: Tensor | None = None
    number: int = field(init=False)
    """The number of pages of the longest row, P."""

    def __post_init__(self):
        object.__setattr__(self, "number", number_of_keys(self.memory, self.block_table))

    def check_queries(self, rows: Tensor) -> None:
        """Raise ValueError unless records of this form, and the weights, fit the queries ``rows [B, Hkv, G, D]``."""
        self.form.check(self.memory, rows, self.weights, self.block_table, of_records=True)

    def in_one_piece(self, rows: Tensor) -> Tensor:
        """The records ``[B, Hkv, P, form.bytes]``: the memory itself, or a copy from the blocks of the queries'
        rows."""
        return in_one_piece(rows, self.block_table, self.memory)[0]

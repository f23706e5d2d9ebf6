"""The keys and values that a verb reads, with their block table and their lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from foveate.ops._math import on_host
from foveate.ops.block_table import BlockTable
from foveate.ops.checks import INTEGERS


@dataclass(frozen=True, eq=False, slots=True)
class KV:
    """Keys and values of a batch's rows, in one piece or in blocks that all rows share (paged KV).

    Tensors are never copied. Shapes are checked once, here; a verb checks that its queries fit them.

    Args:
        k: ``[B, Hkv, Lk, D]``; with a block table ``[N, Hkv, n, D]``, N physical blocks of n slots. It is read through
            its strides.
        v: ``[B, Hkv, Lk, Dv]``, or ``[N, Hkv, n, Dv]``; None for verbs that read keys alone.
        block_table: the blocks that hold each row's keys; None: keys and values are in one piece.
        lengths: int ``[B]`` or ``[B, Hkv]``: the number of keys of a row; later slots may hold anything finite. None:
            every row has Lk keys.

    Raises:
        ValueError: for keys and values that are not floating-point tensors of four dimensions or do not fit each other,
            lengths of another shape or not of integers, or a block table that does not fit, see
            :meth:`BlockTable.check_memory`.
    """

    k: Tensor
    v: Tensor | None = None
    block_table: BlockTable | None = None
    lengths: Tensor | None = None
    num_keys: int = field(init=False)
    """The number of keys of the longest row, Lk."""

    def __post_init__(self):
        k, v, table, lengths = self.k, self.v, self.block_table, self.lengths
        shape = k.shape
        if len(shape) != 4 or not k.is_floating_point():
            raise ValueError(f"k must be a floating-point [B, H, L, D], not {k.dtype} {list(shape)}")
        batch, heads, number, _ = shape
        if v is not None:
            of_values = v.shape
            if len(of_values) != 4 or not v.is_floating_point():
                raise ValueError(f"v must be a floating-point [B, H, L, D], not {v.dtype} {list(of_values)}")
            rows, own, values, _ = of_values
            if rows != batch or own != heads or values != number:
                raise ValueError(f"shapes do not fit: k {tuple(shape)}, v {tuple(of_values)}")
        if table is not None:
            table.check_memory(k, v)
            batch, number = len(table.table), table.length
        if lengths is not None and (lengths.dtype not in INTEGERS or lengths.shape not in ((batch,), (batch, heads))):
            given = f"{lengths.dtype} {list(lengths.shape)}"
            raise ValueError(f"lengths must be integers [{batch}] or [{batch}, {heads}], not {given}")
        object.__setattr__(self, "num_keys", number)

    def check_queries(self, q: Tensor, values: bool = False) -> None:
        """Raise ValueError unless ``q [B, Hq, Lq, D]`` are floating-point queries of these rows and KV heads. With
        ``values``, which a verb sets if it reads values, raise also for a KV without values."""
        k, table = self.k, self.block_table
        if q.dim() != 4 or not q.is_floating_point():
            raise ValueError(f"q must be a floating-point [B, H, L, D], not {q.dtype} {list(q.shape)}")
        if table is not None:
            table.check_rows(q)
        kv_heads = k.shape[1]
        if q.shape[1] % max(1, kv_heads):
            raise ValueError(f"q has {q.shape[1]} heads, which is not a multiple of the {kv_heads} KV heads of k")
        if not kv_heads or k.shape[3] != q.shape[3] or (table is None and len(k) != len(q)):
            given = ", ".join(
                f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", self.v)) if x is not None
            )
            raise ValueError(f"shapes do not fit: {given}")
        if values and self.v is None:
            raise ValueError("attention needs values, and this KV has keys alone")

    def check_blocks(self, read: Callable[[], Tensor]) -> None:
        """On the CPU, raise ValueError unless the block table names a block of ``k`` wherever a key is read.

        ``read()`` returns the mask of the keys that are read, bool ``[B, H, Lk]``. It is called only if some entry of
        the table names no block.
        """
        table, number = self.block_table.table, len(self.k)
        if not on_host(table):
            return
        wrong = (table < 0) | (table >= number)
        if wrong.any():
            of_keys = wrong.repeat_interleave(self.k.shape[2], 1)[:, None, : self.num_keys]
            if (of_keys & read()).any():
                raise ValueError(f"a block table must name one of {number} blocks for every key, not {table[wrong][0]}")

    def check_each_length(self) -> None:
        """Raise ValueError unless there are lengths ``[B]``, for a verb that reads the newest keys of each row."""
        if self.lengths is None or self.lengths.dim() != 1:
            raise ValueError("lengths [B] must say how many keys each row has, for its newest ones are read")

    def check_unpaged(self) -> None:
        """Raise ValueError for a block table or lengths, in a verb that reads all keys of every row in one piece."""
        if self.block_table is not None or self.lengths is not None:
            raise ValueError("keys and values must be in one piece and all there, without a block table and lengths")

    def in_one_piece(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, Hkv, Lk, D(v)]``: the tensors themselves, or copies from the blocks of the rows of
        q."""
        return (self.k, self.v) if self.block_table is None else self.block_table.gather(q, self.k, self.v)

    def keys_in_one_piece(self, q: Tensor) -> Tensor:
        """The keys of :meth:`in_one_piece`, without a copy of the values."""
        return self.k if self.block_table is None else self.block_table.gather(q, self.k)[0]

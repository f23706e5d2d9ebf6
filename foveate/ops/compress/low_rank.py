"""Low-rank summaries of pages: the mean key in eight bits and some directions in four, in one record of bytes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from foveate.ops._math import block_length
from foveate.ops.block_table import BlockTable
from foveate.ops.kv import KV

ITERATIONS = 4
"""Number of power iterations that find a direction."""
MEAN_LIMIT, LIMIT = 127, 7
"""The largest integers: of eight bits, such as the mean's, and of four bits. The smallest are their negatives."""
TINY = torch.finfo(torch.float32).tiny
"""The smallest scale, and the smallest square by which is divided."""
_WEAKEST = 1 / 64
"""The smallest root mean square of a query channel that changes a weight, relative to the mean over the channels."""
_ALIGNED = 16


@dataclass(frozen=True)
class PageRecord:
    """How the summary of one page of keys is stored in bytes.

    A key is approximated by ``mean + sum_i coefficient_i * direction_i``, the directions being shared by the page. The
    bytes are, in this order:

    - fp32 scales, padded to 16 bytes: of the mean, then of each direction's product with its coefficients;
    - the mean, int8 ``[D]``;
    - the directions, int4 ``[rank, D]``;
    - the coefficients ``[rank, page_size]``, int4 or int8;
    - zeros up to a multiple of 16 bytes.

    A row of n four-bit numbers takes ``ceil(n / 2)`` bytes. Byte j holds number j, plus 8, in its low half and number
    ``j + ceil(n / 2)``, plus 8, in its high half. A coefficient of eight bits is stored plus 128.

    Args:
        head_dim: D.
        page_size: keys of a page, 2 to 64.
        rank: directions, 1 to 8.
        coefficient_bits: 4 or 8.

    Raises:
        ValueError: for sizes outside these bounds.
    """

    largest_page: ClassVar[int] = 64
    largest_rank: ClassVar[int] = 8

    head_dim: int
    page_size: int
    rank: int = 2
    coefficient_bits: int = 4

    def __post_init__(self):
        bounds = {
            "head_dim": (1, None),
            "page_size": (2, self.largest_page),
            "rank": (1, min(self.largest_rank, self.page_size)),
        }
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least or (most is not None and value > most):
                allowed = f"at least {least}" if most is None else f"{least} to {most}"
                raise ValueError(f"{name} must be {allowed}, not {value!r}")
        if self.coefficient_bits not in (4, 8):
            raise ValueError(f"coefficient_bits must be 4 or 8, not {self.coefficient_bits}")

    @functools.cached_property
    def mean(self) -> int:
        """The byte at which the mean begins."""
        return _aligned(4 * (self.rank + 1))

    @functools.cached_property
    def directions(self) -> int:
        """The byte at which the directions begin."""
        return self.mean + self.head_dim

    @functools.cached_property
    def coefficients(self) -> int:
        """The byte at which the coefficients begin."""
        return self.directions + self.rank * -(-self.head_dim // 2)

    @functools.cached_property
    def row_of_coefficients(self) -> int:
        """Bytes of the coefficients of one direction."""
        return -(-self.page_size * self.coefficient_bits // 8)

    @functools.cached_property
    def end(self) -> int:
        """The byte after the coefficients, from which zeros fill the record."""
        return self.coefficients + self.rank * self.row_of_coefficients

    @functools.cached_property
    def coefficient_limit(self) -> int:
        """The largest coefficient; the smallest is its negative."""
        return LIMIT if self.coefficient_bits == 4 else MEAN_LIMIT

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes of a record."""
        return _aligned(self.end)

    def check(
        self,
        records: Tensor,
        keys: Tensor,
        weights: Tensor | None = None,
        block_table: BlockTable | None = None,
        of_records: bool = False,
    ) -> None:
        """Raise ValueError unless ``records`` have this form and ``keys``, or queries, and ``weights`` fit them.

        Args:
            block_table: the blocks of the keys or, with ``of_records``, of the records.
        """
        if records.dtype != torch.uint8 or records.dim() != 4 or records.shape[3] != self.bytes:
            raise ValueError(
                f"records must be uint8 [B, Hkv, P, {self.bytes}], not {records.dtype} {list(records.shape)}"
            )
        rows, memory = (keys, records) if of_records else (records, keys)
        if block_table is not None:
            block_table.check(rows, memory)
        shared = slice(2) if block_table is None else slice(1, 2)
        if keys.shape[3] != self.head_dim or keys.shape[shared] != records.shape[shared]:
            raise ValueError(
                f"keys or queries {list(keys.shape)} do not fit records {list(records.shape)} of head dim "
                f"{self.head_dim}"
            )
        self._check_weights(rows, weights)

    def check_pages(self, keys: Tensor, weights: Tensor | None = None) -> None:
        """Raise ValueError unless ``keys`` are whole pages of this form and ``weights`` fit them."""
        if keys.dim() != 4 or keys.shape[3] != self.head_dim or keys.shape[2] % self.page_size:
            raise ValueError(
                f"keys {list(keys.shape)} must be whole pages of {self.page_size} keys of {self.head_dim} numbers"
            )
        self._check_weights(keys, weights)

    def check_blocks(self, keys: Tensor, records: Tensor) -> None:
        """Raise ValueError unless each block of ``records`` has one record for each page of a block of ``keys``."""
        self.check(records, keys)
        if keys.shape[2] != records.shape[2] * self.page_size:
            raise ValueError(
                f"blocks of {keys.shape[2]} keys do not hold {records.shape[2]} whole pages of {self.page_size}"
            )

    def _check_weights(self, rows: Tensor, weights: Tensor | None) -> None:
        shape = [*rows.shape[:2], self.head_dim]
        if weights is not None and (weights.dtype != torch.float32 or list(weights.shape) != shape):
            raise ValueError(f"weights must be float32 {shape}, not {weights.dtype} {list(weights.shape)}")


class Factors(NamedTuple):
    """The content of records, as numbers: a key is ``mean + coefficients.T @ directions``."""

    mean: Tensor
    """fp32 ``[..., D]``."""
    directions: Tensor
    """fp32 ``[..., rank, D]``."""
    coefficients: Tensor
    """fp32 ``[..., rank, page_size]``: integers, because the scale is part of the directions."""

    def keys(self) -> Tensor:
        """The approximated keys, fp32 ``[..., page_size, D]``."""
        return self.mean[..., None, :] + self.coefficients.mT @ self.directions


def channel_weights(q: Tensor, num_kv_heads: int) -> Tensor:
    """The importance of each channel of the keys to given queries, rounded to powers of two.

    The part of a key that a summary loses changes a logit by the query's product with this part. Keys are therefore
    multiplied by these weights before they are summarised, and queries are divided by them. A weight is the square root
    of the queries' root mean square, relative to its mean over the channels. The root mean square itself would be a
    worse weight: channels that queries hardly use would lose more to rounding than the others gain. Dividing a query by
    a power of two is exact within its range.

    Args:
        q: ``[B, Hq, L, D]``, L at least 1: some queries, such as the last queries of a prompt.

    Returns:
        fp32 ``[B, Hkv, D]``, 1/8 to about ``D ** 0.5``.
    """
    of_group = q.float().unflatten(1, (num_kv_heads, -1))
    size = of_group.square().mean((2, 3)).sqrt()
    share = size / size.mean(-1, keepdim=True).clamp_min(TINY)
    return share.clamp_min(_WEAKEST).sqrt().log2().round().exp2()


def compress_pages(keys: Tensor, form: PageRecord, weights: Tensor | None = None) -> Tensor:
    """Low-rank summaries of whole pages.

    Directions are found one after another, by power iterations on the residual keys, which are what the mean and the
    earlier directions do not explain. The iterations start from the longest residual. Each direction is rounded before
    its coefficients are fitted by least squares, and the coefficients are rounded before the next direction is
    computed. Later directions thus correct the rounding of earlier ones. Repeated calls give the same bits.

    Args:
        keys: ``[B, Hkv, P * page_size, D]``, finite; page p is the keys ``p * page_size .. (p + 1) * page_size - 1``.
        weights: fp32 ``[B, Hkv, D]`` of :func:`channel_weights`, by which keys are multiplied; None: 1.

    Returns:
        uint8 ``[B, Hkv, P, form.bytes]``.

    Raises:
        ValueError: for keys of another head dim, or that do not fill their last page, or weights that do not fit.
    """
    form.check_pages(keys, weights)
    batch, heads, length, dim = keys.shape
    records = keys.new_empty(batch, heads, length // form.page_size, form.bytes, dtype=torch.uint8)
    step = block_length(12 * batch * heads * form.page_size * dim, records.shape[2])
    for first in range(0, records.shape[2], step):
        pages = keys[:, :, first * form.page_size : (first + step) * form.page_size].float()
        pages = pages if weights is None else pages * weights[:, :, None]
        records[:, :, first : first + step] = _record(pages.unflatten(2, (-1, form.page_size)), form)
    return records


def compress_newest(kv: KV, records: Tensor, form: PageRecord, weights: Tensor | None = None) -> None:
    """Write the summary of the page that each row's newest key fills. A row whose newest page is not full writes
    nothing.

    Args:
        kv: ``k [B, Hkv, S, D]``, finite where a row has keys, in one piece or in blocks, with lengths ``[B]`` of at
            least 1, see :class:`~foveate.ops.KV`; values are not read. Pages need not have the size of blocks.
        records: uint8 ``[B, Hkv, P, form.bytes]``, written to.
        weights: see :func:`compress_pages`.

    Raises:
        ValueError: for a KV without lengths, records of another form, or records, weights or a table that do not fit
            the keys.
    """
    kv.check_each_length()
    keys, block_table, lengths = kv.k, kv.block_table, kv.lengths
    form.check(records, keys, weights, block_table)
    full = lengths % form.page_size == 0
    page = (lengths // form.page_size - 1).clamp_min(0)
    slots = page[:, None] * form.page_size + torch.arange(form.page_size, device=keys.device)
    slots = slots.where(full[:, None], 0)  # an open page is not read
    if block_table is None:
        of_page = keys.gather(2, slots[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])).float()
    else:
        block, slot = block_table.slots(slots, keys)
        of_page = keys[block, :, slot].transpose(1, 2).contiguous().float()
    of_page = of_page if weights is None else of_page * weights[:, :, None]
    place = page[:, None, None, None].expand(-1, keys.shape[1], 1, form.bytes)
    made = _record(of_page[:, :, None], form)
    records.scatter_(2, place, torch.where(full[:, None, None, None], made, records.gather(2, place)))


def compress_written(keys: Tensor, records: Tensor, slots: Tensor, form: PageRecord) -> None:
    """Write the summaries of the pages that new tokens fill, into blocks that lie beside the blocks of the keys.

    The token in a page's last slot fills the page; the tokens before it are in the block already. Tokens that fill no
    page write nothing.

    Args:
        keys: blocks ``[N, Hkv, n, D]`` that hold the new tokens, n a multiple of the page size.
        records: uint8 ``[N, Hkv, n / page_size, form.bytes]``, written to.
        slots: int ``[T]``: the slot of each new token, which is its block times n plus its place in the block. A token
            with a negative slot is ignored.

    Raises:
        ValueError: for records of another form, or blocks of records that do not fit the blocks of keys.
    """
    form.check_blocks(keys, records)
    last = slots[(slots >= 0) & (slots % form.page_size == form.page_size - 1)].long()
    block, page = last // keys.shape[2], last % keys.shape[2] // form.page_size
    records[block, :, page] = _record(keys.unflatten(2, (-1, form.page_size))[block, :, page].float(), form)


def factors(records: Tensor, form: PageRecord) -> Factors:
    """The content of records, uint8 ``[..., form.bytes]``, as numbers."""
    scales = records[..., : 4 * (form.rank + 1)].contiguous().view(torch.float32)
    mean = records[..., form.mean : form.directions].view(torch.int8) * scales[..., :1]
    directions = records[..., form.directions : form.coefficients].unflatten(-1, (form.rank, -1))
    codes = records[..., form.coefficients : form.end].unflatten(-1, (form.rank, -1))
    coefficients = _unpacked(codes, form.page_size) if form.coefficient_bits == 4 else codes.float() - 128
    return Factors(mean, _unpacked(directions, form.head_dim) * scales[..., 1:, None], coefficients)


def _record(keys: Tensor, form: PageRecord) -> Tensor:
    """Records of pages of keys, fp32 ``[..., page_size, D]``."""
    mean, mean_scale = _rounded(keys.mean(-2), MEAN_LIMIT)
    left, scales, directions, coefficients = keys - (mean * mean_scale)[..., None, :], [mean_scale], [], []
    for _ in range(form.rank):
        direction, _ = _rounded(_principal(left), LIMIT)
        fitted = (left @ direction[..., None])[..., 0] / direction.square().sum(-1, keepdim=True).clamp_min(TINY)
        fitted, scale = _rounded(fitted, form.coefficient_limit)
        left = left - (fitted * scale)[..., None] * direction[..., None, :]
        scales.append(scale)
        directions.append(direction)
        coefficients.append(fitted)
    coefficients = torch.stack(coefficients, -2)
    codes = _packed(coefficients) if form.coefficient_bits == 4 else (coefficients + 128).to(torch.uint8)
    parts = [
        _padded(torch.cat(scales, -1).view(torch.uint8), form.mean),
        mean.to(torch.int8).view(torch.uint8),
        _packed(torch.stack(directions, -2)).flatten(-2),
        codes.flatten(-2),
    ]
    return _padded(torch.cat(parts, -1), form.bytes)


def _principal(left: Tensor) -> Tensor:
    """A direction ``[..., D]``, of any length, along which the rows ``[..., S, D]`` are large; 0 if all rows are 0.

    Power iterations start from the longest row, the first of equally long ones. Rows are scaled to at most 1, so that
    squares stay in range.
    """
    left = left / left.abs().amax((-2, -1), keepdim=True).clamp_min(TINY)
    longest = left.square().sum(-1).argmax(-1)
    direction = left.gather(-2, longest[..., None, None].expand(*longest.shape, 1, left.shape[-1]))
    for _ in range(ITERATIONS):
        direction = direction / direction.square().sum(-1, keepdim=True).clamp_min(TINY).sqrt()
        direction = (left @ direction.mT).mT @ left
    return direction[..., 0, :]


def _rounded(x: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """``x`` as integers ``[..., n]`` of at most ``limit``, in fp32, and their scales ``[..., 1]``."""
    scale = (x.abs().amax(-1, keepdim=True) / limit).clamp_min(TINY)
    return (x / scale).round(), scale


def _packed(x: Tensor) -> Tensor:
    """Integers of four bits ``[..., n]`` as bytes ``[..., ceil(n / 2)]``."""
    half = -(-x.shape[-1] // 2)
    codes = _padded((x + 8).to(torch.uint8), 2 * half)
    return codes[..., :half] | codes[..., half:] << 4


def _unpacked(x: Tensor, number: int) -> Tensor:
    """The first ``number`` integers, in fp32, of bytes ``[..., ceil(number / 2)]``."""
    return torch.cat([x & 15, x >> 4], -1)[..., :number].float() - 8


def _padded(x: Tensor, width: int) -> Tensor:
    """``x`` with zero bytes after it, up to ``width`` bytes."""
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED

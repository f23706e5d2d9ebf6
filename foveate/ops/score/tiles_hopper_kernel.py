"""Attention mass of tiles of queries on Hopper: Gluon kernel of :func:`tile_block_mass`.

A program multiplies keys by the queries of four tiles. Two warpgroups have two tiles each, and compute the exponentials
of one tile while the tensor cores multiply for the other. A third warpgroup fetches keys ahead of both.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from foveate.ops.gpu.tiles import multiprocessors

_LOG2E = gl.constexpr(1.4426950408889634)

ROWS = 128
"""The most queries of a tile."""
_KEYS = 64
"""Keys of a product."""
_STAGES = {64: 8, 128: 5}
"""Blocks of keys that are fetched ahead, by head dim."""
_SPAN = 128
"""The most blocks that a program multiplies, so that its queries are loaded once for all of them."""
_AT_ONCE = 32
"""Rows that are fetched at a time."""
_REGISTERS = (224, 56)
"""Registers of a thread that multiplies, and of a thread that fetches."""
_DTYPES = (torch.bfloat16, torch.float16)


def fits(queries: Tensor, k: Tensor) -> bool:
    """Whether the kernel does this case: queries that fill a product, and memory that can be read 16 bytes at a time.

    Args:
        queries, k: as for :func:`tile_block_mass`.
    """
    rows, dim = queries.shape[3:]
    return (
        k.dtype in _DTYPES
        and dim in _STAGES
        and ROWS // 2 < rows <= ROWS
        and queries.numel() > 0
        and k.stride(3) == 1
        and not k.data_ptr() % 16
        and not any(step % 16 for step in k.stride()[:3])
    )


def tile_block_mass(queries, k, lse, begins, *, scaling):
    """See :func:`foveate.ops.score.reference.tile_block_mass`; only where :func:`fits`.

    Keys stand in the rows of the products. Every sum has one owner and one order: repeats are equal bit for bit.
    """
    batch, heads, tiles, rows, dim = queries.shape
    number = k.shape[2]
    mass = queries.new_empty(batch, heads, tiles, number, dtype=torch.float32)
    groups, blocks = triton.cdiv(tiles, 4), triton.cdiv(number, _KEYS)
    programs = 4 * multiprocessors(k.device)
    span = max(1, min(_SPAN, triton.cdiv(batch * heads * groups * blocks, programs)))
    _tile_block_mass_on_hopper[groups * triton.cdiv(blocks, span), batch * heads](
        queries.contiguous(), k, lse.contiguous(), begins, mass,
        *k.stride()[:3],
        heads, tiles, rows, number, groups, span, scaling * _LOG2E.value,
        ROWS=ROWS, DIM=dim, KEYS=_KEYS, STAGES=_STAGES[dim], AT_ONCE=_AT_ONCE, REGISTERS=_REGISTERS, num_warps=4,
    )  # fmt: skip
    return mass


@gluon.jit
def _fetch(
    q_ptr, k_ptr,
    k_stride_l,
    of_head, first_tile, first, stop, tiles, rows, q_tiles, k_tiles, q_full, full, empty,
    ROWS: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """The warpgroup that fetches. It copies the queries of the program's four tiles to ``q_tiles [4, ROWS, D]``, and
    then the keys ``first .. stop - 1`` in ascending order, block by block, into the ring ``k_tiles [STAGES, KEYS, D]``.
    Rows that do not exist become zeros.

    ``q_full`` and ``full`` tell the other warpgroups that queries and a block of keys have arrived; ``empty`` tells
    this one that both others have multiplied a block.

    Shapes: A = AT_ONCE rows of one copy, D = DIM.
    """
    LANES: gl.constexpr = DIM // 8
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    places = gl.arange(0, AT_ONCE, gl.SliceLayout(1, COPY))  # [A]
    dims = gl.arange(0, DIM, gl.SliceLayout(0, COPY))  # [D]

    # 1. Copy the queries; every second tile completes the pair of tiles of one warpgroup.
    for which in gl.static_range(4):
        tile = first_tile + which
        q_base = q_ptr + (of_head * tiles + gl.minimum(tile, tiles - 1)) * rows * DIM
        for some in gl.static_range(0, ROWS, AT_ONCE):
            there = (some + places < rows) & (tile < tiles)  # [A]
            async_copy.async_copy_global_to_shared(
                q_tiles.index(which).slice(some, AT_ONCE, dim=0),
                q_base + (gl.where(there, some + places, 0) * DIM)[:, None] + dims[None, :],
                mask=there[:, None],
            )
        if which % 2 == 1:
            async_copy.mbarrier_arrive(q_full.index(which // 2), increment_count=False)

    # 2. Copy the keys. In the first round of the ring every stage is empty, and waiting for the opposite parity passes
    # at once.
    turn = 0
    for start in range(first, stop, KEYS):
        stage = turn % STAGES
        mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
        for some in gl.static_range(0, KEYS, AT_ONCE):
            there = start + some + places < stop  # [A]
            keys = gl.where(there, start + some + places, 0).to(gl.int64)  # [A]
            async_copy.async_copy_global_to_shared(
                k_tiles.index(stage).slice(some, AT_ONCE, dim=0),
                k_ptr + (keys * k_stride_l)[:, None] + dims[None, :],
                mask=there[:, None],
            )
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        turn += 1


@gluon.jit
def _of_tile(
    tile, of_head, lse_ptr, begin_ptr, mass_ptr, tiles, rows, number, ROWS: gl.constexpr, OF_QUERY: gl.constexpr
):
    """What a warpgroup needs of a tile: ``lse [ROWS]`` of its queries, to the base 2; a pointer to its masses; its
    first position; and how many masses to write, 0 for a tile that does not exist.

    A query that does not exist has a log-sum-exp of inf: its exponentials are 0.
    """
    columns = gl.arange(0, ROWS, OF_QUERY)  # [ROWS]
    row = of_head * tiles + gl.minimum(tile, tiles - 1)
    there = (columns < rows) & (tile < tiles)  # [ROWS]
    lse = gl.load(lse_ptr + row * rows + columns, mask=there, other=float("inf")) * _LOG2E  # [ROWS]
    begin = gl.minimum(gl.load(begin_ptr + gl.minimum(tile, tiles - 1)).to(gl.int32), number)
    return lse, mass_ptr + row * number, begin, gl.where(tile < tiles, number, 0)


@gluon.jit
def _put(products, lse, scale, mass_ptr, start, begin, end, KEYS: gl.constexpr):
    """Writes the masses of a block of keys from ``products [KEYS, ROWS]``: -inf from the tile's first position on."""
    mass = gl.sum(gl.exp2(products * scale - lse[None, :]), 1)  # [KEYS]
    keys = start + gl.arange(0, KEYS, gl.SliceLayout(1, products.type.layout))  # [KEYS]
    gl.store(mass_ptr + keys, gl.where(keys < begin, mass, float("-inf")), mask=keys < end)


@gluon.jit
def _add_up(
    lse_ptr, begin_ptr, mass_ptr,
    of_head, first_tile, first, stop, last, tiles, rows, number, scale, q_tiles, k_tiles, q_full, full, empty,
    WHICH: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies. It owns two of the program's four tiles (``WHICH``: the first or the last two),
    reads the blocks of keys in ascending order as they arrive, and writes the masses of the keys ``first .. last - 1``.
    From ``stop`` on no tile sees a key, and the masses are -inf.

    Shapes: KEYS keys of a block, ROWS queries of a tile. Keys are the rows of the products.
    """
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OF_QUERY: gl.constexpr = gl.SliceLayout(0, PRODUCTS)
    tile = first_tile + 2 * WHICH

    # 1. Load what the two tiles need, and wait for their queries.
    # fmt: off
    lse, mass, begin, end = _of_tile(tile, of_head, lse_ptr, begin_ptr, mass_ptr, tiles, rows, number, ROWS, OF_QUERY)
    other_lse, other_mass, other_begin, other_end = _of_tile(
        tile + 1, of_head, lse_ptr, begin_ptr, mass_ptr, tiles, rows, number, ROWS, OF_QUERY)
    # fmt: on
    q, other_q = q_tiles.index(2 * WHICH).permute((1, 0)), q_tiles.index(2 * WHICH + 1).permute((1, 0))  # [D, ROWS]
    nothing = gl.zeros([KEYS, ROWS], gl.float32, PRODUCTS)  # [KEYS, ROWS]
    end, other_end = gl.minimum(end, last), gl.minimum(other_end, last)
    mbarrier.wait(q_full.index(WHICH), 0)

    # 2. Walk over the blocks of keys. The exponentials of one tile overlap with the products of the other.
    turn = 0
    for start in range(first, stop, KEYS):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), turn // STAGES & 1)
        fence_async_shared()
        products = warpgroup_mma(k_tiles.index(stage), q, nothing, use_acc=False, is_async=True)  # [KEYS, ROWS]
        others = warpgroup_mma(k_tiles.index(stage), other_q, nothing, use_acc=False, is_async=True)  # [KEYS, ROWS]
        products = warpgroup_mma_wait(1, deps=(products,))
        _put(products, lse, scale, mass, start, begin, end, KEYS)
        others = warpgroup_mma_wait(0, deps=(others,))
        # Both products of this warpgroup are done: the stage may be filled again.
        mbarrier.arrive(empty.index(stage), count=1)
        _put(others, other_lse, scale, other_mass, start, other_begin, other_end, KEYS)
        turn += 1

    # 3. Write -inf to the keys after these blocks.
    beyond = gl.arange(0, ROWS, OF_QUERY)  # [ROWS]
    for start in range(first + turn * KEYS, last, ROWS):
        keys = start + beyond  # [ROWS]
        unseen = gl.full([ROWS], float("-inf"), gl.float32, OF_QUERY)  # [ROWS]
        gl.store(mass + keys, unseen, mask=keys < end)
        gl.store(other_mass + keys, unseen, mask=keys < other_end)


# Sizes change from call to call; unspecialised, one compiled kernel serves all of them.
@gluon.jit(do_not_specialize=["heads", "tiles", "rows", "number", "groups", "span"])
def _tile_block_mass_on_hopper(
    q_ptr, k_ptr, lse_ptr, begin_ptr, mass_ptr,
    k_stride_b, k_stride_h, k_stride_l,
    heads, tiles, rows, number, groups, span, scale,
    ROWS: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, AT_ONCE: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """The attention that tiles of queries pay to the keys before them: writes ``mass [B, H, T, n]`` from contiguous
    queries ``[B, H, T, W, D]`` and ``lse [B, H, T, W]``. Logits are to the base 2, and ``scale`` includes log2(e).

    A program owns four tiles of one head and ``span`` blocks of keys, which it reads once, in ascending order, up to
    the last of the tiles. Programs of the same keys and neighbouring tiles run side by side, so that the keys come from
    the cache.
    """
    # 1. Find the program's keys: from ``first`` on, before ``last``, and seen by one of its tiles before ``stop``.
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    first_tile = gl.program_id(0) % groups * 4
    of_head = gl.program_id(1).to(gl.int64)
    first = gl.program_id(0) // groups * span * KEYS
    last = gl.minimum(first + span * KEYS, number)
    stop = 0
    for which in gl.static_range(4):
        begin = gl.load(begin_ptr + gl.minimum(first_tile + which, tiles - 1)).to(gl.int32)
        stop = gl.maximum(stop, gl.minimum(begin, last))
    k_base = k_ptr + of_head // heads * k_stride_b + of_head % heads * k_stride_h

    # 2. Allocate the tiles, and the barriers by which the warpgroups wait for each other.
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_tiles = gl.allocate_shared_memory(dtype, [4, ROWS, DIM], LAYOUT)  # [4, ROWS, D]
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], LAYOUT)  # [STAGES, KEYS, D]
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for which in gl.static_range(2):
        mbarrier.init(q_full.index(which), count=128)  # one arrival of each thread that fetches
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=128)
        mbarrier.init(empty.index(stage), count=2)  # one arrival of each warpgroup that multiplies

    # 3. Run two warpgroups that multiply and one that fetches.
    # fmt: off
    gl.warp_specialize([
        (_add_up, (lse_ptr, begin_ptr, mass_ptr, of_head, first_tile, first, stop, last, tiles, rows, number, scale,
                   q_tiles, k_tiles, q_full, full, empty, 0, ROWS, KEYS, STAGES)),
        (_add_up, (lse_ptr, begin_ptr, mass_ptr, of_head, first_tile, first, stop, last, tiles, rows, number, scale,
                   q_tiles, k_tiles, q_full, full, empty, 1, ROWS, KEYS, STAGES)),
        (_fetch, (q_ptr, k_base, k_stride_l, of_head, first_tile, first, stop, tiles, rows, q_tiles, k_tiles, q_full,
                  full, empty, ROWS, DIM, KEYS, STAGES, AT_ONCE)),
    ], [4, 4], [REGISTERS[0], REGISTERS[1]])
    # fmt: on

"""The lightning indexer's score on Hopper: Gluon kernel of :func:`indexer_scores`.

Two warpgroups multiply by turns: while one adds up the heads of its products, the tensor cores multiply for the other.
One more warp fetches keys ahead of both.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from foveate.ops.score.indexer import BLOCK, IndexerScores, room_for

_ROWS = 256
"""Queries times heads of a warpgroup, which are the columns of a product."""
_KEYS = 64
"""Keys of a product."""
_STAGES = 4
"""Blocks of keys that are fetched ahead."""
_SPAN = 128
"""The most products that a program makes of its queries."""
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}


def fits(q: Tensor, k: Tensor) -> bool:
    """Whether the kernel does this case: Hopper, enough queries to fill a program, and memory as its copies need it."""
    _, queries, heads, dim = q.shape
    width = q.element_size()
    return (
        torch.cuda.get_device_capability(q.device) == (9, 0)
        and q.dtype in _DTYPES
        and heads in (32, 64, 128)
        and dim * width in (128, 256)
        and queries * heads >= 2 * _ROWS
        and k.shape[1] >= _KEYS
        and (q.stride(3), k.stride(2)) == (1, 1)
        and q.stride(1) == heads * q.stride(2)
        and not any(width * x.stride(1) % 16 or width * x.stride(0) % 16 or x.data_ptr() % 16 for x in (q, k))
        and width * q.stride(2) % 16 == 0
    )


def indexer_scores(q, k, weights, *, ratio, offset, starts, key_scales):
    """See :func:`foveate.ops.score.indexer.indexer_scores`; only where :func:`fits`.

    Every score has one owner and one order of summation: repeats are equal bit for bit.
    """
    batch, queries, heads, dim = q.shape
    number = k.shape[1]
    scores, maxima = room_for(q, number)
    lost = torch.zeros(1, dtype=torch.int32, device=q.device)
    weights, starts = weights.contiguous(), None if starts is None else starts.contiguous()
    scales = None if key_scales is None else key_scales.contiguous()
    each = _ROWS // heads
    groups, tiles = triton.cdiv(queries, 2 * each), triton.cdiv(number, _KEYS)
    programs = 2 * torch.cuda.get_device_properties(q.device).multi_processor_count
    span = max(1, min(_SPAN, groups * tiles // programs))
    layout = gl.NVMMASharedLayout(128, 8 * q.element_size(), rank=2)
    for one in range(batch):
        _indexer_scores[(groups * triton.cdiv(tiles, span),)](
            TensorDescriptor.from_tensor(q[one].view(queries * heads, dim), [_ROWS, dim], layout),
            TensorDescriptor.from_tensor(k[one], [_KEYS, dim], layout), weights[one], scores[one], maxima[one], lost,
            None if starts is None else starts[one:], None if scales is None else scales[one], groups, queries, number,
            scores.stride(1), maxima.stride(1),
            ratio, offset, span,
            HEADS=heads, EACH=each, KEYS=_KEYS, BLOCK=BLOCK, STAGES=_STAGES, PADDED=starts is not None,
            SCALED=scales is not None, num_warps=4,
        )  # fmt: skip
    return IndexerScores(scores, maxima, lost)


@gluon.constexpr_function
def _owners(each):
    """The layout of scores ``[KEYS, EACH]`` in which every score has one thread. After the sums over heads the four
    threads of a quad all hold the scores of the same two keys for all queries; each of them keeps the scores of some
    queries."""
    lanes = [[0, 1], [0, 2]] if each > 2 else [[0, 1], [8, 0]]
    registers = ([[8, 0]] if each > 2 else []) + [[0, 4 << i] for i in range(each.bit_length() - 3)]
    return gl.DistributedLinearLayout(registers, [*lanes, [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, each])


@gluon.jit
def _fetch(
    q_desc, k_desc, first_row, begin, end, q_tiles, k_tiles, q_full, full, empty,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that fetches: it copies both tiles of queries once, to ``q_tiles [2, ROWS, D]``, and then the keys
    ``begin .. end - 1`` in ascending order, block by block, into the ring ``k_tiles [STAGES, KEYS, D]``.

    ``q_full`` and ``full`` tell the warpgroups that queries and a block of keys have arrived; ``empty`` tells this warp
    that both of them have multiplied a block.
    """
    WIDTH: gl.constexpr = q_desc.block_shape[1] * q_desc.dtype.primitive_bitwidth // 8

    # 1. Copy the queries of both warpgroups.
    mbarrier.expect(q_full, 2 * ROWS * WIDTH)
    for which in gl.static_range(2):
        tma.async_copy_global_to_shared(q_desc, [first_row + which * ROWS, 0], q_full, q_tiles.index(which))

    # 2. Copy the keys. In the first round of the ring every stage is empty, and waiting for the opposite parity passes
    # at once.
    turn = 0
    for start in range(begin, end, KEYS):
        stage = turn % STAGES
        mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(stage), KEYS * WIDTH)
        tma.async_copy_global_to_shared(k_desc, [start, 0], full.index(stage), k_tiles.index(stage))
        turn += 1


@gluon.jit
def _add_up(
    which,
    w_ptr, score_ptr, max_ptr, lost_ptr, start_ptr, scale_ptr,
    first_query, begin, end, queries, number, apart, max_apart, ratio, offset, q_tiles, k_tiles, q_full, full, empty,
    HEADS: gl.constexpr, EACH: gl.constexpr, KEYS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    PADDED: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies. It owns ``EACH`` queries with all heads, which are the columns of a product
    (``which``: the first or the second half of the program's queries). It reads the blocks of keys in ascending order
    as they arrive, sums over the heads in fp32, and writes scores, maxima and ``lost``.

    Shapes: E = EACH queries, R = EACH * HEADS columns of queries and heads, T = KEYS keys, C = KEYS / BLOCK blocks of
    keys that have one maximum each.
    """
    ROWS: gl.constexpr = EACH * HEADS
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, ROWS, 256 // k_tiles.dtype.primitive_bitwidth]
    )
    OWNERS: gl.constexpr = _owners(EACH)

    # 1. Load the weights, find how many keys each query sees, and wait for the queries.
    first_query += which * EACH
    columns = gl.arange(0, ROWS, gl.SliceLayout(0, PRODUCTS))  # [R]
    w = gl.load(w_ptr + first_query * HEADS + columns, mask=first_query + columns // HEADS < queries, other=0.0)  # [R]
    query = first_query + gl.arange(0, EACH, gl.SliceLayout(0, OWNERS))  # [E]
    places = gl.arange(0, KEYS, gl.SliceLayout(1, OWNERS))  # [T]
    visible = gl.where(query < queries, gl.minimum((offset + query + 1) // ratio, number), 0)  # [E]
    row = gl.where(query < queries, query, 0).to(gl.int64)  # [E]
    padding = 0
    if PADDED:
        padding = gl.load(start_ptr).to(gl.int32)
    q = q_tiles.index(which).permute((1, 0))  # [D, R]
    nothing = gl.zeros([KEYS, ROWS], gl.float32, PRODUCTS)  # [T, R]
    lost = gl.zeros([KEYS, EACH], gl.int32, OWNERS)  # [T, E]
    mbarrier.wait(q_full, 0)

    # 2. Walk over the blocks of keys.
    turn = 0
    for start in range(begin, end, KEYS):
        stage = turn % STAGES
        keys = start + places  # [T]
        if SCALED:
            scale = gl.load(scale_ptr + keys, mask=keys < number, other=0.0)  # [T]
        mbarrier.wait(full.index(stage), turn // STAGES & 1)
        products = warpgroup_mma(k_tiles.index(stage), q, nothing, use_acc=False, is_async=True)  # [T, R]
        products = warpgroup_mma_wait(0, deps=(products,))
        mbarrier.arrive(empty.index(stage), count=1)
        # A ReLU that turned NaN into 0 would hide it from ``lost``.
        weighted = gl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :]  # [T, R]
        score = gl.convert_layout(gl.sum(gl.reshape(weighted, [KEYS, EACH, HEADS]), 2), OWNERS)  # [T, E]
        if SCALED:
            score *= scale[:, None]
        seen = keys[:, None] < visible[None, :]  # [T, E]
        if PADDED:
            seen = seen & (keys >= padding)[:, None]
        gl.store(score_ptr + row[None, :] * apart + keys[:, None], score, mask=seen)
        lost |= (seen & (score != score)).to(gl.int32)
        best = gl.max(gl.reshape(gl.where(seen, score, float("-inf")), [KEYS // BLOCK, BLOCK, EACH]), 1)  # [C, E]
        BEST: gl.constexpr = best.type.layout
        block = start // BLOCK + gl.arange(0, KEYS // BLOCK, gl.SliceLayout(1, BEST))  # [C]
        of_row = gl.convert_layout(row, gl.SliceLayout(0, BEST))  # [E]
        limit = gl.convert_layout(visible, gl.SliceLayout(0, BEST))  # [E]
        written = (block * BLOCK)[:, None] < limit[None, :]  # [C, E]
        gl.store(max_ptr + of_row[None, :] * max_apart + block[:, None], best, mask=written)
        turn += 1

    # 3. Raise ``lost`` for a score that is NaN, and for a weight that is not finite of a query that sees a key.
    own = first_query + columns // HEADS  # [R]
    sees = (own < queries) & (gl.minimum((offset + own + 1) // ratio, number) > padding)  # [R]
    broken = (sees & (w - w != 0)).to(gl.int32)  # [R]; ``w - w`` is NaN where w is infinite or NaN
    gl.atomic_max(lost_ptr, gl.maximum(gl.max(gl.max(lost, 1), 0), gl.max(broken, 0)))


# Sizes change from call to call; unspecialised, one compiled kernel serves all of them.
@gluon.jit(do_not_specialize=["groups", "queries", "number", "apart", "max_apart", "ratio", "offset", "span"])
def _indexer_scores(
    q_desc, k_desc,
    w_ptr, score_ptr, max_ptr, lost_ptr, start_ptr, scale_ptr,
    groups, queries, number, apart, max_apart, ratio, offset, span,
    HEADS: gl.constexpr, EACH: gl.constexpr, KEYS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    PADDED: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """The lightning indexer's scores of one row of the batch: writes ``scores [S, T]`` and ``maxima [S, blocks]``,
    whose rows are ``apart`` and ``max_apart`` from each other. Weights ``[S, H]`` and scales ``[T]`` are contiguous.

    A program owns ``2 * EACH`` queries with all heads and up to ``span`` blocks of keys. It loads the queries once and
    reads the keys in ascending order, up to the last key that one of its queries sees. Programs of the same keys and
    neighbouring queries run side by side, so that the keys come from the cache.
    """
    # 1. Find the keys of the program; it leaves if its queries see none of them.
    ROWS: gl.constexpr = EACH * HEADS
    first_query = gl.program_id(0) % groups * 2 * EACH
    last = gl.minimum(first_query + 2 * EACH, queries) - 1
    begin = gl.program_id(0) // groups * span * KEYS
    end = gl.minimum((offset + last + 1) // ratio, number)  # keys that the last of the queries sees
    if begin >= end:
        return
    end = gl.minimum(begin + span * KEYS, end)

    # 2. Allocate the tiles, and the barriers by which the warps wait for each other.
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS, q_desc.block_shape[1]], q_desc.layout)  # [2, ROWS, D]
    # [STAGES, KEYS, D]
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, KEYS, k_desc.block_shape[1]], k_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)

    # 3. Run two warpgroups that multiply and one warp that fetches.
    # fmt: off
    gl.warp_specialize([
        (_add_up, (0, w_ptr, score_ptr, max_ptr, lost_ptr, start_ptr, scale_ptr, first_query, begin, end, queries,
                   number, apart, max_apart, ratio, offset, q_tiles, k_tiles, q_full, full, empty,
                   HEADS, EACH, KEYS, BLOCK, STAGES, PADDED, SCALED)),
        (_add_up, (1, w_ptr, score_ptr, max_ptr, lost_ptr, start_ptr, scale_ptr, first_query, begin, end, queries,
                   number, apart, max_apart, ratio, offset, q_tiles, k_tiles, q_full, full, empty,
                   HEADS, EACH, KEYS, BLOCK, STAGES, PADDED, SCALED)),
        (_fetch, (q_desc, k_desc, first_query * HEADS, begin, end, q_tiles, k_tiles, q_full, full, empty,
                  ROWS, KEYS, STAGES)),
    ], [4, 1], [232, 24])
    # fmt: on

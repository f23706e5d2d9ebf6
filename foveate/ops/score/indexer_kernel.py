"""The lightning indexer's score: Triton kernel of :func:`indexer_scores`."""

import importlib

import torch
import triton
import triton.language as tl

from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.tiles import multiprocessors
from foveate.ops.score.indexer import BLOCK, IndexerScores, room_for

_ROWS = 256
"""The most queries times heads of a program."""
_KEYS = 64
"""Keys of a product."""
_SPAN = 64
"""The most products that a program makes, so that its queries are loaded once for all of them."""
_HOPPER = True
"""Whether Hopper gets the kernel written for it."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)


def queries_of(heads: int, width: int) -> int:
    """Queries of a program, for which shared memory suffices; ``width``: bytes of a head. 0: one query is too much."""
    return min(_ROWS // heads, 8) if width <= 512 else _ROWS // 4 // heads


def options(dtype: torch.dtype, dim: int, capability: int) -> dict[str, int]:
    """Options of the launch. Two programs share one of Hopper's multiprocessors, so that one multiplies while the other
    adds up heads; other GPUs have shared memory for fewer blocks of keys."""
    if dtype == torch.float32 or dim > 128:
        return {"num_warps": 8, "num_stages": 1}
    return {"num_warps": 4, "num_stages": 3 if capability >= 9 else 2}


def indexer_scores(q, k, weights, *, ratio=1, offset=0, starts=None, key_scales=None):
    """See :func:`foveate.ops.score.indexer.indexer_scores`.

    Keys are the rows of the products and heads are the columns, so that one thread and its neighbours apply ReLU and
    weights and sum over the heads. Every score has one owner and one order of summation: repeats are equal bit for bit.
    Blocks that no query of a program sees are neither read nor written.
    """
    batch, queries, heads, dim = q.shape
    number = k.shape[1]
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (8, 0)
    if q.dtype != k.dtype or q.dtype not in _DTYPES or (q.dtype == torch.float8_e4m3fn and capability < (8, 9)):
        raise UnsupportedError(f"queries in {q.dtype} with keys in {k.dtype}")
    width = max(16, triton.next_power_of_2(dim))
    each = queries_of(heads, width * q.element_size())
    if heads & (heads - 1) or not 16 <= heads <= _ROWS // 2 or dim > 256 or not each:
        raise UnsupportedError(
            f"{heads} index heads of {dim} in {q.dtype} (powers of two from 16 to {_ROWS // 2}, of at most 256; "
            "in fp32 of more than 128 at most 64)"
        )
    if _HOPPER and capability == (9, 0):
        hopper = importlib.import_module("foveate.ops.score.indexer_hopper_kernel")
        if hopper.fits(q, k):
            how = {"ratio": ratio, "offset": offset, "starts": starts, "key_scales": key_scales}
            return hopper.indexer_scores(q, k, weights, **how)
    scores, maxima = room_for(q, number)
    lost = torch.zeros(1, dtype=torch.int32, device=q.device)
    starts = None if starts is None else starts.contiguous()
    if not number or not queries:
        return IndexerScores(scores, maxima, lost)
    groups, tiles = triton.cdiv(queries, each), triton.cdiv(number, _KEYS)
    programs = 4 * multiprocessors(q.device) if q.is_cuda else 1  # which keep a GPU busy
    span = max(1, min(_SPAN, batch * groups * tiles // programs))
    tile = options(q.dtype, dim, 9 if capability[0] in (9, 10) else 8)  # 12 has the shared memory of 8
    _indexer_scores[groups * triton.cdiv(tiles, span), batch](
        q, k, weights, scores, maxima, lost, starts, key_scales,
        *q.stride(), *k.stride(), *weights.stride(), *((0, 0) if key_scales is None else key_scales.stride()),
        groups, queries, number,
        scores.stride(1), maxima.stride(1),
        ratio, offset, span,
        HEADS=heads, EACH=each, DIM=dim, BLOCK_D=width, BLOCK_T=_KEYS, BLOCK=BLOCK, PADDED=starts is not None,
        SCALED=key_scales is not None, **tile,
    )  # fmt: skip
    return IndexerScores(scores, maxima, lost)


# Sizes change from call to call; unspecialised, one compiled kernel serves all of them.
@triton.jit(do_not_specialize=["groups", "queries", "number", "apart", "max_apart", "ratio", "offset", "span"])
def _indexer_scores(
    q_ptr, k_ptr, w_ptr, score_ptr, max_ptr, lost_ptr, start_ptr, scale_ptr,
    q_stride_b, q_stride_s, q_stride_h, q_stride_d, k_stride_b, k_stride_t, k_stride_d,
    w_stride_b, w_stride_s, w_stride_h, scale_stride_b, scale_stride_t,
    groups, queries, number, apart, max_apart, ratio, offset, span,
    HEADS: tl.constexpr, EACH: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The lightning indexer's scores: writes ``scores [B, S, T]`` and ``maxima [B, S, blocks]``, whose rows are
    ``apart`` and ``max_apart`` from each other, and raises ``lost`` to 1 where a score that a query sees is NaN or a
    weight is not finite.

    A program owns ``EACH`` queries of one row of the batch, with all heads, and up to ``span`` blocks of keys. It loads
    the queries once and reads the keys in ascending order, up to the last key that one of its queries sees. Programs of
    the same keys and neighbouring queries run side by side, so that the keys come from the cache.

    Shapes: E = EACH queries, R = EACH * HEADS rows of queries and heads, T = BLOCK_T keys, C = BLOCK_T / BLOCK blocks
    of keys that have one maximum each, D = BLOCK_D, which holds the head dim ``DIM``.
    """
    group, walk = tl.program_id(0) % groups, tl.program_id(0) // groups
    batch = tl.program_id(1).to(tl.int64)
    first_query = group * EACH

    # 1. Find the keys of the program; it leaves if its queries see none of them.
    last = tl.minimum(first_query + EACH, queries) - 1
    end = tl.minimum((offset + last + 1) // ratio, number)  # keys that the last of the queries sees
    begin = walk * span * BLOCK_T
    if begin >= end:
        return
    rows, dims, places = tl.arange(0, EACH * HEADS), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_T)  # [R], [D], [T]
    blocks_of_product = tl.arange(0, BLOCK_T // BLOCK)  # [C]

    # 2. Load the queries, transposed, and the weights of their heads.
    query, head = first_query + rows // HEADS, rows % HEADS  # [R], [R]
    exist = query < queries  # [R]
    query = tl.where(exist, query, 0).to(tl.int64)  # [R]
    q_tile = (query * q_stride_s + head * q_stride_h)[:, None] + dims[None, :] * q_stride_d  # [R, D]
    q_mask = exist[:, None] & (dims < DIM)[None, :]  # [R, D]
    q = tl.trans(tl.load(q_ptr + batch * q_stride_b + q_tile, mask=q_mask, other=0.0))  # [D, R]
    w_tile = batch * w_stride_b + query * w_stride_s + head * w_stride_h  # [R]
    w = tl.load(w_ptr + w_tile, mask=exist, other=0.0)  # [R]

    # 3. Find how many keys each query sees.
    own = first_query + tl.arange(0, EACH)  # [E]
    own_exist = own < queries  # [E]
    visible = tl.where(own_exist, tl.minimum((offset + own + 1) // ratio, number), 0)  # [E]
    row = batch * queries + tl.where(own_exist, own, 0).to(tl.int64)  # [E]
    padding = 0
    if PADDED:
        padding = tl.load(start_ptr + batch)
    lost = tl.zeros([BLOCK_T, EACH], tl.int32)  # [T, E]

    # 4. Walk over the blocks of keys.
    for start in tl.range(begin, tl.minimum(begin + span * BLOCK_T, end), BLOCK_T):
        keys = start + places  # [T]
        k_tile = batch * k_stride_b + keys.to(tl.int64)[:, None] * k_stride_t + dims[None, :] * k_stride_d  # [T, D]
        k = tl.load(k_ptr + k_tile, mask=(keys < number)[:, None] & (dims < DIM)[None, :], other=0.0)  # [T, D]
        products = tl.dot(k, q, input_precision="ieee")  # [T, R]
        # A ReLU that turned NaN into 0 would hide it from ``lost``.
        weighted = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :]  # [T, R]
        score = tl.sum(tl.reshape(weighted, [BLOCK_T, EACH, HEADS]), 2)  # [T, E]
        if SCALED:
            at = batch * scale_stride_b + keys.to(tl.int64) * scale_stride_t  # [T]
            score *= tl.load(scale_ptr + at, mask=keys < number, other=0.0)[:, None]
        seen = keys[:, None] < visible[None, :]  # [T, E]
        if PADDED:
            seen = seen & (keys >= padding)[:, None]
        tl.store(score_ptr + row[None, :] * apart + keys[:, None], score, mask=seen)
        lost |= (seen & (score != score)).to(tl.int32)
        best = tl.reshape(tl.where(seen, score, float("-inf")), [BLOCK_T // BLOCK, BLOCK, EACH])  # [C, BLOCK, E]
        block = start // BLOCK + blocks_of_product  # [C]
        written = block[:, None] * BLOCK < visible[None, :]  # [C, E]
        tl.store(max_ptr + row[None, :] * max_apart + block[:, None], tl.max(best, 1), mask=written)

    # 5. Raise ``lost`` for a score that is NaN, and for a weight that is not finite of a query that sees a key.
    query = first_query + rows // HEADS  # [R]
    sees = (query < queries) & (tl.minimum((offset + query + 1) // ratio, number) > padding)  # [R]
    broken = (sees & (w - w != 0)).to(tl.int32)  # [R]; ``w - w`` is NaN where w is infinite or NaN
    tl.atomic_max(lost_ptr, tl.maximum(tl.max(tl.max(lost, 1), 0), tl.max(broken, 0)))

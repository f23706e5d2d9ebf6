"""Summaries, chosen blocks and a window in three launches: Triton kernels of :func:`attend_gated`."""

import torch
import triton
import triton.language as tl

from foveate.hybrids.ops import gated as reference
from foveate.ops.attend.attended import Attended
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.softmax import LOG2E, LOWEST, accumulate, exponentials, log_sum_exp, normalised
from foveate.ops.gpu.tiles import multiprocessors

_HEADS = 64
"""The most query heads of a KV head."""
_SUMMARIES = 8192
"""A row has fewer blocks than this: one program holds the weights of all blocks in its registers."""
_RESIDENT, _LONGEST = 3, 8
"""Programs that a multiprocessor runs at a time, and the most blocks of keys that one of them reads."""


def attend_gated(q, k, v, block_keys, block_values, gates, lengths, *, scaling, block, blocks, window):
    """See :func:`foveate.hybrids.ops.gated.attend_gated`. Keys are read in place, once for all heads of a group.

    The first launch attends to the summaries and chooses blocks, with one program for each KV head of a row. The second
    attends to the keys of the chosen blocks and of the window, with several programs for each KV head. The third merges
    and gates. Nothing waits for the device, and repeats are equal bit for bit.
    """
    reference.check(q, k, v, block_keys, block_values, gates, lengths, block)
    batch, num_heads, _, dim = q.shape
    num_kv_heads, number, value_dim = v.shape[1:]
    group, summaries = num_heads // num_kv_heads, number // block
    if len({x.dtype for x in (q, k, v, block_keys, block_values)}) > 1:
        raise UnsupportedError(f"queries in {q.dtype} with keys in {k.dtype} and summaries in {block_keys.dtype}")
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise UnsupportedError(f"queries in {q.dtype}")
    if max(dim, value_dim) > reference.LARGEST_DIM:
        raise UnsupportedError(f"head dims above {reference.LARGEST_DIM}")
    if group > _HEADS:
        raise UnsupportedError(f"more than {_HEADS} query heads to a KV head")
    if summaries >= _SUMMARIES:
        raise UnsupportedError(f"{_SUMMARIES} blocks and more")
    out = q.new_empty(batch, num_heads, 1, value_dim)
    if not out.numel():
        return Attended(out)
    half = q.dtype != torch.float32
    block_n, block_m = 64 if half else 16, max(16, triton.next_power_of_2(group))
    sizes = {
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        "BLOCK_DV": max(16, triton.next_power_of_2(value_dim)),
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": 4,
        "num_stages": 3 if half else 1,
    }
    rows, padded = batch * num_kv_heads, triton.cdiv(summaries + 1, block_n) * block_n
    logits = q.new_empty(rows, block_m, padded, dtype=torch.float32)
    weights = q.new_empty(rows, padded, dtype=torch.float32)
    pages = torch.empty(rows, blocks, dtype=torch.int32, device=q.device)
    compressed = q.new_empty(batch, num_heads, value_dim, dtype=torch.float32)
    _choose[rows,](
        q, block_keys, block_values, lengths, logits, weights, pages, compressed,
        *(q.stride(axis) for axis in (0, 1, 3)), *block_keys.stride(), *block_values.stride(), lengths.stride(0),
        num_kv_heads, group, block, blocks, number, padded, scaling * LOG2E.value,
        WIDE=triton.next_power_of_2(padded), **sizes,
    )  # fmt: skip
    of_blocks, of_window = (triton.cdiv(keys, block_n) for keys in (blocks * block, window))
    share = triton.cdiv(rows * (of_blocks + of_window), _RESIDENT * multiprocessors(q.device))
    each = max(1, min(_LONGEST, share))
    parts_chosen, parts_window = triton.cdiv(of_blocks, each), triton.cdiv(of_window, each)
    parts = parts_chosen + parts_window
    found = q.new_empty(parts, batch, num_heads, value_dim, dtype=torch.float32)
    lses = q.new_empty(parts, batch, num_heads, dtype=torch.float32)
    _attend_parts[rows, parts](
        q, k, v, lengths, pages, found, lses,
        *(q.stride(axis) for axis in (0, 1, 3)), *k.stride(), *v.stride(), lengths.stride(0),
        batch, num_kv_heads, group, block, blocks, window, number, parts_chosen, each, scaling * LOG2E.value,
        **sizes,
    )  # fmt: skip
    _merge_gated[num_heads, batch](
        compressed, found, lses, gates, out,
        *gates.stride()[:3],
        batch, num_heads, parts_chosen, parts,
        VALUE_DIM=value_dim, BLOCK_DV=sizes["BLOCK_DV"], PARTS=triton.next_power_of_2(parts), num_warps=1,
    )  # fmt: skip
    return Attended(out)


@triton.jit
def _fold(q, k_ptr, v_ptr, slots, stored, k_strides, v_strides, scale, top, weight, out, sizes: tl.constexpr):
    """Adds one block of keys to a running softmax ``top [M]``, ``weight [M]``, ``out [M, DV]``.

    Returns the block's logits ``[M, N]``, to the base 2, -inf where no key is ``stored [N]``, and the new running
    softmax. ``sizes``: DIM, VALUE_DIM, BLOCK_D, BLOCK_DV. Strides are by key and by dimension.

    Shapes: M heads, N keys, D = BLOCK_D dimensions of keys, DV = BLOCK_DV dimensions of values.
    """
    dims, value_dims = tl.arange(0, sizes[2]), tl.arange(0, sizes[3])  # [D], [DV]
    k_tile = slots[:, None] * k_strides[0] + dims[None, :] * k_strides[1]  # [N, D]
    k = tl.load(k_ptr + k_tile, mask=stored[:, None] & (dims < sizes[0])[None, :], other=0.0)  # [N, D]
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [M, N]
    logits = tl.where(stored[None, :], logits, float("-inf"))  # [M, N]
    top, p, fade = exponentials(logits, top)  # [M], [M, N], [M]
    v_tile = slots[:, None] * v_strides[0] + value_dims[None, :] * v_strides[1]  # [N, DV]
    v = tl.load(v_ptr + v_tile, mask=stored[:, None] & (value_dims < sizes[1])[None, :], other=0.0)  # [N, DV]
    weight, out = accumulate(p, v, fade, weight, out)  # [M], [M, DV]
    return logits, top, weight, out


_OF_STEP = ["length_stride", "num_kv_heads", "group", "blocks", "number"]


@triton.jit(do_not_specialize=[*_OF_STEP, "padded"])
def _choose(
    q_ptr, k_ptr, v_ptr, length_ptr, logit_ptr, weight_ptr, page_ptr, out_ptr,
    q_stride_b, q_stride_h, q_stride_d, k_stride_b, k_stride_h, k_stride_l, k_stride_d,
    v_stride_b, v_stride_h, v_stride_l, v_stride_d, length_stride,
    num_kv_heads, group, block, blocks, number, padded, scale,
    WIDE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attends to the summaries of a row's complete blocks, and chooses blocks by their weights.

    A program owns a KV head of a row, with all query heads of its group. It reads the summaries ``k [B, Hkv, N, D]``
    and ``v [B, Hkv, N, Dv]`` once, in ascending order, with an online softmax in fp32, and keeps their logits, to the
    base 2, in ``logit [B * Hkv, BLOCK_M, padded]``. It then turns the logits into ``weight [B * Hkv, padded]``, the
    sums of the heads' softmax weights, and chooses the blocks of largest weight. The first block, the query's own and
    the one before it are always chosen, and of equal weights the earlier block.

    It writes ``out [B, Hq, Dv]``, the attention over the summaries, and ``page [B * Hkv, blocks]``, the numbers of the
    chosen blocks in the order of their weights, -1 for none. ``logit`` and ``weight`` are scratch.

    Shapes: M = BLOCK_M heads, N = BLOCK_N summaries, W = WIDE blocks of a row, D = BLOCK_D dimensions of keys, DV =
    BLOCK_DV dimensions of values.
    """
    # 1. Find the row, the KV head and the number of complete blocks.
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // num_kv_heads, row % num_kv_heads
    members, places = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)  # [M], [N]
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)  # [D], [DV]
    exist = members < group  # [M]
    heads = head * group + tl.where(exist, members, 0)  # [M]
    length = tl.minimum(tl.load(length_ptr + batch * length_stride), number).to(tl.int32)
    complete = length // block
    # 2. Load the queries.
    q_tile = batch * q_stride_b + heads[:, None] * q_stride_h + dims[None, :] * q_stride_d  # [M, D]
    q = tl.load(q_ptr + q_tile, mask=exist[:, None] & (dims < DIM)[None, :], other=0.0)  # [M, D]
    k_ptr += batch * k_stride_b + head * k_stride_h
    v_ptr += batch * v_stride_b + head * v_stride_h
    logit_ptr += row * BLOCK_M * padded
    weight_ptr += row * padded

    # 3. Attend to the summaries, and keep their logits.
    top = tl.full([BLOCK_M], LOWEST, tl.float32)  # [M]
    weight = tl.zeros([BLOCK_M], tl.float32)  # [M]
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # [M, DV]
    for first in tl.range(0, complete, BLOCK_N):
        slots = (first + places).to(tl.int64)  # [N]
        # [M, N], [M], [M], [M, DV]
        logits, top, weight, out = _fold(
            q, k_ptr, v_ptr, slots, slots < complete, (k_stride_l, k_stride_d), (v_stride_l, v_stride_d), scale, top,
            weight, out, (DIM, VALUE_DIM, BLOCK_D, BLOCK_DV),
        )  # fmt: skip
        tl.store(logit_ptr + members[:, None] * padded + (first + places)[None, :], logits)
    # 4. Normalise and store the attention.
    out = normalised(weight, out)  # [M, DV]
    lse = top + tl.log2(tl.where(weight == 0, 1.0, weight))  # [M]
    out_tile = (batch * num_kv_heads * group + heads)[:, None] * VALUE_DIM + value_dims[None, :]  # [M, DV]
    tl.store(out_ptr + out_tile, out, mask=exist[:, None] & (value_dims < VALUE_DIM)[None, :])

    # 5. Sum the softmax weights of the heads of the group.
    tl.debug_barrier()  # other threads have written the logits that a thread reads
    for first in tl.range(0, complete, BLOCK_N):
        logits = tl.load(logit_ptr + members[:, None] * padded + (first + places)[None, :])  # [M, N]
        p = tl.where(exist[:, None], tl.exp2(logits - lse[:, None]), 0.0)  # [M, N]
        tl.store(weight_ptr + first + places, tl.sum(p, 0))
    tl.debug_barrier()

    # 6. Choose blocks, the largest first. Weights are not negative, so that their bits have the order of the weights.
    # Below these bits is the block's number, reversed, so that the earlier of two blocks of equal weight is larger.
    own = (length - 1) // block
    numbers = tl.arange(0, WIDE)  # [W]
    shares = tl.load(weight_ptr + numbers, mask=numbers < complete, other=0.0)  # [W]
    shares = tl.where((numbers == 0) | (numbers >= own - 1), float("inf"), shares)  # [W]
    order = (shares.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (0x7FFFFFFF - numbers).to(tl.int64)  # [W]
    order = tl.where(numbers <= own, order, -1)  # [W]
    for place in tl.range(0, blocks):
        best = tl.max(order, 0)
        page = tl.where(best < 0, -1, 0x7FFFFFFF - (best & 0x7FFFFFFF))
        tl.store(page_ptr + row * blocks + place, page.to(tl.int32))
        order = tl.where(order == best, -1, order)  # [W]


@triton.jit(do_not_specialize=[*_OF_STEP, "batches", "window", "parts_chosen", "each"])
def _attend_parts(
    q_ptr, k_ptr, v_ptr, length_ptr, page_ptr, out_ptr, lse_ptr,
    q_stride_b, q_stride_h, q_stride_d, k_stride_b, k_stride_h, k_stride_l, k_stride_d,
    v_stride_b, v_stride_h, v_stride_l, v_stride_d, length_stride,
    batches, num_kv_heads, group, block, blocks, window, number, parts_chosen, each, scale,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention over one part of the chosen blocks' keys, or of the window's keys.

    A program owns one part of the keys of a KV head in a row, at most ``each`` blocks of ``BLOCK_N`` keys, with all
    query heads of its group. The first ``parts_chosen`` parts hold the keys of the chosen blocks
    ``page [B * Hkv, blocks]``, -1 for none; the other parts hold the window, the last ``window`` keys of the row. It
    reads its keys once, with an online softmax in fp32, and the numbers of blocks one step ahead of the keys. It writes
    its rows of ``out [parts, B, Hq, Dv]`` and ``lse [parts, B, Hq]``, to the base 2.

    Shapes: M = BLOCK_M heads, N = BLOCK_N keys, D = BLOCK_D dimensions of keys, DV = BLOCK_DV dimensions of values.
    """
    # 1. Find the row, the KV head and the part that the program owns.
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = row // num_kv_heads, row % num_kv_heads
    members, places = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)  # [M], [N]
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)  # [D], [DV]
    exist = members < group  # [M]
    heads = head * group + tl.where(exist, members, 0)  # [M]
    length = tl.minimum(tl.load(length_ptr + batch * length_stride), number).to(tl.int32)
    # 2. Load the queries.
    q_tile = batch * q_stride_b + heads[:, None] * q_stride_h + dims[None, :] * q_stride_d  # [M, D]
    q = tl.load(q_ptr + q_tile, mask=exist[:, None] & (dims < DIM)[None, :], other=0.0)  # [M, D]
    k_ptr += batch * k_stride_b + head * k_stride_h
    v_ptr += batch * v_stride_b + head * v_stride_h
    page_ptr += row * blocks

    # 3. Find the places of the part, counted over the chosen blocks or over the window.
    chooses = part < parts_chosen
    first = tl.where(chooses, part, part - parts_chosen) * each * BLOCK_N
    last = tl.where(chooses, blocks * block, tl.minimum(window, length))
    last = tl.minimum(first + each * BLOCK_N, last)
    near = tl.maximum(length - window, 0)
    # 4. Start the online softmax.
    top = tl.full([BLOCK_M], LOWEST, tl.float32)  # [M]
    weight = tl.zeros([BLOCK_M], tl.float32)  # [M]
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # [M, DV]
    # 5. Read the keys. The numbers of blocks are loaded one step ahead, so that the compiler can pipeline the loads of
    # keys.
    # [N]
    following = tl.load(page_ptr + (first + places) // block, mask=chooses & (first + places < last), other=-1)
    for begin in tl.range(first, last, BLOCK_N):
        place, page = begin + places, following  # [N], [N]
        ahead = place + BLOCK_N  # [N]
        # [N]
        following = tl.load(page_ptr + ahead // block, mask=chooses & (ahead < last), other=-1)
        slot = tl.where(chooses, tl.maximum(page, 0) * block + place % block, near + place)  # [N]
        stored = (place < last) & (slot < length) & ((page >= 0) | (part >= parts_chosen))  # [N]
        # _, [M], [M], [M, DV]
        _, top, weight, out = _fold(
            q, k_ptr, v_ptr, slot.to(tl.int64), stored, (k_stride_l, k_stride_d), (v_stride_l, v_stride_d), scale, top,
            weight, out, (DIM, VALUE_DIM, BLOCK_D, BLOCK_DV),
        )  # fmt: skip
    # 6. Normalise and store.
    out = normalised(weight, out)  # [M, DV]
    rows = (part.to(tl.int64) * batches + batch) * num_kv_heads * group + heads  # [M]
    out_tile = rows[:, None] * VALUE_DIM + value_dims[None, :]  # [M, DV]
    tl.store(out_ptr + out_tile, out, mask=exist[:, None] & (value_dims < VALUE_DIM)[None, :])
    tl.store(lse_ptr + rows, log_sum_exp(top, weight), mask=exist)


@triton.jit(do_not_specialize=["batches", "num_heads", "parts_chosen", "parts"])
def _merge_gated(
    compressed_ptr, part_ptr, lse_ptr, gate_ptr, out_ptr,
    gate_stride_g, gate_stride_b, gate_stride_h,
    batches, num_heads, parts_chosen, parts,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Merges the parts of one query head and sums the three attentions times their gates.

    A program owns one query head of a row. It reads its row of ``compressed [B, Hq, Dv]``, the attention over
    summaries, and its parts ``part [parts, B, Hq, Dv]`` with ``lse [parts, B, Hq]``, to the base 2, all at once. It
    writes one row of ``out [B, Hq, 1, Dv]``, contiguous.

    Shapes: P = PARTS, the power of two that holds the parts; DV = BLOCK_DV dimensions of values.
    """
    # 1. Load the parts.
    head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    part, value_dims = tl.arange(0, PARTS), tl.arange(0, BLOCK_DV)  # [P], [DV]
    there, row = value_dims < VALUE_DIM, batch * num_heads + head  # [DV], scalar
    rows = part * batches * num_heads + row  # [P]
    lse = tl.load(lse_ptr + rows, mask=part < parts, other=float("-inf"))  # [P]
    # [P, DV]
    outs = tl.load(
        part_ptr + rows[:, None] * VALUE_DIM + value_dims[None, :],
        mask=(part < parts)[:, None] & there[None, :],
        other=0.0,
    )
    # 2. Start with the attention over summaries, times its gate.
    gate_ptr += batch * gate_stride_b + head * gate_stride_h
    out = tl.load(compressed_ptr + row * VALUE_DIM + value_dims, mask=there, other=0.0)  # [DV]
    out = out * tl.load(gate_ptr).to(tl.float32)  # [DV]
    # 3. Merge the parts of the chosen blocks, then the parts of the window, and add each result times its gate.
    for branch in tl.static_range(2):
        mine = tl.where((part >= parts_chosen) == (branch == 1), lse, float("-inf"))  # [P]
        share = tl.exp2(mine - tl.maximum(tl.max(mine, 0), LOWEST))  # [P]
        total = tl.sum(share, 0)
        merged = tl.sum(outs * share[:, None], 0) / tl.where(total == 0, 1.0, total)  # [DV]
        out += merged * tl.load(gate_ptr + (branch + 1) * gate_stride_g).to(tl.float32)  # [DV]
    tl.store(out_ptr + row * VALUE_DIM + value_dims, out.to(out_ptr.dtype.element_ty), mask=there)

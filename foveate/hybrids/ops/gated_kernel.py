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
"""The most blocks of a row: the weights of all are in the registers of one program."""
_RESIDENT, _LONGEST = 3, 8
"""Programs that a multiprocessor runs at a time, and the most blocks of keys that one of them reads."""


def attend_gated(q, k, v, block_keys, block_values, gates, lengths, *, scaling, block, blocks, window):
    """See :func:`foveate.hybrids.ops.gated.attend_gated`. Keys are read in place, once for all heads of a group.

    The first launch attends to the summaries and chooses blocks, a program for a row and a KV head; the second attends
    to the keys of these and of the window, several programs for each; the third merges and gates. Nothing waits for
    the device, and repeats are equal bit for bit.
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
    """One block of keys into a running softmax; ``sizes``: DIM, VALUE_DIM, BLOCK_D, BLOCK_DV."""
    dims, value_dims = tl.arange(0, sizes[2]), tl.arange(0, sizes[3])
    k_tile = slots[:, None] * k_strides[0] + dims[None, :] * k_strides[1]
    k = tl.load(k_ptr + k_tile, mask=stored[:, None] & (dims < sizes[0])[None, :], other=0.0)
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    logits = tl.where(stored[None, :], logits, float("-inf"))
    top, p, fade = exponentials(logits, top)
    v_tile = slots[:, None] * v_strides[0] + value_dims[None, :] * v_strides[1]
    v = tl.load(v_ptr + v_tile, mask=stored[:, None] & (value_dims < sizes[1])[None, :], other=0.0)
    weight, out = accumulate(p, v, fade, weight, out)
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
    """Writes ``out [B, Hq, Dv]`` over the summaries of complete blocks, and ``page [B * Hkv, blocks]``, -1 for none.

    A program owns a KV head of a row: it reads the summaries once, keeps their logits, and chooses blocks by these.
    """
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // num_kv_heads, row % num_kv_heads
    members, places = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    exist = members < group
    heads = head * group + tl.where(exist, members, 0)
    length = tl.minimum(tl.load(length_ptr + batch * length_stride), number).to(tl.int32)
    complete = length // block
    q_tile = batch * q_stride_b + heads[:, None] * q_stride_h + dims[None, :] * q_stride_d
    q = tl.load(q_ptr + q_tile, mask=exist[:, None] & (dims < DIM)[None, :], other=0.0)
    k_ptr += batch * k_stride_b + head * k_stride_h
    v_ptr += batch * v_stride_b + head * v_stride_h
    logit_ptr += row * BLOCK_M * padded
    weight_ptr += row * padded

    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for first in tl.range(0, complete, BLOCK_N):
        slots = (first + places).to(tl.int64)
        logits, top, weight, out = _fold(
            q, k_ptr, v_ptr, slots, slots < complete, (k_stride_l, k_stride_d), (v_stride_l, v_stride_d), scale, top,
            weight, out, (DIM, VALUE_DIM, BLOCK_D, BLOCK_DV),
        )  # fmt: skip
        tl.store(logit_ptr + members[:, None] * padded + (first + places)[None, :], logits)
    out = normalised(weight, out)
    lse = top + tl.log2(tl.where(weight == 0, 1.0, weight))
    out_tile = (batch * num_kv_heads * group + heads)[:, None] * VALUE_DIM + value_dims[None, :]
    tl.store(out_ptr + out_tile, out, mask=exist[:, None] & (value_dims < VALUE_DIM)[None, :])

    tl.debug_barrier()  # what other threads have written is read
    for first in tl.range(0, complete, BLOCK_N):
        logits = tl.load(logit_ptr + members[:, None] * padded + (first + places)[None, :])
        p = tl.where(exist[:, None], tl.exp2(logits - lse[:, None]), 0.0)
        tl.store(weight_ptr + first + places, tl.sum(p, 0))
    tl.debug_barrier()

    # Weights are not negative, so that their bits are in their order; of equal ones the earlier block is larger.
    own = (length - 1) // block
    numbers = tl.arange(0, WIDE)
    shares = tl.load(weight_ptr + numbers, mask=numbers < complete, other=0.0)
    shares = tl.where((numbers == 0) | (numbers >= own - 1), float("inf"), shares)
    order = (shares.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (0x7FFFFFFF - numbers).to(tl.int64)
    order = tl.where(numbers <= own, order, -1)
    for place in tl.range(0, blocks):
        best = tl.max(order, 0)
        page = tl.where(best < 0, -1, 0x7FFFFFFF - (best & 0x7FFFFFFF))
        tl.store(page_ptr + row * blocks + place, page.to(tl.int32))
        order = tl.where(order == best, -1, order)


@triton.jit(do_not_specialize=[*_OF_STEP, "batches", "window", "parts_chosen", "each"])
def _attend_parts(
    q_ptr, k_ptr, v_ptr, length_ptr, page_ptr, out_ptr, lse_ptr,
    q_stride_b, q_stride_h, q_stride_d, k_stride_b, k_stride_h, k_stride_l, k_stride_d,
    v_stride_b, v_stride_h, v_stride_l, v_stride_d, length_stride,
    batches, num_kv_heads, group, block, blocks, window, number, parts_chosen, each, scale,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Writes ``out [parts, B, Hq, Dv]`` and ``lse [parts, B, Hq]`` (of base 2): first parts of chosen blocks, then of
    the window. A program owns one part for all heads of a group, with an online softmax in fp32."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = row // num_kv_heads, row % num_kv_heads
    members, places = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    exist = members < group
    heads = head * group + tl.where(exist, members, 0)
    length = tl.minimum(tl.load(length_ptr + batch * length_stride), number).to(tl.int32)
    q_tile = batch * q_stride_b + heads[:, None] * q_stride_h + dims[None, :] * q_stride_d
    q = tl.load(q_ptr + q_tile, mask=exist[:, None] & (dims < DIM)[None, :], other=0.0)
    k_ptr += batch * k_stride_b + head * k_stride_h
    v_ptr += batch * v_stride_b + head * v_stride_h
    page_ptr += row * blocks

    chooses = part < parts_chosen
    first = tl.where(chooses, part, part - parts_chosen) * each * BLOCK_N
    last = tl.where(chooses, blocks * block, tl.minimum(window, length))
    last = tl.minimum(first + each * BLOCK_N, last)
    near = tl.maximum(length - window, 0)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # pages are read one block ahead, so that reading keys ahead is left to the compiler
    following = tl.load(page_ptr + (first + places) // block, mask=chooses & (first + places < last), other=-1)
    for begin in tl.range(first, last, BLOCK_N):
        place, page = begin + places, following
        ahead = place + BLOCK_N
        following = tl.load(page_ptr + ahead // block, mask=chooses & (ahead < last), other=-1)
        slot = tl.where(chooses, tl.maximum(page, 0) * block + place % block, near + place)
        stored = (place < last) & (slot < length) & ((page >= 0) | (part >= parts_chosen))
        _, top, weight, out = _fold(
            q, k_ptr, v_ptr, slot.to(tl.int64), stored, (k_stride_l, k_stride_d), (v_stride_l, v_stride_d), scale, top,
            weight, out, (DIM, VALUE_DIM, BLOCK_D, BLOCK_DV),
        )  # fmt: skip
    out = normalised(weight, out)
    rows = (part.to(tl.int64) * batches + batch) * num_kv_heads * group + heads
    out_tile = rows[:, None] * VALUE_DIM + value_dims[None, :]
    tl.store(out_ptr + out_tile, out, mask=exist[:, None] & (value_dims < VALUE_DIM)[None, :])
    tl.store(lse_ptr + rows, log_sum_exp(top, weight), mask=exist)


@triton.jit(do_not_specialize=["batches", "num_heads", "parts_chosen", "parts"])
def _merge_gated(
    compressed_ptr, part_ptr, lse_ptr, gate_ptr, out_ptr,
    gate_stride_g, gate_stride_b, gate_stride_h,
    batches, num_heads, parts_chosen, parts,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes ``out [B, Hq, 1, Dv]``, contiguous: the three attentions times their gates."""
    head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    part, value_dims = tl.arange(0, PARTS), tl.arange(0, BLOCK_DV)
    there, row = value_dims < VALUE_DIM, batch * num_heads + head
    rows = part * batches * num_heads + row
    lse = tl.load(lse_ptr + rows, mask=part < parts, other=float("-inf"))
    outs = tl.load(
        part_ptr + rows[:, None] * VALUE_DIM + value_dims[None, :],
        mask=(part < parts)[:, None] & there[None, :],
        other=0.0,
    )
    gate_ptr += batch * gate_stride_b + head * gate_stride_h
    out = tl.load(compressed_ptr + row * VALUE_DIM + value_dims, mask=there, other=0.0)
    out = out * tl.load(gate_ptr).to(tl.float32)
    for branch in tl.static_range(2):
        mine = tl.where((part >= parts_chosen) == (branch == 1), lse, float("-inf"))
        share = tl.exp2(mine - tl.maximum(tl.max(mine, 0), LOWEST))
        total = tl.sum(share, 0)
        merged = tl.sum(outs * share[:, None], 0) / tl.where(total == 0, 1.0, total)
        out += merged * tl.load(gate_ptr + (branch + 1) * gate_stride_g).to(tl.float32)
    tl.store(out_ptr + row * VALUE_DIM + value_dims, out.to(out_ptr.dtype.element_ty), mask=there)

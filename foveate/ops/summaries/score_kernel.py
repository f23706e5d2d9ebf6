"""Triton kernel of :func:`attend_summaries`: scores the nodes of a level, and attends to sinks and tail.

Names in this and the other kernels: ``row`` is a row of the batch and a KV head; ``group`` the number of query heads of
a KV head, ``member`` one of them; ``head_tiles`` the number of programs that share a group, ``head_tile`` one of them;
``q_heads`` indices of query heads over the whole batch, ``num_q_heads`` how many these are; ``places`` the stride
between query heads in an array of places.
"""

import triton
import triton.language as tl

from foveate.ops.gpu.softcap import capped
from foveate.ops.gpu.softmax import LOG2E, LOWEST, log_sum_exp, log_sums, online, store_part

VARYING = ["batches", "num_kv_heads", "head_tiles", "splits", "places"]
"""Arguments that change from step to step or from batch to batch, so that kernels are not specialised on them."""


@triton.jit
def shared_out(logits, mass, GROUPS: tl.constexpr):
    """Log-weights with which children share their parents' mass (LuKA, equation 3), to the base 2.

    ``logits [M, N]``: of the children of ``GROUPS`` parents, one parent's after another's, -inf at unused places;
    ``mass [M, GROUPS]``: log-weights of the parents.
    """
    M: tl.constexpr = logits.shape[0]
    EACH: tl.constexpr = logits.shape[1] // GROUPS
    of_group = tl.reshape(logits, [M, GROUPS, EACH])
    total = log_sums(of_group)
    share = tl.where(total == float("-inf"), float("-inf"), mass - total)
    return tl.reshape(of_group + share[:, :, None], [M, GROUPS * EACH])


@triton.jit
def free_energy(deviation, log_size):
    """See :func:`foveate.ops.score.nodes.free_energy`."""
    within = tl.minimum(deviation, tl.sqrt(2.0 * log_size))
    return (deviation - 0.5 * within) * within


@triton.jit(
    do_not_specialize=[
        *VARYING,
        "raw_splits",
        "sinks",
        "rank_places",
        "estimate_places",
        "list_stride_b",
        "list_stride_h",
    ]
)
def score_nodes(
    q_ptr,
    k_ptr,
    v_ptr,
    node_ptr,
    spread_ptr,
    entropy_ptr,
    estimate_ptr,
    slots_ptr,
    count_ptr,
    list_ptr,
    chosen_ptr,
    parent_ptr,
    weight_ptr,
    rank_ptr,
    rank_lse_ptr,
    raw_ptr,
    part_out_ptr,
    part_lse_ptr,
    arrived_ptr,
    read_ptr,
    q_strides,
    k_strides,
    v_strides,
    node_strides,
    spread_strides,
    entropy_strides,
    count_strides,
    list_stride_b,
    list_stride_h,
    batches,
    num_kv_heads,
    group,
    head_tiles,
    splits,
    places,
    rank_places,
    estimate_places,
    raw_splits,
    sinks,
    scaling,
    log_size,
    reads,
    BRANCH: tl.constexpr,
    PRESERVE: tl.constexpr,
    BIAS: tl.constexpr,
    SCORE: tl.constexpr,
    LARGEST: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write ``weight [B, Hq, places]``, the log-weights of the visited nodes of a level; ``rank [B, Hq, rank_places]``
    if the rule ranks them by another estimate (``SCORE`` > 0); and the log-sum-exp of each program's ranks, ``rank_lse
    [B, Hq, splits]``. All are to the base 2. ``splits`` programs share a row's nodes.

    At the top level (``BRANCH`` 0) these are the first ``count`` nodes. Otherwise they are the children of ``count``
    refined nodes of the level above: ``list`` has the numbers of these, ``chosen`` their places in ``parent [B, Hq,
    places]``, the log-weights of their level.

    At the top level the first ``raw_splits`` programs of a row attend to sinks and tail instead of scoring. They write
    parts ``part_out [raw_splits, B, Hq, Dv]`` and ``part_lse`` and, unless it is None, the log-weights ``raw [B, Hq,
    places]``. ``slots [2, B]`` holds the slots in use and the first slot after the pages.

    ``SCORE`` 2: nodes are ranked by ``estimate [B, Hq, estimate_places]``, log-sum-exps to the base e.

    ``arrived`` is set to 0 for the launch that merges. ``read [B, Hkv]`` counts the keys read.

    ``SOFTCAP``: the cap of logits, 0 for none. A summary's logit is capped before the bias is added; so is the logit
    one deviation above it.
    """
    RAW: tl.constexpr = BRANCH == 0
    SPREAD: tl.constexpr = SCORE == 1
    q_stride_b, q_stride_h, q_stride_d = q_strides
    k_stride_b, k_stride_h, k_stride_l, k_stride_d = k_strides
    v_stride_b, v_stride_h, v_stride_l, v_stride_d = v_strides
    node_stride_b, node_stride_h, node_stride_n, node_stride_d = node_strides
    spread_stride_b, spread_stride_h, spread_stride_n, spread_stride_d = spread_strides
    entropy_stride_b, entropy_stride_h, entropy_stride_n = entropy_strides
    count_stride_b, count_stride_h = count_strides
    row, head_tile, split = tl.program_id(0) // head_tiles, tl.program_id(0) % head_tiles, tl.program_id(1)
    batch, head = (row // num_kv_heads).to(tl.int64), (row % num_kv_heads).to(tl.int64)
    member = head_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exist = member < group
    heads = head * group + tl.where(exist, member, 0)
    q_heads = batch * num_kv_heads * group + heads
    dims = tl.arange(0, BLOCK_D)
    q_tile = batch * q_stride_b + heads[:, None] * q_stride_h + dims[None, :] * q_stride_d
    q = tl.load(q_ptr + q_tile, mask=exist[:, None] & (dims < DIM)[None, :], other=0.0)
    lanes, value_dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_DV)
    count = tl.load(count_ptr + batch * count_stride_b + head * count_stride_h).to(tl.int32)
    if BRANCH:
        count = count * BRANCH

    first_node = raw_splits if RAW else 0
    if RAW:
        length = tl.load(slots_ptr + batch).to(tl.int32)
        start = tl.load(slots_ptr + batches + batch).to(tl.int32)
        lead = tl.where(start > 0, sinks, 0)
        number = length - start + lead
        if split < raw_splits:
            k_ptr += batch * k_stride_b + head * k_stride_h
            v_ptr += batch * v_stride_b + head * v_stride_h
            top = tl.full([BLOCK_M], LOWEST, tl.float32)
            weight = tl.zeros([BLOCK_M], tl.float32)
            out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
            blocks = tl.cdiv(number, BLOCK_N)
            each = tl.cdiv(blocks, raw_splits)
            for block in tl.range(split * each, tl.minimum((split + 1) * each, blocks)):
                place = block * BLOCK_N + lanes
                stored = place < number
                slot = tl.where(place < lead, place, start + place - lead).to(tl.int64)
                k_mask, v_mask = stored[:, None], stored[:, None]
                if BLOCK_D > DIM:
                    k_mask = k_mask & (dims < DIM)[None, :]
                if BLOCK_DV > VALUE_DIM:
                    v_mask = v_mask & (value_dims < VALUE_DIM)[None, :]
                k_tile = (slot * k_stride_l)[:, None] + dims[None, :] * k_stride_d
                k = tl.load(k_ptr + k_tile, mask=k_mask, other=0.0)
                v_tile = (slot * v_stride_l)[:, None] + value_dims[None, :] * v_stride_d
                v = tl.load(v_ptr + v_tile, mask=v_mask, other=0.0)
                logits = capped(tl.dot(q, tl.trans(k), input_precision="ieee") * (scaling * LOG2E), SOFTCAP)
                logits = tl.where(stored[None, :], logits, float("-inf"))
                if raw_ptr is not None:
                    kept = raw_ptr + q_heads[:, None] * places + place[None, :]
                    tl.store(kept, logits, mask=exist[:, None] & stored[None, :])
                top, weight, out = online(logits, v, top, weight, out)
            part = split.to(tl.int64) * (batches * num_kv_heads * group) + q_heads
            store_part(part_out_ptr, part_lse_ptr, part, exist, top, weight, out, VALUE_DIM)
        if split == 0:
            tl.store(arrived_ptr + tl.program_id(0), 0)

    if split >= first_node:
        split -= first_node
        node_ptr += batch * node_stride_b + head * node_stride_h
        if BRANCH:
            list_ptr += batch * list_stride_b + head * list_stride_h
            chosen_ptr += batch * list_stride_b + head * list_stride_h
        if BIAS == 2:
            entropy_ptr += batch * entropy_stride_b + head * entropy_stride_h
        if SPREAD:
            spread_ptr += batch * spread_stride_b + head * spread_stride_h
            scaled = q.to(tl.float32) * scaling
            squared = tl.minimum(scaled * scaled, LARGEST).to(q.dtype)
        top = tl.full([BLOCK_M], LOWEST, tl.float32)
        weight = tl.zeros([BLOCK_M], tl.float32)
        blocks, padded = tl.cdiv(count, BLOCK_N), tl.cdiv(count, 16) * 16
        each = tl.cdiv(blocks, splits)
        next_node = split * each * BLOCK_N + lanes
        if BRANCH:  # loaded one block ahead, so that the compiler can pipeline the loads of summaries
            next_node = tl.load(list_ptr + next_node // BRANCH, mask=next_node < count, other=0).to(tl.int32)
        for block in tl.range(split * each, tl.minimum((split + 1) * each, blocks)):
            place = block * BLOCK_N + lanes
            there = place < count
            node = place
            if BRANCH:
                node, next_place = next_node * BRANCH + place % BRANCH, place + BLOCK_N
                next_node = tl.load(list_ptr + next_place // BRANCH, mask=next_place < count, other=0).to(tl.int32)
            node = node.to(tl.int64)
            node_mask = there[:, None]
            if BLOCK_D > DIM:
                node_mask = node_mask & (dims < DIM)[None, :]
            k_tile = (node * node_stride_n)[:, None] + dims[None, :] * node_stride_d
            k = tl.load(node_ptr + k_tile, mask=node_mask, other=0.0)
            plain = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
            dot = capped(plain, SOFTCAP, NATURAL=True)

            if SPREAD:
                spread_tile = (node * spread_stride_n)[:, None] + dims[None, :] * spread_stride_d
                spread = tl.load(spread_ptr + spread_tile, mask=node_mask, other=0.0)
                variance = tl.dot(squared, tl.trans(spread), input_precision="ieee")
                deviation = tl.sqrt(tl.maximum(variance, 0.0))
                if SOFTCAP > 0:
                    deviation = capped(plain + deviation, SOFTCAP, NATURAL=True) - dot
            logits = dot
            if BIAS == 1:
                logits = dot + log_size
            elif BIAS == 2:
                entropy = tl.load(entropy_ptr + node * entropy_stride_n, mask=there, other=0.0)
                logits = dot + entropy[None, :]
            logits = tl.where(there[None, :], logits * LOG2E, float("-inf"))
            ranks = logits
            if SPREAD:
                ranks = tl.where(
                    there[None, :], (dot + log_size + free_energy(deviation, log_size)) * LOG2E, float("-inf")
                )
            elif SCORE == 2:
                of_nodes = estimate_ptr + q_heads[:, None] * estimate_places + place[None, :]
                estimate = tl.load(of_nodes, mask=exist[:, None] & there[None, :], other=float("-inf"))
                ranks = estimate * LOG2E
            if BRANCH and PRESERVE:
                GROUPS: tl.constexpr = BLOCK_N // BRANCH
                sibling = block * GROUPS + tl.arange(0, GROUPS)
                known = sibling * BRANCH < count
                parent = tl.load(chosen_ptr + sibling, mask=known, other=0).to(tl.int64)
                of_parent = q_heads[:, None] * places + parent[None, :]
                mass = tl.load(parent_ptr + of_parent, mask=exist[:, None] & known[None, :], other=0.0)
                given = shared_out(logits, mass, GROUPS)
                moved = tl.where(there[None, :], ranks + (given - logits), float("-inf"))
                ranks, logits = moved if SCORE > 0 else given, given
            stored = exist[:, None] & (place < padded)[None, :]  # up to the padding
            tl.store(weight_ptr + q_heads[:, None] * (places // 16 * 16) + place[None, :], logits, mask=stored)
            if SCORE > 0:
                tl.store(rank_ptr + q_heads[:, None] * (rank_places // 16 * 16) + place[None, :], ranks, mask=stored)
            higher = tl.maximum(top, tl.max(ranks, 1))
            weight = weight * tl.exp2(top - higher) + tl.sum(tl.exp2(ranks - higher[:, None]), 1)
            top = higher
        tl.store(rank_lse_ptr + q_heads * splits + split, log_sum_exp(top, weight), mask=exist)
        if (split == 0) & (head_tile == 0):
            read = count * reads
            if RAW:
                read += number
            else:
                read += tl.load(read_ptr + row)
            tl.store(read_ptr + row, read)

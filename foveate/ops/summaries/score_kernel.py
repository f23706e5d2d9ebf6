"""Triton kernel of :func:`attend_summaries`: scores the nodes of a level, and attends to sinks and tail.

Names in this and the other kernels of this folder: ``row`` is a row of the batch and a KV head; ``GROUP`` the number of
query heads of a KV head, ``member`` one of them; ``head_tile`` one of the programs that share a group; ``q_heads``
indices of query heads over the whole batch; ``places`` the stride between query heads in arrays of places, a multiple
of 16.

Shapes: M = BLOCK_M heads, N = BLOCK_N nodes or keys, D = BLOCK_D dimensions of keys and summaries, DV = BLOCK_DV
dimensions of values.
"""

import triton
import triton.language as tl

from foveate.ops.gpu.softcap import capped
from foveate.ops.gpu.softmax import LOG2E, LOWEST, log_sum_exp, online, store_part

VARYING = ["num_kv_heads", "places", "list_places"]
"""Arguments that change from step to step or from batch to batch, so that kernels are not specialised on them."""


@triton.jit
def free_energy(deviation, log_size):
    """See :func:`foveate.ops.score.nodes.free_energy`; ``deviation [M, N]`` gives ``[M, N]``, natural."""
    within = tl.minimum(deviation, tl.sqrt(2.0 * log_size))  # [M, N]
    return (deviation - 0.5 * within) * within


@triton.jit
def visited(count_ptr, row, num_kv_heads, BRANCH: tl.constexpr):
    """The number of nodes of a level that a row visits, see :func:`score_nodes`."""
    if BRANCH:
        return tl.load(count_ptr + row).to(tl.int32) * BRANCH
    else:
        return tl.load(count_ptr + row // num_kv_heads).to(tl.int32)


@triton.jit
def node_at(place, there, list_ptr, BRANCH: tl.constexpr):
    """Numbers ``[N]`` of the visited nodes at places ``place [N]``; ``list_ptr`` is offset to a row."""
    if BRANCH:
        return tl.load(list_ptr + place // BRANCH, mask=there, other=0).to(tl.int32) * BRANCH + place % BRANCH  # [N]
    else:
        return place  # [N]


@triton.jit(do_not_specialize=[*VARYING, "estimate_places", "raw_splits", "sinks"])
def score_nodes(
    q_ptr, k_ptr, v_ptr, node_ptr, spread_ptr, estimate_ptr, slots_ptr, count_ptr, list_ptr, weight_ptr, rank_ptr,
    rank_lse_ptr, raw_ptr, part_out_ptr, part_lse_ptr, arrived_ptr, read_ptr,
    q_strides, k_strides, v_strides, node_strides, spread_strides,
    num_kv_heads, places, list_places, estimate_places, raw_splits, sinks, scaling, log_size, reads,
    BRANCH: tl.constexpr, GROUP: tl.constexpr, SOFTCAP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scores the visited nodes of one level and, at the top level, attends to sinks and tail.

    A program owns up to ``BLOCK_M`` query heads of a KV head in a row, and one split of the visited nodes. It reads the
    nodes' summaries once, in ascending order, and writes ``weight [B, Hq, places]``, the nodes' log-weights; ``rank``,
    of the same shape, if another estimate than the log-weight ranks the nodes; and the log-sum-exp of its ranks in
    ``rank_lse [B, Hq, splits]``. All are to the base 2.

    At the top level (``BRANCH`` 0) the visited nodes are the first ``count [B]``. Otherwise they are the children of
    ``count [B, Hkv]`` refined nodes of the level above, whose numbers are ``list [B, Hkv, list_places]``.

    At the top level the first ``raw_splits`` programs of a row attend to sinks and tail instead of scoring. Each reads
    its split of these keys and values once, with an online softmax in fp32, and writes a part
    ``part_out [raw_splits, B, Hq, Dv]`` and ``part_lse``, to the base 2, and, unless it is None, the log-weights
    ``raw [B, Hq, places]``. ``slots [2, B]`` holds the number of slots in use and the first slot after the pages.

    Nodes are ranked by the ``spread`` of the keys under them, by ``estimate [B, Hq, estimate_places]``, log-sum-exps to
    the base e, or where both are None by their log-weights.

    ``arrived`` is set to 0 for the launch that merges. ``read [B, Hkv]`` counts the keys read, a summary as ``reads``
    keys.

    ``SOFTCAP``: the cap of logits, 0 for none. A summary's logit is capped before the logarithm of its number of tokens
    is added; so is the logit one deviation above it.
    """
    # 1. Unpack the constants and strides, and find the heads and the split that the program owns.
    RAW: tl.constexpr = BRANCH == 0
    SPREAD: tl.constexpr = spread_ptr is not None
    ESTIMATE: tl.constexpr = estimate_ptr is not None
    BLOCK_D: tl.constexpr = max(16, triton.next_power_of_2(DIM))
    BLOCK_DV: tl.constexpr = max(16, triton.next_power_of_2(VALUE_DIM))
    HEAD_TILES: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    q_stride_b, q_stride_h, q_stride_d = q_strides
    k_stride_b, k_stride_h, k_stride_l, k_stride_d = k_strides
    v_stride_b, v_stride_h, v_stride_l, v_stride_d = v_strides
    node_stride_b, node_stride_h, node_stride_n, node_stride_d = node_strides
    spread_stride_b, spread_stride_h, spread_stride_n, spread_stride_d = spread_strides
    row, head_tile, split = tl.program_id(0) // HEAD_TILES, tl.program_id(0) % HEAD_TILES, tl.program_id(1)
    rows = tl.num_programs(0) // HEAD_TILES
    batch, head = (row // num_kv_heads).to(tl.int64), (row % num_kv_heads).to(tl.int64)
    member = head_tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    exist = member < GROUP  # [M]
    heads = head * GROUP + tl.where(exist, member, 0)  # [M]
    q_heads = batch * num_kv_heads * GROUP + heads  # [M]
    dims, lanes, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_DV)  # [D], [N], [DV]
    # 2. Load the queries.
    q_tile = batch * q_stride_b + heads[:, None] * q_stride_h + dims[None, :] * q_stride_d  # [M, D]
    q = tl.load(q_ptr + q_tile, mask=exist[:, None] & (dims < DIM)[None, :], other=0.0)  # [M, D]
    count = visited(count_ptr, row, num_kv_heads, BRANCH)

    # 3. At the top level, attend to one split of sinks and tail: ``lead`` sinks, and the slots from ``start`` on.
    first_node = raw_splits if RAW else 0
    if RAW:
        length = tl.load(slots_ptr + batch).to(tl.int32)
        start = tl.load(slots_ptr + rows // num_kv_heads + batch).to(tl.int32)
        lead = tl.where(start > 0, sinks, 0)
        number = length - start + lead
        if split < raw_splits:
            k_ptr += batch * k_stride_b + head * k_stride_h
            v_ptr += batch * v_stride_b + head * v_stride_h
            top = tl.full([BLOCK_M], LOWEST, tl.float32)  # [M]
            weight = tl.zeros([BLOCK_M], tl.float32)  # [M]
            out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # [M, DV]
            blocks = tl.cdiv(number, BLOCK_N)
            each = tl.cdiv(blocks, raw_splits)
            for block in tl.range(split * each, tl.minimum((split + 1) * each, blocks)):
                place = block * BLOCK_N + lanes  # [N]
                stored = place < number  # [N]
                slot = tl.where(place < lead, place, start + place - lead).to(tl.int64)  # [N]
                k_mask, v_mask = stored[:, None], stored[:, None]  # [N, 1], [N, 1]
                if BLOCK_D > DIM:
                    k_mask = k_mask & (dims < DIM)[None, :]  # [N, D]
                if BLOCK_DV > VALUE_DIM:
                    v_mask = v_mask & (value_dims < VALUE_DIM)[None, :]  # [N, DV]
                k_tile = (slot * k_stride_l)[:, None] + dims[None, :] * k_stride_d  # [N, D]
                k = tl.load(k_ptr + k_tile, mask=k_mask, other=0.0)  # [N, D]
                v_tile = (slot * v_stride_l)[:, None] + value_dims[None, :] * v_stride_d  # [N, DV]
                v = tl.load(v_ptr + v_tile, mask=v_mask, other=0.0)  # [N, DV]
                logits = capped(tl.dot(q, tl.trans(k), input_precision="ieee") * (scaling * LOG2E), SOFTCAP)  # [M, N]
                logits = tl.where(stored[None, :], logits, float("-inf"))  # [M, N]
                if raw_ptr is not None:
                    kept = raw_ptr + q_heads[:, None] * places + place[None, :]  # [M, N]
                    tl.store(kept, logits, mask=exist[:, None] & stored[None, :])
                top, weight, out = online(logits, v, top, weight, out)  # [M], [M], [M, DV]
            part = split.to(tl.int64) * (rows * GROUP) + q_heads  # [M]
            store_part(part_out_ptr, part_lse_ptr, part, exist, top, weight, out, VALUE_DIM)
        if split == 0:
            tl.store(arrived_ptr + tl.program_id(0), 0)

    # 4. Score one split of the visited nodes.
    if split >= first_node:
        split -= first_node
        splits = tl.num_programs(1) - first_node
        node_ptr += batch * node_stride_b + head * node_stride_h
        if BRANCH:
            list_ptr += row.to(tl.int64) * list_places
        if SPREAD:
            LARGEST: tl.constexpr = 65504.0 if q.dtype == tl.float16 else 3.38e38
            spread_ptr += batch * spread_stride_b + head * spread_stride_h
            scaled = q.to(tl.float32) * scaling  # [M, D]
            squared = tl.minimum(scaled * scaled, LARGEST).to(q.dtype)  # [M, D]
        top = tl.full([BLOCK_M], LOWEST, tl.float32)  # [M]
        weight = tl.zeros([BLOCK_M], tl.float32)  # [M]
        blocks, padded = tl.cdiv(count, BLOCK_N), tl.cdiv(count, 16) * 16
        each = tl.cdiv(blocks, splits)
        next_node = split * each * BLOCK_N + lanes  # [N]
        if BRANCH:  # loaded one block ahead, so that the compiler can pipeline the loads of summaries
            next_node = tl.load(list_ptr + next_node // BRANCH, mask=next_node < count, other=0).to(tl.int32)  # [N]
        for block in tl.range(split * each, tl.minimum((split + 1) * each, blocks)):
            # 4a. Find the numbers of the nodes, and load the numbers of the next block.
            place = block * BLOCK_N + lanes  # [N]
            there = place < count  # [N]
            node = place  # [N]
            if BRANCH:
                node, next_place = next_node * BRANCH + place % BRANCH, place + BLOCK_N  # [N], [N]
                # [N]
                next_node = tl.load(list_ptr + next_place // BRANCH, mask=next_place < count, other=0).to(tl.int32)
            node = node.to(tl.int64)  # [N]
            # 4b. Load the summaries and compute the log-weights.
            node_mask = there[:, None]  # [N, 1]
            if BLOCK_D > DIM:
                node_mask = node_mask & (dims < DIM)[None, :]  # [N, D]
            k_tile = (node * node_stride_n)[:, None] + dims[None, :] * node_stride_d  # [N, D]
            k = tl.load(node_ptr + k_tile, mask=node_mask, other=0.0)  # [N, D]
            plain = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling  # [M, N]
            dot = capped(plain, SOFTCAP, NATURAL=True)  # [M, N]
            logits = tl.where(there[None, :], (dot + log_size) * LOG2E, float("-inf"))  # [M, N]
            # 4c. Rank the nodes. With dimensions taken as independent, the variance of the logits under a node is the
            # product of the squared queries and the variances of its keys (``spread``).
            if SPREAD:
                spread_tile = (node * spread_stride_n)[:, None] + dims[None, :] * spread_stride_d  # [N, D]
                spread = tl.load(spread_ptr + spread_tile, mask=node_mask, other=0.0)  # [N, D]
                variance = tl.dot(squared, tl.trans(spread), input_precision="ieee")  # [M, N]
                deviation = tl.sqrt(tl.maximum(variance, 0.0))  # [M, N]
                if SOFTCAP > 0:
                    deviation = capped(plain + deviation, SOFTCAP, NATURAL=True) - dot  # [M, N]
                ranks = logits + free_energy(deviation, log_size) * LOG2E  # [M, N]
            elif ESTIMATE:
                of_nodes = estimate_ptr + q_heads[:, None] * estimate_places + place[None, :]  # [M, N]
                ranks = tl.load(of_nodes, mask=exist[:, None] & there[None, :], other=float("-inf")) * LOG2E  # [M, N]
            else:
                ranks = logits  # [M, N]
            # 4d. Store log-weights and ranks up to the padding, and add the ranks to their log-sum-exp.
            stored = exist[:, None] & (place < padded)[None, :]  # [M, N]
            at = q_heads[:, None] * (places // 16 * 16) + place[None, :]  # [M, N]; a multiple of 16, for the compiler
            tl.store(weight_ptr + at, logits, mask=stored)
            if SPREAD or ESTIMATE:
                tl.store(rank_ptr + at, ranks, mask=stored)
            higher = tl.maximum(top, tl.max(ranks, 1))  # [M]
            weight = weight * tl.exp2(top - higher) + tl.sum(tl.exp2(ranks - higher[:, None]), 1)  # [M]
            top = higher  # [M]
        # 5. Store the log-sum-exp of the ranks, and count the keys read.
        tl.store(rank_lse_ptr + q_heads * splits + split, log_sum_exp(top, weight), mask=exist)
        if (split == 0) & (head_tile == 0):
            read = count * reads
            if RAW:
                read += number
            else:
                read += tl.load(read_ptr + row)
            tl.store(read_ptr + row, read)

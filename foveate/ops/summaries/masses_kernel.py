"""Triton kernel of :func:`attend_summaries`: the update of running averages of attention (:class:`Sums`).

Names as in ``score_kernel``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foveate.ops.gpu.softmax import LOG2E
from foveate.ops.summaries.score_kernel import VARYING, node_at, visited
from foveate.ops.summaries.tree import Tree
from foveate.ops.summaries.types import Sums
from foveate.ops.summaries.workspace import Workspace

_POOLED = 512
"""Places that a program owns."""
_HEADS = 4
"""The most heads of a group whose log-weights a program reads at once."""


def note(space: Workspace, tree: Tree, sums: Sums) -> None:
    """Update running averages, from the lowest level up, since a refined node gets the mass of its children."""
    (batch, heads), group = space.read.shape, space.weights.shape[1] // space.read.shape[1]
    mass, below = torch.empty_like(space.gone, dtype=torch.float32), None
    for visit in reversed(space.visits):
        stage, above, mine = visit.stage, visit.above, visit.selection
        last, level = below is None, tree.levels[stage.level]
        width = space.chunks if last else tree.branch(stage.level)
        block_w = triton.next_power_of_2(width)
        each = max(1, min(triton.next_power_of_2(max(1, stage.k)), _POOLED // block_w))
        node_blocks, refined_blocks = triton.cdiv(stage.width, _POOLED), triton.cdiv(stage.k, each)
        raw_blocks = triton.cdiv(tree.rows.width, _POOLED) if last else 0
        own = None if above is None else mass[:, :, stage.begin :]
        note_masses[node_blocks + refined_blocks + raw_blocks, batch * heads](
            visit.weights, space.of_raw, space.of_chunks, space.lse, tree.rows.numbers, visit.count, visit.listed,
            *mine, own, below, level.recent, sums.recent if last else None,
            level.recent.stride(), sums.recent.stride()[:2],
            heads, space.weights.shape[2], 0 if above is None else above.pages.shape[2], space.gone.shape[2],
            tree.sinks, node_blocks, refined_blocks, stage.k, width, sums.share,
            BRANCH=visit.branch, GROUP=group, EACH=each, BLOCK_W=block_w, BLOCK=_POOLED,
            HEADS=min(_HEADS, triton.next_power_of_2(group)),
        )  # fmt: skip
        below = own


@triton.jit
def _pooled(weight_ptr, lse_ptr, row, place, there, places, GROUP: tl.constexpr, HEADS: tl.constexpr):
    """Masses ``[N]`` at places ``place [N]`` of a KV head, the mean over its group; 0 where ``there [N]`` is False.

    ``HEADS`` heads of the group are read at once. Shapes: H = HEADS, N = places.
    """
    mass = tl.zeros(place.shape, tl.float32)  # [N]
    for first in tl.range(0, GROUP, HEADS):
        member = first + tl.arange(0, HEADS)  # [H]
        exist = member < GROUP  # [H]
        head = row * GROUP + tl.where(exist, member, 0)  # [H]
        weight = weight_ptr + (head * places)[:, None] + place[None, :]  # [H, N]
        weight = tl.load(weight, mask=exist[:, None] & there[None, :], other=float("-inf"))  # [H, N]
        mass += tl.sum(tl.exp2(weight - (tl.load(lse_ptr + head) * LOG2E)[:, None]), 0)  # [N]
    return mass / GROUP  # [N]


@triton.jit
def _towards(ptr, mass, there, share):
    """Moves averages ``[N]`` in memory a ``share`` of the way towards ``mass [N]``."""
    before = tl.load(ptr, mask=there, other=0.0)  # [N]
    tl.store(ptr, before + (mass - before) * share, mask=there)


@triton.jit(do_not_specialize=[*VARYING, "gone_places", "node_blocks", "refined_blocks", "most", "width", "sinks"])
def note_masses(
    weight_ptr, raw_ptr, chunk_ptr, lse_ptr, slots_ptr, count_ptr, list_ptr, chosen_ptr, page_ptr, picked_ptr, gone_ptr,
    mass_ptr, below_ptr, recent_ptr, raw_recent_ptr,
    recent_strides, raw_recent_strides,
    num_kv_heads, places, list_places, gone_places, sinks, node_blocks, refined_blocks, most, width, share,
    BRANCH: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Moves ``recent`` a ``share`` of the way towards the masses of one level's nodes, the mean over the group.

    A program owns one block of nodes, or of sinks and tail, of a KV head in a row. It computes their masses from
    log-weights ``weight [B, Hq, places]``, to the base 2, and ``lse [B, Hq]``, natural. The programs of a row divide
    the work in this order:

    - The first ``node_blocks`` programs own ``BLOCK`` visited nodes each and handle the nodes among them that are not
      refined.
    - The next ``refined_blocks`` programs own ``EACH`` refined nodes each. The mass of a refined node is the mass of
      its ``width`` children (``below``) or, at the lowest level (``below`` None), of the ``width`` chunks of its page
      (``chunk``).
    - At the lowest level the remaining programs own ``BLOCK`` slots of sinks and tail each and move ``raw_recent``.

    Each mass is also written to ``mass [B, Hkv, gone_places]``, which is ``below`` for the level above, unless it is
    None. ``count`` and ``list`` are as in :func:`score_nodes`, and the selection is as in :func:`select_nodes`.

    Shapes: N = BLOCK places, E = EACH refined nodes, W = BLOCK_W children or chunks of a node.
    """
    # 1. Unpack the strides, and find the row and the KV head.
    LAST: tl.constexpr = below_ptr is None
    recent_stride_b, recent_stride_h, recent_stride_n = recent_strides
    raw_stride_b, raw_stride_h = raw_recent_strides
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    batch, head = row // num_kv_heads, row % num_kv_heads
    recent_ptr += batch * recent_stride_b + head * recent_stride_h
    if BRANCH:
        list_ptr += row * list_places
    if mass_ptr is not None:
        mass_ptr += row * gone_places
    if block < node_blocks:
        # 2. Nodes that are not refined.
        place = block * BLOCK + tl.arange(0, BLOCK)  # [N]
        known = place < visited(count_ptr, row, num_kv_heads, BRANCH)  # [N]
        stays = known & (tl.load(gone_ptr + row * gone_places + place, mask=known, other=1) == 0)  # [N]
        mass = _pooled(weight_ptr, lse_ptr, row, place, stays, places, GROUP, HEADS)  # [N]
        if mass_ptr is not None:
            tl.store(mass_ptr + place, mass, mask=stays)
        node = node_at(place, stays, list_ptr, BRANCH)  # [N]
        _towards(recent_ptr + node.to(tl.int64) * recent_stride_n, mass, stays, share)
    elif block < node_blocks + refined_blocks:
        # 3. Refined nodes, whose mass is the sum over their children or chunks.
        picked = tl.load(picked_ptr + row)
        number, inside = (block - node_blocks) * EACH + tl.arange(0, EACH), tl.arange(0, BLOCK_W)  # [E], [W]
        known = number < picked  # [E]
        beneath = number[:, None] * width + inside[None, :]  # [E, W]
        there = known[:, None] & (inside < width)[None, :]  # [E, W]
        if LAST:
            # [E * W], [E * W]
            flat, stored = tl.reshape(beneath, [EACH * BLOCK_W]), tl.reshape(there, [EACH * BLOCK_W])
            masses = _pooled(chunk_ptr, lse_ptr, row, flat, stored, places, GROUP, HEADS)  # [E * W]
            masses = tl.reshape(masses, [EACH, BLOCK_W])  # [E, W]
        else:
            masses = tl.load(below_ptr + row * gone_places + beneath, mask=there, other=0.0)  # [E, W]
        mass = tl.sum(masses, 1)  # [E]
        if mass_ptr is not None:
            place = tl.load(chosen_ptr + row * most + number, mask=known, other=0)  # [E]
            tl.store(mass_ptr + place, mass, mask=known)
        node = tl.load(page_ptr + row * most + number, mask=known, other=0)  # [E]
        _towards(recent_ptr + node * recent_stride_n, mass, known, share)
    if LAST and block >= node_blocks + refined_blocks:
        # 4. Sinks and tail.
        place = (block - node_blocks - refined_blocks) * BLOCK + tl.arange(0, BLOCK)  # [N]
        length = tl.load(slots_ptr + batch)
        start = tl.load(slots_ptr + tl.num_programs(1) // num_kv_heads + batch)
        lead = tl.where(start > 0, sinks, 0)
        there = place < length - start + lead  # [N]
        slot = tl.where(place < lead, place, start + place - lead)  # [N]
        mass = _pooled(raw_ptr, lse_ptr, row, place, there, places, GROUP, HEADS)  # [N]
        _towards(raw_recent_ptr + batch * raw_stride_b + head * raw_stride_h + slot, mass, there, share)

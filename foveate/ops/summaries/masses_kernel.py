"""Triton kernels of :func:`attend_summaries`: the masses of a call, and the update of running sums (:class:`Sums`).

Names as in ``score_kernel``; ``found_stride`` are the strides of ``chosen`` and ``page``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops.gpu.softmax import LOG2E
from foveate.ops.summaries.tree import Tree
from foveate.ops.summaries.types import Sums
from foveate.ops.summaries.workspace import Workspace, strides_by_head

_POOLED = 512
"""Places of a program."""
_HEADS = 4
"""The most heads of a group whose log-weights a program reads at once."""


def pooled(space: Workspace, tree: Tree) -> tuple[Tensor, ...]:
    """:attr:`Covered.masses` of a call, fp32 ``[B, Hkv, places]`` each, summed over the group."""
    last, width, (batch, heads) = space.visits[-1], tree.width, space.read.shape
    mass = torch.empty(batch, heads, space.places, dtype=torch.float32, device=space.weights.device)
    pool_masses[triton.cdiv(space.places, _POOLED), batch * heads](
        space.weights,
        space.lse,
        space.gone,
        last.selection.picked,
        last.count,
        tree.rows.numbers,
        mass,
        *strides_by_head(space.gone, last.selection.picked),
        last.count_strides,
        batch,
        heads,
        space.group,
        tree.sinks,
        space.places,
        space.raw,
        space.tokens,
        width,
        last.stage.begin,
        BRANCH=last.branch,
        BLOCK=_POOLED,
        HEADS=_heads_at_once(space.group),
        num_warps=4,
    )
    ranges = [(space.raw, tree.rows.width), *((visit.stage.begin, visit.stage.width) for visit in space.visits)]
    ranges += [(space.tokens, last.stage.k * width)] * (last.stage.k > 0)
    return tuple(mass[:, :, begin : begin + number] for begin, number in ranges)


def note(space: Workspace, tree: Tree, sums: Sums) -> None:
    """Update running sums, from the lowest level up, since a refined node gets the mass of its children."""
    (batch, heads), visits = space.read.shape, space.visits
    levels = len(visits) if sums.recent is not None else 1
    mass = None
    if levels > 1:
        mass = torch.empty(batch, heads, space.raw, dtype=torch.float32, device=space.weights.device)
    for number in reversed(range(len(visits) - levels, len(visits))):
        visit = visits[number]
        stage, above, mine = visit.stage, visit.above, visit.selection
        last = number == len(visits) - 1
        recent = None if sums.recent is None else tree.levels[stage.level].recent
        width = space.kept if last else tree.branch(stage.level)
        block_w = triton.next_power_of_2(width)
        each = max(1, min(triton.next_power_of_2(max(1, stage.k)), _POOLED // block_w))
        node_blocks, refined_blocks = triton.cdiv(stage.width, _POOLED), triton.cdiv(stage.k, each)
        if recent is None:
            node_blocks = refined_blocks = 0
        raw_blocks = triton.cdiv(tree.rows.width, _POOLED) if last else 0
        note_masses[node_blocks + refined_blocks + raw_blocks, batch * heads](
            *space.log_weights(visit),
            space.lse,
            tree.rows.numbers,
            visit.count,
            visit.pages_above,
            *mine,
            None if mass is None or above is None else mass[:, :, stage.begin :],
            None if last else mass[:, :, visits[number + 1].stage.begin :],
            recent,
            sums.total,
            sums.recent,
            *visit.strides,
            *strides_by_head(mine.chosen, mine.picked, mine.gone),
            (0, 0, 0) if recent is None else recent.stride(),
            *strides_by_head(sums.total, sums.recent),
            batch,
            heads,
            space.group,
            tree.sinks,
            space.places,
            space.raw,
            node_blocks,
            refined_blocks,
            stage.k,
            width,
            sums.share,
            BRANCH=visit.branch,
            LAST=last,
            EACH=each,
            BLOCK_W=block_w,
            BLOCK=_POOLED,
            HEADS=_heads_at_once(space.group),
        )


def _heads_at_once(group: int) -> int:
    return min(_HEADS, triton.next_power_of_2(group))


_STRIDES = [f"{x}_stride_{axis}" for x in ("list", "chosen", "picked", "gone", "total", "raw_recent") for axis in "bh"]
_VARYING = ["batches", "num_kv_heads", "places", "mass_places", "node_blocks", "refined_blocks", "most", "page_places"]


@triton.jit
def _pooled(weight_ptr, lse_ptr, row, place, there, places, group, HEADS: tl.constexpr):
    """Masses at places ``[N]`` of a KV head, summed over the group, of which ``HEADS`` heads are read at once; 0 where
    not ``there``."""
    mass = tl.zeros(place.shape, tl.float32)
    for first in tl.range(0, group, HEADS):
        member = first + tl.arange(0, HEADS)
        exist = member < group
        head = row * group + tl.where(exist, member, 0)
        weight = weight_ptr + (head * places)[:, None] + place[None, :]
        weight = tl.load(weight, mask=exist[:, None] & there[None, :], other=float("-inf"))
        mass += tl.sum(tl.exp2(weight - (tl.load(lse_ptr + head) * LOG2E)[:, None]), 0)
    return mass


@triton.jit
def _towards(ptr, mass, there, share):
    """Move averages in memory a ``share`` of the way towards ``mass``."""
    before = tl.load(ptr, mask=there, other=0.0)
    tl.store(ptr, before + (mass - before) * share, mask=there)


@triton.jit(do_not_specialize=[*_VARYING, *_STRIDES, "sinks"])
def note_masses(
    weight_ptr,
    raw_ptr,
    token_ptr,
    lse_ptr,
    slots_ptr,
    count_ptr,
    list_ptr,
    chosen_ptr,
    page_ptr,
    picked_ptr,
    gone_ptr,
    mass_ptr,
    below_ptr,
    recent_ptr,
    total_ptr,
    raw_recent_ptr,
    count_strides,
    list_stride_b,
    list_stride_h,
    chosen_stride_b,
    chosen_stride_h,
    picked_stride_b,
    picked_stride_h,
    gone_stride_b,
    gone_stride_h,
    recent_strides,
    total_stride_b,
    total_stride_h,
    raw_recent_stride_b,
    raw_recent_stride_h,
    batches,
    num_kv_heads,
    group,
    sinks,
    places,
    mass_places,
    node_blocks,
    refined_blocks,
    most,
    page_places,
    share,
    BRANCH: tl.constexpr,
    LAST: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Move ``recent`` a ``share`` of the way towards the masses of one level's nodes, the mean over the group.

    Masses follow from log-weights ``weight [B, Hq, places]``, to the base 2, and ``lse [B, Hq]``, natural. The first
    ``node_blocks`` programs of a row handle the nodes that are not refined. The next ``refined_blocks`` handle the
    refined ones, whose mass is that of their children: of tokens or chunks of them (``token``) at the ``LAST`` level,
    else of ``below [B, Hkv, mass_places]``, ``page_places`` children each. The masses are also written to ``mass``,
    which is ``below`` for the level above, unless it is None. ``count``, ``list`` and the selection as in
    :func:`attend_nodes`.

    At the ``LAST`` level the remaining programs add the masses of sinks and tail to ``total`` and move ``raw_recent``.
    """
    count_stride_b, count_stride_h = count_strides
    recent_stride_b, recent_stride_h, recent_stride_n = recent_strides
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    batch, head = row // num_kv_heads, row % num_kv_heads
    if recent_ptr is not None:
        recent_ptr += batch * recent_stride_b + head * recent_stride_h
        if BRANCH:
            list_ptr += batch * list_stride_b + head * list_stride_h
        if mass_ptr is not None:
            mass_ptr += row * mass_places
        if block < node_blocks:
            count = tl.load(count_ptr + batch * count_stride_b + head * count_stride_h).to(tl.int32)
            if BRANCH:
                count = count * BRANCH
            place = block * BLOCK + tl.arange(0, BLOCK)
            gone = tl.load(gone_ptr + batch * gone_stride_b + head * gone_stride_h + place, mask=place < count, other=1)
            stays = (place < count) & (gone == 0)
            mass = _pooled(weight_ptr, lse_ptr, row, place, stays, places, group, HEADS)
            if mass_ptr is not None:
                tl.store(mass_ptr + place, mass, mask=stays)
            node = place.to(tl.int64)
            if BRANCH:
                node = tl.load(list_ptr + place // BRANCH, mask=stays, other=0) * BRANCH + place % BRANCH
            _towards(recent_ptr + node * recent_stride_n, mass / group, stays, share)
        elif block < node_blocks + refined_blocks:
            chosen_ptr += batch * chosen_stride_b + head * chosen_stride_h
            page_ptr += batch * chosen_stride_b + head * chosen_stride_h
            picked = tl.load(picked_ptr + batch * picked_stride_b + head * picked_stride_h)
            number, inside = (block - node_blocks) * EACH + tl.arange(0, EACH), tl.arange(0, BLOCK_W)
            known = (number < picked) & (number < most)
            beneath = number[:, None] * page_places + inside[None, :]
            there = known[:, None] & (inside < page_places)[None, :]
            if LAST:
                flat, stored = tl.reshape(beneath, [EACH * BLOCK_W]), tl.reshape(there, [EACH * BLOCK_W])
                masses = _pooled(token_ptr, lse_ptr, row, flat, stored, places, group, HEADS)
                masses = tl.reshape(masses, [EACH, BLOCK_W])
            else:
                masses = tl.load(below_ptr + row * mass_places + beneath, mask=there, other=0.0)
            mass = tl.sum(masses, 1)
            if mass_ptr is not None:
                place = tl.load(chosen_ptr + number, mask=known, other=0)
                tl.store(mass_ptr + place, mass, mask=known)
            node = tl.load(page_ptr + number, mask=known, other=0)
            _towards(recent_ptr + node * recent_stride_n, mass / group, known, share)
    if LAST and block >= node_blocks + refined_blocks:
        place = (block - node_blocks - refined_blocks) * BLOCK + tl.arange(0, BLOCK)
        length, start = tl.load(slots_ptr + batch), tl.load(slots_ptr + batches + batch)
        lead = tl.where(start > 0, sinks, 0)
        there = place < length - start + lead
        slot = tl.where(place < lead, place, start + place - lead)
        mass = _pooled(raw_ptr, lse_ptr, row, place, there, places, group, HEADS)
        if total_ptr is not None:
            total = total_ptr + batch * total_stride_b + head * total_stride_h + slot
            tl.store(total, tl.load(total, mask=there, other=0.0) + mass, mask=there)
        if raw_recent_ptr is not None:
            of_row = raw_recent_ptr + batch * raw_recent_stride_b + head * raw_recent_stride_h
            _towards(of_row + slot, mass / group, there, share)


@triton.jit(
    do_not_specialize=["batches", "num_kv_heads", "places", "nodes", "tokens", "page_places", "last", *_STRIDES[4:8]]
)
def pool_masses(
    weight_ptr,
    lse_ptr,
    gone_ptr,
    picked_ptr,
    count_ptr,
    slots_ptr,
    mass_ptr,
    gone_stride_b,
    gone_stride_h,
    picked_stride_b,
    picked_stride_h,
    count_strides,
    batches,
    num_kv_heads,
    group,
    sinks,
    places,
    nodes,
    tokens,
    page_places,
    last,
    BRANCH: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Write ``mass [B, Hkv, places]``, summed over the group, from the log-weights ``weight [B, Hq, places]``, to the
    base 2, and ``lse [B, Hq]``, natural.

    Places are those of :class:`Workspace`: ``nodes`` places of visited nodes (0 where ``gone``), from ``last`` on those
    of the last level, whose number is ``count`` (see :func:`score_nodes`); then sinks and tail; from ``tokens`` on the
    tokens of refined pages, ``page_places`` for each.
    """
    count_stride_b, count_stride_h = count_strides
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // num_kv_heads, row % num_kv_heads
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length, start = tl.load(slots_ptr + batch), tl.load(slots_ptr + batches + batch)
    number = length - start + tl.where(start > 0, sinks, 0)
    picked = tl.load(picked_ptr + batch * picked_stride_b + head * picked_stride_h)
    gone_ptr += batch * gone_stride_b + head * gone_stride_h
    count = tl.load(count_ptr + batch * count_stride_b + head * count_stride_h).to(tl.int32)
    if BRANCH:
        count = count * BRANCH
    known = place < tl.minimum(nodes, last + count)
    stays = known & (tl.load(gone_ptr + place, mask=known, other=1) == 0)
    stays = stays | ((place >= nodes) & (place < nodes + number) & (place < tokens))
    stays = stays | ((place >= tokens) & (place < tokens + picked * page_places) & (place < places))
    mass = _pooled(weight_ptr, lse_ptr, row, place, stays, places, group, HEADS)
    tl.store(mass_ptr + row * places + place, mass, mask=place < places)

"""What a step's masses add to running sums: Triton kernels of :func:`note_masses`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foveate.ops._dispatch import UnsupportedError
from foveate.ops.attend.summaries import Covered, Tree

_BLOCK = 512
"""Places of a program."""
_CHILDREN = 1024
"""Places of a program that sums what is beneath nodes."""


def note_masses(
    covered: Covered, tree: Tree, *, group: int, total: Tensor | None = None, recent: Tensor | None = None, share: float
) -> None:
    """See :func:`foveate.ops.attend.masses.note_masses`.

    One launch for raw tokens and the nodes of one level, one for each further level, and before them one for each level
    of which nodes were refined: it adds the masses of what is beneath these to their own, which are none.
    """
    if any(x is not None and x.dtype != torch.float32 for x in (total, recent, *covered.masses)):
        raise UnsupportedError("masses in other dtypes than float32")
    if any(x.stride(2) != 1 for x in (total, recent, *covered.masses) if x is not None and x.shape[2] > 1):
        raise UnsupportedError("masses that are not next to each other")
    levels, beneath = [], covered.masses[-1]
    if recent is not None:
        for nodes, mass in zip(reversed(covered.looked), reversed(covered.masses[1 : 1 + len(covered.looked)])):
            places = nodes.chosen.shape[-1]
            if places:
                width = tree.branch(nodes.level) if nodes.level else beneath.shape[-1] // places
                _gather(beneath, nodes.chosen, mass, places, width)
            levels.append((tree.levels[nodes.level].recent, mass, nodes.index))
            beneath = mass
    for number, level in enumerate(levels or [(None, None, None)]):
        _note(tree, covered.masses[0], total, recent, group, share, level, raw=not number)


def _gather(beneath: Tensor, chosen: Tensor, mass: Tensor, places: int, width: int) -> None:
    """Adds to ``mass [B, Hkv, C]``, where ``chosen [B, Hkv, places]`` says, the sums of ``width`` of ``beneath``."""
    batch, heads = chosen.shape[:2]
    block = triton.next_power_of_2(width)
    each = min(triton.next_power_of_2(places), max(1, _CHILDREN // block))
    _add_children[triton.cdiv(places, each), batch * heads](
        beneath,
        chosen,
        mass,
        *beneath.stride()[:2],
        *chosen.stride()[:2],
        *mass.stride()[:2],
        heads,
        places,
        width,
        EACH=each,
        BLOCK=block,
        num_warps=4,
    )


def _note(tree, raw_mass, total, recent, group, share, level, raw) -> None:
    """One launch of :func:`_take_in`."""
    rows, (into, mass, index) = tree.rows, level
    batch, heads, width = raw_mass.shape
    nodes = 0 if mass is None else mass.shape[-1]
    blocks = triton.cdiv(nodes, _BLOCK)
    programs = blocks + (triton.cdiv(width, _BLOCK) if raw else 0)
    if not programs:
        return

    def strides(x: Tensor | None, axes: int = 2) -> tuple[int, ...]:
        return (0,) * axes if x is None else x.stride()[:axes]

    _take_in[programs, batch * heads](
        rows.numbers,
        raw_mass,
        total,
        recent,
        into,
        mass,
        index,
        *strides(raw_mass),
        *strides(total),
        *strides(recent),
        *strides(into, 3),
        *strides(mass),
        *strides(index, 3),
        batch,
        heads,
        nodes,
        width,
        blocks,
        tree.sinks,
        share,
        1.0 / group,
        RAW=raw,
        BLOCK=_BLOCK,
        num_warps=4,
    )


_CHILD_STRIDES = [f"{x}_stride_{axis}" for x in ("beneath", "chosen", "mass") for axis in "bh"]


@triton.jit(do_not_specialize=[*_CHILD_STRIDES, "heads", "places"])
def _add_children(
    beneath_ptr,
    chosen_ptr,
    mass_ptr,
    beneath_stride_b,
    beneath_stride_h,
    chosen_stride_b,
    chosen_stride_h,
    mass_stride_b,
    mass_stride_h,
    heads,
    places,
    width,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds to ``mass``: the nodes that are chosen are different ones."""
    row = tl.program_id(1)
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    place, child = tl.program_id(0) * EACH + tl.arange(0, EACH), tl.arange(0, BLOCK)
    there = place < places
    chosen = tl.load(chosen_ptr + batch * chosen_stride_b + head * chosen_stride_h + place, mask=there, other=-1)
    there &= chosen >= 0
    beneath_ptr += batch * beneath_stride_b + head * beneath_stride_h
    of_place = place[:, None] * width + child[None, :]
    of_them = tl.load(beneath_ptr + of_place, mask=there[:, None] & (child < width)[None, :], other=0.0)
    mass_ptr += batch * mass_stride_b + head * mass_stride_h + chosen
    tl.store(mass_ptr, tl.load(mass_ptr, mask=there, other=0.0) + tl.sum(of_them, 1), mask=there)


_STRIDES = [f"{x}_stride_{axis}" for x in ("raw", "total", "recent", "into", "mass", "index") for axis in "bh"]


@triton.jit(do_not_specialize=[*_STRIDES, "batches", "heads", "nodes", "width", "node_blocks", "sinks"])
def _take_in(
    slots_ptr,
    raw_ptr,
    total_ptr,
    recent_ptr,
    into_ptr,
    mass_ptr,
    index_ptr,
    raw_stride_b,
    raw_stride_h,
    total_stride_b,
    total_stride_h,
    recent_stride_b,
    recent_stride_h,
    into_stride_b,
    into_stride_h,
    into_stride_n,
    mass_stride_b,
    mass_stride_h,
    index_stride_b,
    index_stride_h,
    index_stride_n,
    batches,
    heads,
    nodes,
    width,
    node_blocks,
    sinks,
    share,
    of_group,
    RAW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first ``node_blocks`` programs of a row move ``into`` towards ``mass``, at ``index`` or place by place; with
    ``RAW`` the others add the mass of raw tokens to ``total`` and move ``recent`` towards it (``slots [2, B]``: how
    many are in use, and the first behind the pages)."""
    row, block = tl.program_id(1), tl.program_id(0)
    batch, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    if block < node_blocks:
        place = block * BLOCK + tl.arange(0, BLOCK)
        there, node = place < nodes, place.to(tl.int64)
        got = tl.load(mass_ptr + batch * mass_stride_b + head * mass_stride_h + place, mask=there, other=0.0)
        if index_ptr is not None:
            of_row = index_ptr + batch * index_stride_b + head * index_stride_h
            node = tl.load(of_row + place * index_stride_n, mask=there, other=-1)
            there &= node >= 0
        into = into_ptr + batch * into_stride_b + head * into_stride_h + node * into_stride_n
        before = tl.load(into, mask=there, other=0.0)
        tl.store(into, before + (got * of_group - before) * share, mask=there)
    if RAW and block >= node_blocks:
        place = (block - node_blocks) * BLOCK + tl.arange(0, BLOCK)
        length, start = tl.load(slots_ptr + batch), tl.load(slots_ptr + batches + batch)
        lead = tl.where(start > 0, sinks, 0)
        there = (place < width) & (place < length - start + lead)
        slot = tl.where(place < lead, place, start + place - lead)
        got = tl.load(raw_ptr + batch * raw_stride_b + head * raw_stride_h + place, mask=there, other=0.0)
        if total_ptr is not None:
            total = total_ptr + batch * total_stride_b + head * total_stride_h + slot
            tl.store(total, tl.load(total, mask=there, other=0.0) + got, mask=there)
        if recent_ptr is not None:
            recent = recent_ptr + batch * recent_stride_b + head * recent_stride_h + slot
            before = tl.load(recent, mask=there, other=0.0)
            tl.store(recent, before + (got * of_group - before) * share, mask=there)

"""What a step's masses add to running sums: Triton kernel of :func:`attend_summaries`' sums."""

import triton
import triton.language as tl

from foveate.ops.score.summaries_kernel import LOG2E

_STRIDES = [f"{x}_stride_{axis}" for x in ("list", "found", "picked", "gone", "total", "raw_recent") for axis in "bh"]
_VARYING = ["batches", "num_kv_heads", "places", "mass_places", "node_blocks", "found_blocks", "most", "page_places"]


@triton.jit
def _pooled(weight_ptr, lse_ptr, row, place, there, places, group):
    """Masses of places ``[...]`` of a KV head, summed over the group; 0 where none is ``there``."""
    mass = tl.zeros(place.shape, tl.float32)
    for member in tl.range(0, group):
        head = row * group + member
        lse = tl.load(lse_ptr + head) * LOG2E
        mass += tl.exp2(tl.load(weight_ptr + head * places + place, mask=there, other=float("-inf")) - lse)
    return mass


@triton.jit
def _towards(ptr, mass, there, share):
    """Moves averages towards ``mass``."""
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
    count_stride_b,
    count_stride_h,
    list_stride_b,
    list_stride_h,
    found_stride_b,
    found_stride_h,
    picked_stride_b,
    picked_stride_h,
    gone_stride_b,
    gone_stride_h,
    recent_stride_b,
    recent_stride_h,
    recent_stride_n,
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
    found_blocks,
    most,
    page_places,
    share,
    BRANCH: tl.constexpr,
    NODES: tl.constexpr,
    LAST: tl.constexpr,
    KEEPS: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Moves ``recent`` towards the masses of the nodes of one level, the mean over the group, a ``share`` of the way.

    Of log-weights ``weight [B, Hq, places]``, to the base 2, and ``lse [B, Hq]``: the first ``node_blocks`` programs of
    a row do so for nodes that were not refined, the next ``found_blocks`` for those that were, whose mass is that of
    what is beneath: of tokens, the ``LAST`` time, or of ``below [B, Hkv, mass_places]``, ``page_places`` for each.
    ``KEEPS``: ``mass``, likewise, is written for the level above. See :func:`attend_nodes` for what says which nodes
    there are and which are refined.

    The programs behind, the ``LAST`` time, add the masses of sinks and tail to ``total`` and move ``raw_recent``.
    """
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    batch, head = row // num_kv_heads, row % num_kv_heads
    if NODES:
        recent_ptr += batch * recent_stride_b + head * recent_stride_h
        if BRANCH:
            list_ptr += batch * list_stride_b + head * list_stride_h
        if KEEPS:
            mass_ptr += row * mass_places
        if block < node_blocks:
            count = tl.load(count_ptr + batch * count_stride_b + head * count_stride_h).to(tl.int32)
            if BRANCH:
                count = count * BRANCH
            place = block * BLOCK + tl.arange(0, BLOCK)
            gone = tl.load(gone_ptr + batch * gone_stride_b + head * gone_stride_h + place, mask=place < count, other=1)
            stays = (place < count) & (gone == 0)
            mass = _pooled(weight_ptr, lse_ptr, row, place, stays, places, group)
            if KEEPS:
                tl.store(mass_ptr + place, mass, mask=stays)
            node = place.to(tl.int64)
            if BRANCH:
                node = tl.load(list_ptr + place // BRANCH, mask=stays, other=0) * BRANCH + place % BRANCH
            _towards(recent_ptr + node * recent_stride_n, mass / group, stays, share)
        elif block < node_blocks + found_blocks:
            chosen_ptr += batch * found_stride_b + head * found_stride_h
            page_ptr += batch * found_stride_b + head * found_stride_h
            picked = tl.load(picked_ptr + batch * picked_stride_b + head * picked_stride_h)
            number, inside = (block - node_blocks) * EACH + tl.arange(0, EACH), tl.arange(0, BLOCK_W)
            known = (number < picked) & (number < most)
            beneath = number[:, None] * page_places + inside[None, :]
            there = known[:, None] & (inside < page_places)[None, :]
            if LAST:
                masses = _pooled(token_ptr, lse_ptr, row, beneath, there, places, group)
            else:
                masses = tl.load(below_ptr + row * mass_places + beneath, mask=there, other=0.0)
            mass = tl.sum(masses, 1)
            if KEEPS:
                place = tl.load(chosen_ptr + number, mask=known, other=0)
                tl.store(mass_ptr + place, mass, mask=known)
            node = tl.load(page_ptr + number, mask=known, other=0)
            _towards(recent_ptr + node * recent_stride_n, mass / group, known, share)
    if LAST and block >= node_blocks + found_blocks:
        place = (block - node_blocks - found_blocks) * BLOCK + tl.arange(0, BLOCK)
        length, start = tl.load(slots_ptr + batch), tl.load(slots_ptr + batches + batch)
        lead = tl.where(start > 0, sinks, 0)
        there = place < length - start + lead
        slot = tl.where(place < lead, place, start + place - lead)
        mass = _pooled(raw_ptr, lse_ptr, row, place, there, places, group)
        if total_ptr is not None:
            total = total_ptr + batch * total_stride_b + head * total_stride_h + slot
            tl.store(total, tl.load(total, mask=there, other=0.0) + mass, mask=there)
        if raw_recent_ptr is not None:
            of_row = raw_recent_ptr + batch * raw_recent_stride_b + head * raw_recent_stride_h
            _towards(of_row + slot, mass / group, there, share)

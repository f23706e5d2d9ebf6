"""The references of :mod:`foveate.ops.fetch`, in PyTorch. On a GPU they wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from foveate.ops._math import on_host
from foveate.ops.fetch.types import NEVER, OLDEST, HostPages, HotPages, Placed

_MOST = 2**31 - 1


def place_pages(pages: Tensor, hot: HotPages) -> Placed:
    """Find slots for the pages that a step has chosen and that the device does not hold.

    They replace the pages that were chosen least recently; among equally old pages, those in the first slots. The freed
    slots, in their order, go to the missing pages in their order. All pages that were not chosen for :data:`OLDEST`
    steps count as equally old.

    Args:
        pages: int32 ``[R, P]``; -1 marks an unused place. A row has no page twice, and no more pages than slots.
        hot: the slots. Their table, ages and clock are updated; their keys and values are not.

    Raises:
        ValueError: for pages of other rows, and on the CPU for more pages than slots.
    """
    rows, size = hot.holds.shape
    there = pages >= 0
    asked = there.sum(1, dtype=torch.int32)
    if on_host(asked) and asked.numel() and int(asked.max()) > size:
        raise ValueError(f"a step chooses {int(asked.max())} pages, and the device keeps {size} of each KV head")
    hot.clock.add_(1)
    now, first = hot.clock[:, None], size * torch.arange(rows, dtype=torch.int32, device=pages.device)[:, None]
    page = pages.clamp_min(0).long()
    at = hot.table.gather(1, page)
    missing = there & (at < 0)
    found = now.where(there & ~missing, NEVER)
    hot.chosen.scatter_reduce_(1, (at - first).clamp(0, size - 1).long(), found, "amax")
    absent = missing.sum(1, dtype=torch.int32)
    # slots are given away by their age; the k-th slot given away goes to the k-th missing page
    oldest = (now - hot.chosen).clamp_max(OLDEST).argsort(dim=1, descending=True, stable=True)
    slots = torch.arange(size, device=pages.device).expand(rows, -1)
    given = torch.empty_like(oldest).scatter_(1, oldest, slots) < absent[:, None]
    turn_of_slot, turn = given.cumsum(1) - 1, missing.cumsum(1) - 1
    listed = slots.new_zeros(rows, size + 1).scatter_(1, turn_of_slot.where(given, size), slots)
    into = listed.gather(1, turn.clamp(0, size - 1))
    replaced = hot.holds.gather(1, into)
    gone = torch.full_like(replaced, -1).where(missing & (replaced >= 0), _MOST)
    hot.table.scatter_reduce_(1, replaced.clamp_min(0).long(), gone, "amin")
    blocks = (into.to(torch.int32) + first).where(missing, -1)
    hot.table.scatter_reduce_(1, page, blocks, "amax")
    new = pages.new_zeros(rows, pages.shape[1] + 1).scatter_(1, turn.where(missing, pages.shape[1]), pages)
    hot.holds.copy_(new.gather(1, turn_of_slot.clamp(0, pages.shape[1])).where(given, hot.holds))
    hot.chosen.copy_(now.where(given, hot.chosen))
    return Placed(blocks, asked, absent)


def fetch_pages(pages: Tensor, blocks: Tensor, host: HostPages, hot: HotPages) -> None:
    """Copy pages from host memory to the blocks that :func:`place_pages` found for them.

    Args:
        pages, blocks: int32 ``[R, P]``: the pages, and the blocks to copy them to; a block of -1 copies nothing.
    """
    size, per = hot.page_size, host.slots // hot.page_size
    into = blocks.where(blocks >= 0, len(hot.keys) - 1).long()  # the last block takes what nobody reads
    page = pages.to(host.keys[0].device)
    rows = torch.arange(len(pages), device=page.device)[:, None]
    for memory, segments in ((hot.keys, host.keys), (hot.values, host.values)):
        found = memory[into, 0].to(page.device)
        for number, segment in enumerate(segments):
            inside = (page - number * per).clamp(0, per - 1).long()
            here = segment.flatten(0, 1).unflatten(1, (per, size))[rows, inside]
            found = here.where((page // per == number)[..., None, None], found)
        memory[into, 0] = found.to(memory.device)


def put_both(
    k: Tensor, v: Tensor, slots: Tensor, host: HostPages, hot: HotPages, open_keys: Tensor, open_values: Tensor
) -> None:
    """Write one token of every sequence to host memory, to the page that is being filled, and to its hot copy if there
    is one.

    Args:
        k, v: ``[B, Hkv, 1, D(v)]``.
        slots: int64 ``[B]``: the slots of the tokens.
        open_keys, open_values: ``[B, Hkv, n, D(v)]``: the page that holds each sequence's newest token.
    """
    batch, heads = k.shape[:2]
    page, inside, rows = slots // hot.page_size, slots % hot.page_size, torch.arange(batch, device=k.device)
    block = hot.table.view(batch, heads, -1).gather(2, page[:, None, None].expand(-1, heads, 1))[..., 0]
    block = block.where(block >= 0, len(hot.keys) - 1).long()
    on_host = slots.to(host.keys[0].device)
    for x, opened, memory, segments in (
        (k[:, :, 0], open_keys, hot.keys, host.keys),
        (v[:, :, 0], open_values, hot.values, host.values),
    ):
        opened[rows, :, inside] = x
        memory[block, 0, inside[:, None]] = x
        for number, segment in enumerate(segments):
            at = (on_host - number * host.slots).clamp(0, host.slots - 1)
            here = (on_host // host.slots == number)[:, None, None]
            row = rows.to(segment.device)
            segment[row, :, at] = x.to(segment.device).where(here, segment[row, :, at])


def check_place(pages: Tensor, hot: HotPages) -> None:
    """Raise ValueError unless ``pages`` and the hot pages have equal numbers of rows."""
    rows = len(hot.holds)
    if pages.dtype != torch.int32 or pages.dim() != 2 or len(pages) != rows:
        raise ValueError(f"pages must be int32 of {rows} rows, not {pages.dtype} {list(pages.shape)}")

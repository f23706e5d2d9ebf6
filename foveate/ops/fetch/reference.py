"""The references of :mod:`foveate.ops.fetch`, in PyTorch. On a GPU they wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from foveate.ops.fetch.types import OLDEST, HostPages, HotPages, Placed


def place_pages(pages: Tensor, hot: HotPages) -> Placed:
    """Find slots for the pages that a step has chosen and the device does not have.

    They replace the pages that were chosen least recently, of equally old ones those in the first slots. Slots are
    given in their order to missing pages in theirs. What was not chosen for :data:`OLDEST` steps is equally old.

    Args:
        pages: int32 ``[R, P]``, -1 for none; no page stands twice in a row, and a row has no more than slots.
        hot: the slots, whose table, ages and clock are brought up to date; their keys and values are not.

    Raises:
        ValueError: for pages of other rows, and on the CPU for more pages than there are slots.
    """
    rows, size = hot.holds.shape
    check_rows(pages, rows)
    hot.clock.add_(1)
    there = pages >= 0
    at = hot.table.gather(1, pages.clamp_min(0).long())
    missing = there & (at < 0)
    blocks = torch.full_like(pages, -1)
    asked, absent = there.sum(1, dtype=torch.int32), missing.sum(1, dtype=torch.int32)
    if int(asked.max()) > size:
        raise ValueError(f"a step chooses {int(asked.max())} pages, and the device keeps {size} of each KV head")
    for row in range(rows):
        now, first = hot.clock[row], row * size
        hot.chosen[row, (at[row][there[row] & ~missing[row]] - first).long()] = now
        places = missing[row].nonzero()[:, 0]
        if not len(places):
            continue
        age = (now - hot.chosen[row]).clamp_max(OLDEST)
        given = age.argsort(descending=True, stable=True)[: len(places)].sort().values
        replaced = hot.holds[row, given]
        hot.table[row, replaced[replaced >= 0].long()] = -1
        new, into = pages[row, places], (given + first).to(torch.int32)
        hot.table[row, new.long()] = into
        hot.holds[row, given], hot.chosen[row, given] = new, now
        blocks[row, places] = into
    return Placed(blocks, asked, absent)


def fetch_pages(pages: Tensor, blocks: Tensor, host: HostPages, hot: HotPages) -> None:
    """Copy pages from host memory to the blocks that :func:`place_pages` found for them.

    Args:
        pages, blocks: int32 ``[R, P]``; of a block that is -1 nothing is copied.
    """
    size, per = hot.page_size, host.slots // hot.page_size
    rows, places = (blocks >= 0).nonzero(as_tuple=True)
    page, block = pages[rows, places].cpu(), blocks[rows, places].long()
    for number in page.div(per, rounding_mode="floor").unique().tolist():
        here = (page // per == number).to(block.device)
        row, inside = rows[here].cpu(), page[here.cpu()] % per
        for memory, segments in ((hot.keys, host.keys), (hot.values, host.values)):
            segment = segments[number].flatten(0, 1).unflatten(1, (per, size))
            memory[block[here], 0] = segment[row, inside].to(memory.device)


def put_both(
    k: Tensor, v: Tensor, slots: Tensor, host: HostPages, hot: HotPages, open_keys: Tensor, open_values: Tensor
) -> None:
    """Write one token of every sequence to host memory, to the page that is being filled, and to its hot copy, if any.

    Args:
        k, v: ``[B, Hkv, 1, D(v)]``.
        slots: int64 ``[B]``, where the tokens go.
        open_keys, open_values: ``[B, Hkv, n, D(v)]``: the page that each sequence's newest token is in.
    """
    batch, heads = k.shape[:2]
    size = hot.page_size
    page, inside = slots // size, slots % size
    rows = torch.arange(batch, device=k.device)
    for memory, x in ((open_keys, k), (open_values, v)):
        memory[rows, :, inside] = x[:, :, 0]
    block = hot.table.view(batch, heads, -1).gather(2, page[:, None, None].expand(-1, heads, 1))[..., 0].long()
    there, inside_of_heads = block >= 0, inside[:, None].expand(-1, heads)
    for memory, x in ((hot.keys, k), (hot.values, v)):
        memory[block[there], 0, inside_of_heads[there]] = x[:, :, 0][there]
    for b, slot in enumerate(slots.tolist()):
        for segments, x in ((host.keys, k), (host.values, v)):
            segments[slot // host.slots][b, :, slot % host.slots] = x[b, :, 0].to(segments[0].device)


def check_rows(pages: Tensor, rows: int) -> None:
    """Raise ValueError unless these are pages of so many rows."""
    if pages.dtype != torch.int32 or pages.dim() != 2 or len(pages) != rows:
        raise ValueError(f"pages must be int32 of {rows} rows, not {pages.dtype} {list(pages.shape)}")

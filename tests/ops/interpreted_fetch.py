"""The kernels of `foveate.ops.fetch` under Triton's interpreter: what the references do, to the last bit."""

import pytest
import torch

from foveate.ops.fetch import kernel, reference
from tests.ops.test_fetch import BATCH, DIM, HEADS, SIZE, SLOTS, VALUE_DIM, check, choices, hot, memory

DTYPES = [torch.float32, torch.float16]


def same(mine, its):
    for a, b in zip(mine[2:], its[2:], strict=True):  # tables and ages
        assert torch.equal(a, b)
    for a, b in zip(mine[:2], its[:2], strict=True):  # the last block is scratch
        assert torch.equal(a[:-1], b[:-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [SLOTS, 13])
@pytest.mark.parametrize("block", [2, 16, 1024])
def test_steps_over_host_memory(dtype, slots, block, monkeypatch):
    """Pages and slots in several turns of a program, or in one."""
    monkeypatch.setattr(kernel, "_BLOCK", block)
    host, mine, its = memory(dtype=dtype), hot(slots=slots, dtype=dtype), hot(slots=slots, dtype=dtype)
    for chosen in choices(25 if block > 2 else 8):
        found, expected = kernel.place_pages(chosen, mine), reference.place_pages(chosen, its)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
        kernel.fetch_pages(chosen, found.blocks, host, mine)
        reference.fetch_pages(chosen, expected.blocks, host, its)
        same(mine, its)
        check(mine, host, chosen, found.blocks)


def test_ages_beyond_the_oldest_are_alike():
    mine, its = hot(), hot()
    for tables in (mine, its):
        tables.clock.fill_(1000)
        tables.chosen.copy_(1000 - torch.tensor([3, 500, 254, 255, 256, 0, 300], dtype=torch.int32))
        tables.holds.copy_(torch.arange(SLOTS, dtype=torch.int32))
        tables.table[:, :SLOTS] = torch.arange(4)[:, None] * SLOTS + torch.arange(SLOTS)
    chosen = torch.tensor([[9, 10, 11, 12]] * 4, dtype=torch.int32)
    for a, b in zip(kernel.place_pages(chosen, mine), reference.place_pages(chosen, its), strict=True):
        assert torch.equal(a, b)
    assert (mine.holds == torch.tensor([0, 9, 10, 11, 12, 5, 6])).all()
    same(mine, its)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token(dtype):
    """Of keys and values in any layout."""
    host, mine, its = memory(dtype=dtype), hot(dtype=dtype), hot(dtype=dtype)
    other = memory(dtype=dtype)
    chosen = torch.tensor([[1, 6], [0, 6], [1, 2], [6, 9]], dtype=torch.int32)
    for tables, where in ((mine, host), (its, other)):
        reference.fetch_pages(chosen, reference.place_pages(chosen, tables).blocks, where, tables)
    k = torch.randn(BATCH, 1, HEADS, DIM).to(dtype).transpose(1, 2)
    v = torch.randn(BATCH, HEADS, VALUE_DIM, 1).to(dtype).transpose(2, 3)
    slots = torch.tensor([6 * SIZE + 1, 2 * SIZE])
    opened = [[torch.zeros(BATCH, HEADS, SIZE, dim, dtype=dtype) for dim in (DIM, VALUE_DIM)] for _ in range(2)]
    kernel.put_both(k, v, slots, host, mine, *opened[0])
    reference.put_both(k, v, slots, other, its, *opened[1])
    same(mine, its)
    for a, b in zip((*host.keys, *host.values, *opened[0]), (*other.keys, *other.values, *opened[1]), strict=True):
        assert torch.equal(a, b)

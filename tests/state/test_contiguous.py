"""Keys and values of a cache: growth, rows of their own, branches."""

import copy

import pytest
import torch

from foveate.state import Evicts, Geometry, SlotCache
from foveate.state.borrowed import branch_of

GEOMETRY = Geometry(4, 2, 8, 6)


def cache(batch=3):
    return SlotCache(GEOMETRY, batch, torch.float32, torch.device("cpu"))


def tokens(n, batch=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, n, 8, generator=generator), torch.randn(batch, 2, n, 6, generator=generator)


def assert_holds(store, k, v):
    assert torch.equal(store.keys, k)
    assert torch.equal(store.values, v)


def test_tokens_are_kept_over_growth():
    store, (k, v) = cache(), tokens(200)
    store.append(k[:, :, :50], v[:, :, :50])
    assert_holds(store, k[:, :, :50], v[:, :, :50])
    for at in range(50, 200):
        store.write_step(k[:, :, at : at + 1], v[:, :, at : at + 1])
    assert_holds(store, k, v)


def test_rows_of_different_lengths():
    """A row that is filled alone writes to its own slots."""
    store, (k, v), lengths = cache(), tokens(31), [20, 3, 30]
    store.reserve(31)
    for b, length in enumerate(lengths):
        with store.row(b) as row:
            row.append(k[b : b + 1, :, :length], v[b : b + 1, :, :length])
            assert_holds(row, k[b : b + 1, :, :length], v[b : b + 1, :, :length])
    store.write_step(k[:, :, 30:], v[:, :, 30:])
    for b, length in enumerate(lengths):
        assert torch.equal(store.keys[b, :, :length], k[b, :, :length])
        assert torch.equal(store.values[b, :, length], v[b, :, 30])
    with pytest.raises(RuntimeError, match="cannot grow alone"), store.row(0) as row:
        row.reserve(1000)


@pytest.mark.parametrize("evicts", [*Evicts])
def test_branches(evicts):
    """They share memory until one of them grows; what one does with its rows leaves the other as it is."""
    store, (k, v), more = cache(), tokens(50), tokens(100, seed=1)
    store.append(k, v)
    branch = branch_of(store, {}, evicts, copy.deepcopy(store.counters), {})
    assert_holds(branch, k, v)
    assert branch.store.keys is store.store.keys
    branch.take_rows(torch.tensor([2, 2, 1]))
    branch.append(*more)
    assert torch.equal(branch.keys, torch.cat([k[[2, 2, 1]], more[0]], 2))
    assert_holds(store, k, v)


def test_what_is_kept_of_a_prompt_gets_memory_of_its_own():
    """That of the prompt stays with the cache that it was branched from."""
    store, (k, v) = cache(), tokens(50)
    store.append(k, v)
    branch = branch_of(store, {}, Evicts.AT_PROMPT_END, copy.deepcopy(store.counters), {})
    branch.retain(torch.tensor([40, 2, 30]))
    assert_holds(branch, k[:, :, [2, 30, 40]], v[:, :, [2, 30, 40]])
    branch.append(*tokens(100, seed=1))
    assert_holds(store, k, v)


def test_slots_are_read_by_their_numbers():
    store, (k, v) = cache(), tokens(20)
    store.append(k, v)
    for found, x in zip(store.read_slots(3, 20), (k, v)):
        assert torch.equal(found, x[:, :, 3:])
    slots = torch.tensor([19, 0, 7, -1, 25]).expand(3, 2, -1)
    for found, x in zip(store.fetch_slots(slots), (k, v)):
        assert torch.equal(found[:, :, :3], x[:, :, [19, 0, 7]])
        assert found.isfinite().all()


def test_whether_a_row_may_have_a_number():
    """As methods ask before they launch something."""
    store, (k, v) = cache(2), tokens(9, batch=2)
    assert not store.plan.some("counts")
    store.append(k, v)
    assert [every for every in range(1, 12) if store.plan.some("counts", every)] == [1, 3, 9]

"""Keys and values of a cache in one piece and in blocks."""

import copy

import pytest
import torch

from foveate.state import Channel, Evicts, Geometry, SlotCache
from foveate.state.borrowed import branch_of

GEOMETRY = Geometry(4, 2, 8, 6)


def cache(block_size, batch=3, **how):
    return SlotCache(GEOMETRY, batch, torch.float32, torch.device("cpu"), block_size=block_size, **how)


def tokens(n, batch=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, n, 8, generator=generator), torch.randn(batch, 2, n, 6, generator=generator)


def assert_holds(store, k, v):
    assert torch.equal(store.keys, k)
    assert torch.equal(store.values, v)


def blocks_of(store):
    """The blocks of each row; no two rows hold one, and every block is held or free."""
    rows = store.block_table.table.tolist()
    held = [block for row in rows for block in row]
    assert sorted([*held, *store._free_blocks]) == list(range(len(store.memory[0])))
    return rows


@pytest.mark.parametrize("block_size", [0, 1, 5, 16, 300])
def test_tokens_are_kept_over_growth(block_size):
    store, (k, v) = cache(block_size), tokens(200)
    store.append(k[:, :, :50], v[:, :, :50])
    assert_holds(store, k[:, :, :50], v[:, :, :50])
    for at in range(50, 200):
        store.write_step(k[:, :, at : at + 1], v[:, :, at : at + 1])
    assert_holds(store, k, v)
    assert store.block_table is None or store.block_table.length == 200


@pytest.mark.parametrize("block_size", [0, 5, 16])
def test_rows_of_different_lengths(block_size):
    """A row that is filled alone writes to its own slots."""
    store, (k, v), lengths = cache(block_size), tokens(31), [20, 3, 30]
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


def test_memory_is_what_a_block_table_says():
    store, (k, v) = cache(16), tokens(50)
    store.append(k, v)
    (keys, values), table = store.memory, store.block_table
    assert keys.shape[1:] == (2, 16, 8)
    assert values.shape[1:] == (2, 16, 6)
    for found, expected in zip(table.gather(k, keys, values), (k, v)):
        assert torch.equal(found, expected)
    assert cache(0).block_table is None
    blocks_of(store)


def test_growth_takes_new_blocks_and_moves_no_token():
    store, (k, v) = cache(16), tokens(200)
    store.append(k[:, :, :50], v[:, :, :50])
    before = blocks_of(store)
    store.append(k[:, :, 50:], v[:, :, 50:])
    for old, new in zip(before, blocks_of(store)):
        assert new[: len(old)] == old
        assert len(new) > len(old)


def test_rows_keep_their_blocks_and_repeated_ones_take_free_ones():
    store, (k, v) = cache(16), tokens(50)
    store.append(k, v)
    before, memory = blocks_of(store), store.memory[0]
    store.take_rows(torch.tensor([2, 0, 2]))
    assert_holds(store, k[[2, 0, 2]], v[[2, 0, 2]])
    after = blocks_of(store)
    assert after[:2] == [before[2], before[0]]
    assert sorted(after[2]) == sorted(before[1]), "the blocks of the row that has gone"
    assert store.memory[0] is memory
    store.take_rows(torch.tensor([1]))
    assert len(store._free_blocks) == 2 * len(before[0])
    assert_holds(store, k[:1], v[:1])
    store.take_rows(torch.tensor([0, 0, 0, 0]))
    assert len(store.memory[0]) == 4 * len(before[0]), "one row's worth more than there were"
    assert_holds(store, k[[0] * 4], v[[0] * 4])
    blocks_of(store)


def test_a_repeated_row_goes_its_own_way():
    store, (k, v) = cache(16, 1), tokens(51, 2)
    store.append(k[:1, :, :50], v[:1, :, :50])
    store.take_rows(torch.tensor([0, 0]))
    store.write_step(k[:, :, 50:], v[:, :, 50:])
    assert torch.equal(store.keys[:, :, 50], k[:, :, 50])
    assert torch.equal(store.keys[1, :, :50], k[0, :, :50])


@pytest.mark.parametrize("evicts", [*Evicts])
def test_branches(evicts):
    """A branch that evicts in decode has slots in one piece; what one does with its rows leaves the other as it is."""
    store, (k, v), more = cache(16), tokens(50), tokens(100, seed=1)
    store.append(k, v)
    branch = branch_of(store, {}, evicts, copy.deepcopy(store.counters), {})
    assert branch.block_size == (0 if evicts is Evicts.IN_DECODE else 16)
    assert_holds(branch, k, v)
    assert (branch.memory[0] is store.memory[0]) == (evicts is not Evicts.IN_DECODE)
    branch.take_rows(torch.tensor([2, 2, 1]))
    branch.append(*more)
    assert torch.equal(branch.keys, torch.cat([k[[2, 2, 1]], more[0]], 2))
    assert_holds(store, k, v)


def test_what_is_kept_of_a_prompt_gets_blocks_of_its_own():
    """Those of the prompt stay with the cache that it was branched from."""
    store, (k, v) = cache(16), tokens(50)
    store.append(k, v)
    branch = branch_of(store, {}, Evicts.AT_PROMPT_END, copy.deepcopy(store.counters), {})
    branch.retain(torch.tensor([40, 2, 30]))
    assert_holds(branch, k[:, :, [2, 30, 40]], v[:, :, [2, 30, 40]])
    assert len(branch.memory[0]) * 16 == 3 * branch.capacity
    blocks_of(branch)
    branch.append(*tokens(100, seed=1))
    assert_holds(store, k, v)
    blocks_of(store)


def test_state_of_a_method_is_in_one_piece():
    channels = {"mass": Channel(), "low": Channel((8,), per=4), "count": Channel(per=0)}
    store, (k, v) = cache(16, channels=channels), tokens(50)
    store.append(k, v)
    assert store.channel("mass").shape == (3, 2, 50)
    assert store.channel("low").shape[:2] == (3, 2)
    with store.row(1) as row:
        assert row.channel("count").shape == (1,)


def test_what_evicts_is_refused():
    with pytest.raises(ValueError, match="keeps its slots in one piece"):
        cache(16, evicts=Evicts.IN_DECODE)

"""The protocol of captured steps and of maintenance between them, on a cache without a model."""

import pytest
import torch

from foveate.runtime import capture
from foveate.state import Counters, Evicts, Geometry, RowNumber, SlotCache
from foveate.state.borrowed import branch_of

LENGTH = 9


def filled(evicts=Evicts.NEVER):
    """A cache of two rows that hold the same tokens, with a row number of its own."""
    own = {"pages": RowNumber()}
    cache = SlotCache(Geometry(4, 2, 8, 8), 2, torch.float32, torch.device("cpu"), own, evicts, Counters())
    tokens = torch.randn(2, 2, LENGTH, 8, generator=torch.Generator().manual_seed(0))
    cache.append(tokens, tokens)
    return cache


def test_a_step_counts_its_token_before_and_what_was_read_afterwards():
    cache = filled()
    cache.reserve(LENGTH + 1)
    cache.counters.on_device(cache.device)
    rows = capture.move_to_device([cache])
    with capture.step([rows]):
        assert cache.plan["lengths"].tolist() == [LENGTH + 1] * 2
        cache.count("keys_read", 3.0)
        assert float(cache.counters.keys_read) == 0.0
    assert float(cache.counters.keys_read) == 6.0
    rows.steps += 1
    assert cache.lengths == [LENGTH + 1] * 2


@pytest.mark.parametrize("block", [capture.step, capture.maintenance, capture.capturing])
def test_within_a_block_the_host_is_not_asked_also_not_after_an_error(block):
    cache = filled()
    rows = capture.move_to_device([cache])
    with pytest.raises(RuntimeError, match="asked for row numbers on the host"), block([rows]):
        list(cache.lengths)
    assert not rows.capturing
    assert cache.lengths == [LENGTH] * 2


def test_row_numbers_that_maintenance_changes_are_changed_at_its_end():
    rows = capture.move_to_device([filled()])
    with capture.maintenance([rows]):
        rows.plan.after("pages", lambda: rows["pages"].add_(1))
        rows.plan.after("pages", lambda: rows["pages"].add_(1))  # of another layer
        assert rows["pages"].tolist() == [0, 0]
    assert rows["pages"].tolist() == [1, 1]


def test_steps_that_free_slots_get_memory_for_them_and_keys_of_their_own():
    read = filled()
    branch = branch_of(read, {}, Evicts.IN_DECODE, Counters(), {})
    assert branch.store.keys is read.store.keys
    capture.move_to_device([branch])
    assert branch.device_state.freed_slots.tolist() == [[-1, -1]] * 2
    assert branch.store.keys is not read.store.keys
    assert torch.equal(branch.store.keys, read.store.keys)
    assert capture.freed_slots(read) is None


def test_a_slot_that_was_freed_on_the_host_is_reused_in_a_captured_step():
    cache = filled(Evicts.IN_DECODE)
    cache.reserve(LENGTH + 1)
    cache.evict([True, False], at=torch.full((2,), 3))
    rows = capture.move_to_device([cache])
    with capture.step([rows]):
        cache.write_step(*torch.ones(2, 2, 2, 1, 8))
    rows.steps += 1
    assert cache.rows["counts"] == [LENGTH, LENGTH + 1]
    assert cache.positions[0, 1].tolist() == [0, 1, 2, LENGTH, *range(4, LENGTH), -1]
    assert cache.positions[1, 1].tolist() == list(range(LENGTH + 1))

"""SlotCache: packing, growth, eviction, rows, snapshots."""

import copy
import operator

import pytest
import torch

from foveate.methods._common import occupied
from foveate.methods.shared_prompt import _part
from foveate.state import Channel, Counters, Evicts, Geometry, RowNumber, SlotCache
from foveate.state.borrowed import branch_of, cache_of
from foveate.state.contiguous import Contiguous
from foveate.state.counters import BytesInUse, Tally
from foveate.state.device_rows import DeviceRows

GEOMETRY = Geometry(num_heads=6, num_kv_heads=2, head_dim=4, value_dim=3)
MASS = {"mass": Channel()}


def make(batch: int = 2, channels=None, evicts: Evicts = Evicts.NEVER) -> SlotCache:
    return SlotCache(GEOMETRY, batch, torch.float32, torch.device("cpu"), channels, evicts)


def kv(first: int, n: int, rows: list[int]):
    """Keys and values that tell their origin: ``1000 * row + 100 * head + position``, the values negative."""
    numbers = torch.arange(first, first + n) + 100 * torch.arange(2)[:, None]
    numbers = (numbers + 1000 * torch.tensor(rows)[:, None, None]).float()[..., None]
    return numbers.expand(-1, -1, -1, 4), -numbers.expand(-1, -1, -1, 3)


def append(cache: SlotCache, n: int) -> None:
    cache.append(*kv(cache.lengths[0], n, list(range(cache.batch_size))))


def filled(n: int, batch: int = 2, **options) -> SlotCache:
    cache = make(batch, **options)
    append(cache, n)
    return cache


def append_to_row(cache: SlotCache, b: int, n: int) -> None:
    with cache.row(b) as row:
        row.append(*kv(row.lengths[0], n, [b]))


def ragged(lengths: list[int], **options) -> SlotCache:
    cache = make(len(lengths), **options)
    cache.reserve(max(lengths))
    for b, n in enumerate(lengths):
        append_to_row(cache, b, n)
    return cache


def step(cache: SlotCache) -> None:
    """One more token in every row, stamped with its own position."""
    pieces = [kv(length, 1, [b]) for b, length in enumerate(cache.lengths)]
    cache.write_step(*(torch.cat(parts) for parts in zip(*pieces)))


def evict(cache: SlotCache, slots, rows=None) -> None:
    scores = torch.ones_like(cache.positions, dtype=torch.float32)
    scores.scatter_(2, torch.tensor(slots)[..., None], 0.0)
    cache.evict([True] * cache.batch_size if rows is None else rows, scores=scores)


def held(cache: SlotCache, b: int, head: int = 0) -> list[int]:
    """Positions that a head of a row holds, slot by slot; -1 for a hole. Keys and values must agree with them."""
    positions = cache.positions[b, head].tolist()
    for slot, position in enumerate(positions):
        if position >= 0:
            stamp = 1000 * b + 100 * head + position
            assert cache.keys[b, head, slot].tolist() == [stamp] * 4
            assert cache.values[b, head, slot].tolist() == [-stamp] * 3
    return positions


# Writing


def test_tokens_are_packed_and_read_without_a_copy():
    cache = filled(5)
    append(cache, 3)
    assert cache.keys.shape == (2, 2, 8, 4)
    assert cache.values.shape == (2, 2, 8, 3)
    assert [held(cache, b, h) for b in range(2) for h in range(2)] == [list(range(8))] * 4
    assert cache.lengths == [8, 8]
    assert cache.used == 8
    assert cache.plan.alike
    assert occupied(cache) is None
    assert cache.keys.data_ptr() == cache.store.keys.data_ptr()
    assert cache.values.data_ptr() == cache.store.values.data_ptr()


@pytest.mark.parametrize("evicts", [*Evicts])
def test_growth_keeps_everything(evicts):
    channels = {"mass": Channel(), "queries": Channel((6, 4), per=0, dtype=None)}
    channels |= {} if evicts else {"page": Channel((4,), per=8)}
    cache = filled(40, channels=channels, evicts=evicts)
    full = cache.capacity
    append(cache, full - 40)
    assert cache.capacity == full
    cache.channel("mass").copy_(torch.arange(full))
    cache.tensors["queries"].fill_(3)
    if not evicts:
        cache.tensors["page"][:] = 7
    append(cache, 200)
    assert cache.capacity >= full + 200
    assert held(cache, 1, 1) == list(range(full + 200))
    assert cache.channel("mass")[1, 1].tolist() == [*range(full)] + [0] * 200
    assert (cache.tensors["queries"] == 3).all()
    if not evicts:
        assert (cache.tensors["page"][:, :, : full // 8] == 7).all()
        assert cache.tensors["page"].shape[2] >= (full + 200) // 8


def test_growth_is_geometric():
    cache, sizes = make(1), set()
    for _ in range(2000):
        step(cache)
        sizes.add(cache.capacity)
    assert len(sizes) < 30
    assert cache.capacity < 2000 * 1.2


def test_growth_that_fails_halfway_may_be_followed_by_less(monkeypatch):
    cache = filled(60, channels=MASS)
    buffer = Contiguous._buffer

    def short(self, dim, slots):
        if dim == GEOMETRY.value_dim:
            raise torch.OutOfMemoryError
        return buffer(self, dim, slots)

    with monkeypatch.context() as stop:
        stop.setattr(Contiguous, "_buffer", short)
        with pytest.raises(torch.OutOfMemoryError):
            cache.reserve(1000)
    cache.reserve(cache.capacity + 1)
    append(cache, 100)
    assert cache.lengths == [160, 160]
    assert all(x.shape[2] == cache.capacity for x in (cache.store.keys, cache.store.values, cache.tensors["mass"]))
    assert held(cache, 0) == list(range(160))


def test_reserve_never_shrinks():
    cache = filled(5)
    cache.reserve(300)
    keys = cache.store.keys
    cache.reserve(10)
    assert cache.store.keys is keys


def test_rows_of_different_lengths():
    cache = ragged([3, 7, 1])
    assert cache.lengths == [3, 7, 1]
    assert cache.used == 7
    assert not cache.plan.alike
    assert occupied(cache)[:, 0].sum(-1).tolist() == [3, 7, 1]
    assert held(cache, 0, 1) == [0, 1, 2, -1, -1, -1, -1]
    assert held(cache, 1, 0) == list(range(7))
    assert cache.plan["counts"].tolist() == [3, 7, 1]
    with pytest.raises(ValueError, match="rows use different numbers of slots"):
        append(cache, 2)


@pytest.mark.parametrize("evicts", [*Evicts])
def test_a_step_goes_to_the_end_of_each_row(evicts):
    cache = ragged([3, 7, 64], evicts=evicts)
    step(cache)
    assert cache.lengths == cache.rows["counts"] == [4, 8, 65]
    for b, length in enumerate(cache.lengths):
        assert held(cache, b, 1)[:length] == list(range(length))


def test_a_page_channel_cannot_be_kept_where_slots_move():
    with pytest.raises(ValueError, match="evicts in decode cannot have channels per page"):
        make(channels={"page": Channel((4,), per=8)}, evicts=Evicts.IN_DECODE)


def test_of_wraps_given_tensors_without_a_copy():
    k, v = kv(0, 6, [0, 1])
    cache = cache_of(k, v, num_heads=6)
    assert cache.keys.data_ptr() == k.data_ptr()
    assert cache.geometry == GEOMETRY
    assert cache.geometry.group == 3
    assert held(cache, 1, 1) == list(range(6))


# Evicting


def test_the_next_token_takes_the_freed_slot_of_each_head():
    cache = filled(6, evicts=Evicts.IN_DECODE, channels=MASS)
    cache.channel("mass").fill_(5)
    evict(cache, [[2, 4], [0, 5]])
    assert held(cache, 0, 0) == [0, 1, -1, 3, 4, 5]
    assert cache.rows["live"] == [5, 5]
    assert occupied(cache).sum(-1).tolist() == [[5, 5], [5, 5]]
    step(cache)
    assert held(cache, 0, 0) == [0, 1, 6, 3, 4, 5]
    assert held(cache, 0, 1) == [0, 1, 2, 3, 6, 5]
    assert held(cache, 1, 0) == [6, 1, 2, 3, 4, 5]
    assert held(cache, 1, 1) == [0, 1, 2, 3, 4, 6]
    assert cache.channel("mass")[0, 0].tolist() == [5, 5, 0, 5, 5, 5]
    assert cache.lengths == [7, 7]
    assert cache.used == 6
    assert occupied(cache) is None
    assert cache.counters.tokens_evicted == 2


def test_what_evicts_at_the_end_of_a_prompt_alone_appends_in_order_and_bounds_its_counts_by_the_capacity():
    """Also in captured steps, which give up no slot."""
    cache = filled(70, evicts=Evicts.AT_PROMPT_END, channels={"page": Channel((4,), per=8)})
    cache.channel("page").fill_(5)
    cache.retain(torch.tensor([1, 4, 69]))
    assert cache.channel("page").eq(0).all()
    step(cache)
    rows = DeviceRows(2, cache.evicts.in_decode, cache.device)
    rows.write(cache.rows, None)
    cache.move_to_device(rows, None)
    rows.begin()
    rows.capturing = True
    cache.write_step(*kv(71, 1, [0, 1]))
    mask, counts = cache.stored()
    assert (mask, counts.tolist()) == (None, [5, 5])
    assert cache.used == cache.capacity
    rows.capturing, rows.steps = False, 1
    assert cache.rows["lengths"] == [72, 72]
    for head in range(2):
        assert held(cache, 0, head) == [1, 4, 69, 70, 71]


@pytest.mark.parametrize("keep", [[1, 3], [[[1, 3], [1, 3]]] * 2])
def test_slots_to_keep_are_those_of_all_heads_or_of_each(keep):
    cache = filled(4, evicts=Evicts.AT_PROMPT_END)
    cache.retain(torch.tensor(keep) if isinstance(keep[0], int) else torch.tensor(keep).view(2, 2, 2))
    assert [held(cache, b, head) for b in range(2) for head in range(2)] == [[1, 3]] * 4
    ragged_cache = ragged([3, 6], evicts=Evicts.AT_PROMPT_END)
    ragged_cache.retain([torch.tensor([0, 2]), torch.tensor([5])])
    assert [held(ragged_cache, b, 1)[:count] for b, count in enumerate((2, 1))] == [[0, 2], [5]]


def test_a_freed_slot_is_used_once():
    cache = filled(6, evicts=Evicts.IN_DECODE)
    evict(cache, [[2, 4], [0, 5]])
    step(cache)
    step(cache)
    assert held(cache, 0, 0) == [0, 1, 6, 3, 4, 5, 7]


def test_only_some_rows_evict():
    cache = filled(6, evicts=Evicts.IN_DECODE, batch=3)
    evict(cache, [[2, 4], [0, 0], [1, 1]], [True, False, True])
    assert cache.rows["live"] == [5, 6, 5]
    assert held(cache, 1, 0) == [0, 1, 2, 3, 4, 5]
    step(cache)
    assert cache.rows["counts"] == [6, 7, 6]
    assert cache.rows["live"] == [6, 7, 6]
    assert held(cache, 0, 1)[:6] == [0, 1, 2, 3, 6, 5]
    assert held(cache, 1, 1) == [0, 1, 2, 3, 4, 5, 6]
    assert held(cache, 2, 1)[:6] == [0, 6, 2, 3, 4, 5]
    assert occupied(cache)[:, 0].sum(-1).tolist() == [6, 7, 6]
    assert cache.counters.tokens_evicted == 2


def test_evicting_in_no_row_changes_nothing():
    cache = filled(6, evicts=Evicts.IN_DECODE)
    evict(cache, [[2, 4], [0, 5]], [False, False])
    step(cache)
    assert held(cache, 0, 0) == list(range(7))
    assert cache.counters.tokens_evicted == 0


def test_evicting_from_rows_of_different_lengths():
    cache = ragged([3, 6], evicts=Evicts.IN_DECODE)
    evict(cache, [[1, 2], [0, 5]])
    step(cache)
    assert cache.lengths == [4, 7]
    assert held(cache, 0, 0)[:3] == [0, 3, 2]
    assert held(cache, 0, 1)[:3] == [0, 1, 3]
    assert held(cache, 1, 1) == [0, 1, 2, 3, 4, 6]


def test_retain_orders_by_position_and_frees_memory():
    cache = filled(1000, evicts=Evicts.IN_DECODE, channels=MASS)
    cache.channel("mass").copy_(torch.arange(1000.0))
    before = cache.resident_bytes
    cache.retain(torch.tensor([[[7, 999, 3], [500, 0, 1]], [[5, 6, 4], [8, 2, 9]]]))
    assert cache.resident_bytes < before / 5
    assert held(cache, 0, 0) == [3, 7, 999]
    assert held(cache, 0, 1) == [0, 1, 500]
    assert held(cache, 1, 0) == [4, 5, 6]
    assert cache.channel("mass")[0, 1].tolist() == [0, 1, 500]
    assert cache.lengths == [1000, 1000]
    assert cache.rows["counts"] == cache.rows["live"] == [3, 3]
    assert cache.counters.tokens_evicted == 2 * 997
    append(cache, 1)
    assert held(cache, 1, 1) == [2, 8, 9, 1000]


def test_resident_bytes_are_those_of_the_tensors_held():
    cache = filled(
        40, evicts=Evicts.IN_DECODE, channels=MASS | {"queries": Channel((6, 4), per=0, dtype=torch.float64)}
    )
    slot = 2 * 2 * (4 * 4 + 4 * 3 + 4 + 4)  # rows, heads; keys, values, position, mass
    assert cache.resident_bytes == cache.capacity * slot + 2 * 6 * 4 * 8


def test_retain_of_a_different_number_in_each_row():
    cache = filled(6, evicts=Evicts.IN_DECODE, batch=3)
    keep = [torch.tensor(one)[None] for one in ([[5, 0], [1, 2]], [[0, 1, 2, 3], [2, 3, 4, 5]], [[], []])]
    cache.retain([one.long() for one in keep])
    assert cache.rows["counts"] == cache.rows["live"] == [2, 4, 0]
    assert held(cache, 0, 0)[:2] == [0, 5]
    assert held(cache, 1, 1) == [2, 3, 4, 5]
    assert occupied(cache)[:, 0].sum(-1).tolist() == [2, 4, 0]
    assert cache.counters.tokens_evicted == 4 + 2 + 6
    step(cache)
    assert held(cache, 0, 1)[:3] == [1, 2, 6]
    assert held(cache, 2, 1)[:1] == [6]


def test_compact_closes_holes():
    cache = filled(6, evicts=Evicts.IN_DECODE, batch=3)
    evict(cache, [[2, 4], [0, 0], [1, 1]], [True, False, True])
    cache.compact()
    assert cache.freed is None
    assert cache.rows["counts"] == [5, 6, 5]
    assert held(cache, 0, 0)[:5] == [0, 1, 3, 4, 5]
    assert held(cache, 1, 0) == [0, 1, 2, 3, 4, 5]
    assert held(cache, 2, 1)[:5] == [0, 2, 3, 4, 5]
    assert cache.counters.tokens_evicted == 2


@pytest.mark.parametrize("last_evicts", [True, False], ids=["with_a_hole", "without_a_hole"])
def test_compact_leaves_slots_in_the_order_of_their_positions(last_evicts):
    cache = filled(6, evicts=Evicts.IN_DECODE)
    evict(cache, [[2, 2], [2, 2]])
    step(cache)
    if last_evicts:
        evict(cache, [[1, 1], [1, 1]])
    cache.compact()
    assert held(cache, 0, 0) == ([0, 3, 4, 5, 6] if last_evicts else [0, 1, 3, 4, 5, 6])


def test_compact_of_a_cache_that_never_evicts_does_nothing():
    cache = ragged([3, 6])
    keys = cache.store.keys
    cache.compact()
    assert cache.store.keys is keys


# Rows


def test_take_rows_repeats_selects_and_reorders():
    cache = ragged([3, 6, 4], evicts=Evicts.IN_DECODE, channels=MASS | {"seen": Channel((2,), per=0)})
    cache.tensors["seen"].copy_(torch.arange(6.0).reshape(3, 2))
    cache.channel("mass").copy_(torch.arange(3.0)[:, None, None].expand(3, 2, 6))
    evict(cache, [[0, 1], [2, 3], [1, 2]], [True, True, False])
    rows = [1, 1, 2, 0]
    cache.take_rows(torch.tensor(rows))
    assert cache.batch_size == 4
    assert cache.lengths == [6, 6, 4, 3]
    assert cache.rows["live"] == [5, 5, 4, 2]
    assert cache.tensors["seen"][:, 0].tolist() == [2, 2, 4, 0]
    assert cache.channel("mass")[:, 0, 0].tolist() == [1, 1, 2, 0]
    for b, origin in enumerate(rows):
        assert cache.keys[b, 1, 1, 0] == 1000 * origin + 101
    cache.write_step(*(torch.zeros(4, 2, 1, width) for width in (4, 3)))
    assert cache.positions[:, 0].tolist() == [
        [0, 1, 6, 3, 4, 5],
        [0, 1, 6, 3, 4, 5],
        [0, 1, 2, 3, 4, -1],
        [3, 1, 2, -1, -1, -1],
    ]


def test_taken_rows_are_independent():
    cache = filled(4)
    cache.take_rows(torch.tensor([0, 0]))
    cache.keys[0] = 9
    assert (cache.keys[1] != 9).all()


def test_a_row_shares_the_memory_of_its_batch():
    cache = ragged([3, 6], channels=MASS)
    with cache.row(1) as row:
        assert row.batch_size == 1
        assert row.lengths == [6]
        assert row.keys.data_ptr() == cache.keys[1].data_ptr()
        row.channel("mass").fill_(4)
    assert cache.channel("mass")[:, 0].tolist() == [[0] * 6, [4] * 6]
    append_to_row(cache, 0, 2)
    assert held(cache, 0, 1) == [0, 1, 2, 3, 4, -1]


def test_a_row_changes_its_batch_at_its_end():
    cache = ragged([3, 6])
    with cache.row(0) as row:
        row.append(*kv(3, 2, [0]))
        assert cache.lengths == [3, 6]
    assert cache.lengths == [5, 6]
    assert cache.rows["live"] == [5, 6]


def test_a_row_cannot_grow():
    cache = filled(60)
    with pytest.raises(RuntimeError, match="row of a batch cannot grow alone"), cache.row(0) as row:
        row.reserve(cache.capacity + 1)


# Other methods


def branched(cache: SlotCache, evicts: Evicts = Evicts.NEVER, channels=None) -> SlotCache:
    return branch_of(cache, channels or {}, evicts, Counters(), {})


def test_a_part_has_channels_by_other_names_and_numbers_of_its_own():
    cache = filled(5, channels={"0.mass": Channel(), "1.mass": Channel(), "1.seen": Channel((3,), per=0)})
    part = _part(cache, {"mass": "1.mass", "seen": "1.seen"})
    part.channel("mass").fill_(7.0)
    part.channel("seen").fill_(8.0)
    assert cache.channel("1.mass").eq(7).all()
    assert cache.channel("1.seen").eq(8).all()
    assert cache.channel("0.mass").eq(0).all()
    assert held(part, 1) == list(range(5))
    part.rows["prompt"] = [9, 0]
    assert cache.rows["prompt"] == [0, 0]


def test_branches_write_behind_shared_keys_one_after_the_other():
    cache = ragged([5, 3])
    before = cache.resident_bytes
    for _ in range(2):
        branch = branched(cache)
        assert branch.keys.data_ptr() == cache.keys.data_ptr()
        assert branch.counters.resident_bytes == branch.resident_bytes == before
        step(branch)
        assert [held(branch, b) for b in range(2)] == [list(range(6)), [0, 1, 2, 3, -1, -1]]
        assert cache.lengths == [5, 3]
    branch.reserve(branch.capacity + 1)
    branch.keys.zero_()
    assert held(cache, 0) == list(range(5))


def test_a_branch_that_evicts_knows_positions_and_copies_before_it_writes():
    cache = ragged([5, 3])
    branch = branched(cache, evicts=Evicts.IN_DECODE)
    assert branch.keys.data_ptr() == cache.keys.data_ptr()
    evict(branch, [[1, 2], [0, 0]], [True, False])
    step(branch)
    assert [held(branch, b, 0) for b in range(2)] == [[0, 5, 2, 3, 4], [0, 1, 2, 3, -1]]
    assert [held(cache, b, 0) for b in range(2)] == [list(range(5)), [0, 1, 2, -1, -1]]
    kept = branched(cache, evicts=Evicts.IN_DECODE)
    kept.retain(torch.tensor([[[0, 4]] * 2, [[1, 2]] * 2]))
    copied = kept.keys.data_ptr()
    evict(kept, [[0, 0], [0, 0]])
    assert kept.keys.data_ptr() == copied  # what is its own need not be copied


def test_a_branch_that_evicts_in_captured_steps_copies_before_they_are_captured():
    for evicts in (Evicts.IN_DECODE, Evicts.NEVER):
        cache = filled(5)
        branch, rows = branched(cache, evicts=evicts), DeviceRows(2, evicts.in_decode, cache.device)
        rows.write(branch.rows, None)
        captured = branch.move_to_device(rows, torch.full((2, 2), -1) if evicts else None)
        assert (branch.store.keys is cache.store.keys) == (evicts is Evicts.NEVER)
        assert any(x is branch.store.keys for x in captured)


def test_a_branch_takes_over_what_was_filled_for_it():
    cache = filled(5, channels={"0.mass": Channel(), "0.seen": Channel((3,), per=0)})
    cache.channel("0.mass").fill_(7.0)
    channels = {"mass": Channel(), "page": Channel(per=2), "seen": Channel((3,), per=0)}
    branch = branch_of(cache, channels, Evicts.NEVER, Counters(), {"mass": "0.mass"})
    assert branch.channel("mass").eq(7).all()
    assert branch.channel("seen").eq(0).all()
    assert branch.channel("page").shape == (2, 2, branch.capacity // 2)
    branch.channel("mass").fill_(8.0)
    assert cache.channel("0.mass").eq(7).all()


# Snapshots


def state(cache: SlotCache):
    return (
        {name: list(numbers) for name, numbers in cache.rows.items()},
        {
            name: tensor[:, :, : cache.used].clone()
            for name, tensor in cache.tensors.items()
            if name not in ("keys", "values")
        },
        [held(cache, b, h) for b in range(cache.batch_size) for h in range(2)],
    )


def test_restore_gives_back_what_was_saved():
    cache = filled(6, evicts=Evicts.IN_DECODE, channels=MASS)
    cache.record_past = True
    saved = {}
    for clock in range(6, 10):
        cache.channel("mass").add_(clock)
        cache.save(clock)
        saved[clock] = state(cache)
        evict(cache, [[clock - 6, 3], [5, clock - 6]] if clock != 9 else [[4, 4], [4, 4]])
        step(cache)
    assert cache.used == 10
    for clock in (8, 6):
        cache.restore(clock)
        rows, tensors, positions = state(cache)
        assert rows == saved[clock][0]
        assert all(torch.equal(tensor, saved[clock][1][name]) for name, tensor in tensors.items())
        assert positions == saved[clock][2]
        assert max(cache.snapshots) == clock
    step(cache)
    assert held(cache, 1, 1) == list(range(7))


def test_restore_may_be_repeated():
    cache = filled(4, evicts=Evicts.IN_DECODE, channels=MASS)
    cache.record_past = True
    cache.save(4)
    for _ in range(2):
        step(cache)
        cache.channel("mass").fill_(3)
        cache.restore(4)
        assert cache.lengths == [4, 4]
        assert (cache.channel("mass") == 0).all()


def test_restore_brings_back_state_of_sequences_but_not_what_is_recomputed():
    channels = {"queries": Channel((2,), per=0), "page": Channel((4,), per=2, recomputed=True)}
    cache = filled(4, channels=channels)
    cache.record_past = True
    cache.save(4)
    cache.tensors["queries"].fill_(1)
    cache.tensors["page"].fill_(1)
    cache.restore(4)
    assert (cache.tensors["queries"] == 0).all()
    assert (cache.tensors["page"] == 1).all()


def test_restore_after_growth():
    cache = filled(60, evicts=Evicts.IN_DECODE, channels=MASS)
    cache.record_past = True
    cache.channel("mass").fill_(2)
    cache.save(60)
    for _ in range(90):
        step(cache)
    cache.restore(60)
    assert held(cache, 0, 0) == list(range(60))
    assert (cache.channel("mass") == 2).all()
    step(cache)
    assert held(cache, 1, 0) == list(range(61))


def test_restore_of_rows_of_different_lengths():
    cache = ragged([3, 6], evicts=Evicts.IN_DECODE)
    cache.record_past = True
    cache.save(6)
    for _ in range(5):
        step(cache)
    cache.restore(6)
    assert held(cache, 0, 0) == [0, 1, 2, -1, -1, -1]
    step(cache)
    assert held(cache, 0, 0) == [0, 1, 2, 3, -1, -1, -1]
    assert held(cache, 1, 1) == [0, 1, 2, 3, 4, 5, 6]


def test_nothing_is_saved_unless_tokens_may_be_undone():
    cache = filled(4, evicts=Evicts.IN_DECODE)
    cache.save(4)
    assert cache.snapshots == {}


def test_an_eviction_that_may_be_undone_frees_no_slot():
    cache = filled(6, evicts=Evicts.IN_DECODE)
    cache.record_past = True
    evict(cache, [[2, 2], [2, 2]])
    step(cache)
    assert held(cache, 0, 0) == [0, 1, -1, 3, 4, 5, 6]
    assert cache.rows["live"] == [6, 6]


def test_truncate_drops_the_last_tokens_of_every_row():
    cache = ragged([3, 6])
    cache.truncate(2)
    assert cache.lengths == [1, 4]
    assert cache.used == 4
    step(cache)
    assert held(cache, 0, 0) == [0, 1, -1, -1, -1]
    assert held(cache, 1, 0) == [0, 1, 2, 3, 4]


def test_truncate_empties_the_slots_of_a_row_behind_which_others_have_more():
    """As after an uneven eviction: no step reads them, or counts them."""
    cache = filled(9, evicts=Evicts.AT_PROMPT_END | Evicts.UNEVENLY)
    keep = torch.arange(6).expand(2, 2, -1).clone()
    keep[0, :, 3:] = -1
    cache.retain(keep, uneven=True)
    for _ in range(3):
        step(cache)
    cache.truncate(2)
    assert cache.positions[:, 0].tolist() == [[0, 1, 2, 9, -1, -1, -1], [0, 1, 2, 3, 4, 5, 9]]
    assert (cache.stored()[0].sum(-1) == cache.plan["live"][:, None]).all()


def test_truncate_within_a_prompt_takes_back_what_was_observed():
    cache = ragged([3, 6])
    cache.rows["observed"] = [1, 6]  # the first row has had an earlier turn
    cache.rows["prompt"] = [2, 0]
    cache.truncate(2)
    assert (cache.rows["observed"], cache.rows["prompt"]) == ([0, 4], [1, 0])


# Counting


def test_reads_are_counted_from_their_sizes():
    cache = ragged([3, 6])
    cache.count_read(4)
    cache.count_read(torch.tensor([[2, 4], [5, 5]]))
    cache.count_read(1, available=7)
    counters = cache.counters
    assert counters.decode_steps == 3
    assert counters.decode_rows == 6
    assert float(counters.keys_read) == 2 * 4 + 3 + 5 + 2 * 1
    assert counters.keys_available == 9 + 9 + 14
    assert counters.bytes_per_key == 2 * (4 + 3) * 4


@pytest.mark.parametrize("as_list", [False, True])
def test_evictions_of_unequal_heads_count_as_their_mean(as_list):
    cache = filled(6, batch=1, evicts=Evicts.AT_PROMPT_END)
    keep = torch.tensor([[[1, 4, -1], [0, 2, 5]]])
    cache.retain([keep] if as_list else keep, uneven=True)
    assert cache.counters.tokens_evicted == (4 + 3) / 2
    assert (cache.rows["live"], cache.uneven) == ([3], True)


def test_a_step_of_evictions_by_head_counts_as_their_mean():
    cache = filled(6, batch=1, evicts=Evicts.IN_DECODE)
    scores, before = torch.ones(1, 2, 6), torch.tensor([6])
    cache.evict_by_head([[True, False]], [[6, 6]], scores, before)
    assert cache.counters.tokens_evicted == 0.5


def test_a_row_holds_as_many_tokens_as_the_head_with_the_most():
    """Of several rows, with heads that evict in turns, together and not at all."""
    cache, tokens = filled(6, batch=3, evicts=Evicts.IN_DECODE), [[6, 6], [6, 6], [6, 6]]
    for heads in (
        [[True, False]] * 3,
        [[True, False], [False, True], [False, False]],
        [[True, True], [False, True]] * 2,
    ):
        heads = heads[:3]
        step(cache)
        tokens = [[own + 1 for own in row] for row in tokens]
        scores, before = torch.rand(3, 2, cache.used), torch.tensor(cache.lengths)
        cache.evict_by_head(heads, tokens, scores, before)
        tokens = [[own - evicts for own, evicts in zip(*both)] for both in zip(tokens, heads)]
        assert (cache.positions >= 0).sum(-1).tolist() == tokens
        assert cache.rows["live"] == [max(row) for row in tokens]


def test_the_peak_is_the_most_that_layers_hold_together():
    held, now, most = BytesInUse(), 0, 0
    for change in (5, 7, -3, 2, -11, 9, 1):
        held.change(change)
        now += change
        most = max(most, now)
        assert (held.bytes, held.peak) == (now, most)
    assert most == 12


def test_a_method_s_own_counters_are_those_that_it_declares():
    cache = ragged([3, 6])
    cache.counters.declare(("pages_refined", "reused"))
    cache.count("pages_refined", torch.tensor([[1], [2]]))
    cache.count("reused", 1)
    assert cache.counters.own == {"pages_refined": 3.0, "reused": 2.0}
    cache.counters.declare(("reused", "capped"))
    assert cache.counters.own == {"pages_refined": 3.0, "reused": 2.0, "capped": 0.0}
    with pytest.raises(KeyError, match="refined"):
        cache.count("refined", 1)
    cache.counters.reset()
    assert cache.counters.own == {"pages_refined": 0.0, "reused": 0.0, "capped": 0.0}


def test_a_method_s_own_row_numbers_start_at_0_and_go_with_their_rows():
    channels = {"mass": Channel(), "pages": RowNumber()}
    cache = SlotCache(GEOMETRY, 2, torch.float32, torch.device("cpu"), channels)
    assert (cache.own_numbers, cache.specs) == (("pages",), {"mass": Channel()})
    cache.rows["pages"] = [4, 7]
    cache.take_rows(torch.tensor([1, 0, 1]))
    assert cache.rows["pages"] == [7, 4, 7]
    assert branch_of(cache, {"pages": RowNumber()}, Evicts.NEVER, Counters(), {}).rows["pages"] == [0, 0, 0]
    assert "pages" not in branch_of(cache, {}, Evicts.NEVER, Counters(), {}).rows


def test_reset_counters_still_know_sizes():
    cache = filled(3)
    counters = cache.counters
    counters.decode_steps = counters.prompt_tokens = counters.tokens_evicted = 4
    counters.keys_read = torch.tensor(3.0)
    counters.reset()
    assert counters == Counters(bytes_per_key=2 * 7 * 4, resident_bytes=cache.resident_bytes)


def test_a_copied_cache_has_its_own_memory_and_counts_together():
    cache = filled(4, evicts=Evicts.IN_DECODE)
    twin = copy.deepcopy(cache)
    step(twin)
    twin.keys.fill_(0)
    assert held(cache, 0, 0) == list(range(4))
    assert cache.lengths == [4, 4]
    assert twin.counters is cache.counters


def test_a_token_in_a_reused_slot_starts_with_cleared_state():
    geometry = Geometry(2, 2, 4, 4)
    cache = SlotCache(
        geometry, 1, torch.float32, torch.device("cpu"), {"state": Channel((3,))}, evicts=Evicts.IN_DECODE
    )
    cache.append(torch.randn(1, 2, 4, 4), torch.randn(1, 2, 4, 4))
    cache.channel("state").fill_(7.0)
    evict(cache, [[1, 2]])
    cache.write_step(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4))
    state = cache.channel("state")
    assert state[0, 0, 1].eq(0).all()
    assert state[0, 1, 2].eq(0).all()
    assert state.eq(7).sum() == 3 * 2 * 3


def test_rules_give_whole_numbers_or_shares_even_where_they_are_equal():
    cache = filled(8)
    append_to_row(cache, 0, 0)
    for _ in range(2):
        assert cache.plan.per_row(operator.mul, 2.0).is_floating_point()
        assert cache.plan.per_row(operator.mul, 2).dtype == torch.int64
        assert cache.plan.per_row(operator.mul, 2).tolist() == [16, 16]


def test_numbers_that_move_on_the_device_come_back_when_they_are_asked_for():
    cache = filled(8, evicts=Evicts.IN_DECODE)
    freed_slots, rows = torch.full((2, 2), -1), DeviceRows(2, True, cache.device)
    rows.write(cache.rows, None)
    cache.move_to_device(rows, freed_slots)
    rows.begin()
    rows.capturing = True
    cache.write_step(*kv(8, 1, [0, 1]))
    assert cache.plan.per_row(operator.sub, 1).tolist() == [8, 8]
    assert cache.plan.where(operator.lt).tolist() == [False, False]
    assert cache.used == cache.capacity
    assert not cache.plan.alike
    cache.evict(torch.tensor([True, False]), at=torch.full((2,), 3))
    for ask in (lambda: cache.rows, lambda: cache.lengths):
        with pytest.raises(RuntimeError, match="asked for row numbers on the host"):
            ask()
    rows.capturing, rows.steps = False, 1
    twin = copy.deepcopy(cache)
    for one in (cache, twin):
        assert one.rows["lengths"] == one.rows["counts"] == [9, 9]
        assert one.rows["live"] == [8, 9]
        assert one.device_state is None
        assert one.freed.rows == [True, False]
        assert one.freed.slots.tolist() == [[3, 3], [-1, -1]]
        assert one.used == 9
        one.write_step(*kv(9, 1, [0, 1]))
        assert one.positions[0, 0].tolist() == [0, 1, 2, 9, 4, 5, 6, 7, 8, -1]
        assert one.positions[1, 1].tolist() == list(range(10))
    with pytest.raises(TypeError, match="read them before copying"):
        copy.deepcopy(rows)


def test_numbers_on_the_device_are_read_again_after_a_further_step():
    cache = filled(8, evicts=Evicts.IN_DECODE)
    rows = DeviceRows(2, True, cache.device)
    rows.write(cache.rows, None)
    for steps in (1, 2):
        rows.begin()
        rows.evict(torch.tensor([True, False]))
        rows.steps = steps
        numbers, freed = rows.read()
        assert numbers["lengths"] == [8 + steps, 8 + steps]
        assert numbers["live"] == [8, 8 + steps]
        assert freed == [True, False]


def test_one_total_gets_no_two_numbers_in_one_launch(monkeypatch):
    real, tally, total = torch._foreach_add_, Tally(), torch.tensor(1.0, dtype=torch.float64)

    def distinct(totals, numbers):
        assert len({one.data_ptr() for one in totals}) == len(totals)
        real(totals, numbers)

    monkeypatch.setattr(torch, "_foreach_add_", distinct)
    for number in (2.0, 3.0, torch.ones(2, 3), torch.full((2, 3), 4.0), torch.tensor(5.0)):
        tally.add(total, number)
    tally.flush()
    assert total == 1 + 5 + 2 * 5 + 5


def test_what_layers_count_together_is_added_once():
    generator, tally = torch.Generator().manual_seed(0), Tally()
    totals = [torch.tensor(n, dtype=torch.float64) for n in (0.0, 2.5, 7.0, 1.0, 2.0, 9.0)] + [torch.tensor(3)]
    numbers = [torch.rand(3, 2, generator=generator) for _ in range(2)]
    numbers += [torch.randint(9, (3, 1), generator=generator), torch.tensor(4.25, dtype=torch.float64), 12.5, 0.0]
    numbers.append(torch.tensor(5))
    expected = [
        total + (number.double().mean(1).sum() if isinstance(number, torch.Tensor) and number.dim() else number)
        for total, number in zip(totals, numbers)
    ]
    for total, number in zip(totals, numbers):
        tally.add(total, number)
    assert totals[-1] == 3
    for _ in range(2):  # the second time there is nothing left
        tally.flush()
        for total, its in zip(totals, expected):
            torch.testing.assert_close(total.double(), its.double(), rtol=1e-12, atol=0)
    tally.add(totals[0], numbers[0])
    tally.forget()
    tally.flush()
    assert totals[0] == expected[0]


@pytest.mark.parametrize("uneven", [False, True])
def test_a_snapshot_outlives_the_packing_of_its_tokens(uneven):
    """It holds the memory from before, once; further tokens there do not change it."""
    cache = filled(8, batch=1, channels=MASS, evicts=Evicts.IN_DECODE)
    cache.channel("mass")[:] = torch.arange(8.0)
    cache.record_past, cache.uneven = True, uneven
    cache.save(8)
    bytes_before = cache.resident_bytes
    for _ in range(3):
        append(cache, 2)
        cache.retain(torch.tensor([1, 4, 9]), uneven=not uneven)
        assert held(cache, 0) == [1, 4, 9]
        assert cache.uneven is not uneven
        cache.restore(8)
        assert held(cache, 0) == list(range(8))
        assert cache.uneven is uneven
        assert cache.channel("mass")[0, 1].tolist() == list(range(8))
        assert (cache.resident_bytes, cache.rows["live"], cache.freed) == (bytes_before, [8], None)
        assert torch.equal(cache.keys[:, :, :8], kv(0, 8, [0])[0])
    cache.restore(8)
    step(cache)
    assert held(cache, 0) == list(range(9))


def test_each_snapshot_holds_the_memory_of_its_own_time():
    cache = filled(8, batch=1, evicts=Evicts.IN_DECODE)
    cache.record_past = True
    cache.save(8)
    append(cache, 2)
    cache.retain(torch.tensor([1, 4, 9]))
    cache.save(10)
    append(cache, 2)
    cache.retain(torch.tensor([1, 4]))
    assert held(cache, 0) == [4, 11]
    cache.restore(10)
    assert held(cache, 0) == [1, 4, 9]
    cache.restore(8)
    assert held(cache, 0) == list(range(8))


def test_memory_that_a_snapshot_brings_back_is_counted():
    cache = filled(200, batch=1, evicts=Evicts.IN_DECODE)
    cache.record_past = True
    cache.save(200)
    before = cache.resident_bytes
    for _ in range(2):
        cache.retain(torch.tensor([1, 4, 9]))
        assert cache.counters.held.bytes == cache.resident_bytes < before
        cache.restore(200)
        assert cache.counters.resident_bytes == cache.counters.held.bytes == cache.resident_bytes == before
    assert cache.counters.held.peak == before


def test_layers_on_several_devices_share_numbers_and_no_tensors():
    """Of a model that is spread over devices: results of rules are kept for the layers of one device."""
    shared = {}
    caches = [SlotCache(Geometry(2, 2, 4, 4), 1, torch.float32, torch.device(place)) for place in ("cpu", "meta")]
    for cache in caches:
        cache.forward = shared
        cache.rows = {name: [9] for name in cache.rows}
    found = [cache.plan.per_row(operator.sub, 4) for cache in caches]
    assert [one.device.type for one in found] == ["cpu", "meta"]
    assert caches[0].plan.per_row(operator.sub, 4) is found[0]


@pytest.mark.parametrize("lengths", [[6, 6], [6, 4], [3, 9], [5, 4]])
@pytest.mark.parametrize("kept", [2, 3])
def test_a_step_has_the_position_of_its_own_row(lengths, kept):
    """Rows that hold equally many tokens may have read different numbers of tokens."""
    cache = ragged(lengths, evicts=Evicts.IN_DECODE)
    cache.retain([torch.arange(kept).expand(1, 2, -1) for _ in lengths])
    assert cache.rows["counts"] == [kept] * len(lengths)
    for _ in range(2):
        step(cache)
    for row, length in enumerate(lengths):
        assert all(held(cache, row, head) == [*range(kept), length, length + 1] for head in range(2))
    assert cache.lengths == [length + 2 for length in lengths]

"""Every store answers the same questions alike: the three of foveate, the one of the guide, and the least one."""

import copy
import functools

import pytest
import torch

from foveate.methods import Dense
from foveate.ops import Choice
from foveate.ops.choice import ALL
from foveate.runtime.decode import _attend
from foveate.state import Channel, Geometry, SlotCache, Store
from foveate.state.contiguous import Contiguous
from foveate.state.device_rows import DeviceRows
from foveate.state.engine_blocks import EngineBlocks, engine_cache, enter, has_room
from foveate.state.host_pages import HostPages
from foveate.state.store import class_of
from tests.stores import Least, MappedFile, Room

GEOMETRY, CPU, PAGE = Geometry(4, 2, 8, 6), torch.device("cpu"), 4
LENGTHS = [[9, 9], [9, 2, 12], [1, 5, 4, 8]]


class Case:
    """Rows of several lengths in a cache with a store of some kind, and what each of them holds, ``[Hkv, n, D(v)]``."""

    make = None

    def __init__(self, lengths, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.rows = [self.drawn(length) for length in lengths]
        self.begin()

    def drawn(self, length):
        return tuple(torch.randn(2, length, dim, generator=self.generator) for dim in (8, 6))

    def begin(self):
        """Have the rows in a cache."""
        shape = (GEOMETRY, len(self.rows), torch.float32, CPU)
        self.cache = SlotCache(*shape, store=type(self).make(), page_size=PAGE)
        self.cache.reserve(max(k.shape[1] for k, _ in self.rows))
        for b, row in enumerate(self.rows):
            with self.cache.row(b) as one:
                one.append(*(x[None] for x in row))

    def step(self):
        """Write a token to every row."""
        new = [self.drawn(1) for _ in self.rows]
        self.rows = [tuple(torch.cat(pair, 1) for pair in zip(*both)) for both in zip(self.rows, new)]
        self.write([torch.stack(x) for x in zip(*new)])

    def write(self, new):
        self.cache.write_step(*new)

    def crop(self, tokens):
        """Remove the last tokens of every row."""
        self.rows = [tuple(x[:, :-tokens] for x in row) for row in self.rows]
        self.cache.truncate(tokens)

    def take(self, index):
        """Rearrange the rows."""
        self.rows = [self.rows[b] for b in index]
        self.cache.take_rows(torch.tensor(index))

    # Questions

    def holds(self):
        """Every token is found by its slot, and a slot without one gives something finite."""
        longest = max(k.shape[1] for k, _ in self.rows)
        slots = torch.arange(longest).expand(len(self.rows), 2, -1)
        ends = torch.tensor([k.shape[1] for k, _ in self.rows])[:, None, None]
        found = self.cache.fetch_slots(slots.where(slots < ends, -1))
        for row, written in enumerate(self.rows):
            for x, wanted in zip(found, written, strict=True):
                assert torch.equal(x[row, :, : wanted.shape[1]], wanted)
        assert all(x.isfinite().all() for x in found)

    def attends(self):
        """A step reads all keys, some slots, or some pages, and each of its rows attends to what it has chosen."""
        number, q = len(self.rows), torch.randn(len(self.rows), 4, 1, 8, generator=self.generator)
        counts = [k.shape[1] for k, _ in self.rows]
        slots = torch.tensor([[[0, count // 2, count - 1] for _ in range(2)] for count in counts])
        slots[:, 1, 0] = -1  # heads read different numbers
        slots = slots.where(torch.tensor(counts)[:, None, None] > 3, torch.tensor([0, -1, -1]))
        last = torch.tensor([(count - 1) // PAGE for count in counts])
        pages = torch.stack([last, last.where(last < 0, -1)], 1)[:, None].expand(-1, 2, -1).int().contiguous()
        pages[:, 0] = torch.stack([last.clamp_max(0), last.where(last > 0, -1)], 1).int()
        of_pages = pages[..., None] * PAGE + torch.arange(PAGE)
        beyond = of_pages >= torch.tensor(counts)[:, None, None, None]
        of_pages = of_pages.masked_fill((pages[..., None] < 0) | beyond, -1)
        every = torch.arange(max(counts)).expand(number, 2, -1)
        every = every.where(every < torch.tensor(counts)[:, None, None], -1)
        read = torch.ones(number, 2)
        for choice, chosen in (
            (ALL, every),
            (Choice(keys=slots, read=read), slots),
            (Choice(pages=pages, page_size=PAGE, read=read), of_pages.flatten(2)),
        ):
            found = _attend(Dense(), self.cache, q, choice, 0.3, self.cache.plan, False).out
            torch.testing.assert_close(found, self.expected(q, chosen), atol=1e-5, rtol=1e-5)

    def expected(self, q, chosen):
        """Attention of the rows to slots ``[B, Hkv, K]``, in a loop."""
        out = torch.zeros(*q.shape[:3], 6)
        for b, (k, v) in enumerate(self.rows):
            for head in range(4):
                slots = chosen[b, head // 2]
                slots = slots[slots >= 0]
                weights = (0.3 * k[head // 2, slots] @ q[b, head, 0]).softmax(0)
                out[b, head, 0] = weights @ v[head // 2, slots]
        return out

    def shows_the_newest_page(self):
        """The page that a row's newest token is in is where the block table, if there is one, says."""
        counts = torch.tensor([k.shape[1] for k, _ in self.rows])
        kv = self.cache.newest_page(counts)
        for row, (k, _) in enumerate(self.rows):
            slots = torch.arange((k.shape[1] - 1) // PAGE * PAGE, k.shape[1])
            if kv.block_table is None:
                found = kv.k[row, :, slots]
            else:
                block, place = kv.block_table.slots(slots.expand(len(self.rows), -1), kv.k)
                found = kv.k[block[row], :, place[row]].transpose(0, 1)
            assert torch.equal(found, k[:, slots])


class OfContiguous(Case):
    make = staticmethod(lambda: Contiguous)


class OfHostPages(Case):
    make = staticmethod(lambda: functools.partial(HostPages, room=Room()))


class OfMappedFile(Case):
    make = staticmethod(lambda: MappedFile)


class OfLeast(Case):
    make = staticmethod(lambda: Least)


class OfEngineBlocks(Case):
    """The engine, here the test, writes the blocks and names the rows of a step."""

    def begin(self):
        self.cache = engine_cache(GEOMETRY, torch.empty(64, 2, 8, 8), CPU)
        store = self.cache.store
        store.keys, store.values = (torch.full((64, 2, 8, dim), 9.0) for dim in (8, 6))
        self.table = torch.randperm(64, generator=self.generator)[: 8 * len(self.rows)].view(-1, 8).int()
        for b, row in enumerate(self.rows):
            self._write(b, 0, row)
        self.enter()

    def _write(self, b, first, row):
        for slot in range(row[0].shape[1]):
            block, place = self.table[b, (first + slot) // 8], (first + slot) % 8
            for memory, x in zip((self.cache.store.keys, self.cache.store.values), row):
                memory[block, :, place] = x[:, slot]

    def enter(self):
        rows = DeviceRows(len(self.rows), False, CPU)
        rows.capturing = True
        rows.begin_of(torch.tensor([k.shape[1] for k, _ in self.rows]))
        enter(self.cache, rows, self.table, 48, None)

    def write(self, new):
        for b, row in enumerate(zip(*new)):
            self._write(b, self.rows[b][0].shape[1] - 1, row)
        self.enter()

    def crop(self, tokens):
        self.rows = [tuple(x[:, :-tokens] for x in row) for row in self.rows]
        self.enter()

    def take(self, index):
        """A row that comes several times shares its blocks until the engine copies them."""
        self.rows, store = [self.rows[b] for b in index], self.cache.store
        blocks = self.table[index].long()
        store.keys, store.values = (torch.cat([x, x[blocks.flatten()]]) for x in (store.keys, store.values))
        self.table = (len(store.keys) - blocks.numel() + torch.arange(blocks.numel())).view(len(index), -1).int()
        self.enter()


CASES = [OfContiguous, OfHostPages, OfEngineBlocks, OfMappedFile, OfLeast]
WRITTEN = [one for one in CASES if one is not OfEngineBlocks]
"""Stores that a cache writes to."""


@pytest.fixture(params=CASES, ids=lambda one: one.__name__)
def case(request):
    return request.param


@pytest.fixture(params=WRITTEN, ids=lambda one: one.__name__)
def written(request):
    return request.param


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("lengths", LENGTHS)
def test_steps_find_what_was_written(case, lengths):
    """Over growth."""
    found = case(lengths)
    found.holds()
    for _ in range(20):
        found.step()
        found.holds()
        found.shows_the_newest_page()
        found.attends()


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("removed", [1, 3, 7])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_other_tokens_come_after_a_crop(case, lengths, removed):
    found = case(lengths)
    for _ in range(7):
        found.step()
    for _ in range(2):
        found.crop(removed)
        for _ in range(removed + 1):
            found.step()
            found.holds()
            found.shows_the_newest_page()
            found.attends()


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("index", [[1, 0], [0, 1], [1, 1, 0, 1], [1]])
@pytest.mark.parametrize("steps", [0, 5])
def test_rows_are_rearranged(case, index, steps):
    found = case([9, 4])
    for _ in range(steps):
        found.step()
    found.take(index)
    found.holds()
    for _ in range(9):
        found.step()
        found.holds()
        found.attends()


@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_prompt_is_viewed_and_read(written, lengths):
    found = written(lengths)
    longest = max(k.shape[1] for k, _ in found.rows)
    kv, first = found.cache.view(), min(1, min(lengths) - 1)
    read, saved = found.cache.read_slots(first, longest), found.cache.store.contents(longest)
    for row, tokens in enumerate(found.rows):
        for x, wanted in zip((kv.k, kv.v), tokens, strict=True):
            assert torch.equal(x[row, :, : wanted.shape[1]], wanted)
        for x, wanted in zip(read, tokens, strict=True):
            assert torch.equal(x[row, :, : wanted.shape[1] - first], wanted[:, first:])
        for x, wanted in zip(saved, tokens, strict=True):
            assert torch.equal(x[row, :, : wanted.shape[1]], wanted)
    assert found.cache.keys.shape == (len(lengths), 2, longest, 8)
    assert found.cache.values.shape == (len(lengths), 2, longest, 6)


@pytest.mark.usefixtures("little_room")
def test_another_prompt_follows_steps(written):
    """Row by row, and of all rows at once."""
    found = written([9, 9])
    for turn in range(2):
        for _ in range(5):
            found.step()
        new = [found.drawn(11) for _ in found.rows]
        found.rows = [tuple(torch.cat(pair, 1) for pair in zip(*both)) for both in zip(found.rows, new)]
        found.cache.reserve(found.cache.used + 11)
        if turn:
            found.cache.append(*(torch.stack(x) for x in zip(*new)))
        for b in () if turn else range(2):
            with found.cache.row(b) as one:
                one.append(*(x[None] for x in new[b]))
        kv = found.cache.view()
        assert all(torch.equal(kv.k[b], k) and torch.equal(kv.v[b], v) for b, (k, v) in enumerate(found.rows))
        found.holds()


def test_a_saved_cache_is_read(written):
    source, found = written([9, 9]), written([1, 1])
    found.cache = SlotCache(GEOMETRY, 2, torch.float32, CPU, store=written.make(), page_size=PAGE)
    found.cache.reserve(9)
    found.cache.store.fill(*source.cache.store.contents(9))
    found.cache.rows = {name: list(numbers) for name, numbers in source.cache.rows.items()}
    found.rows = source.rows
    kv = found.cache.view()
    assert all(torch.equal(kv.k[b], k) and torch.equal(kv.v[b], v) for b, (k, v) in enumerate(found.rows))
    for _ in range(5):
        found.step()
        found.holds()
        found.attends()


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("steps", [0, 5])
def test_a_copy_goes_on_by_itself(written, steps):
    found = written([9, 4])
    for _ in range(steps):
        found.step()
    other = copy.deepcopy(found)
    for one in (found, other, found):
        one.generator.manual_seed(id(one) % 1000)
        for _ in range(4):
            one.step()
            one.holds()
    other.holds()


def test_what_is_counted_is_what_there_is(written):
    found = written([9, 4])
    found.step()
    cache = found.cache
    assert cache.counters.resident_bytes == cache.resident_bytes == cache.store.resident_bytes
    assert cache.counters.host_bytes == cache.store.host_bytes
    assert (cache.store.resident_bytes + cache.store.host_bytes > 0) == (written is not OfLeast)


@pytest.mark.usefixtures("little_room")
def test_what_a_captured_step_reads_stays_where_it_is():
    """Until the store grows, for the stores that declare it."""
    captured = [case for case in CASES if class_of(case.make() if case.make else EngineBlocks).can_be_captured]
    assert captured == [OfContiguous, OfHostPages, OfEngineBlocks]
    for case in (OfContiguous, OfHostPages):
        found = case([9, 4])
        found.cache.reserve(60)
        found.step()
        before = found.cache.store.device_tensors()
        for _ in range(9):
            found.step()
        after = found.cache.store.device_tensors()
        assert len(before) >= 2
        assert all(one is other for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("index", [[0, 1], [1, 0, 1]])
def test_slots_of_blocks_are_read_by_row(index):
    found = OfEngineBlocks([11, 11])
    found.take(index)
    for read, first in ((found.cache.read_slots(3, 11), 3), (found.cache.store.contents(11), 0)):
        for x, wanted in zip(read, zip(*found.rows), strict=True):
            assert torch.equal(x, torch.stack(wanted)[:, :, first:])


def test_fewer_slots_are_asked_for_after_an_error(written):
    """Such as too little memory for channels, after which the cache has grown in part."""
    found = written([9, 4])
    found.cache.store.reserve(500)
    found.cache.store.reserve(200)
    for _ in range(3):
        found.step()
        found.holds()


def test_a_store_is_told_before_each_step_that_is_not_captured():
    class Told(Least):
        def prepare_steps(self, counts):
            assert self.both.shape[2] > max(counts)
            told.append(list(counts))

    for lengths, after in (([9, 9], [10, 10]), ([9, 4], [10, 5])):
        told = []
        found = type("OfTold", (Case,), {"make": staticmethod(lambda: Told)})(lengths)
        assert told == []
        found.step()
        found.step()
        assert told == [lengths, after]
        found.cache.write_verified(*(torch.zeros(2, 2, 1, dim) for dim in (8, 6)))
        assert told[2] == [count + 1 for count in after]


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kind", [OfContiguous, OfMappedFile, OfLeast])
def test_verified_tokens_take_the_place_of_drafts(kind, tokens):
    found = kind([9, 4])
    for _ in range(3):
        found.step()
    new = [found.drawn(tokens) for _ in found.rows]
    found.rows = [
        tuple(torch.cat([x[:, : x.shape[1] + 1 - tokens], y], 1) for x, y in zip(*b)) for b in zip(found.rows, new)
    ]
    found.cache.write_verified(*(torch.stack(x) for x in zip(*new)))
    found.holds()
    assert found.cache.rows["counts"] == [13, 8]


@pytest.mark.usefixtures("little_room")
def test_pages_stay_on_the_device_while_a_store_grows(monkeypatch):
    monkeypatch.setattr(Room, "hot_pages", lambda *given: 20)
    found = OfHostPages([9, 2, 12])
    found.step()
    hot = found.cache.store.device_tensors()[0]
    capacity = found.cache.capacity
    for _ in range(20):
        found.step()
        found.holds()
        found.shows_the_newest_page()
        found.attends()
    assert found.cache.capacity > capacity
    assert found.cache.store.device_tensors()[0] is hot


def test_channels_of_blocks_have_room_for_such_blocks_alone():
    memory = torch.empty(64, 2, 8, 8)
    cache = engine_cache(GEOMETRY, memory, CPU, {"records": Channel((3,), per=4)})
    assert has_room(cache, memory)
    assert not has_room(cache, memory[:63])
    assert not has_room(cache, torch.empty(64, 2, 16, 8))


def test_what_a_step_fetches_is_counted_once():
    """Eleven and four tokens have three pages and one."""
    found = OfHostPages([10, 3])
    found.step()
    for times in range(1, 4):
        found.holds()
        assert float(found.cache.counters["pages_asked"]) == 4 * times
        assert found.cache.store.counted() == []
    pages = torch.tensor([[[0, 2]] * 2, [[0, -1]] * 2], dtype=torch.int32)
    for again, asked in ((True, 12), (False, 15)):
        found.cache.fetch(pages, PAGE, again)
        assert float(found.cache.counters["pages_asked"]) == asked


def test_an_engine_alone_writes_its_blocks():
    cache = OfEngineBlocks([9, 4]).cache
    for call in (
        lambda: cache.store.reserve(60),
        lambda: cache.store.write(0, torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 6)),
        lambda: cache.store.put(torch.zeros(2, 2, dtype=torch.int64), None, None),
        lambda: cache.store.of_row(0, 9),
        lambda: cache.store.take_rows(torch.tensor([0])),
    ):
        with pytest.raises(RuntimeError, match="by the engine alone"):
            call()


def test_what_is_no_store_is_refused():
    class Half(Store):
        def reserve(self, slots):
            pass

    class Called(Least):
        def func(self):
            pass

    assert class_of(functools.partial(MappedFile, folder="/")) is MappedFile
    assert class_of(Called) is Called
    with pytest.raises(ValueError, match="Half lacks the methods fetch_slots, of_row, put, take_rows, view"):
        class_of(Half)
    for given in ("file", lambda shape: Least(shape), dict, 3):
        with pytest.raises(ValueError, match="store must be a class derived from"):
            class_of(given)

"""What a cache in host memory has on the device in decode steps is what was written, whatever came before."""

from functools import partial
from unittest import mock

import pytest
import torch

from foveate.state import Geometry, SlotCache
from foveate.state.host_pages import HostPages
from tests.stores import Room

GEOMETRY, CPU = Geometry(4, 2, 8, 6), torch.device("cpu")


class Followed:
    """A cache of rows of several lengths, and what was written to each."""

    def __init__(self, lengths, page_size, seed=0, room=None):
        store = partial(HostPages, room=room or Room())
        self.store = SlotCache(GEOMETRY, len(lengths), torch.float32, CPU, store=store, page_size=page_size)
        self.generator, self.rows = torch.Generator().manual_seed(seed), []
        self.store.reserve(max(lengths))
        for row, length in enumerate(lengths):
            self.rows.append(self._drawn(length))
            with self.store.row(row) as one:
                one.append(*(x[None] for x in self.rows[-1]))

    def _drawn(self, length):
        return [torch.randn(2, length, dim, generator=self.generator) for dim in (8, 6)]

    def step(self):
        new = [self._drawn(1) for _ in self.rows]
        self.rows = [[torch.cat(pair, 1) for pair in zip(*both)] for both in zip(self.rows, new)]
        self.store.write_step(*(torch.stack(x) for x in zip(*new)))

    def crop(self, tokens):
        self.rows = [[x[:, :-tokens] for x in row] for row in self.rows]
        self.store.truncate(tokens)

    def check(self):
        size, newest = self.store.store.page_size, self.store.newest_page(self.store.plan["counts"])
        slots = torch.arange(self.store.used).expand(len(self.rows), 2, -1)
        ends = torch.tensor([row[0].shape[1] for row in self.rows])
        fetched = self.store.fetch_slots(slots.masked_fill(slots >= ends[:, None, None], -1))
        for row, (k, v) in enumerate(self.rows):
            first, last = (k.shape[1] - 1) // size * size, k.shape[1]
            block = int(newest.block_table.table[row, first // size])
            assert torch.equal(newest.k[block, :, : last - first], k[:, first:])
            for found, wanted in zip(fetched, (k, v)):
                assert torch.equal(found[row, :, :last], wanted)


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("lengths", [[9, 9], [9, 2, 12], [1, 5, 4, 8]])
@pytest.mark.parametrize("removed", [1, 2, 3, 7])
def test_steps_after_a_crop(removed, lengths, page_size):
    """Tokens are removed within a page and across its beginning, and others come in their place."""
    followed = Followed(lengths, page_size)
    for _ in range(7):
        followed.step()
        followed.check()
    for _ in range(2):
        followed.crop(removed)
        for _ in range(removed + 1):
            followed.step()
            followed.check()


@pytest.mark.parametrize("lengths", [[9, 9], [9, 2, 12]])
def test_slots_are_read_where_they_are(lengths, monkeypatch):
    """While a prompt is read from the device, and nothing is fetched; in decode steps from host memory."""
    followed = Followed(lengths, page_size=4)
    store = followed.store
    slots = torch.tensor([1, 0, -1]).expand(len(lengths), 2, -1)

    def check():
        fetched = store.fetch_slots(slots)
        for row, written in enumerate(followed.rows):
            with store.row(row) as one:
                read = one.read_slots(1, 2)
            for of_row, among, x in zip(read, fetched, written):
                assert torch.equal(of_row[0], x[:, 1:2])
                assert torch.equal(among[row, :, :2], x[:, [1, 0]])

    with monkeypatch.context() as reading:
        reading.setattr(store.store.host, "read", lambda *_: pytest.fail("a prompt's keys are on the device"))
        check()
    followed.step()
    check()


@pytest.mark.parametrize("lengths", [[9, 9], [9, 2, 12]])
def test_a_later_turn_reads_the_slots_in_use_of_each_layer(lengths, monkeypatch):
    """And not all that decode steps had room for, whether rows come together or one by one."""
    room = Room()
    layers = [Followed(lengths, 4, seed, room) for seed in range(3)]
    for _ in range(2):
        for followed in layers:
            followed.step()
    used, read = layers[0].store.used, []
    room.transfers.room = used + 5
    for index, followed in enumerate(layers):
        store, host = followed.store, followed.store.store.host
        with monkeypatch.context() as reading:
            whole = host.read
            reading.setattr(
                host, "read", lambda first, last, *to, whole=whole: read.append(last) or whole(first, last, *to)
            )
            store.reserve(used + 5)
            for row in range(1 if len(set(lengths)) == 1 else len(lengths)):
                new = [x[None] for x in followed._drawn(5)]
                if len(set(lengths)) == 1:
                    store.append(*(x.expand(len(lengths), -1, -1, -1) for x in new))
                else:
                    with store.row(row) as one:
                        one.append(*new)
                after = layers[index + 1 : index + 2]
                assert [other.store.store.used for other in after] == [used] * len(after)
    assert read == [used] * 3
    assert [one.store.store.used for one in layers] == [one.store.used for one in layers], "the first layer's, too"


def test_growth_that_fails_elsewhere_may_be_followed_by_less(monkeypatch):
    """In decode steps whose number of hot pages stays what it is."""
    room = Room()
    monkeypatch.setattr(room, "hot_pages", lambda store, capacity: 40)
    followed = Followed([9, 9], 4, room=room)
    followed.step()
    with monkeypatch.context() as stop:
        stop.setattr("foveate.state.channels.grow", mock.Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            followed.store.reserve(1000)
    capacity = followed.store.capacity
    while followed.store.capacity == capacity:
        followed.step()
    followed.check()


def test_pages_of_another_size_are_refused():
    followed = Followed([9, 9], page_size=4)
    followed.step()
    with pytest.raises(ValueError, match=r"pages of 2 keys are chosen, but .*fetches.page_size is 4"):
        followed.store.fetch(torch.zeros(2, 2, 1, dtype=torch.int32), 2)

"""Pages of host memory and their copies: the reference of `foveate.ops.fetch` against plain loops."""

import pytest
import torch

from foveate.ops.fetch import HostPages, HotPages, place_pages, reference
from foveate.ops.fetch.types import NEVER

BATCH, HEADS, SIZE, DIM, VALUE_DIM, SLOTS = 2, 2, 3, 5, 4, 7


def memory(pages=20, per_segment=6, dtype=torch.float32, size=SIZE, dims=(DIM, VALUE_DIM)):
    """Host memory of random keys and values, in segments."""
    generator = torch.Generator().manual_seed(0)
    number = -(-pages // per_segment)
    segments = [
        tuple(torch.randn(BATCH, HEADS, per_segment * size, dim, generator=generator).to(dtype) for _ in range(number))
        for dim in dims
    ]
    return HostPages(*segments, torch.tensor([[x.data_ptr() for x in of] for of in segments]))


def hot(pages=20, slots=SLOTS, dtype=torch.float32, size=SIZE, dims=(DIM, VALUE_DIM)):
    rows = BATCH * HEADS

    def numbers(*shape, fill):
        return torch.full(shape, fill, dtype=torch.int32)

    blocks = [torch.full((rows * slots + 1, 1, size, dim), 7.0, dtype=dtype) for dim in dims]
    tables = numbers(rows, pages, fill=-1), numbers(rows, slots, fill=-1), numbers(rows, slots, fill=NEVER)
    return HotPages(*blocks, *tables, numbers(rows, fill=0))


def choices(steps, rows=BATCH * HEADS, pages=20, most=SLOTS, seed=0):
    """For each step the pages of each row, ascending, then -1; the newest of them again and again."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.full((rows, most + 2), -1, dtype=torch.int32)
        for row in range(rows):
            number = int(torch.randint(0, most + 1, (), generator=generator))
            likely = 1.0 / (1 + torch.arange(pages).flip(0))
            some = likely.multinomial(number, generator=generator) if number else likely[:0].long()
            chosen[row, :number] = some.sort().values
        yield chosen


class Plainly:
    """A row's slots as lists: what was chosen least recently goes, of equally old slots the first."""

    def __init__(self, slots):
        self.holds, self.chosen, self.now = [-1] * slots, [NEVER] * slots, 0

    def place(self, pages):
        self.now += 1
        for page in pages:
            if page in self.holds:
                self.chosen[self.holds.index(page)] = self.now
        missing = [page for page in pages if page not in self.holds]
        ages = [min(self.now - one, 255) for one in self.chosen]
        given = sorted(sorted(range(len(ages)), key=lambda slot: (-ages[slot], slot))[: len(missing)])
        for slot, page in zip(given, missing):
            self.holds[slot], self.chosen[slot] = page, self.now
        return dict(zip(missing, given))


def page_of(host, row, page, size=SIZE):
    b, h = divmod(row, HEADS)
    segment, inside = divmod(page * size, host.slots)
    return [of[segment][b, h, inside : inside + size] for of in (host.keys, host.values)]


def check(given, host, chosen, blocks):
    """Every chosen page is where the table says, and what was missing was placed."""
    for row, pages in enumerate(chosen.tolist()):
        for page in filter(lambda one: one >= 0, pages):
            block = int(given.table[row, page])
            for memory, x in zip((given.keys, given.values), page_of(host, row, page, given.page_size)):
                assert torch.equal(memory[block, 0], x)
    assert ((blocks >= 0) <= (chosen >= 0)).all()


@pytest.mark.parametrize("slots", [SLOTS, 13])
def test_the_least_recently_chosen_pages_are_replaced(slots):
    host, given = memory(), hot(slots=slots)
    plain = [Plainly(slots) for _ in range(BATCH * HEADS)]
    for chosen in choices(300):
        placed = reference.place_pages(chosen, given)
        reference.fetch_pages(chosen, placed.blocks, host, given)
        for row, one in enumerate(plain):
            pages = [page for page in chosen[row].tolist() if page >= 0]
            expected = one.place(pages)
            places = [expected.get(page, -1) for page in chosen[row].tolist()]
            assert placed.blocks[row].tolist() == [-1 if slot < 0 else row * slots + slot for slot in places]
            assert (int(placed.asked[row]), int(placed.missing[row])) == (len(pages), len(expected))
            assert given.holds[row].tolist() == one.holds
        check(given, host, chosen, placed.blocks)
    assert given.clock.tolist() == [300] * BATCH * HEADS


def test_a_step_cannot_choose_more_than_there_is_room_for():
    given = hot(slots=2)
    with pytest.raises(ValueError, match="chooses 3 pages, and the device keeps 2"):
        reference.place_pages(torch.tensor([[0, 1, 2], [0, -1, -1], [4, -1, -1], [5, 6, -1]], dtype=torch.int32), given)
    assert (given.clock == 0).all()
    with pytest.raises(ValueError, match="int32 of 4 rows"):
        place_pages(torch.zeros(3, 1, dtype=torch.int32), given)


def test_a_token_is_written_to_host_memory_and_to_what_is_on_the_device():
    host, given = memory(), hot()
    chosen = torch.tensor([[1, 6], [0, 6], [1, 2], [6, 9]], dtype=torch.int32)
    reference.fetch_pages(chosen, reference.place_pages(chosen, given).blocks, host, given)
    opened = [torch.zeros(BATCH, HEADS, SIZE, dim) for dim in (DIM, VALUE_DIM)]
    k, v = torch.randn(BATCH, HEADS, 1, DIM), torch.randn(BATCH, HEADS, 1, VALUE_DIM)
    slots = torch.tensor([6 * SIZE + 1, 2 * SIZE])
    reference.put_both(k, v, slots, host, given, *opened)
    for b, slot in enumerate(slots.tolist()):
        segment, inside = divmod(slot, host.slots)
        for of, x, opened_page in ((host.keys, k, opened[0]), (host.values, v, opened[1])):
            assert torch.equal(of[segment][b, :, inside], x[b, :, 0])
            assert torch.equal(opened_page[b, :, slot % SIZE], x[b, :, 0])
    check(given, host, chosen, chosen)

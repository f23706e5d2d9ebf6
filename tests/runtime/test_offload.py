"""Keys and values of one layer in host memory: the bits of a layer on the device, for every method that fetches."""

import copy
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matrix import GEOMETRY, LENGTHS, PROMPT, VARIANTS, Driver, Tokens, close, deal, each, each_in_turn, padded

from foveate import methods
from foveate.methods._facts import Fetches
from foveate.ops import Choice
from foveate.runtime import offload, replay
from foveate.runtime.offload import DoesNotFitError, LayerShape, Offload
from foveate.state import Geometry, host_memory
from foveate.state.packing import contents
from foveate.state.store import capacity_for
from tests.recorded import Replayed

FETCHING = [(name, method) for name, method in VARIANTS if method.fetches]
FETCHING += [("pages/every2", methods.make("pages", page_size=8, top_k=40, every=2))]
pytestmark = pytest.mark.usefixtures("little_room")
FEW, ALL = 0.75, 1.0
"""Of the pages on the device."""


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr(host_memory, "SEGMENT_BYTES", 1 << 14)
    monkeypatch.setattr(offload, "ROOM", 1)
    monkeypatch.setattr(replay, "ROOM", 1)


def drivers(method, budget=FEW):
    """A layer on the device, and one in host memory: the device keeps this share of pages, or what a step needs."""
    found = Driver(method), Driver(method)
    shape = LayerShape(method, GEOMETRY, torch.float32)
    needed = max(shape.least(slots) / -(-slots // method.fetches.page_size) for slots in range(PROMPT, 2 * PROMPT))
    found[1].layer.phase.keep_in_host(Offload(max(budget, needed), {0: shape}, torch.device("cpu")))
    return found


def same_state(plain, offloaded):
    assert plain.rows == offloaded.rows
    for mine, its in zip(contents(offloaded), contents(plain), strict=True):
        for row, count in enumerate(plain.rows["counts"]):
            assert torch.equal(mine[row, :, :count], its[row, :, :count])
    for name, spec in plain.specs.items():
        used = None if not spec.per else min(plain.rows["counts"]) // spec.per
        a, b = (store.tensors[name][:, :, :used] if spec.per else store.tensors[name] for store in (plain, offloaded))
        assert torch.equal(a, b), name


def check_table(hot):
    """It names the block of each page that a slot holds, and no other."""
    rows, slots = hot.holds.shape
    blocks = torch.arange(rows * slots).view(rows, slots)
    named = hot.table.gather(1, hot.holds.clamp_min(0).long())
    assert torch.equal(named[hot.holds >= 0].long(), blocks[hot.holds >= 0])
    assert (hot.table >= 0).sum() == (hot.holds >= 0).sum() > 0


def test_methods_that_fetch():
    assert {method.name for _, method in FETCHING} == {"pages", "luka", "luka_paper", "kascade_pages"}


@each_in_turn("budget", [FEW, ALL], FETCHING)
def test_host_memory_gives_the_same_to_the_last_bit(method, budget):
    """Of a padded batch, and over growth of the cache: hot pages stay where their number was known before."""
    chunk = 20 if budget == FEW else PROMPT
    batch, mask = padded([Tokens.random(1, length, seed=length) for length in LENGTHS], PROMPT)
    steps = Tokens.random(len(LENGTHS), 32, seed=1)
    cuts = [*range(0, PROMPT, chunk), PROMPT]
    both, outs = drivers(method, budget), []
    both[1].layer.phase.offload.slots = 3 * PROMPT if budget == FEW else 0
    for driver in both:
        outs.append([driver.feed(batch[first:last], mask[:, :last]) for first, last in itertools.pairwise(cuts)])
        room = driver.store.capacity
        outs[-1].append(driver.feed_steps(steps))
        assert driver.store.capacity > room
    for found, expected in zip(*outs, strict=True):
        assert torch.equal(found, expected)
    same_state(*(driver.store for driver in both))
    check_table(both[1].store.store._decoding.hot)
    for x in contents(both[1].store):  # what no token has is as in a cache on the device
        assert all((x[row, :, count:] == 0).all() for row, count in enumerate(both[1].store.rows["counts"]))
    counted = [driver.layer.counters for driver in both]
    assert counted[0].keys_read == counted[1].keys_read
    assert 0 < counted[1]["pages_fetched"] < counted[1]["pages_asked"]


def test_pages_behind_the_number_that_is_read_are_neither_fetched_nor_read():
    @dataclass(frozen=True)
    class FirstPages(methods.Method):
        needs_prompt_end = True
        fetches = Fetches(4, lambda length: 5)

        def choose(self, cache, q, scaling):
            pages = torch.arange(5, dtype=torch.int32).expand(cache.batch_size, 2, -1)
            return Choice(pages=pages, page_size=4, counts=torch.tensor([2, 3]), read=torch.tensor([[8], [12]]))

    tokens, both = Tokens.random(2, PROMPT + 1), drivers(FirstPages())
    outs = [(driver.feed(tokens[:PROMPT]), driver.feed(tokens[PROMPT:])) for driver in both]
    torch.testing.assert_close(*outs)
    assert both[1].layer.counters["pages_asked"] == both[1].layer.counters["pages_fetched"] == 5


@each(deal(0, variants=FETCHING))
def test_host_memory_is_undone_and_rearranged_to_the_last_bit(method):
    tokens, steps = Tokens.random(3, PROMPT + 8), Tokens.random(6, 5, seed=3)
    outs, both = [[], []], drivers(method)
    for driver, found in zip(both, outs):
        driver.layer.activate_past_recording()
        driver.feed(tokens[:PROMPT])
        driver.feed(tokens[PROMPT:])
        driver.layer.crop(-3)
        for act in (
            lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0])),
            lambda layer: layer.batch_repeat_interleave(2),
            lambda layer: layer.batch_select_indices(torch.tensor([5, 1])),
            lambda layer: layer.reorder_cache(torch.tensor([1, 1])),
        ):
            act(driver.layer)
            found.append(driver.feed_steps(steps.rows(slice(driver.store.batch_size))))
    for mine, its in zip(*outs, strict=True):
        assert torch.equal(mine, its)
    same_state(*(driver.store for driver in both))


@each_in_turn("removed", [1, 6], deal(1, variants=FETCHING))
def test_tokens_after_a_crop(method, removed):
    """Also where it leaves the page that was being filled."""
    tokens, steps = Tokens.random(2, PROMPT + 8), Tokens.random(2, 11, seed=3)
    outs, both = [], drivers(method)
    for driver in both:
        driver.layer.activate_past_recording()
        driver.feed(tokens[:PROMPT])
        driver.feed_steps(tokens[PROMPT:])
        driver.layer.crop(-removed)
        outs.append(driver.feed_steps(steps))
    assert torch.equal(*outs)
    same_state(*(driver.store for driver in both))


@each(deal(0, variants=FETCHING))
def test_rows_change_before_anything_is_decoded(method):
    """The buffers of the prompt, which have room for more, are of other rows then."""
    tokens, outs, both = Tokens.random(2, PROMPT + 20), [[], []], drivers(method)
    both[1].layer.phase.offload.transfers.room = 2 * PROMPT
    for driver, found in zip(both, outs):
        driver.feed(tokens[:PROMPT])
        for rows in ([1, 0], [0, 1, 1]):
            driver.layer.reorder_cache(torch.tensor(rows))
            driver.layer.phase.prompt_end = driver.layer.seen + 9
            found.append(driver.feed(tokens.rows(torch.arange(len(rows)) % 2)[PROMPT : PROMPT + 9]))
        found.append(driver.feed_steps(tokens.rows([0, 1, 0])[PROMPT + 9 :]))
    for mine, its in zip(*outs, strict=True):
        assert torch.equal(mine, its)


@each(deal(1, variants=FETCHING))
def test_rows_that_stay_keep_their_hot_pages(method):
    """As beams do at most steps."""
    tokens, outs, both = Tokens.random(2, PROMPT + 20), [], drivers(method)
    for driver in both:
        driver.feed(tokens[:PROMPT])
        driver.feed_steps(tokens[PROMPT : PROMPT + 9])
        hot = getattr(driver.store.store, "_decoding", None)
        driver.layer.reorder_cache(torch.tensor([0, 1]))
        assert getattr(driver.store.store, "_decoding", None) is hot
        outs.append(driver.feed_steps(tokens[PROMPT + 9 :]))
    assert hot is not None
    assert torch.equal(*outs)


@each(deal(0, variants=FETCHING))
def test_copies_and_another_turn(method):
    """A copy goes on by itself, from memory of its own."""
    tokens, more = Tokens.random(2, PROMPT + 9), Tokens.random(2, 30, seed=3)
    outs, both = [[], []], drivers(method)
    for driver, found in zip(both, outs):
        driver.feed(tokens[:PROMPT])
        found.append(driver.feed_steps(tokens[PROMPT:]))
        layer = driver.layer
        for turn in (layer, copy.deepcopy(layer), layer):
            driver.layer = turn
            turn.phase.prompt_end = turn.seen + 21
            found += [driver.feed(more[:21]), driver.feed_steps(more[21:])]
    for mine, its in zip(*outs, strict=True):
        assert torch.equal(mine, its)


@each_in_turn("lengths", [LENGTHS[:1], LENGTHS], deal(1, variants=FETCHING))
def test_replays_equal_ordinary_steps(method, lengths):
    """Also over growth, after which the step is recorded anew: nothing is read on the host."""
    batch, mask = padded([Tokens.random(1, length, seed=length) for length in lengths], PROMPT)
    tokens = Tokens.random(len(lengths), 22, seed=1)
    plain, driver = drivers(method, ALL)
    for one in (plain, driver):
        one.feed(batch, mask)
    replayed = Replayed(driver)
    close(replayed.feed_steps(tokens), plain.feed_steps(tokens))
    assert replayed.use.replayed > 12
    assert replayed.use.captured > 1
    same_counts = ("decode_steps", "decode_rows", "keys_available")
    assert [getattr(plain.layer.counters, name) for name in same_counts] == [
        getattr(driver.layer.counters, name) for name in same_counts
    ]
    assert float(plain.layer.counters.keys_read) == pytest.approx(float(driver.layer.counters.keys_read))


SIZES = {16: 64, 4: 100, 8: 0.314}
"""Of pages, and the ``top_k`` with each."""


def with_pages_of(sizes, budget):
    made = [methods.make("pages", page_size=size, top_k=SIZES[size]) for size in sizes]
    layers = {number: LayerShape(method, GEOMETRY, torch.float32) for number, method in enumerate(made)}
    return Offload(budget, layers, torch.device("cpu"))


def test_layers_with_pages_of_other_sizes_need_other_numbers_of_them():
    shared = with_pages_of((16, 4), 0.6)
    shared.reserve_memory(1, 200)
    stores = [SimpleNamespace(page_size=size, batch_size=1) for size in (16, 4)]
    assert [shared.hot_pages(store, 320) for store in stores] == [12, 48]


@pytest.mark.parametrize("sizes", [(16, 4), (4, 16), (8,)])
@pytest.mark.parametrize("tokens", [100, 200, 450, 8000])
def test_the_share_that_is_asked_for_suffices(sizes, tokens):
    with pytest.raises(DoesNotFitError) as refused:
        with_pages_of(sizes, 0.01).reserve_memory(1, tokens)
    share = float(re.search(r"a share of at least ([\d.]+),", str(refused.value))[1])
    with_pages_of(sizes, share).reserve_memory(1, tokens)


def tokens_that_fit(spec, free, offloaded):
    """By bisection, in thousands of 1,024, and the GB of host memory that they take: of one sequence of an 8B."""
    layers, most = [LayerShape(methods.make(spec), Geometry(32, 8, 128, 128), torch.bfloat16)] * 32, [0, 1 << 13]
    while most[1] - most[0] > 1:
        middle = sum(most) // 2
        what = offload.needs(layers, 1, capacity_for(1024 * middle + 256))
        taken = what.fixed + (max(what.prompt, what.least) if offloaded else what.host)
        most[taken > free] = middle
    return most[0], offload.needs(layers, 1, capacity_for(1024 * most[0] + 256)).host / 1e9


def test_the_guide_says_how_many_tokens_fit(monkeypatch):
    monkeypatch.setattr("foveate.state.store.ALIGN", 64)
    guide = (Path(__file__).parents[2] / "docs/guide/memory.md").read_text(encoding="utf-8")
    for gigabytes, weights in ((8, "5.5 (4 bits)"), (16, "5.5 (4 bits)"), (24, "16.1"), (48, "16.1"), (80, "16.1")):
        free = 1e9 * (gigabytes * (1 - offload.MARGIN) - float(weights.split()[0]))
        cells = [f"{tokens_that_fit('pages', free, False)[0]}K"]
        for spec in ("pages", "pages:top_k=0.125"):
            tokens, host = tokens_that_fit(spec, free, True)
            cells.append(f"{tokens}K ({host:.0f})")
        assert " | ".join((f"| {gigabytes}", weights, *cells)) + " |" in guide

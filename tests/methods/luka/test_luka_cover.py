"""What LuKA's cover holds at every step, read off its outputs: the values are labels, so outputs are masses."""

import copy
import functools
import itertools
import random

import pytest
import torch
from matrix import HEADS, KV_HEADS, SCALING, VARIANTS, Driver, Tokens
from test_luka import any_settings

import foveate
from foveate import methods
from foveate.runtime import Layer
from tests import helpers

GROUP = HEADS // KV_HEADS
WIDTH = 256
LUKAS = {name: method for name, method in VARIANTS if name.startswith("luka")}


def blank(tokens):
    """The same queries and keys, with values wide enough for a label on everything."""
    return Tokens(tokens.q, tokens.k, tokens.k.new_zeros(*tokens.k.shape[:3], WIDTH))


def read_cover(driver, token):
    """Masses in the cover of the next token: ``[B, Hq, slots]`` of raw tokens, and ``[B, Hq, N]`` of each level."""
    probe = copy.deepcopy(driver)
    store, pages = probe.store, probe.layer.method.pages
    slots = store.rows["counts"]  # of the new tokens
    store.reserve(max(slots) + 1)
    entries = {"values": max(slots) + 1}
    for level in range(len(pages.sizes)):
        entries[pages.channel("v", level)] = pages.count(level, max(store.rows["pages"]))
    labels = torch.eye(WIDTH)
    for name, label in zip(entries, labels[: sum(entries.values())].split(list(entries.values()))):
        store.tensors[name][:, :, : len(label)] = label
    own = labels[slots][:, None, None].expand(-1, KV_HEADS, -1, -1)
    out = probe.feed(Tokens(token.q, token.k, own))[:, :, 0]
    raw, *levels, unlabelled = out.split([*entries.values(), WIDTH - sum(entries.values())], -1)
    assert (unlabelled == 0).all()
    return raw, levels


def tokens_beneath(driver, row, level):
    """``[N, slots]``: which slots each node of a row stands for."""
    store, method = driver.store, driver.layer.method
    number, sinks = store.rows["pages"][row], method.sinks
    if method.segmenter == "fixed":
        ends = [sinks + method.sizes[0] * (page + 1) for page in range(number)]
    else:
        ends = store.channel("page_end")[row, 0, :number].int().tolist()
    starts = [sinks, *ends][:number]
    ratio = method.sizes[level] // method.sizes[0]
    beneath = torch.zeros(number // ratio, max(store.rows["counts"]) + 1, dtype=torch.bool)
    for node in range(number // ratio):
        beneath[node, starts[node * ratio] : ends[(node + 1) * ratio - 1]] = True
    return beneath


def times_represented(driver, raw, levels, row):
    """``[Hq, slots]``: how often each slot of a row is in the cover, itself or by a node above it."""
    times = (raw[row] > 0).int()
    for level, masses in enumerate(levels):
        beneath = tokens_beneath(driver, row, level)
        assert (masses[row, :, len(beneath) :] == 0).all()  # nodes that the row does not have
        times += (masses[row, :, : len(beneath)] > 0).int() @ beneath.int()
    return times


def assert_is_cover(driver, token):
    raw, levels = read_cover(driver, token)
    total = raw.sum(-1) + sum(masses.sum(-1) for masses in levels)
    torch.testing.assert_close(total, torch.ones_like(total))
    for row, length in enumerate(driver.store.lengths):
        times = times_represented(driver, raw, levels, row)
        assert (times[:, : length + 1] == 1).all()
        assert (times[:, length + 1 :] == 0).all()
    for masses in (raw, *levels):  # all heads of a KV head have one cover
        there = (masses > 0).unflatten(1, (KV_HEADS, GROUP))
        assert (there == there[:, :, :1]).all()
        if driver.layer.method.pool == "layer":
            assert (there == there[:, :1]).all()
    return raw, levels


def draw(lengths, decoded, seed=0, loudness=1.0):
    """A left-padded batch, its mask, and the tokens that follow; values are blank."""
    width = max(lengths)
    prompt, steps = (blank(Tokens.random(len(lengths), n, s)) for n, s in ((width, seed), (decoded, seed + 1)))
    prompt.q.mul_(loudness)
    steps.q.mul_(loudness)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return prompt, mask, steps


def walk(method, lengths, decoded, seed=0, loudness=1.0):
    """Every step of a batch: the driver before it, and its token."""
    prompt, mask, steps = draw(lengths, decoded, seed, loudness)
    driver = Driver(method, max(lengths))
    driver.feed(prompt, None if len(set(lengths)) == 1 else mask)
    for step in range(decoded):
        yield driver, steps[step : step + 1]
        driver.feed(steps[step : step + 1])


@pytest.mark.parametrize("lengths", [(47,), (47, 30, 3)], ids=str)
@pytest.mark.parametrize("method", LUKAS.values(), ids=LUKAS)
def test_every_token_is_represented_once_in_every_variant_of_the_matrix(method, lengths):
    for driver, token in walk(method, lengths, 7):
        assert_is_cover(driver, token)


@pytest.mark.parametrize("seed", range(24))
def test_every_token_is_represented_once_under_any_settings(seed):
    chance = random.Random(f"cover {seed}")
    lengths = [chance.randint(1, 60) for _ in range(chance.randint(1, 3))]
    for driver, token in walk(any_settings(1000 + seed), lengths, 7, seed, chance.choice([0.3, 1.0, 2.0])):
        assert_is_cover(driver, token)


def test_all_levels_are_met_and_left():
    """The tests above see nodes of every level in the cover, and refined ones."""
    met, refined = [0, 0, 0], [0, 0, 0]
    method = methods.make("luka", page_size=[2, 4, 8], sinks=1, tail=3, compress_every=1, top_k=2, expand=2)
    for driver, token in walk(method, (60,), 8):
        _, levels = assert_is_cover(driver, token)
        for level, masses in enumerate(levels):
            met[level] += int((masses > 0).sum())
            refined[level] += int((masses == 0).sum())
    assert min(met) > 0
    assert min(refined) > 0


# What unrefined pages hold


def attention(driver, token):
    """Dense attention of the next token over all keys, ``[B, Hq, slots]`` in fp64: what the summaries stand for."""
    found = []
    for row, length in enumerate(driver.store.lengths):
        keys = torch.cat([driver.store.keys[row, :, :length], token.k[row]], 1).double().repeat_interleave(GROUP, 0)
        logits = (keys @ token.q[row, :, 0, :, None].double())[..., 0] * SCALING
        logits = logits if driver.softcap is None else driver.softcap * (logits / driver.softcap).tanh()
        found.append(torch.nn.functional.pad(logits.softmax(-1), (0, max(driver.store.lengths) - length)))
    return torch.stack(found)


def missed(driver, token):
    """True attention mass of the tokens that are not read raw: ``[B, Hq]``."""
    raw, _ = assert_is_cover(driver, token)
    return attention(driver, token).masked_fill(raw > 0, 0.0).sum(-1)


@functools.cache
def model_tokens(length=110):
    """Queries and keys of the last layer of a random Llama, as its attention gets them."""
    model, seen = helpers.tiny_model(), []
    foveate.attach(model, "dense")
    attend = Layer.attend

    def spy(self, q, k, v, mask, scaling, *more):
        assert (scaling, *more) == (SCALING, None, None)
        seen.append(blank(Tokens(q.detach().clone(), k.detach().clone(), v)))
        return attend(self, q, k, v, mask, scaling)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(Layer, "attend", spy)
        model(input_ids=helpers.repetitive(length), use_cache=True)
    return seen[-1]


def clustered_tokens(length=110, sinks=2, page=4, noise=0.1):
    """The keys of a page are alike; a query looks at one of the pages."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(1, KV_HEADS, length // page + 2, 16, generator=generator) * 1.5
    k = centres.repeat_interleave(page, 2)[:, :, page - sinks :][:, :, :length]
    k = k + torch.randn(k.shape, generator=generator) * noise
    aim = torch.randint(centres.shape[2], (length,), generator=generator)
    q = centres[:, :, aim].repeat_interleave(GROUP, 1) + torch.randn(1, HEADS, length, 16, generator=generator) * noise
    return blank(Tokens(q, k, k))


SOURCES = {
    "random": lambda: blank(Tokens.random(1, 110)),
    "clustered": clustered_tokens,
    "model": model_tokens,
}
BOUNDED = {
    "pages": {},
    "layer": {"pool": "layer"},
    "preserve": {"mass": "preserve", "bias": "none", "score": "summary"},
    "two_levels": {"page_size": [4, 8]},
    "three_levels": {"page_size": [2, 4, 8], "mass": "preserve"},
    "gaussian": {"segmenter": "gaussian", "page_deviation": 3.0},
    "kl_levels": {"segmenter": "kl", "page_size": [3, 6], "tail": 12},
    "attention": {"compressor": "attention", "page_size": [4, 8]},
    "random": {"compressor": "random"},
    "zero": {"zero_values": True},
}


@pytest.mark.parametrize(
    ("source", "limit", "softcap"),
    [
        ("random", 0.9, None),
        ("model", 0.9, None),
        ("clustered", 0.3, None),
        ("clustered", 0.05, None),
        ("random", 0.9, 3.0),
        ("clustered", 0.3, 3.0),
    ],
)
@pytest.mark.parametrize("settings", BOUNDED.values(), ids=BOUNDED)
def test_unrefined_pages_never_hold_more_than_the_missed_mass_allows(settings, source, limit, softcap):
    given = {"page_size": 4, "sinks": 2, "tail": 9, "compress_every": 3, "refine": "missed_mass"} | settings
    method = methods.make("luka", **given, max_missed_mass=limit)
    tokens, unread = SOURCES[source](), 0
    for loudness in (0.5, 2.5):  # louder, and masses underflow
        loud = Tokens(tokens.q * loudness, tokens.k, tokens.v)
        driver = Driver(method, 100, softcap)
        driver.feed(loud[:100])
        for step in range(100, 104):
            held = missed(driver, loud[step : step + 1])
            assert (held <= limit + 1e-6).all()
            unread += int((held > 0).sum())
            driver.feed(loud[step : step + 1])
        assert int(driver.layer.counters.selections_capped) == 0
    assert unread > 0 or source != "clustered"  # boxes of unlike keys may say so little that all is read


def test_rows_of_a_batch_and_their_missed_mass():
    method = methods.make(
        "luka", page_size=[2, 4], sinks=2, tail=9, compress_every=3, refine="missed_mass", max_missed_mass=0.3
    )
    for driver, token in walk(method, (60, 41, 12), 8, loudness=0.5):
        assert (missed(driver, token) <= 0.3 + 1e-6).all()
        assert int(driver.layer.counters.selections_capped) == 0


def test_a_capped_selection_is_counted_and_may_miss_more():
    settings = {"page_size": 4, "sinks": 2, "tail": 9, "refine": "missed_mass", "max_missed_mass": 0.05}
    method = methods.make("luka", **settings, max_refined=2)
    over = 0
    for driver, token in walk(method, (60,), 6):
        over += int((missed(driver, token) > 0.05).sum())
    counters = driver.layer.counters
    assert over > 0
    assert int(counters.selections_capped) == counters.decode_steps * KV_HEADS
    assert float(counters.pages_refined) == counters.decode_steps * 2


def refined_pages(method, loudness):
    tokens = clustered_tokens()
    driver = Driver(method, 100)
    driver.feed(tokens[:100])
    driver.feed_steps(Tokens(tokens.q * loudness, tokens.k, tokens.v)[100:])
    return float(driver.layer.counters.pages_refined) / driver.layer.counters.decode_steps


@pytest.mark.parametrize("page_size", [4, [4, 8]], ids=str)
def test_peaked_queries_refine_fewer_pages_than_flat_ones(page_size):
    settings = {"page_size": page_size, "sinks": 2, "tail": 9, "refine": "missed_mass", "max_missed_mass": 0.2}
    method = methods.make("luka", **settings)
    refined = [refined_pages(method, loudness) for loudness in (0.01, 0.3, 1.0, 3.0)]
    assert refined == sorted(refined, reverse=True)
    pages = (100 - 9 - 2) // 4
    assert refined[0] > 0.75 * pages  # all pages hold alike
    assert refined[-1] < 0.2 * pages
    bolder = methods.make(method, max_missed_mass=0.5)
    for loudness, before in zip((0.01, 0.3, 1.0, 3.0), refined):
        assert refined_pages(bolder, loudness) <= before
    assert sum(itertools.starmap(refined_pages, [(bolder, 0.01), (bolder, 0.3)])) < sum(refined[:2])

"""What LuKA's cover holds at every step, read off its outputs: the values are labels, so outputs are masses."""

import copy
import random

import pytest
import torch
from matrix import HEADS, KV_HEADS, VARIANTS, Driver, Tokens, memory
from test_luka import any_settings, few_of

from foveate import methods

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
        memory(store, name)[:, :, : len(label)] = label
    own = labels[slots][:, None, None].expand(-1, KV_HEADS, -1, -1)
    out = probe.feed(Tokens(token.q, token.k, own))[:, :, 0]
    raw, *levels, unlabelled = out.split([*entries.values(), WIDTH - sum(entries.values())], -1)
    assert (unlabelled == 0).all()
    return raw, levels


def tokens_beneath(driver, row, level):
    """``[N, slots]``: which slots each node of a row stands for."""
    store, method = driver.store, driver.layer.method
    number, sinks = store.rows["pages"][row], method.sinks
    edges = [sinks + method.sizes[0] * page for page in range(number + 1)]
    ratio = method.sizes[level] // method.sizes[0]
    beneath = torch.zeros(number // ratio, max(store.rows["counts"]) + 1, dtype=torch.bool)
    for node in range(number // ratio):
        beneath[node, edges[node * ratio] : edges[(node + 1) * ratio]] = True
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


@few_of(range(1000, 1024))
def test_every_token_is_represented_once_under_any_settings(seed):
    chance = random.Random(f"cover {seed}")
    lengths = [chance.randint(1, 60) for _ in range(chance.randint(1, 3))]
    for driver, token in walk(any_settings(seed), lengths, 7, seed, chance.choice([0.3, 1.0, 2.0])):
        assert_is_cover(driver, token)


def test_all_levels_are_met_and_left():
    """The tests above see nodes of every level in the cover, and refined ones."""
    met, refined = [0, 0, 0], [0, 0, 0]
    method = methods.make("luka", page_size=[2, 4, 8], sinks=1, tail=3, top_k=2, expand=2)
    for driver, token in walk(method, (60,), 8):
        _, levels = assert_is_cover(driver, token)
        for level, masses in enumerate(levels):
            met[level] += int((masses > 0).sum())
            refined[level] += int((masses == 0).sum())
    assert min(met) > 0
    assert min(refined) > 0

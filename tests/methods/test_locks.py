"""LOCKS, written out."""

import math

import pytest
import torch

from foveate import methods, ops
from foveate.ops.compress.low_rank import factors
from foveate.state import Geometry
from tests.helpers import assert_close
from tests.methods.driver import DIM, GROUP, HEADS, KV_HEADS, PROMPT, SCALING, TOTAL, Driver


def score(driver, method, own, position, pages):
    """Of the first so many pages: each head's masses over its largest, summed."""
    size, total, form = (
        method.page_size,
        torch.zeros(pages).double(),
        ops.PageRecord(DIM, method.page_size, method.rank, 8),
    )
    keys = [
        factors(ops.compress_pages(driver.k[:1, own : own + 1, page * size : (page + 1) * size], form), form)
        .keys()[0, 0, 0]
        .double()
        for page in range(pages)
    ]
    for q in driver.q[0, own * GROUP : (own + 1) * GROUP, position].double():
        mass = torch.stack([driver.capped(of_page @ q * SCALING).exp().sum() for of_page in keys])
        total += mass / mass.max()
    return total


SETTINGS = {
    "eight directions": {"page_size": 8, "rank": 8, "top_k": 30},
    "share": {"top_k": 0.4},
    "odd pages": {"page_size": 7, "rank": 5, "top_k": 24},
    "little": {"top_k": 1},
}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_heads_of_a_group_read_the_pages_of_the_largest_sum_of_masses(settings, softcap, monkeypatch):
    monkeypatch.setattr("foveate.methods.pages.LEAST_KEYS", 5)
    method = methods.make("locks", **{"top_k": 17, "page_size": 4, "rank": 2} | settings)
    size, driver = method.page_size, Driver(method, softcap)
    driver.feed(0, PROMPT)
    reads, choices = 0.0, 0
    for position in range(PROMPT, TOTAL):
        out, length = driver.feed(position, position + 1), position + 1
        number = math.ceil(length / size)
        tokens = max(int(method.top_k * length), 5) if isinstance(method.top_k, float) else method.top_k
        newest = number - 1
        always = {0, newest}
        count = max(tokens // size, len(always))
        for own in range(KV_HEADS):
            scores = score(driver, method, own, position, newest)
            others = sorted(set(range(newest)) - always, key=lambda page, scores=scores: -scores[page])
            pages = always | {*others[: count - len(always)]}
            slots = torch.tensor(
                [slot for page in pages for slot in range(page * size, min((page + 1) * size, length))]
            )
            for head in range(own * GROUP, (own + 1) * GROUP):
                logits = driver.capped(driver.k[0, own, slots] @ driver.q[0, head, position] * SCALING)
                assert_close(out[0, head, 0], logits.softmax(0) @ driver.v[0, own, slots])
            reads += len(slots) / KV_HEADS
        choices += len(pages)
    assert float(driver.layer.counters["pages_refined"]) == choices
    record = ops.PageRecord(DIM, size, method.rank, 8).bytes / (size * 2 * DIM * 4)
    scored = sum(range(PROMPT + 1, TOTAL + 1)) * record
    assert float(driver.layer.counters.keys_read) == pytest.approx(reads + scored, rel=1e-12)


def test_it_is_published_with_2048_of_the_keys_and_a_tenth_of_their_bytes():
    method, geometry = methods.make("locks"), Geometry(HEADS, KV_HEADS, 128, 128)
    assert methods.settings_of(method) == {"top_k": 2048, "page_size": 16, "rank": 8}
    assert method.scored(1000, geometry, torch.bfloat16) == pytest.approx(1000 * 816 / (16 * 2 * 128 * 2))
    assert method.observation is None
    assert method.count(2047) == 128
    assert method.count(131072) == 128

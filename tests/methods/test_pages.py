"""Pages by low-rank summaries, written out."""

import math

import pytest
import torch

import foveate
from foveate import methods, ops
from foveate.ops.compress.low_rank import factors
from foveate.runtime.decode import decode
from foveate.state import Geometry, SlotCache
from tests.helpers import assert_close, generate, left_padded, tiny_model
from tests.methods.driver import DIM, GROUP, HEADS, KV_HEADS, PROMPT, SCALING, TOTAL, Driver


def weights_of(driver, weighted):
    """What the channels of each KV head's keys are multiplied by, by the last 16 queries of the prompt."""
    if not weighted:
        return torch.ones(KV_HEADS, DIM)
    return ops.channel_weights(driver.q[:, :, PROMPT - 16 : PROMPT], KV_HEADS)[0]


def masses(driver, method, position):
    """Share of each full page in each query head's attention to full pages, by the page's summary: ``[H, P]``."""
    size, length, found = method.page_size, position + 1, []
    weights, form = weights_of(driver, method.weighted), ops.PageRecord(DIM, size, method.rank)
    for own in range(KV_HEADS):
        pages = (driver.k[:1, own : own + 1, page * size : (page + 1) * size] for page in range(length // size))
        held = [factors(ops.compress_pages(page * weights[own], form), form).keys()[0, 0, 0].double() for page in pages]
        for q in driver.q[0, own * GROUP : (own + 1) * GROUP, position].double() / weights[own].double():
            logs = [driver.capped(keys @ q * SCALING).logsumexp(0) for keys in held]
            found.append(torch.stack(logs).softmax(0))
    return torch.stack(found)


SETTINGS = {
    "kv_head": {},
    "share": {"top_k": 0.4},
    "unweighted": {"weighted": False, "rank": 1},
    "no_sinks": {"sinks": 0, "tail": 1},
    "many_sinks": {"sinks": 9, "top_k": 20, "tail": 7},
    "larger_pages": {"page_size": 7, "top_k": 24},
    "little": {"top_k": 1},
}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_heads_of_a_group_read_the_pages_of_most_estimated_attention(settings, softcap, monkeypatch):
    monkeypatch.setattr("foveate.methods.pages.LEAST_KEYS", 5)
    given = {"top_k": 17, "page_size": 4, "tail": 6, "sinks": 3} | settings
    for name in ("sinks", "tail"):  # smaller than they are, for short contexts
        monkeypatch.setattr(methods.get("pages"), name, given.pop(name))
    method = methods.make("pages", **given)
    size, driver = method.page_size, Driver(method, softcap)
    driver.feed(0, PROMPT)
    shares, reads, choices = 0.0, 0, 0
    for position in range(PROMPT, TOTAL):
        out, length = driver.feed(position, position + 1), position + 1
        number = math.ceil(length / size)
        tokens = max(int(method.top_k * length), 5) if isinstance(method.top_k, float) else method.top_k
        always = {*range(math.ceil(method.sinks / size)), *range((length - method.tail) // size, number)}
        count = max(tokens // size, len(always))
        mass = masses(driver, method, position).unflatten(0, (KV_HEADS, GROUP)).mean(1)
        for own in range(KV_HEADS):
            others = sorted((page for page in range(number) if page not in always), key=lambda page: -mass[own, page])
            pages = always | {*others[: count - len(always)]}
            slots = torch.tensor(
                [slot for page in pages for slot in range(page * size, min((page + 1) * size, length))]
            )
            for head in range(own * GROUP, (own + 1) * GROUP):
                logits = driver.capped(driver.k[0, own, slots] @ driver.q[0, head, position] * SCALING)
                assert_close(out[0, head, 0], logits.softmax(0) @ driver.v[0, own, slots])
            shares += sum(mass[own, page] for page in pages if page < length // size) / KV_HEADS
            reads += len(slots) / KV_HEADS
        choices += len(pages)
    counters = driver.layer.counters
    assert float(counters["mass_read"]) == pytest.approx(float(shares), rel=1e-5)
    assert float(counters["pages_refined"]) == choices
    record = ops.PageRecord(DIM, size, method.rank).bytes / (size * 2 * DIM * 4)
    scored = sum(range(PROMPT + 1, TOTAL + 1)) * record
    assert float(counters.keys_read) == pytest.approx(reads + scored, rel=1e-12)


@pytest.mark.parametrize("turn", [16, 5])
def test_each_prompt_weighs_the_channels_of_all_keys_by_its_own_queries(turn):
    """By its last 16 queries, or all of a shorter turn's, and none of the tokens before it."""
    driver, form = Driver(methods.make("pages", page_size=4), batch=2), ops.PageRecord(DIM, 4)
    before, end = PROMPT + 3, PROMPT + 3 + turn
    driver.q[:, :, before:, 5] /= 5.0
    driver.q[:, :, before:, 11] *= 40.0
    driver.feed(0, PROMPT)
    store = driver.layer.cache
    first = store.channel("channel_weights").clone()
    assert torch.equal(first, ops.channel_weights(driver.q[:, :, PROMPT - 16 : PROMPT], KV_HEADS))
    driver.feed(PROMPT, before)
    driver.layer.phase.prompt_end = end
    driver.feed(before, end)
    weights = ops.channel_weights(driver.q[:, :, before:end], KV_HEADS)
    assert torch.equal(store.channel("channel_weights"), weights)
    assert (weights.amax((0, 1)) != first.amax((0, 1)))[[5, 11]].all()
    expected = ops.compress_pages(driver.k[:, :, : end // 4 * 4], form, weights)
    assert torch.equal(store.channel("records")[:, :, : end // 4], expected)
    old = PROMPT // 4  # pages of the first prompt alone
    for other in (None, first):
        assert not torch.equal(expected[:, :, :old], ops.compress_pages(driver.k[:, :, : old * 4], form, other))


def test_summaries_are_made_when_pages_are_full():
    driver, form = Driver(methods.make("pages", page_size=4)), ops.PageRecord(DIM, 4)
    driver.feed(0, PROMPT)
    records = driver.layer.cache.channel("records")
    for length in range(PROMPT, TOTAL):
        weights = driver.layer.cache.channel("channel_weights")
        expected = ops.compress_pages(driver.k[:, :, : length // 4 * 4], form, weights)
        assert torch.equal(records[:, :, : length // 4], expected)
        assert not records[:, :, length // 4 :].any()
        driver.feed(length, length + 1)


def test_rows_of_several_lengths_count_what_they_read(monkeypatch):
    """The shortest has no full page, and reads all that it has."""
    lengths, geometry = [54, 37, 3, 48], Geometry(HEADS, KV_HEADS, DIM, 2 * DIM)
    monkeypatch.setattr(methods.get("pages"), "tail", 2)
    method = methods.make("pages", top_k=13, page_size=4, weighted=False)
    cache = SlotCache(geometry, 4, torch.float32, torch.device("cpu"), method.channels(geometry))
    cache.counters.declare(method.counters)
    generator = torch.Generator().manual_seed(0)
    cache.append(*(torch.randn(4, KV_HEADS, 54, dim, generator=generator) for dim in (DIM, 2 * DIM)))
    method.summaries.write(cache, 0, 54 // 4)
    for name in ("lengths", "counts", "live"):
        cache.rows[name] = list(lengths)
    cache.store.keys[2, :, 3:] = float("nan")
    q = torch.randn(4, HEADS, 1, DIM, generator=generator)
    assert decode(method, cache, q, SCALING)[0].out.isfinite().all()
    counters = cache.counters
    # three pages of 4, of which the newest has 2, 1 and 4 tokens
    record = ops.PageRecord(DIM, 4).bytes / (4 * 3 * DIM * 4)
    assert float(counters.keys_read) == pytest.approx(10 + 9 + 3 + 12 + sum(lengths) * record)
    assert float(counters["pages_refined"]) == 3 + 3 + 1 + 3
    assert 1.0 < float(counters["mass_read"]) < 4.0


def test_stats_tell_the_estimated_share_of_attention(monkeypatch):
    monkeypatch.setattr(methods.get("pages"), "tail", 4)
    model, found = tiny_model(), {}
    for top_k in (8, 24, 1.0):
        with foveate.attached(model, f"pages:page_size=4,top_k={top_k}"):
            generate(model, new=12, **left_padded([61, 40]))
            found[top_k] = foveate.stats(model)
        shares = [layer.mass_read_share for layer in found[top_k].layers]
        assert found[top_k].summary()["mass_read_share"] == pytest.approx(sum(shares) / len(shares))
        assert f"{100 * sum(shares) / len(shares):.1f} % of the attention to pages" in str(found[top_k])
    small, large, whole = (one.summary()["mass_read_share"] for one in found.values())
    assert 0 < small < large < whole == pytest.approx(1.0)
    # sinks, and two pages for the newest tokens, or one where these are a page: at 64, 68 and 72, and at 44 and 48
    assert [layer.pages_refined for layer in found[8].layers] == [2 * 11 * 3 - 5] * len(found[8].layers)
    with foveate.attached(model, "quest"):
        generate(model, new=3, **left_padded([20]))
        assert foveate.stats(model).summary()["mass_read_share"] is None
        assert "attention to pages" not in str(foveate.stats(model))

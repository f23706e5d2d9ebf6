"""Layers that score keys or pages at every few tokens, against loops, and what undoes tokens."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from foveate import methods, ops
from foveate.methods._kept_scores import KeptScores
from foveate.runtime.steps import obstacle
from foveate.state import Geometry
from foveate.state.step_plan import StepPlan
from tests.methods.driver import DIM, GROUP, HEADS, KV_HEADS, PROMPT, SCALING, TOTAL, Driver

KASCADE = "kascade_paper:top_k=0.3,min_k=6,anchors=[1],decode_only=true"
PAGES = "pages:top_k=40,page_size=4"


def attention(driver, head, last, keys):
    """Probabilities over some keys of the token at ``last``, and its output, of a query head."""
    k, v = (x[0, head // GROUP, keys].double() for x in (driver.k, driver.v))
    mass = (k @ driver.q[0, head, last].double() * SCALING).softmax(0)
    return mass, mass @ v


def expected_kascade(driver, every):
    """In loops: the best keys by the attention to the keys that were there at the last scoring, before them newer ones,
    the newest first."""
    outs, scores, scored = [], None, -math.inf
    for last in range(PROMPT, TOTAL):
        if last - scored >= every:
            scored, scores = last, []
            for kv in range(KV_HEADS):
                heads = range(kv * GROUP, (kv + 1) * GROUP)
                of_heads = [attention(driver, head, last, slice(last + 1))[0] for head in heads]
                scores.append(torch.stack(of_heads).mean(0).tolist())
        count, now = max(6, math.floor(0.3 * (last + 1) + 1e-9)), []
        for head in range(HEADS):
            own = scores[head // GROUP] + [1e30 * (1 + n) for n in range(last - scored)]
            best = sorted(range(last + 1), key=lambda key: (-own[key], key))[:count]
            now.append(attention(driver, head, last, sorted(best))[1])
        outs.append(torch.stack(now))
    return torch.stack(outs, 1)[None].float()


@pytest.mark.parametrize("every", [1, 2, 3, 16])
def test_keys_are_chosen_by_the_last_scores_and_newer_ones_first(every):
    driver = Driver(methods.parse(f"{KASCADE},every={every}"))
    driver.feed(0, PROMPT)
    found = torch.cat([driver.feed(n, n + 1) for n in range(PROMPT, TOTAL)], 2)
    torch.testing.assert_close(found, expected_kascade(driver, every))
    if every > 1:
        assert not torch.allclose(found, expected_kascade(driver, 1), atol=1e-3)


def test_the_newest_key_is_always_read():
    """Also where fewer keys are read than have come since the last scoring."""
    driver = Driver(methods.parse("kascade_paper:top_k=2,min_k=1,anchors=[1],decode_only=true,every=16"))
    driver.feed(0, PROMPT)
    for n in range(PROMPT, PROMPT + 6):
        found = driver.feed(n, n + 1)
    for head in range(HEADS):
        torch.testing.assert_close(found[0, head, 0], attention(driver, head, n, [n - 1, n])[1].float())


@pytest.mark.parametrize("every", [2, 4])
def test_pages_are_chosen_by_the_last_scores(every, monkeypatch):
    """And by new ones at each token that is due: the same as a layer that scores then, and is asked what it chose."""
    spec = methods.parse(PAGES)
    scored, outs, chosen, inner, attend = [], [], [], type(spec.summaries).mass, ops.attend_pages

    def mass(self, cache, q, scaling, pooling, pool="kv_head", due=None):
        found = inner(self, cache, q, scaling, pooling, pool)
        scored.append(cache.lengths[0])
        return found

    monkeypatch.setattr(type(spec.summaries), "mass", mass)
    monkeypatch.setattr(
        ops, "attend_pages", lambda q, kv, *how, **more: chosen.append(how[0]) or attend(q, kv, *how, **more)
    )
    driver = Driver(methods.make(spec, every=every))
    driver.feed(0, PROMPT)
    for n in range(PROMPT, TOTAL):
        outs.append(driver.feed(n, n + 1))
    assert scored == list(range(PROMPT + 1, TOTAL + 1, every))
    own, chosen[:] = list(chosen), []
    plain = Driver(spec)
    plain.feed(0, PROMPT)
    scores = None
    for step, n in enumerate(range(PROMPT, TOTAL)):
        out = plain.feed(n, n + 1)
        if step % every == 0:
            assert torch.equal(own[step], chosen[step])
            torch.testing.assert_close(outs[step], out)
            scores = inner(spec.summaries, plain.layer.cache, plain.q[:, :, n : n + 1], SCALING, "post_softmax")
        pages, length = -(-(n + 1) // 4), n + 1
        forced = {0, *range((length - 16) // 4, pages)}
        for head in range(KV_HEADS):
            value = {page: float(scores[0, head, page]) if page < scores.shape[2] else 0.0 for page in range(pages)}
            value |= dict.fromkeys(forced, math.inf)
            best = sorted(value, key=lambda page: (-value[page], page))[:10]
            assert [page for page in own[step][0, head].tolist() if page >= 0] == sorted(best)


def plan_of(lengths, captured):
    """The plan of a step whose rows hold these numbers of tokens."""
    numbers = dict.fromkeys(("lengths", "counts", "live"), tuple(lengths))
    if captured:
        numbers = {name: torch.tensor(lengths) for name in numbers}
    return StepPlan(numbers, torch.device("cpu"), {} if captured else None)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_each_row_is_scored_in_its_own_time(size, captured):
    """Rows that turns of different lengths have parted, some of which are due."""
    every, rows, kept = 3, 3, torch.zeros(3, 2, 60)
    at, wanted, lengths = torch.zeros(rows, dtype=torch.int64), kept.clone(), [9, 4, 20]
    generator, times = torch.Generator().manual_seed(0), [0] * rows
    for grown in [(0, 0, 0), (1, 1, 1), (1, 6, 2), *[(1, 1, 1)] * 4, (4, 2, 1), *[(1, 1, 1)] * 5]:
        lengths = [length + more for length, more in zip(lengths, grown)]
        new, plan = torch.rand(kept.shape, generator=generator), plan_of(lengths, captured)
        cache = SimpleNamespace(plan=plan, tensors={"kept_scores": kept}, channel=lambda name: at)
        scores, scored_at = KeptScores(every, size).renew(cache, 2, 60, lambda due, new=new: new)
        for row, length in enumerate(lengths):
            if not times[row] or length - times[row] >= every:
                times[row], full = length, length // size
                wanted[row, :, :full] = new[row, :, :full]
        assert torch.equal(scores, wanted)
        assert scored_at.tolist() == times
    assert len({time % every for time in times}) > 1


@pytest.mark.parametrize("spec", [KASCADE, PAGES])
def test_at_one_nothing_is_kept(spec):
    method = methods.parse(spec)
    assert methods.parse(f"{spec},every=1") == method
    assert not method.stateful
    assert "kept_scores" not in method.for_layer(1, 2).channels(Geometry(HEADS, KV_HEADS, DIM, DIM))


@pytest.mark.parametrize("spec", [f"{KASCADE},every=3", f"{PAGES},every=3"])
@pytest.mark.parametrize("removed", [1, 2, 3, 5])
def test_removed_tokens_leave_the_scores_of_before(spec, removed):
    """Those that later tokens have replaced included."""
    driver, fresh = (Driver(methods.parse(spec)) for _ in range(2))
    driver.layer.start_recording_past()
    driver.feed(0, PROMPT)
    for n in range(PROMPT, PROMPT + 7):
        driver.feed(n, n + 1)
    driver.layer.remove_last(removed)
    fresh.feed(0, PROMPT)
    for n in range(PROMPT, PROMPT + 7 - removed):
        fresh.feed(n, n + 1)
    for n in range(PROMPT + 7 - removed, TOTAL):
        torch.testing.assert_close(driver.feed(n, n + 1), fresh.feed(n, n + 1))


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (f"{KASCADE},every=0", "every must be"),
        (f"{PAGES},every=17", "every must be 1 to 16, not 17"),
        ("kascade_pages:every=2", "kascade_pages has no setting 'every'"),
    ],
)
def test_settings_that_cannot_be(spec, why):
    with pytest.raises(ValueError, match=why):
        methods.parse(spec)


@pytest.mark.parametrize("spec", [f"{KASCADE},every=2", f"{PAGES},weighted=false,every=2"])
def test_an_engine_that_does_not_tell_requests_apart_refuses_it(spec):
    assert "leave out every=2" in obstacle(methods.parse(spec).for_layer(1, 2), Geometry(HEADS, KV_HEADS, DIM, DIM))

"""Twilight and DuoAttention: outputs against their rules in plain fp64 loops."""

import pytest
import torch

from foveate import methods
from tests.methods.driver import DIM, GROUP, HEADS, KV_HEADS, PROMPT, SCALING, TOTAL, Driver


def attended(driver, head, query, seen):
    """Output of a query head that reads the keys ``seen``."""
    k, v = (x[0, head // GROUP, seen].double() for x in (driver.k, driver.v))
    return driver.capped(k @ driver.q[0, head, query].double() * SCALING).softmax(0) @ v


def rounded(k):
    """Keys in 16 steps from the least to the largest of their numbers."""
    low, high = min(k.tolist()), max(k.tolist())
    step = (high - low) / 15
    return torch.tensor([low + round((x - low) / step) * step for x in k.tolist()], dtype=torch.float64)


@pytest.mark.parametrize("p", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("min_k", [1, 7])
@pytest.mark.parametrize("softcap", [None, 40.0])
def test_twilight_reads_what_any_head_of_a_group_chooses(p, min_k, softcap):
    driver = Driver(methods.make("twilight", p=p, min_k=min_k), softcap)
    driver.feed(0, PROMPT)
    copies = [[rounded(k) for k in driver.k[0, kv]] for kv in range(KV_HEADS)]
    read = 0
    for query in range(PROMPT, TOTAL):
        out = driver.feed(query, query + 1)
        for kv in range(KV_HEADS):
            keys, seen = torch.stack(copies[kv][: query + 1]), set()
            for head in range(kv * GROUP, (kv + 1) * GROUP):
                mass = driver.capped(keys @ driver.q[0, head, query].double() * SCALING).softmax(0).tolist()
                chosen, total = [], 0.0
                for position in sorted(range(query + 1), key=lambda one, mass=mass: (-mass[one], one)):
                    if total >= p - 1e-6 and len(chosen) >= min_k:
                        break
                    chosen.append(position)
                    total += mass[position]
                seen |= set(chosen)
            read += len(seen) / KV_HEADS
            expected = [attended(driver, head, query, sorted(seen)) for head in range(kv * GROUP, (kv + 1) * GROUP)]
            found = out[0, kv * GROUP : (kv + 1) * GROUP, 0].double()
            torch.testing.assert_close(found, torch.stack(expected), atol=2e-5, rtol=1e-4)
    held = sum(range(PROMPT + 1, TOTAL + 1))
    scored = held * (DIM / 2 + 8) / (2 * DIM * 4)
    if p < 1:
        assert float(driver.layer.counters.keys_read) == pytest.approx(read + scored, rel=1e-3)
        assert read < held


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("streaming", "sinks", "recent"), [([0], 2, 9), ([1], 0, 1), ([0, 1], 3, 4), ([], 0, 1)])
def test_streaming_heads_read_the_first_keys_and_the_newest(streaming, sinks, recent, softcap):
    driver = Driver(methods.make("duo", heads=streaming, sinks=sinks, recent=recent), softcap)
    parts = [driver.feed(0, 20), driver.feed(20, PROMPT)]
    out = torch.cat([*parts, *(driver.feed(query, query + 1) for query in range(PROMPT, TOTAL))], 2)
    for query in range(TOTAL):
        for head in range(HEADS):
            all_keys = head // GROUP not in streaming
            seen = [one for one in range(query + 1) if all_keys or one < sinks or one > query - recent]
            expected = attended(driver, head, query, seen)
            torch.testing.assert_close(out[0, head, query].double(), expected, atol=2e-5, rtol=1e-4)


def test_layers_have_heads_of_their_own():
    method = methods.parse("duo:heads=[[0],[],[0,1]],recent=9")
    assert methods.parse(method.spec) == method
    assert [method.for_layer(layer, 3).heads for layer in range(3)] == [(0,), (), (0, 1)]
    with pytest.raises(ValueError, match=r"duo: heads must be a list of 5 lists, .* not \(\(0,\), \(\), \(0, 1\)\)"):
        method.for_layer(0, 5)
    with pytest.raises(ValueError, match=r"duo: heads must be numbers below 2, as the layer has KV heads, not \(2,\)"):
        Driver(methods.make("duo", heads=[2])).feed(0, PROMPT)


@pytest.mark.parametrize("heads", [None, 3, "0", [-1], [0.5], [True], [[0], 1]])
def test_heads_are_numbers(heads):
    with pytest.raises(ValueError, match="duo: heads must be a list of whole numbers from 0, or a list of such lists"):
        methods.make("duo", heads=heads)

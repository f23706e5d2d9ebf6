"""SparQ, written out."""

import itertools

import matrix
import pytest
import torch
from matrix import DIM, HEADS, KV_HEADS, SCALING, Driver, Tokens, close

from foveate import methods
from foveate.ops import Logits

PROMPT, TOTAL = 37, 54
GROUP = HEADS // KV_HEADS


def attention(logits, sink, softcap):
    """Softmax of the logits of some keys, beside a sink without a value."""
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    sink = torch.tensor([-torch.inf if sink is None else sink], dtype=torch.float64)
    return torch.cat([logits, sink]).softmax(0)[:-1]


def written_out(tokens, i, method, sinks=None, softcap=None):
    """The output of token i, ``[Hq, D]``, and the keys that each KV head reads."""
    q, k, v = (x[0].double() for x in (tokens.q, tokens.k, tokens.v))
    outs, chosen, length = [], [], i + 1
    number = int(method.top_k * length) if isinstance(method.top_k, float) else method.top_k
    least = method.min_k if isinstance(method.top_k, float) else 0
    number = min(max(number, least, method.window), length)
    for kv_head in range(KV_HEADS):
        heads = range(kv_head * GROUP, (kv_head + 1) * GROUP)
        size = sum(q[h, i].abs() for h in heads)
        dims = sorted(range(DIM), key=lambda d: -float(size[d]))[: method.rank]
        approximate = {}
        for h in heads:
            share = q[h, i, dims].abs().sum() / q[h, i].abs().sum()
            logits = k[kv_head, :length, dims] @ q[h, i, dims] * SCALING / share.sqrt()
            approximate[h] = attention(logits, None if sinks is None else sinks[h], softcap)
        total = sum(approximate.values())
        recent = list(range(max(length - method.window, 0), length))
        others = sorted(range(length - len(recent)), key=lambda slot: -float(total[slot]))
        keys = sorted(recent + others[: number - len(recent)])
        chosen.append(keys)
        for h in heads:
            logits = k[kv_head, keys] @ q[h, i] * SCALING
            out = attention(logits, None if sinks is None else sinks[h], softcap) @ v[kv_head, keys]
            rest = approximate[h].sum() - approximate[h][keys].sum()
            outs.append((1 - rest) * out + rest * v[kv_head, :length].mean(0))
    return torch.stack(outs).float(), chosen


class Layer(Driver):
    """A layer with learned sinks."""

    sinks = None

    def feed(self, tokens, mask=None):
        matrix.handover.begin("driver", self.layer.phase)
        key, value = self.layer.update(tokens.k, tokens.v)
        return self.layer.attend(tokens.q, key, value, mask, Logits(SCALING, self.sinks, self.softcap))


@pytest.mark.parametrize(("top_k", "rank", "window"), [(9, 4, 3), (0.3, 6, 1), (5, 7, 8), (0.5, 32, 2)])
def test_each_kv_head_reads_the_best_keys_by_its_largest_dimensions(top_k, rank, window):
    method = methods.make("sparq", top_k=top_k, min_k=4, rank=rank, window=window)
    tokens, driver = Tokens.random(1, TOTAL), Driver(method, PROMPT)
    driver.feed(tokens[:PROMPT])
    for i in range(PROMPT, TOTAL):
        expected, chosen = written_out(tokens, i, method)
        read, _ = matrix.influences(driver, tokens[i : i + 1])
        close(driver.feed(tokens[i : i + 1])[0, :, 0], expected)
        for head in range(KV_HEADS):
            assert read[head].nonzero()[:, 0].tolist() == [slot for slot in chosen[head] if slot < i]


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_sinks_take_their_share_and_logits_are_capped(softcap):
    method = methods.make("sparq", **methods.get("sparq").about.small_budget)
    tokens, driver = Tokens.random(1, TOTAL), Layer(method, PROMPT, softcap)
    driver.sinks = torch.linspace(-1.0, 3.0, HEADS)
    driver.feed(tokens[:PROMPT])
    for i in range(PROMPT, TOTAL):
        expected, _ = written_out(tokens, i, method, driver.sinks.double(), softcap)
        close(driver.feed(tokens[i : i + 1])[0, :, 0], expected)


def test_the_mean_is_of_all_values_after_chunks_dense_steps_and_turns():
    tokens, driver = Tokens.random(1, TOTAL), Driver(methods.make("sparq"), PROMPT)
    for first, last in itertools.pairwise((0, 11, PROMPT, PROMPT + 4)):
        driver.feed(tokens[first:last])
    driver.layer.dense_below = 1 << 40
    driver.feed_steps(tokens[PROMPT + 4 : 48])
    driver.layer.phase.prompt_end = TOTAL
    driver.feed(tokens[48:])
    assert driver.layer.counters.dense_steps == 48 - PROMPT - 4
    close(driver.store.channel("value_sum"), tokens.v.sum(2))


def test_a_query_of_zeros_attends_to_all_keys_alike():
    tokens, driver = Tokens.random(1, TOTAL), Driver(methods.make("sparq", top_k=9, window=3), PROMPT)
    tokens.q[:, :, PROMPT:] = 0
    driver.feed(tokens[:PROMPT])
    assert driver.feed_steps(tokens[PROMPT:]).isfinite().all()

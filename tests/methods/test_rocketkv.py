"""RocketKV, written out: what the end of a prompt keeps, and which pages of it a decoded token reads."""

import pytest
import torch

from foveate import methods, ops
from foveate.ops import Logits
from foveate.runtime import Layer, Phase, handover
from foveate.state import Counters, Geometry
from tests.helpers import assert_close
from tests.matrix import LENGTHS, PROMPT, Driver, Tokens, padded

HEADS, KV_HEADS, DIM, SCALING = 6, 2, 16, 0.4
GROUP = HEADS // KV_HEADS


class Sequence:
    """A layer that reads one sequence, and its tokens in fp64."""

    def __init__(self, total, prompt, seed, **settings):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = [torch.randn(1, heads, total, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        self.q, self.k, self.v = (x[0].double() for x in self.tokens)
        self.layer = Layer(methods.make("rocketkv", **settings), Counters(), Phase(prompt_end=prompt))

    def feed(self, first, last):
        handover.begin("driver", self.layer.phase)
        new = [x[:, :, first:last] for x in self.tokens]
        handover.post(self.layer, new[1])
        return self.layer.attend(*new, None, Logits(SCALING))[0]

    @property
    def held(self):
        """Positions that each KV head holds, in the order of its slots."""
        return self.layer.cache.positions[0].tolist()

    def votes(self, kv, held, window):
        """Attention of the last ``window`` of the tokens ``held`` to those before them, by position."""
        old = held[: len(held) - window]
        votes = dict.fromkeys(old, 0.0)
        for head in range(kv * GROUP, (kv + 1) * GROUP):
            for query in held[-window:]:
                seen = [p for p in held if p <= query]
                weights = (self.k[kv, seen] @ self.q[head, query] * SCALING).softmax(0).tolist()
                for position, weight in zip(seen, weights):
                    if position in votes:
                        votes[position] += weight
        return votes

    def kept(self, kv, held, number, window, kernel_size):
        """What a prompt that ends with the tokens ``held`` leaves of them."""
        votes = list(self.votes(kv, held, window).values())
        reach = kernel_size // 2
        pooled = [max(votes[max(0, i - reach) : i + reach + 1]) for i in range(len(votes))]
        best = sorted(range(len(pooled)), key=lambda i: (-pooled[i], i))[: number - window]
        return [held[i] for i in sorted(best)] + held[len(held) - window :]

    def read(self, kv, token, held, size, number):
        """The tokens of the pages that a decoded token reads, of those that its KV head holds."""
        pages = [held[first : first + size] for first in range(0, len(held), size)]
        shares = torch.zeros(len(pages), dtype=torch.float64)
        for head in range(kv * GROUP, (kv + 1) * GROUP):
            bounds = []
            for page in pages:
                low, high = self.k[kv, page].amin(0), self.k[kv, page].amax(0)
                bounds.append(torch.maximum(self.q[head, token] * low, self.q[head, token] * high).sum() * SCALING)
            shares += torch.stack(bounds).softmax(0) / GROUP
        best = sorted(range(len(pages)), key=lambda page: (-float(shares[page]), page))[:number]
        return [p for page in sorted(best) for p in pages[page]]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("keep", "top_k", "size", "window", "kernel_size"),
    [(20, 12, 4, 6, 5), (0.4, 7, 3, 3, 1), (9, 4, 2, 9, 3)],
)
def test_what_is_kept_and_what_is_read(keep, top_k, size, window, kernel_size, seed):
    """Two turns: the second evicts again, of what the first has left."""
    how = {"keep": keep, "top_k": top_k, "page_size": size, "window": window, "kernel_size": kernel_size}
    sequence, held = Sequence(95, 41, seed, **how), [[] for _ in range(KV_HEADS)]
    first = 0
    for prompt, end in ((41, 58), (75, 95)):
        sequence.layer.phase.prompt_end = prompt
        sequence.feed(first, prompt)
        number = int(keep * prompt) if isinstance(keep, float) else keep
        held = [[*own, *range(first, prompt)] for own in held]
        held = [sequence.kept(kv, own, number, window, kernel_size) for kv, own in enumerate(held)]
        assert sequence.held == held
        for token in range(prompt, end):
            out, held = sequence.feed(token, token + 1), [[*own, token] for own in held]
            assert sequence.held == held
            for head in range(HEADS):
                kv = head // GROUP
                read = sequence.read(kv, token, held[kv], size, top_k // size)
                weights = (sequence.k[kv, read] @ sequence.q[head, token] * SCALING).softmax(0)
                assert_close(out[head, 0].double(), weights @ sequence.v[kv, read])
        first = end
    assert float(sequence.layer.counters.tokens_evicted) == 95 - len(held[0])


def test_a_prompt_within_the_budget_is_kept_and_a_turn_shorter_than_the_window_votes_by_its_own_tokens():
    sequence = Sequence(60, 30, 0, keep=40, top_k=8, window=8)
    sequence.feed(0, 30)
    assert sequence.held == [[*range(30)]] * KV_HEADS
    sequence.layer.phase.prompt_end = 43
    sequence.feed(30, 40)
    sequence.feed(40, 43)
    assert [own[-8:] for own in sequence.held] == [[*range(35, 43)]] * KV_HEADS
    assert [len(own) for own in sequence.held] == [40] * KV_HEADS


def test_what_follows_a_rows_pages_in_their_bounds_does_not_matter(monkeypatch):
    def decoded():
        batch, mask = padded([Tokens.random(1, length, seed=length) for length in LENGTHS], PROMPT)
        driver = Driver(methods.make("rocketkv", keep=25, top_k=9, page_size=3, window=8, kernel_size=3))
        driver.feed(batch, mask)
        return driver.feed_steps(Tokens.random(len(LENGTHS), 12, seed=1))

    def spoiled(*args, lengths, **more):
        bounds = largest_logit(*args, lengths=lengths, **more)
        return bounds.masked_fill(~ops.first_keys(lengths, bounds.shape[-1])[:, :, None], float("nan"))

    expected, largest_logit = decoded(), ops.largest_logit
    monkeypatch.setattr(ops, "largest_logit", spoiled)
    assert torch.equal(decoded(), expected)


def test_boxes_count_by_their_corners_and_queries_by_the_window():
    method = methods.make("rocketkv", page_size=4, window=5)
    geometry = Geometry(HEADS, KV_HEADS, DIM, DIM)
    assert method.scored(10, geometry, torch.float32) == 0.5 * (2 * 2 + 2)
    assert {name: spec.shape for name, spec in method.channels(geometry).items()} == {
        **{"low": (DIM,), "high": (DIM,)},
        "queries": (HEADS, 5, DIM),
    }

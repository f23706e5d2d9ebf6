"""What ``adakv`` keeps, against its rule written out with loops in fp64: kvpress's mask over all heads of a layer."""

import pytest
from matrix import HEADS, KV_HEADS, PROMPT, SCALING, Driver, Tokens

from foveate import methods

GROUP = HEADS // KV_HEADS
SECOND = 21


def votes(tokens, kept, window, observing, kernel_size):
    """By KV head, the votes for the tokens that it holds before the window, in their order."""
    length = len(tokens)
    found = []
    for kv, held in enumerate(kept):
        mass = [0.0] * (len(held) - window)
        for head in range(kv * GROUP, (kv + 1) * GROUP):
            one = [0.0] * len(mass)
            for query in range(length - observing, length):
                seen = [p for p in held if p <= query]
                weights = (tokens.k[0, kv, seen].double() @ tokens.q[0, head, query].double() * SCALING).softmax(0)
                one = [a + float(w) for a, w in zip(one, weights)]
            for i in range(len(mass)):
                near = range(i - kernel_size // 2, i + kernel_size // 2 + 1)
                mass[i] += sum(one[j] for j in near if 0 <= j < len(mass)) / kernel_size
        found.append(mass)
    return found


def masked(kept, mass, window, top_k, floor):
    """What is left of each head when the weakest tokens of all heads are masked, but for a floor and the window."""
    most = max(max(one) for one in mass)
    scores = [[*one, *[most] * window] for one in mass]
    for one in scores:
        best = sorted(range(len(one)), key=lambda i: (-one[i], -i))  # the window first, of what is alike
        for i in best[: int(floor * (top_k + window))]:
            one[i] = float("inf")
    every = [(score, i, kv) for kv, one in enumerate(scores) for i, score in enumerate(one)]
    pruned = {(kv, i) for _, i, kv in sorted(every)[: max(len(every) - KV_HEADS * (top_k + window), 0)]}
    return [[p for i, p in enumerate(held) if (kv, i) not in pruned] for kv, held in enumerate(kept)]


@pytest.mark.parametrize("seed", range(8))
def test_what_each_head_keeps_of_two_turns(seed):
    """In the second turn heads hold different numbers of tokens, and the prompt comes in two pieces."""
    top_k, window, kernel_size = 12, 6, 3
    method = methods.make("adakv", top_k=top_k, window=window, kernel_size=kernel_size)
    end = PROMPT + 3 + SECOND
    tokens, driver, kept = Tokens.random(1, end, seed), Driver(method), [list(range(PROMPT))] * KV_HEADS
    tokens.q[:, :GROUP] *= 4.0  # so that the attention of one head is less spread than the other's

    def held():
        return [sorted(p for p in own if p >= 0) for own in driver.store.positions[0].tolist()]

    driver.feed(tokens[:PROMPT])
    kept = masked(kept, votes(tokens[:PROMPT], kept, window, window, kernel_size), window, top_k, 0.2)
    assert held() == kept
    assert sum(map(len, kept)) == KV_HEADS * (top_k + window)
    assert len(kept[0]) != len(kept[1])
    driver.feed_steps(tokens[PROMPT : PROMPT + 3])
    driver.layer.phase.prompt_end = end
    driver.feed(tokens[PROMPT + 3 : end - 2])
    driver.feed(tokens[end - 2 :])
    kept = [[*own, *range(PROMPT, end)] for own in kept]
    kept = masked(kept, votes(tokens, kept, window, window, kernel_size), window, top_k, 0.2)
    assert held() == kept

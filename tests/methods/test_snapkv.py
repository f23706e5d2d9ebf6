"""SnapKV: whose queries vote."""

import pytest
import torch
from matrix import Driver, Tokens

from foveate import methods


@pytest.mark.parametrize("decoded", [0, 6], ids=["at_once", "after_an_answer"])
def test_a_turn_shorter_than_the_window_observes_with_its_own_queries_alone(decoded):
    """The first turn fits the budget; whatever its queries were, the second turn's choose what is kept."""
    method = methods.make("snapkv", top_k=12, window=8, kernel_size=1)
    first, length = 18, 18 + decoded + 5
    tokens, others = Tokens.random(1, length), Tokens.random(1, length, seed=1)
    kept = []
    for first_queries in (tokens.q, others.q):
        driver = Driver(method, first)
        asked = Tokens(torch.cat([first_queries[:, :, :first], tokens.q[:, :, first:]], 2), tokens.k, tokens.v)
        driver.feed(asked[:first])
        assert driver.store.used == first
        if decoded:
            driver.feed_steps(asked[first : first + decoded])
        driver.layer.phase.prompt_end = length
        driver.feed(asked[first + decoded :])
        assert driver.store.used == 20
        kept.append(driver.store.positions)
    assert torch.equal(*kept)

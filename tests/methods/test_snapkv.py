"""SnapKV: whose queries vote."""

import torch
from matrix import Driver, Tokens

from foveate import methods


def test_a_turn_shorter_than_the_window_observes_with_its_own_queries_alone():
    method = methods.make("snapkv", top_k=12, window=8, kernel_size=1)
    tokens, others = Tokens.random(1, 23), Tokens.random(1, 23, seed=1)
    kept = []
    for first_queries in (tokens.q, others.q):
        driver = Driver(method, 18)
        asked = Tokens(torch.cat([first_queries[:, :, :18], tokens.q[:, :, 18:]], 2), tokens.k, tokens.v)
        driver.feed(asked[:18])
        assert driver.store.used == 18
        driver.layer.phase.prompt_end = 23
        driver.feed(asked[18:])
        assert driver.store.used == 20
        kept.append(driver.store.positions)
    assert torch.equal(*kept)

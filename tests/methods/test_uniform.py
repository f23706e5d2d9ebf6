"""Even spacing, also over what an earlier turn has thinned out."""

import torch
from matrix import Driver, Tokens

from foveate import methods


def test_tokens_are_evenly_spaced_after_every_turn():
    method = methods.make("uniform", top_k=40, window=8)
    tokens = Tokens.random(1, 800)
    driver = Driver(method, 400)
    for end in (400, 800):
        driver.layer.phase.prompt_end = end
        driver.feed(tokens[end - 400 : end])
        positions = driver.store.positions[0, 0].long()
        assert len(positions) == 48
        assert torch.equal(positions[-8:], torch.arange(end - 8, end))
        gaps = positions[:40].diff()
        assert gaps.min() >= 1
        assert gaps.max() <= 2 * end / 40
        assert abs(int((positions[:40] < end / 2).sum()) - 20) <= 1

"""What a method declares that it scores, on SparQ: the matrix passes what is so, and nothing else."""

import types

import matrix
import pytest
import torch

from foveate.methods import sparq
from foveate.runtime import decode
from foveate.state import Channel

SMALL = {"top_k": 9, "rank": 4, "window": 3}


class DeclaresNothing(sparq.SparQ):
    def scored(self, tokens, geometry, dtype):
        return tokens * 0.0


class DeclaresOfTheKeyAlone(sparq.SparQ):
    def scored(self, tokens, geometry, dtype):
        return tokens * self.rank / geometry.head_dim


class DeclaresWholeKeys(sparq.SparQ):
    def scored(self, tokens, geometry, dtype):
        return tokens * geometry.key_share


class DeclaresOneDimensionLess(sparq.SparQ):
    def scored(self, tokens, geometry, dtype):
        return super().scored(tokens, geometry, dtype) * (self.rank - 1) / self.rank


class ScoresAnUndeclaredCopy(DeclaresNothing):
    def channels(self, geometry):
        return super().channels(geometry) | {"copy": Channel((geometry.head_dim,), recomputed=True)}

    def prompt_end(self, cache, scaling):
        cache.channel("copy").copy_(cache.keys)

    def _approximate(self, cache, q, scaling):
        copy = cache.channel("copy")
        copy[:, :, -1] = cache.keys[:, :, -1]
        names = ("geometry", "positions", "sink_logits", "logits")
        seen = types.SimpleNamespace(keys=copy, **{name: getattr(cache, name) for name in names})
        return super()._approximate(seen, q, scaling)


WRONG = {  # of 71 keys 9 are read whole, and of each 4 numbers of 32 are scored: 8.875 keys
    DeclaresNothing: "not close",
    DeclaresOfTheKeyAlone: "8.875 == 17.75",
    DeclaresWholeKeys: "8.875 == 35.5",
    DeclaresOneDimensionLess: "8.875 == 6.65625",
    ScoresAnUndeclaredCopy: "8.875 == 0.0",
}
"""Methods that differ from SparQ in one thing, and what the matrix finds: what is so, and what should be."""


@pytest.mark.parametrize(("wrong", "message"), WRONG.items(), ids=[wrong.__name__ for wrong in WRONG])
def test_the_matrix_fails_what_is_declared_wrongly(wrong, message):
    with pytest.raises(AssertionError, match=message):
        matrix.test_unselected_keys_may_be_nan_and_counters_tell_the_truth(wrong(**SMALL))


@pytest.mark.parametrize(("times", "message"), [(0, "9.0 == 17.875"), (2, "26.75 == 17.875")])
def test_the_matrix_fails_what_is_counted_wrongly(monkeypatch, times, message):
    count = decode._count_scored
    monkeypatch.setattr(decode, "_count_scored", lambda *args: [count(*args) for _ in range(times)])
    with pytest.raises(AssertionError, match=message):
        matrix.test_unselected_keys_may_be_nan_and_counters_tell_the_truth(sparq.SparQ(**SMALL))


def test_the_share_that_is_found_is_that_of_every_key():
    tokens, driver = matrix.Tokens.random(1, 40), matrix.Driver(sparq.SparQ(**SMALL), 35)
    driver.feed(tokens[:35])
    driver.feed_steps(tokens[35:39])
    found = matrix.scored(driver, tokens[39:])
    assert torch.equal(found, torch.full((matrix.KV_HEADS, 40), 4 / 32, dtype=torch.float64))


def test_what_is_scored_counts_once_for_each_token_of_rows_of_several_lengths():
    prompts = [matrix.Tokens.random(1, length, seed=length) for length in (40, 23)]
    driver = matrix.Driver(sparq.SparQ(**SMALL), 40)
    driver.feed(*matrix.padded(prompts, 40))
    driver.feed(matrix.Tokens.random(2, 1))
    assert float(driver.layer.counters.keys_read) == 2 * 9 + (41 + 24) * 4 / 32

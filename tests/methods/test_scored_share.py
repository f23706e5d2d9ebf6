"""The share of a key that a method scores, on SparQ: the matrix passes what it declares, and nothing else."""

import inspect
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import matrix
import pytest
import torch
from torch import Tensor

from foveate import methods, ops
from foveate.methods._common import count_scored
from foveate.methods.base import Method, setting
from foveate.methods.budgets import Number, budget, clamp
from foveate.state import Channel, Geometry, SlotCache


@dataclass(frozen=True)
class PlainSparQ(Method):
    """SparQ in parts that tests can change: a decoded token scores every key by the dimensions in which its
    query is largest, and reads the best keys whole. It has no window, and no mean of the values.
    """

    source: ClassVar[str] = "SparQ Attention, Ribar et al. 2024, arXiv:2312.04985"
    stateful: ClassVar[bool] = False
    needs_prompt_end: ClassVar[bool] = True
    full_budget: ClassVar[dict] = {"top_k": 1.0}
    small_budget: ClassVar[dict] = {"top_k": 9, "rank": 4}

    top_k: int | float = setting(0.1, "keys read: a number, or a share of the tokens so far")
    min_k: int = setting(128, "least number of keys when top_k is a share")
    rank: int = setting(8, "dimensions of each key that are scored")

    def __post_init__(self):
        self._check_budget("top_k")
        self._check_count("min_k")
        self._check_count("rank", 1)

    def scored_share(self, geometry: Geometry, dtype: torch.dtype) -> float:
        return self.rank / (geometry.head_dim + geometry.value_dim)

    def decode(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        indices = self.select(cache, q, scaling)
        cache.count_read((indices >= 0).sum(-1))
        self.count_scored(cache)
        how = {"scaling": scaling, "sink_logits": cache.sink_logits, "softcap": cache.softcap}
        return ops.attend_indices(q, cache.keys, cache.values, indices, **how).out

    def select(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """Slots of the keys that are read, int ``[B, Hkv, K]``, -1 for none."""
        rows, keys = ops.fold_group(q, cache.geometry.num_kv_heads).float(), self.scored_keys(cache)
        dims = rows.abs().sum(2, keepdim=True).topk(self.scored_dims).indices
        part = rows.gather(3, dims.expand(-1, -1, rows.shape[2], -1))
        keys = keys.gather(3, dims.expand(-1, -1, keys.shape[2], -1)).float()
        seen = part.abs().sum(3, keepdim=True) / rows.abs().sum(3, keepdim=True)
        logits = part @ keys.transpose(2, 3) * scaling / seen.sqrt()  # the paper's temperature; the paper has no cap
        holes = cache.holes()
        logits = logits if holes is None else logits.masked_fill(~holes[:, :, None], float("-inf"))
        return ops.topk_rows(logits.softmax(3).mean(2), cache.each_row(self.count), cache.most(self.count))

    def count(self, length: Number) -> Number:
        """Keys that a row of this length may read."""
        return clamp(budget(self.top_k, length, self.min_k), 1, length)

    # What the wrong ones change

    @property
    def scored_dims(self) -> int:
        return self.rank

    def scored_keys(self, cache: SlotCache) -> Tensor:
        return cache.keys

    def count_scored(self, cache: SlotCache) -> None:
        count_scored(self, cache)


PlainSparQ.name = "plain_sparq"  # given to a finished class, which does not register: it is no method of the library


class DeclaresNothing(PlainSparQ):
    def scored_share(self, geometry: Geometry, dtype: torch.dtype) -> float:
        return 0.0


class DeclaresOfTheKeyAlone(PlainSparQ):
    def scored_share(self, geometry: Geometry, dtype: torch.dtype) -> float:
        return self.rank / geometry.head_dim


class DeclaresWholeKeys(PlainSparQ):
    def scored_share(self, geometry: Geometry, dtype: torch.dtype) -> float:
        return geometry.key_share


class ScoresOneDimensionMore(PlainSparQ):
    @property
    def scored_dims(self) -> int:
        return self.rank + 1


class CountsNothing(PlainSparQ):
    def count_scored(self, cache: SlotCache) -> None:
        pass


class CountsTwice(PlainSparQ):
    def count_scored(self, cache: SlotCache) -> None:
        count_scored(self, cache)
        count_scored(self, cache)


class ScoresAnUndeclaredCopy(DeclaresNothing):
    def channels(self, geometry: Geometry) -> dict[str, Channel]:
        return {"copy": Channel((geometry.head_dim,), recomputed=True)}

    def prompt_end(self, cache: SlotCache, scaling: float) -> None:
        cache.channel("copy").copy_(cache.keys)

    def scored_keys(self, cache: SlotCache) -> Tensor:
        cache.channel("copy")[:, :, -1] = cache.keys[:, :, -1]
        return cache.channel("copy")


WRONG = {  # of 71 keys 9 are read whole, and of each 4 numbers of 32 are scored: 8.875 keys
    DeclaresNothing: "not close",
    DeclaresOfTheKeyAlone: "8.875 == 17.75",
    DeclaresWholeKeys: "8.875 == 35.5",
    ScoresOneDimensionMore: "11.09375 == 8.875",
    CountsNothing: "9.0 == 17.875",
    CountsTwice: "26.75 == 17.875",
    ScoresAnUndeclaredCopy: "8.875 == 0.0",
}
"""Methods that differ from SparQ in one thing, and what the matrix finds: what is so, and what should be."""

SMALL = PlainSparQ(**PlainSparQ.small_budget)
OF_THE_METHOD = {"method": (SMALL, PlainSparQ(top_k=0.2, min_k=6, rank=7)), "name": (PlainSparQ.name,)}


OTHERS = {
    "test_preserved_mass_is_declared_not_dense_and_is_not",
    "test_what_is_always_kept_is_always_read",
    "test_every_setting_that_promises_tokens_is_held_to_it",
}
"""Tests of LuKA alone, and of methods that promise to keep some tokens."""


def each_case():
    """Every test of every method in the matrix, with SparQ for the method."""
    for test_name, test in vars(matrix).items():
        given = {} if not test_name.startswith("test_") else dict(mark.args for mark in getattr(test, "pytestmark", ()))
        if test_name in OTHERS or not given.keys() & OF_THE_METHOD.keys():
            continue
        assert inspect.signature(test).parameters.keys() == given.keys()
        values: list[Any] = [OF_THE_METHOD.get(argument, given[argument]) for argument in given]
        for number, chosen in enumerate(itertools.product(*values)):
            yield pytest.param(test, dict(zip(given, chosen)), id=f"{test_name.removeprefix('test_')}-{number}")


CASES = list(each_case())


def test_the_matrix_is_run_whole():
    tests = {case.values[0].__name__ for case in CASES}
    assert tests == {name for name in vars(matrix) if name.startswith("test_")} - OTHERS


@pytest.mark.parametrize(("test", "given"), CASES)
def test_a_method_that_scores_a_part_of_each_key_passes_the_matrix(test, given, monkeypatch):
    monkeypatch.setitem(methods.REGISTRY, PlainSparQ.name, PlainSparQ)
    test(**given)


@pytest.mark.parametrize(("wrong", "message"), WRONG.items(), ids=[wrong.__name__ for wrong in WRONG])
def test_the_matrix_fails_what_is_declared_or_counted_wrongly(wrong, message):
    with pytest.raises(AssertionError, match=message):
        matrix.test_unselected_keys_may_be_nan_and_counters_tell_the_truth(wrong(**PlainSparQ.small_budget))


def test_the_share_that_is_found_is_that_of_every_key():
    tokens, driver = matrix.Tokens.random(1, 40), matrix.Driver(SMALL, 35)
    driver.feed(tokens[:35])
    driver.feed_steps(tokens[35:39])
    found = matrix.scored(driver, tokens[39:])
    assert torch.equal(found, torch.full((matrix.KV_HEADS, 40), 4 / 32, dtype=torch.float64))


def test_what_is_scored_counts_once_for_each_token_of_rows_of_several_lengths():
    prompts = [matrix.Tokens.random(1, length, seed=length) for length in (40, 23)]
    driver = matrix.Driver(SMALL, 40)
    driver.feed(*matrix.padded(prompts, 40))
    driver.feed(matrix.Tokens.random(2, 1))
    assert float(driver.layer.counters.keys_read) == 2 * 9 + (41 + 24) * 4 / 32

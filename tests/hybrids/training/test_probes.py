"""Answers on the way: where they stood before, what counts as right, and rows that no step of training has."""

import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from foveate.hybrids.training import probes
from foveate.hybrids.training.mixture import Mixture
from foveate.hybrids.training.needles import Needles
from foveate.hybrids.training.sources import ANSWER, TEXT, Row
from foveate.hybrids.training.synthetic import Recall


def row(ids, answers):
    roles = np.full(len(ids), TEXT, np.int8)
    roles[answers] = ANSWER
    return Row(np.array(ids, np.int64), roles)


def test_an_answer_is_found_by_its_first_tokens_at_the_nearest_place():
    found = row([5, 6, 7, 9, 5, 6, 8, 1, 5, 6, 7, 4, 2], [8, 9, 10, 11])
    assert list(probes.answers(found)) == [(8, 12, 8)]  # 5 6 7, not the 5 6 8 that is nearer
    pairs = row([11, 21, 12, 22, 1, 1, 12, 22, 11, 21], [7, 9])  # of a single token with its key
    assert list(probes.answers(pairs)) == [(7, 8, 4), (9, 10, 8)]
    assert list(probes.answers(row([1, 2, 3, 4], [2, 3]))) == []  # stands nowhere before
    for places in ([0, 5], [5, 0, 10], [10]):  # of several, the nearest
        ids = np.arange(100, 130)
        for place in [*places, 20]:
            ids[place : place + 4] = [5, 6, 7, 8]
        assert [one.distance for one in probes.answers(row(ids, range(20, 24)))] == [20 - max(places)]


class Copies:
    """Says at every place the token that stood `far` tokens before the next one."""

    def __init__(self, far, vocabulary):
        self.far, self.vocabulary = far, vocabulary
        self.training, self.read_in = True, []

    def __call__(self, input_ids, use_cache):
        self.read_in.append(self.training)
        said = torch.roll(input_ids, self.far - 1, 1)
        return SimpleNamespace(logits=20.0 * torch.nn.functional.one_hot(said, self.vocabulary))

    def train(self, training=True):
        self.training = training

    def eval(self):
        self.training = False


def test_near_and_far_are_told_apart():
    """A model that copies from eight tokens before answers the far one, and begins the near one with luck."""
    made = object.__new__(probes.Probes)
    made.far, pattern = 6, [5, 6, 7, 3]
    far = row([*pattern, 1, 1, 1, 1, *pattern], [8, 9, 10, 11])
    near = row([1, 1, 1, 1, *pattern, *pattern], [8, 9, 10, 11])
    made.rows = {"needles": [far, near]}
    made.answers = {"needles": [list(probes.answers(one)) for one in (far, near)]}
    model = Copies(8, 9)
    found = made.measure(model, torch.device("cpu"), contextlib.nullcontext)["needles"]
    assert made.measure(model, torch.device("cpu"), contextlib.nullcontext, training=True)["needles"] == found
    assert model.read_in == [False, True]  # as in inference unless it is asked otherwise
    assert model.training  # which goes on
    assert (found["far"]["right"], found["far"]["begun"], found["far"]["n"]) == (100.0, 100.0, 1)
    assert (found["near"]["right"], found["near"]["begun"], found["near"]["n"]) == (0.0, 0.0, 1)
    assert found["far"]["loss"] == pytest.approx(math.log(1 + 8 * math.exp(-20)), abs=1e-6)
    assert found["near"]["loss"] == pytest.approx(20.0, abs=0.1)


def test_probes_are_fresh_rows_of_generated_sources(store):
    sources = [Needles(share=0.5, keys=(1, 1)), Recall(share=0.5, pairs=(2, 8))]
    mixtures = [Mixture(store, sources, seed, 10) for seed in (0, 1)]
    one, other = (probes.Probes(mixture, 512, 100) for mixture in mixtures)
    assert {kind: len(rows) for kind, rows in one.rows.items()} == {"needles": 16, "recall": 16}
    asked = {tuple(row.ids) for rows in one.rows.values() for row in rows}
    assert asked == {tuple(row.ids) for rows in other.rows.values() for row in rows}
    trained = {tuple(mixture.row(0, number, 512, 1.0)[0]) for mixture in mixtures for number in range(50)}
    assert not asked & trained
    assert all(len(answers) for answers in one.answers["recall"])

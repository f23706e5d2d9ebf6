"""Decode steps whose heads several ranks hold: together they give what one rank gives that has all heads."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from foveate import methods
from foveate.runtime import EngineSteps
from tests.runtime.test_steps import CAN
from tests.served import BATCHES, BELOW, HEADS, KV_HEADS, LAYERS, LOGITS, SPECS, Served, of_layers

SHARED = [
    "kascade:top_k=0.3,min_k=4,anchors=[1,4],pool=layer",
    "kascade:top_k=0.3,min_k=4,anchors=[0,3],pooling=post_softmax",
    'kascade:top_k=0.1,min_k=4,anchors=[0,3],pool=kv_head,heads={"1": [1, 1], "5": [1, 0]}',
    "kascade_pages:top_k=7,min_k=4,anchors=[1,3],page_size=2,weighted=false",
    "kascade_pages:top_k=7,min_k=4,anchors=[0,3],first_layer=pages,page_size=4,weighted=false",
]


class Threads:
    """Ranks that are threads of this process."""

    def __init__(self, size, rank, shared):
        self.size, self.rank, self.shared = size, rank, shared

    def all(self, x):
        slots, barrier = self.shared
        slots[self.rank] = x.clone()
        barrier.wait(60)
        found = list(slots)
        barrier.wait(60)
        return found

    def mean(self, x):
        assert x.dtype == torch.float32
        return torch.stack(self.all(x)).mean(0)

    def gather(self, x):
        return torch.cat(self.all(x), 1)


def outputs(spec, ranks, batch, audited=False):
    """The outputs of all heads, ``[layers, B, Hq, D]``, dense ones of a step that is audited, and each rank's steps.

    As many ranks as query heads have one KV head each, which several hold.
    """
    served, (lengths, prompts) = Served(), BATCHES[batch]
    own_kv = max(KV_HEADS // ranks, 1)
    shared = [None] * ranks, threading.Barrier(ranks)

    def of_rank(rank):
        steps = EngineSteps(
            of_layers(spec), served.device, BELOW, None, None if ranks == 1 else Threads(ranks, rank, shared)
        )
        heads = slice(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
        first = rank * KV_HEADS // ranks
        kv = [[x[:, first : first + own_kv] for x in served.kv(n)] for n in range(LAYERS)]
        for n in range(LAYERS):
            every = torch.arange(served.memory.shape[1] * served.memory.shape[3])
            steps.written(n, HEADS // ranks, *kv[n], every)
        served.begin(steps, lengths, prompts)
        with steps.audit() if audited else contextlib.nullcontext() as steps.noted:
            outs = [steps.attend(n, served.q[n][:, heads], *kv[n], LOGITS)[:, :, 0] for n in range(LAYERS)]
        return torch.stack(outs), steps

    served.fill(lengths)
    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(of_rank, range(ranks)))
    return torch.cat([outs for outs, _ in found], 2), [steps for _, steps in found]


@pytest.mark.parametrize("batch", ["long", "padding", "chunks of one token of prompts"])
@pytest.mark.parametrize("spec", [*SPECS, *SHARED])
def test_two_ranks_give_the_outputs_of_one(spec, batch):
    expected, (one,) = outputs(spec, 1, batch)
    found, steps = outputs(spec, 2, batch)
    torch.testing.assert_close(found, expected)
    assert [own.totals for own in steps] == [one.totals] * 2
    if all(method.pools_layer for method in one.methods.values()):  # all read as many keys for each head
        assert [float(own.keys_read()) for own in steps] == pytest.approx([float(one.keys_read())] * 2)


def test_every_method_that_is_served_is_tested_here():
    assert {methods.parse(spec).name for spec in [*SPECS, *SHARED]} >= CAN


@pytest.mark.parametrize("spec", [spec for spec in [*SPECS, *SHARED] if of_layers(spec)[0].pools_layer])
def test_more_ranks_than_kv_heads_choose_alike_where_a_layer_chooses_once(spec):
    torch.testing.assert_close(outputs(spec, 4, "long")[0], outputs(spec, 1, "long")[0])


def test_ranks_that_do_not_ask_each_other_would_choose_otherwise(monkeypatch):
    """So that the tests above can fail; an audit tells."""
    expected, (one,) = outputs(SHARED[0], 1, "long", audited=True)
    found, steps = outputs(SHARED[0], 2, "long", audited=True)
    torch.testing.assert_close(found, expected)
    assert not one.noted.alike
    for own in steps:
        assert len(own.noted.alike) == len(own.noted.mass) == LAYERS - 1, "layer 0 reads all keys and chooses none"
        assert torch.stack(own.noted.alike).min() == 1
    monkeypatch.setattr(Threads, "mean", lambda self, x: x)
    assert not torch.allclose(outputs(SHARED[0], 2, "long")[0], outputs(SHARED[0], 1, "long")[0], atol=1e-3)
    for own in outputs(SHARED[0], 2, "long", audited=True)[1]:
        assert torch.stack(own.noted.alike).mean() < 0.5

"""What layers leave for each other, and prompts that are cropped before their end."""

import pytest
import torch

import foveate
from tests.helpers import cached, tiny_model

METHODS = [
    "quest:top_k=9,page_size=3,dense_layers=0",
    "kascade_paper:anchors=1,top_k=6,tile=1",
    'kascade_paper:anchors=[0,1],heads={"2":[1,1]},top_k=6,tile=1',
    "dense",
]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def ids():
    return torch.randint(3, 90, (1, 48), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_a_prompt_cropped_before_its_end_goes_on_as_if_nothing_had_been(model, ids, method):
    with foveate.attached(model, method):
        cropped, fresh = (foveate.Cache(model, prompt_length=40) for _ in range(2))
        model(torch.cat([ids[:, :20], ids[:, :10]], 1), **cached(cropped))
        cropped.crop(-10)
        for cache in (cropped, fresh):
            model(ids[:, cache.get_seq_length() : 40], **cached(cache))
        for i in range(40, 48):
            outs = [model(ids[:, i : i + 1], **cached(cache)).logits for cache in (cropped, fresh)]
            torch.testing.assert_close(*outs)


@torch.no_grad()
def test_nothing_gathers_while_a_model_in_training_generates(model, ids):
    with foveate.attached(model.train(), METHODS[1]):
        cache, left = foveate.Cache(model, prompt_length=40), set()
        model(ids[:, :40], **cached(cache))
        for i in range(40, 48):
            model(ids[:, i : i + 1], **cached(cache))
            left.add(len(cache.phase.forward))
        assert left == {0}
    model.eval()

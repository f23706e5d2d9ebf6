"""Decode steps that docs/guide/models.md says are replayed on a GPU: they are, with the tokens of ordinary steps."""

import pytest
import torch

import foveate
from tests.families import FAMILIES, family
from tests.helpers import generate, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", FAMILIES)
def test_replayed_steps(name):
    model = family(name).cuda()
    try:
        with foveate.attached(model, "h2o", top_k=16, window=4, cuda_graph=False):
            ordinary = generate(model, tokens(60, 2).cuda(), 24)
        with foveate.attached(model, "h2o", top_k=16, window=4) as attachment:
            found = generate(model, tokens(60, 2).cuda(), 24)
            used = foveate.stats(model).graphs
            sliding = any("sliding" in kind for kind in attachment.unchanged.values())
    finally:
        model.cpu()
    assert torch.equal(found, ordinary)
    assert (used.replayed > 0) == (not sliding), used.reason

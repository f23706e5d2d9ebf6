"""Every kernel and every method's replayed steps once, on little data. Run with `make smoke-gpu`."""

import importlib

import pytest
import small_run
import torch
from test_graphs_on_gpu import SPECS

import foveate
from foveate.ops import dispatch
from tests.helpers import generate, left_padded, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.smoke]


@pytest.mark.parametrize("name", small_run.parts())
@pytest.mark.filterwarnings("error:.*slower reference")
def test_kernels_run(name, monkeypatch):
    """What they compute is for other tests to say; ``make sanitize`` checks that the parts reach all of them."""
    ran = set()
    for verb, kernel in dispatch._verbs.items():
        module = importlib.import_module(kernel)
        monkeypatch.setattr(module, verb, small_run.noted(getattr(module, verb), verb, ran))
    with torch.inference_mode():
        small_run.parts()[name]()
    torch.cuda.synchronize()
    assert ran


@pytest.mark.parametrize("spec", SPECS)
def test_steps_are_replayed(spec):
    batch = {name: x.cuda() for name, x in left_padded([60, 41, 3]).items()}
    outs = []
    for cuda_graph in (False, True):
        model = tiny_model().cuda()
        foveate.attach(model, spec, cuda_graph=cuda_graph, dense_below=0)
        outs.append(generate(model, **batch, new=70))
    assert torch.equal(*outs)
    assert foveate.stats(model).graphs.replayed >= 30

"""The trainable page summariser: its weights, its file, its place in LuKA."""

import pytest
import torch
from matrix import KV_HEADS, PROMPT, Driver, Tokens, close

from foveate import methods
from foveate.layers.page_summariser import PageSummariser

SMALL = {"page_size": 4, "sinks": 2, "tail": 9, "compress_every": 3, "top_k": 2}


@pytest.fixture
def summariser():
    torch.manual_seed(0)
    made = PageSummariser(3, KV_HEADS, 16)
    torch.nn.init.normal_(made.direction)
    return made


def run(method):
    tokens = Tokens.random(1, PROMPT + 8)
    driver = Driver(method)
    driver.feed(tokens[:PROMPT])
    return driver.feed_steps(tokens[PROMPT:])


def trained(path, layer=1, num_layers=3):
    return methods.make("luka", compressor="trained", summariser=str(path), **SMALL).for_layer(layer, num_layers)


def test_untrained_is_the_mean_and_trained_is_not(tmp_path, summariser):
    PageSummariser(3, KV_HEADS, 16).save(tmp_path / "zero.safetensors")
    summariser.save(tmp_path / "some.safetensors")
    mean = run(methods.make("luka", **SMALL))
    close(run(trained(tmp_path / "zero.safetensors")), mean)
    outs = [run(trained(tmp_path / "some.safetensors", layer)) for layer in (0, 1)]
    assert (outs[0] - mean).abs().max() > 1e-3
    assert (outs[0] - outs[1]).abs().max() > 1e-3


def test_weights_are_a_softmax_over_the_used_children_and_have_gradients(summariser):
    k = torch.randn(2, KV_HEADS, 5, 4, 16)
    used = torch.ones(1, 1, 5, 4, dtype=torch.bool)
    used[..., 2, 3] = False
    weights = summariser(k, 2, used)
    expected = (k.double() @ summariser.direction[2].double()[None, :, None, :, None])[..., 0]
    expected = expected.masked_fill(~used, float("-inf")).softmax(-1).float()
    close(weights, expected)
    (weights * k[..., 0]).sum().backward()
    assert summariser.direction.grad[2].abs().sum() > 0
    assert summariser.direction.grad[0].abs().sum() == 0


def test_file_round_trip_and_what_does_not_fit(tmp_path, summariser):
    path = tmp_path / "some.safetensors"
    summariser.save(path)
    assert torch.equal(PageSummariser.load(path).direction, summariser.direction)
    with pytest.raises(ValueError, match=r"trained for 3 layers, but the model has 4"):
        trained(path, 0, 4)
    PageSummariser(3, KV_HEADS, 8).save(path)
    with pytest.raises(ValueError, match="trained for another model"):
        run(trained(path))
    path.write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match="not a page summariser"):
        trained(path)
    with pytest.raises(ValueError, match="not a page summariser"):
        trained(tmp_path / "missing")


@pytest.mark.parametrize("settings", [{"compressor": "trained"}, {"summariser": "x"}])
def test_file_and_compressor_belong_together(settings):
    with pytest.raises(ValueError, match="summariser must be a file under compressor=trained"):
        methods.make("luka", **settings)

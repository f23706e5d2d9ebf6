"""`foveate.lab.time_step`: decode steps of a model in memory."""

import pytest

import foveate
from foveate import lab
from foveate.errors import UserError
from foveate.integrations.transformers import loading
from foveate.lab import stepping
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return loading.load_model(tiny.build(tmp_path_factory.mktemp("models") / "tiny-llama"), "float32", "cpu")


def test_methods_are_timed_beside_dense_attention(model, monkeypatch):
    monkeypatch.setattr(stepping, "_WARM_UP", 3)
    found = lab.time_step(model, ["pages:top_k=32", "snapkv:top_k=16"], tokens=200, batch=2, steps=4, rounds=2)
    dense, pages, snapkv = found
    assert [one.method for one in found] == ["dense", "pages:top_k=32", "snapkv:top_k=16"]
    assert dense.times_as_fast == dense.keys_read_share == 1.0
    assert pages.times_as_fast == pytest.approx(dense.ms / pages.ms)
    assert 0 < pages.keys_read_share < 1
    assert snapkv.resident_bytes < dense.resident_bytes < pages.resident_bytes
    assert not any(one.replayed for one in found), "there are no CUDA graphs on a CPU"
    assert getattr(model, "foveate", None) is None


def test_a_bound_makes_steps_dense(model, monkeypatch):
    monkeypatch.setattr(stepping, "_WARM_UP", 1)
    _, pages = lab.time_step(model, ["pages:top_k=32"], tokens=100, steps=2, rounds=1, dense_below=10_000)
    assert pages.keys_read_share == 1.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tokens": 0}, "tokens must be at least 1, got 0"),
        ({"tokens": 9, "batch": 0}, "batch must be at least 1, got 0"),
        ({"tokens": 10**6}, "context and steps need 1,000,085 positions, and the model has 2,048"),
        ({"tokens": 9, "methods": ["page"]}, "did you mean 'pages'"),
        ({"tokens": 9, "methods": ["kascade:anchors=[9]"]}, "method 'kascade:anchors=\\[9\\]' cannot be applied"),
    ],
)
def test_what_cannot_be(model, given, words):
    with pytest.raises(UserError, match=words):
        lab.time_step(model, given.pop("methods", ["pages"]), **given)
    assert getattr(model, "foveate", None) is None


def test_a_model_with_a_method_is_refused(model):
    with foveate.attached(model, "pages"), pytest.raises(UserError, match="has a method already"):
        lab.time_step(model, ["pages"], tokens=9)

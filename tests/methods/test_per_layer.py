"""Methods made of others."""

import json

import pytest

from foveate import methods
from foveate.calibration import say_once
from foveate.lab import checks
from foveate.methods import base, spec

SPECS = ['mixed:clustered="luka:top_k=3"', 'per_layer:layers={"0-1": "h2o:window=9", "rest": "luka:page_size=[4,8]"}']


@pytest.mark.parametrize("spec", SPECS)
def test_settings_hold_the_inner_methods_complete_and_make_the_same_method(spec):
    method = methods.parse(spec)
    settings = json.loads(json.dumps(methods.settings_of(method)))
    inner = settings["layers"] if method.name == "per_layer" else {key: settings[key] for key in ("lined", "clustered")}
    for own in inner.values():
        made = methods.make(own["method"])
        assert own.keys() == {"method", *methods.settings_of(made)}
    assert methods.make(method.name, **settings) == method


@pytest.mark.parametrize("spec", ['per_layer:layers={"0":"dense","rest":"kascade:top_k=9"}', "mixed:clustered=kascade"])
def test_kascade_in_few_layers_has_no_more_anchors_than_they_are(spec):
    """The number of anchors was not given, so that few layers get fewer of them, as a model of few layers does."""
    method = methods.parse(spec)
    assert "anchors" not in method.spec
    for layers in (3, 4, 12):
        inner = [one for one in (method.for_layer(layer, layers) for layer in range(layers)) if one.name == "kascade"]
        assert sum(one.role.chooses or one.role.has_readers for one in inner) <= min(5, len(inner))


def test_auto_does_not_say_that_it_has_looked_for_a_calibration():
    say_once.cache_clear()
    with pytest.warns(UserWarning, match="^auto: pages, because within another method no calibration is looked for$"):
        method = methods.make("per_layer", layers={"rest": "auto"})
    assert method.layers == {"rest": "pages"}


@pytest.mark.parametrize(
    ("inner", "stateful", "captured", "tile"),
    [
        (["dense", "dense"], False, True, 0),
        (["dense", "pages:page_size=4,top_k=32"], False, True, 0),
        (["pages:every=2", "dense"], True, True, 0),
        (["h2o", "luka"], True, True, 0),
        (["kascade_paper:tile=6", "streaming"], True, True, 3),
        (["kascade_paper:tile=8", "oracle_topk:tile=12"], False, True, 12),
    ],
)
def test_declared_facts_are_those_of_all_inner_methods(inner, stateful, captured, tile):
    per_layer = methods.make("per_layer", layers={"0": inner[0], "rest": inner[1]})
    for method in (per_layer, methods.make("mixed", lined=inner[0], clustered=inner[1])):
        assert method.stateful == stateful
        assert (methods.replay_obstacle(method) == "") == captured
        assert method.prompt_tile(2) == tile


def test_a_layer_that_is_not_captured_keeps_all_steps_from_it(monkeypatch):
    monkeypatch.setattr(base, "REGISTRY", base.REGISTRY.copy())
    monkeypatch.setattr(spec, "REGISTRY", base.REGISTRY)

    @base.register
    class Uncaptured(methods.Method):
        name = "uncaptured"

    assert methods.make("uncaptured").replay is None
    for method in ('per_layer:layers={"0":"uncaptured","rest":"dense"}', "mixed:lined=uncaptured"):
        assert "reads numbers on the host" in methods.replay_obstacle(methods.parse(method))


@pytest.mark.parametrize("rest", ["pages:page_size=4,top_k=32", "oracle_topk:top_k=9,min_k=4"])
def test_the_check_of_a_user_holds(rest):
    found = checks.check(f'per_layer:layers={{"0":"dense","rest":"{rest}"}}')
    assert found.passed, str(found)
    assert "not captured" not in str(found)

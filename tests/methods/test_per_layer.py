"""Methods made of others."""

import json

import pytest

from foveate import methods

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

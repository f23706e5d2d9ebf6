"""Rows that record a setting, or a value, that their method has no more: they stand as they were written."""

import json

import pytest

from foveate import methods
from foveate.lab.report.rows import chosen, spelled
from foveate.lab.results.resultfile import method_of
from foveate.methods._settings import spelled_value

GONE = {
    "kascade": {"top_p": 0.95, "remap": False, "score_queries": 0.25, "score_keys": "fp8"},
    "pages": {"score": "bound", "dense_layers": 1},
    "quest": {"min_pages": 1},
    "streaming": {"min_window": 4},
    "mixed": {"ends": 0.5},
    "sparq": {"mean_value": False},
    "adakv": {"floor": 0.5},
    "expected_attention": {"future": 64},
}


def row(method, **settings):
    pieces = ",".join(f"{name}={spelled_value(value)}" for name, value in settings.items())
    made = {**json.loads(json.dumps(methods.settings_of(methods.make(method)))), **settings}
    return {"method": method, "spec": f"{method}:{pieces}", "settings": made, "task_settings": {}}


@pytest.mark.parametrize(("name", "setting"), [(name, setting) for name, of in GONE.items() for setting in of])
def test_a_row_with_a_setting_that_is_gone_stands_and_its_spec_is_refused(name, setting):
    old = row(name, **{setting: GONE[name][setting]})
    assert method_of(old) is None
    assert spelled(old) == old
    assert chosen([row("dense"), old, row(name)], [f"spec={old['spec']}"]) == [row("dense"), old]
    with pytest.raises(ValueError, match=f"{name} has no setting {setting!r}|{setting} must be one of"):
        methods.parse(old["spec"])


def test_a_row_that_lacks_a_setting_or_has_it_otherwise_is_of_no_method():
    old = row("pages", top_k=77)
    assert method_of(old).top_k == 77
    del old["settings"]["top_k"]
    assert method_of(old) is None
    assert spelled(old) == old

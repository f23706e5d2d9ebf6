"""Settings of methods that cannot be: beside those of tests/integrations/test_errors.py."""

import contextlib
import dataclasses

import pytest

import foveate
from foveate import methods
from foveate.methods._settings import MOST, MOST_KEPT, spelled_value
from tests.helpers import LargestTensor, generate, tiny_model, tokens


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("kascade", {"anchors": []}, "anchors must be a list of layers"),
        ("kascade", {"anchors": [3, 1]}, "anchors must be rising layer numbers"),
        ("kascade", {"anchors": [0, 4]}, "anchors must be among the layers that it is applied to, .* not 4"),
        ("kascade", {"anchors": 6}, "anchors must be at most 4, the layers that it is applied to, not 6$"),
        ("kascade", {"pooling": "pre_softmax"}, "pooling must be one of post_softmax, sqrt, not 'pre_softmax'"),
        ("kascade", {"heads": [0, 1]}, "heads must be lists of KV heads by layer"),
        ("kascade", {"heads": {"1": [True, False]}}, "heads must be lists of KV heads by layer"),
        ("kascade_paper", {"anchors": [0, 2], "heads": {"2": [0, 1]}}, "heads must be of layers .* not of layer 2"),
        ("kascade", {"anchors": [0, 2], "heads": {"1": [0, 1]}}, "heads must be left out with pool=layer, under which"),
        ("kascade", {"anchors": [[0]]}, "anchors must be rising layer numbers"),
        ("omnikv", {"filters": [0, "a"]}, "filters must be rising layer numbers"),
        ("kascade", {"dense_anchor_prefill": 1}, "dense_anchor_prefill must be true or false"),
        ("kascade", {"score_keys": "int8"}, "kascade has no setting 'score_keys'; it has"),
        ("kascade", {"score_keys": "exact", "top_k": 7}, "no setting 'score_keys' any more: write kascade:top_k=7$"),
        ("kascade", {"score_keys": "pages", "page_size": 4}, "any more: write kascade_pages:page_size=4$"),
        ("kascade", {"first_layer": "pages"}, "kascade has no setting 'first_layer'; it has"),
        ("kascade_pages", {"first_layer": "sparse"}, "first_layer must be one of dense, pages, not 'sparse'"),
        ("kascade_pages", {"weighted": 1}, "weighted must be true or false"),
        ("kascade_pages", {"page_size": 1}, "page_size must be 2 to 64, not 1"),
        ("kascade_pages", {"page_size": 65}, "page_size must be 2 to 64, not 65"),
        ("kascade", {"tile": 0}, "tile must be an integer of at least 1"),
        ("omnikv", {"filters": [0.5, 1]}, "filters must be rising layer numbers, or depths"),
        ("omnikv", {"filters": "2,8"}, "filters must be a list of layers"),
        ("omnikv", {"score": "last"}, "score must be one of softmax, logit, not 'last'"),
        ("lessismore", {"recent": 1.0}, "recent must be a float in"),
        ("lessismore", {"selections": [9]}, "selections must be among the layers that it is applied to"),
        ("locks", {"page_size": 1}, "page_size must be 2 to 64, not 1"),
        ("locks", {"page_size": 65}, "page_size must be 2 to 64, not 65"),
        ("locks", {"rank": 0}, "rank must be an integer of at least 1"),
        ("locks", {"rank": 9}, "rank must be at most 8 with pages of 16"),
        ("locks", {"rank": 5, "page_size": 4}, "rank must be at most 4 with pages of 4"),
        ("locks", {"window_pages": 2}, "locks has no setting 'window_pages'"),
        ("pages", {"page_size": 1}, "page_size must be 2 to 64, not 1"),
        ("pages", {"page_size": 65}, "page_size must be 2 to 64, not 65"),
        ("pages", {"page_size": 0}, "page_size must be an integer of at least 1"),
        ("pages", {"rank": 0}, "rank must be an integer of at least 1"),
        ("pages", {"rank": 9}, "rank must be at most 8 with pages of 8"),
        ("pages", {"rank": 3, "page_size": 2}, "rank must be at most 2 with pages of 2"),
        ("pages", {"weighted": 1}, "weighted must be true or false"),
        ("pages", {"window": 9}, "pages has no setting 'window'"),
        ("pages", {"dense_layers": 1}, "pages has no setting 'dense_layers'"),
        ("quest", {"page_size": 0}, "page_size must be an integer of at least 1"),
        ("quest", {"pool": "kv_head"}, "quest has no setting 'pool'"),
        ("quest", {"dense_layers": -1}, "dense_layers must be an integer of at least 0"),
        (
            "rocketkv",
            {"keep": 0},
            r"keep must be an integer of at least 1 \(a number\) or a float in \(0, 1\] \(a share\), not 0",
        ),
        ("rocketkv", {"window": 0}, "window must be an integer of at least 1, not 0"),
        ("rocketkv", {"kernel_size": 4}, "kernel_size must be odd and positive, not 4"),
        ("rocketkv", {"kernel_size": True}, "kernel_size must be odd and positive, not True"),
        ("sparq", {"rank": 0}, "rank must be an integer of at least 1"),
        ("sparq", {"window": 0}, "window must be an integer of at least 1"),
    ],
)
def test_settings_that_cannot_be(name, settings, message):
    with pytest.raises(ValueError, match=message):
        methods.make(name, **settings).for_layer(0, 4)


@pytest.mark.parametrize("name", methods.names())
@pytest.mark.parametrize("number", [1 << 25, 1 << 31, 1 << 40, 1 << 63, 10**30, -(1 << 63)])
def test_no_setting_is_larger_than_any_cache(name, number):
    """Every setting that takes a whole number names itself, before a tensor is made; numbers of layers are checked
    where the model is known."""
    cls = methods.get(name)
    for field in dataclasses.fields(cls):
        if name != "mixed":  # its settings are specs
            with pytest.raises(ValueError, match=field.name):
                methods.make(name, **{**cls.about.small_budget, field.name: number})


def largest(name):
    """The largest value of each setting that may be a whole number, as settings of a method."""
    for field in dataclasses.fields(methods.get(name)):
        for number in (MOST, MOST - 1, MOST_KEPT, MOST_KEPT - 1):
            settings = {**methods.get(name).about.small_budget, field.name: number}
            with contextlib.suppress(ValueError):
                methods.make(name, **settings).for_layer(0, 2)
                yield settings
                break


@pytest.mark.parametrize("name", methods.names())
def test_the_largest_settings_take_the_memory_of_their_windows_alone(name):
    model, ids = tiny_model(), tokens(40)
    for settings in largest(name):
        with foveate.attached(model, name, cuda_graph=False, **settings), LargestTensor() as seen:
            generate(model, ids, 3)
        assert seen.bytes <= MOST_KEPT * 16384, (settings, seen.what)


@pytest.mark.parametrize("written", [{"x": 1}, {"method": 3}, {}])
def test_an_object_that_names_no_method_is_refused(written):
    with pytest.raises(ValueError, match="has its name as 'method'"):
        methods.make("per_layer", layers={"rest": written})


@pytest.mark.parametrize("word", ["true", "null", "None", "True", "NaN", "Infinity", "-1", "word", "a b", '"', "["])
def test_a_text_is_read_as_it_was_written(word):
    """Also a word that JSON or Python reads as something else, such as the name of a file."""
    written = f"x={spelled_value(word)},y=1"
    assert methods.spec._split(written, written) == {"x": word, "y": 1}

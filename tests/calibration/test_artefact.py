"""The file of a calibration: what is written is read again, what is damaged or another model's is refused."""

import json
import math
import re
import warnings

import pytest
import torch

from foveate.calibration import Calibration, load
from foveate.integrations.transformers.facts import model_facts
from tests.helpers import full_disk, tiny_model

MODEL = {"model_type": "llama", "layers": 4, "heads": 6, "kv_heads": 2, "head_dim": 16, "weights": [[0.5, -0.25], None]}
FOUND = {"coverage": [[0.9, None], [0.8, 0.7]], "run": {"model": "tiny é", "tokens": [300, 310]}, "layers": []}


def calibration(**more):
    parts = {"model": MODEL, "anchors": (0, 2), "heads": {"1": [1, 1], "3": [0, 1]}, "found": FOUND}
    return Calibration(**parts | more)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiny.json"


def says(text):
    return pytest.raises(ValueError, match=text)


def facts(model):
    return model_facts(model.config, {n: layer.self_attn for n, layer in enumerate(model.model.layers)})


class TestTheFile:
    def test_is_read_as_it_was_written(self, path):
        calibration().write(path)
        assert load(path) == load(str(path)) == calibration()
        assert list(path.parent.iterdir()) == [path]

    def test_replaces_an_older_one(self, path):
        calibration().write(path)
        calibration(anchors=(0, 1, 2, 3), heads={}).write(path)
        assert load(path).anchors == (0, 1, 2, 3)

    def test_a_full_disk_keeps_the_older_one(self, path):
        calibration().write(path)
        with full_disk(10), pytest.raises(ValueError, match=f"{path}: cannot be written to .File too large"):
            calibration(anchors=(0, 1, 2, 3), heads={}).write(path)
        assert load(path) == calibration()
        assert list(path.parent.iterdir()) == [path]

    def test_is_for_people(self, path):
        calibration().write(path)
        text = path.read_text(encoding="utf-8")
        assert '\n  "anchors": [0, 2],\n' in text
        assert '\n    "1": [1, 1],\n' in text
        assert "\n      [0.9, null],\n" in text
        assert "tiny é" in text
        assert max(map(len, text.splitlines())) < 100

    def test_holds_no_number_that_is_none(self):
        with pytest.raises(ValueError, match="not JSON compliant"):
            calibration(found={"coverage": [math.nan]}).text()


def damaged(**more):
    values = {
        "kind": "foveate calibration",
        "schema": 1,
        "anchors": [0, 2],
        "heads": {"1": [1, 1], "3": [0, 1]},
        "found": FOUND,
    }
    return {name: value for name, value in ({**values, "model": MODEL} | more).items() if value is not ...}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (damaged(kind="rows"), "not a calibration of foveate"),
        (damaged(kind=...), "not a calibration of foveate"),
        ([1, 2], "not a calibration of foveate"),
        (damaged(schema=2), "schema 2, and this version reads 1"),
        (damaged(schema=...), "schema None"),
        *((damaged(**{key: ...}), f"damaged .*{key}") for key in ("anchors", "heads", "model", "found")),
        (damaged(model={**MODEL, "layers": "4"}), "damaged"),
        (damaged(model=[1]), "damaged"),
        *(
            (damaged(model={name: value for name, value in MODEL.items() if name != key}), f"damaged .*{key}")
            for key in ("layers", "kv_heads")
        ),
        *((damaged(anchors=anchors), "its anchors, heads or weights") for anchors in ([2, 0], [0, 0], [0, 4])),
        (damaged(anchors=[]), "damaged"),
        *((damaged(anchors=anchors), "its anchors, heads or weights") for anchors in ([-1, 2], [0.0], [False])),
        *((damaged(anchors=anchors), "damaged") for anchors in (3, "02", None)),
        *(
            (damaged(heads={"1": heads, "3": [0, 1]}), "its anchors, heads or weights")
            for heads in ([0], [0, 2], [0, -1], "01")
        ),
        *(
            (damaged(heads={"1": [1, 1], "3": [0, 1], layer: [0, 1]}), "its anchors, heads or weights")
            for layer in ("4", "-1", "0", "2")
        ),
        (damaged(heads={"1": [1, 1]}), "its anchors, heads or weights"),  # none for layer 3
        (damaged(heads={"1": [True, False], "3": [0, 1]}), "its anchors, heads or weights"),
        (damaged(heads={"x": [0, 1]}), "damaged"),
        (damaged(heads=[[0, 1]]), "damaged"),
        (damaged(heads={"1": 0}), "damaged"),
        (damaged(anchors=[2], heads={"1": [0, 1], "3": [0, 1]}), "its anchors, heads or weights"),
        *(
            (damaged(found={**FOUND, name: [[0.5, value]]}), f"'{name}' must hold numbers from 0 to {most}")
            for name, value, most in (
                *(("coverage", 1.5, 1), ("similarity", -0.2, 1), ("mean_similarity", 10**200, 1), ("importance", 3, 2)),
                *(("coverage", "x", 1), ("coverage", True, 1), ("divergence", -1.0, "1.79769e")),
            )
        ),
        (damaged(model={**MODEL, "weights": [[10**310]]}), "malformed JSON .an integer of 311 digits"),
        (damaged(model={**MODEL, "weights": [[math.inf]]}), "its anchors, heads or weights"),
        (damaged(model={**MODEL, "weights": [["a"]]}), "its anchors, heads or weights"),
        (damaged(model={**MODEL, "weights": 3}), "damaged"),
    ],
)
def test_damage_is_told(path, content, message):
    path.write_text(json.dumps(content))
    with says(f"{re.escape(str(path))}: .*{message}.*foveate calibrate"):
        load(path)


def test_what_is_no_file_of_json_is_told(path):
    with says("no such calibration; `foveate calibrate --model DIR` makes one"):
        load(path)
    with says("is a folder, not a file"):
        load(path.parent)
    for content in (b"", b"{", b"\xff\xfe", b"method,score\n"):
        path.write_bytes(content)
        with says(f"{re.escape(str(path))}: malformed JSON"):
            load(path)


def test_the_file_that_is_whole_passes(path):
    path.write_text(json.dumps(damaged()))
    assert load(path).heads == {"1": [1, 1], "3": [0, 1]}
    path.write_text(json.dumps(damaged(heads={"1": [1, 1]}, found={"layers": [0, 1, 2]})))  # 3 has a sliding window
    assert load(path).heads == {"1": [1, 1]}
    path.write_text(json.dumps(damaged(model={name: value for name, value in MODEL.items() if name != "weights"})))
    with pytest.warns(UserWarning, match=rf"calibration '{re.escape(str(path))}' holds no weights: .* shape alone"):
        load(path).check_model(MODEL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        load(path).check_model(MODEL)


class TestTheModel:
    def test_is_the_same(self):
        calibration().check_model(MODEL)
        calibration().check_layers(4)

    @pytest.mark.parametrize(
        ("name", "value"), [("model_type", "qwen2"), ("layers", 5), ("heads", 8), ("kv_heads", 1), ("head_dim", 64)]
    )
    def test_differs_in_one_fact(self, name, value):
        with says(rf"calibration 'x' is for a model with {name} {MODEL[name]!r}, and this one has {value!r}; .*makes"):
            calibration(source="x").check_model({**MODEL, name: value})

    def test_has_another_depth(self):
        with says("a model with layers 4, and this one has 5"):
            calibration().check_layers(5)

    @pytest.mark.parametrize("weights", [[0.5, 0.25], [0.505, -0.25], [0.5, math.nan]])
    def test_has_other_weights(self, weights):
        with says("another model of the same shape"):
            calibration().check_model({**MODEL, "weights": [weights, None]})

    def test_does_not_tell_its_weights(self):
        calibration().check_model({**MODEL, "weights": []})

    def test_has_some_weights_elsewhere(self):
        calibration().check_model({**MODEL, "weights": [None, [9.0, 9.0]]})
        calibration().check_model({**MODEL, "weights": [[0.5, -0.25], [9.0, 9.0]]})

    @pytest.mark.parametrize("family", ["llama", "qwen2"])
    def test_may_be_in_any_number_format(self, family):
        ours = facts(tiny_model(family))
        assert [len(some) for some in ours["weights"]] == [4] * ours["layers"]
        assert all(math.isfinite(one) for some in ours["weights"] for one in some)
        for one in (torch.float32, torch.bfloat16, torch.float16):
            for other in (torch.float32, torch.bfloat16, torch.float16):
                theirs = facts(tiny_model(family).to(other))
                calibration(model=facts(tiny_model(family).to(one))).check_model(theirs)

    def test_may_be_offloaded_or_quantised_in_part(self):
        model = tiny_model()
        weight = model.model.layers[1].self_attn.q_proj.weight
        model.model.layers[1].self_attn.q_proj.weight = torch.nn.Parameter(torch.empty_like(weight, device="meta"))
        quantised = model.model.layers[2].self_attn.q_proj
        quantised.weight = torch.nn.Parameter(quantised.weight.to(torch.float8_e4m3fn), requires_grad=False)
        ours = facts(tiny_model())
        calibration(model=ours).check_model(facts(model))
        assert [some is None for some in facts(model)["weights"][:4]] == [False, True, True, False][: ours["layers"]]

    def test_is_another_one_of_the_same_shape(self):
        with says("another model of the same shape: its weights differ"):
            calibration(model=facts(tiny_model())).check_model(facts(tiny_model(seed=1)))

    def test_was_trained_further_in_one_layer(self):
        model = tiny_model()
        model.model.layers[2].self_attn.q_proj.weight.data *= 1.1
        with says("its weights differ"):
            calibration(model=facts(tiny_model())).check_model(facts(model))

    def test_tells_facts_that_are_json(self):
        ours = facts(tiny_model("gemma3"))
        assert json.loads(json.dumps(ours)) == ours
        assert [ours[name] for name in ("model_type", "layers", "heads", "kv_heads", "head_dim")] == [
            *("gemma3_text", 4, 6, 2, 16)
        ]

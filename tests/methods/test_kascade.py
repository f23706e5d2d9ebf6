"""Kascade's anchors and heads from the file of a calibration."""

import copy
import json
import warnings

import pytest
import torch

import foveate
from foveate import methods
from foveate.calibration import Calibration, say_once
from foveate.integrations.transformers.facts import model_facts
from foveate.lab.results.resultfile import method_of
from tests.helpers import fingerprint, kascade_by_head, tiny_model, tokens

ANCHORS, HEADS = (0, 1), {"2": [1, 1]}


def write(path, model=None, **more):
    """A calibration for the tiny model, or one of no model in particular."""
    model = tiny_model() if model is None else model
    facts = model_facts(model.config, {n: layer.self_attn for n, layer in enumerate(model.model.layers)})
    Calibration(**{"model": facts | more.pop("facts", {}), "anchors": ANCHORS, "heads": HEADS} | more).write(path)
    return path


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "a, b.json")


@pytest.fixture
def method(path):
    return kascade_by_head(calibration=str(path), top_k=9)


def row(method):
    return json.loads(json.dumps({"method": method.name, "settings": methods.settings_of(method)}))


class TestTheFile:
    def test_has_anchors_and_heads(self, method):
        roles = [method.for_layer(layer, 3).role for layer in range(3)]
        assert [role.reads_choice_of for role in roles] == [None, None, 1]
        assert [role.heads for role in roles] == [None, None, (1, 1)]
        assert [role.name for role in roles] == ["dense", "choosing", "reading"]

    def test_stands_for_them_in_a_spec_that_parses_back(self, method, path):
        assert (
            method.spec == f'kascade:top_k=9,pool=kv_head,pooling=post_softmax,decode_only=false,calibration="{path}"'
        )
        assert methods.parse(method.spec) == method
        assert hash(methods.parse(method.spec)) == hash(method)
        assert method.for_layer(2, 3).spec == method.spec

    def test_is_told_with_them_in_the_settings(self, method, path):
        settings = row(method)["settings"]
        assert (settings["anchors"], settings["heads"]) == ([0, 1], {"2": [1, 1]})
        assert settings["calibration"] == str(path)

    def test_may_be_gone_when_a_row_is_read(self, method, path):
        written = row(method)
        path.unlink()
        again = method_of(written)
        assert again.spec == method.spec
        assert methods.settings_of(again) == methods.settings_of(method)
        assert [again.role_of(layer, range(3)) for layer in range(3)] == [
            method.role_of(layer, range(3)) for layer in range(3)
        ]
        with pytest.raises(ValueError, match="anchors and heads must be left out beside a calibration"):
            foveate.attach(tiny_model(), again)  # nothing tells which model they are for

    def test_is_read_anew_when_a_setting_changes(self, method, path, tmp_path):
        other = write(tmp_path / "other.json", anchors=(0, 2), heads={"1": [0, 0]})
        wider = methods.make(method, top_k=20)
        assert (wider.top_k, wider.anchors, wider._artefact) == (20, (0, 1), method._artefact)
        assert methods.make(method, calibration=str(other)).anchors == (0, 2)
        assert methods.make(method, calibration="").anchors is None
        with pytest.raises(ValueError, match="anchors must be left out beside a calibration"):
            methods.make(method, anchors=[0, 2])

    def test_serves_composed_methods(self, path):
        spec = kascade_by_head(calibration=str(path)).spec
        with pytest.raises(ValueError, match="anchors must be among the layers that it is applied to"):
            methods.make("per_layer", layers={"0": "dense", "rest": spec}).for_layer(2, 3)
        mixed = methods.make("per_layer", layers={"rest": spec})
        assert mixed.for_layer(2, 3).role.heads == (1, 1)
        assert mixed.for_layer(2, 3)._artefact.anchors == ANCHORS
        assert methods.parse(mixed.spec) == mixed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"anchors": 3}, "anchors must be left out beside a calibration, which has them, not 3"),
        ({"anchors": [0, 1]}, r"anchors must be left out beside a calibration, which has them, not \[0, 1\]"),
        ({"heads": {"2": [0, 0]}}, "heads must be left out beside a calibration"),
        ({"anchors": 3, "heads": {"2": [0, 0]}}, "anchors must be left out"),
        ({"calibration": 3}, "calibration must be a file of `foveate calibrate`, not 3"),
        ({"calibration": "nowhere.json"}, "^kascade: nowhere.json: no such calibration"),
        ({"calibration": "auto"}, "^kascade: auto: no such calibration"),
        ({"calibration": "", "anchors": 0}, "anchors must be an integer of at least 1"),
    ],
)
def test_settings_that_do_not_go_together(path, settings, message):
    with pytest.raises(ValueError, match=message):
        methods.make("kascade", **{"calibration": str(path)} | settings)


def test_a_damaged_file_is_no_method(path):
    path.write_text(path.read_text().replace('"anchors": [0, 1]', '"anchors": [1, 0]'))
    with pytest.raises(ValueError, match=r"kascade: .*a damaged calibration"):
        methods.make("kascade", calibration=str(path))


class TestAttached:
    def test_it_is_as_if_anchors_and_heads_were_given(self, method):
        model, ids = tiny_model(), tokens(60)
        given = kascade_by_head(anchors=[0, 1], heads=HEADS, top_k=9)
        with torch.no_grad():
            outs = []
            for one in (method, given, kascade_by_head(anchors=[0, 1], top_k=9)):
                with foveate.attached(model, one, tile=12):
                    outs.append(model(ids).logits)
        assert torch.equal(outs[0], outs[1])
        assert not torch.allclose(outs[0], outs[2], atol=1e-4)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_to_the_model_in_another_number_format(self, method, dtype):
        with foveate.attached(tiny_model().to(dtype), method) as attachment:
            assert attachment.policies[2].method.role.heads == (1, 1)

    @pytest.mark.parametrize(
        ("facts", "message"),
        [
            ({"layers": 4}, "a model with layers 4, and this one has 3"),
            ({"heads": 8}, "a model with heads 8, and this one has 6"),
            ({"kv_heads": 3}, "a model with kv_heads 3, and this one has 2"),
            ({"weights": [[0.0] * 4] * 3}, "another model of the same shape: its weights differ"),
        ],
    )
    @pytest.mark.parametrize("how", ["alone", "composed", "changed"])
    def test_to_another_model_it_is_refused_and_the_model_stays_as_it_was(self, path, facts, message, how):
        write(
            path, facts=facts, heads={str(n): [1] * facts.get("kv_heads", 2) for n in range(2, facts.get("layers", 3))}
        )
        method = methods.make("kascade", calibration=str(path))
        if how == "composed":
            method = methods.make("per_layer", layers={"rest": method})
        model = tiny_model()
        foveate.attach(model, "h2o")
        before = fingerprint(model)
        with pytest.raises(ValueError, match=message):
            foveate.attach(model, method, **({"top_k": 7} if how == "changed" else {}))
        assert fingerprint(model) == before
        assert model.foveate.method.name == "h2o"

    def test_a_copy_of_the_model_has_it_too(self, method):
        model = tiny_model()
        foveate.attach(model, method)
        twin = copy.deepcopy(model)
        assert [policy.method for policy in twin.foveate.policies.values()] == [
            policy.method for policy in model.foveate.policies.values()
        ]


class TestOtherSettings:
    """A file says under which settings its anchors were chosen."""

    def said(self, path, method="kascade", **settings):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            foveate.attach(tiny_model(), method, calibration=str(path), **settings)
        return [str(one.message) for one in said]

    def test_are_warned_of_once_and_named(self, tmp_path):
        path = write(tmp_path / "a.json", settings={"pool": "layer", "pooling": "sqrt", "decode_only": True})
        chosen = f"the anchors of calibration {str(path)!r} were chosen under"
        sparse = f"{chosen} decode_only=true, and may lose more under decode_only=false"
        assert self.said(path) == self.said(path, top_k=0.2) == self.said(path, "kascade_pages") == []
        assert self.said(path, decode_only=False) == [f"kascade: {sparse} (docs/guide/calibrate.md)"]
        assert self.said(path, decode_only=False, top_k=7) == []
        (by_head,) = self.said(path, "kascade_paper", decode_only=True)
        assert by_head == (
            f"kascade_paper: {chosen} pool=layer, pooling=sqrt, and may lose more under pool=kv_head, "
            "pooling=post_softmax (docs/guide/calibrate.md)"
        )

    def test_are_not_known_of_older_files(self, path):
        assert "settings" not in json.loads(path.read_text(encoding="utf-8"))
        assert self.said(path, "kascade_paper") == self.said(path) == []


def test_evenly_spaced_anchors_are_warned_of():
    """Once; not where nothing is left out, and not where someone has chosen the anchors."""
    say_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for settings in ("top_k=1.0,anchors=2", "anchors=[0,2]"):
            foveate.attach(tiny_model(), f"kascade:{settings}")
    with pytest.warns(UserWarning, match="kascade without a calibration.*foveate calibrate"):
        foveate.attach(tiny_model(), "kascade:anchors=2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        foveate.attach(tiny_model(), "kascade:anchors=2")


def test_a_model_of_few_layers_has_no_more_anchors():
    model = tiny_model()
    assert foveate.attach(model, "kascade").method.anchors == model.config.num_hidden_layers == 3
    with pytest.raises(ValueError, match=r"anchors must be at most 3, the layers that it is applied to, not 5$"):
        foveate.attach(model, "kascade:anchors=5")


@pytest.mark.parametrize("page_size", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("top_k", [1, 7, 0.1, 0.4, 1.0])
@pytest.mark.parametrize("min_k", [1, 20])
def test_the_pages_that_are_scored_hold_the_keys_that_are_read(top_k, min_k, page_size):
    """However few keys the newest page has; no more pages than that, or than one in three."""
    method = methods.make("kascade_pages", page_size=page_size, top_k=top_k, min_k=min_k)
    for length in range(1, 150):
        pages, scored, wanted = -(-length // page_size), method.scored_pages(length), method.count(length)
        newest = length - (pages - 1) * page_size
        assert 1 <= scored <= pages
        assert method.page_keys(length) == (scored - 1) * page_size + newest >= wanted
        assert scored <= -(-pages // 3) or (scored - 2) * page_size + 1 < wanted

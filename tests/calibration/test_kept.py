"""Calibrations in the user's cache folder: where it is, what is found for a model, what auto makes of it."""

import os
import types
import warnings

import pytest
import torch

import foveate
from foveate import methods
from foveate.calibration import Calibration, artefact, kept_folder, kept_name, kept_path, known, load, say_once
from foveate.integrations.transformers.facts import model_facts
from tests.helpers import tiny_model, tokens

OURS = {"pool": "layer", "pooling": "sqrt", "decode_only": True}
PAPER = {"pool": "kv_head", "pooling": "post_softmax"}


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch, tmp_path):
    say_once.cache_clear()
    monkeypatch.setattr(artefact, "SHIPPED", tmp_path / "nothing is shipped")


def facts(model):
    return model_facts(model.config, {n: layer.self_attn for n, layer in enumerate(model.model.layers)})


def keep(model, settings=OURS, weights="", anchors=(0, 1)):
    """What `foveate calibrate` would keep; returns its name."""
    path = kept_path(facts(model), weights or str(facts(model)["weights"]), settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    heads = {str(layer): [1, 1] for layer in range(3) if layer not in anchors}
    Calibration(facts(model), anchors, heads, settings=settings).write(path)
    return kept_name(path)


def attached(model, method=None, **settings):
    """The spec of the method, and what was said."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with foveate.attached(model, method, **settings) as attachment:
            return attachment.method.spec, [str(one.message) for one in said]


class TestFolder:
    def test_is_that_of_xdg_or_in_the_home(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert kept_folder() == tmp_path / "foveate" / "calibrations"
        monkeypatch.setenv("HOME", "/home/somebody")
        for none in ("", "relative/folder"):  # which the specification says to ignore
            monkeypatch.setenv("XDG_CACHE_HOME", none)
            assert str(kept_folder()) == "/home/somebody/.cache/foveate/calibrations"

    @pytest.mark.parametrize("what", ["nothing", "a file", "no folder above"])
    def test_need_not_be_one(self, monkeypatch, tmp_path, what):
        if what == "a file":
            (tmp_path / "foveate").mkdir()
            (tmp_path / "foveate" / "calibrations").touch()
        elif what == "no folder above":
            (tmp_path / "cache").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache" if what == "no folder above" else tmp_path))
        assert known(facts(tiny_model())) == ([], [])
        assert attached(tiny_model())[0] == "pages"


class TestKnown:
    def test_each_of_two_models_has_its_own(self):
        models = [tiny_model(seed=seed) for seed in (0, 1)]
        names = [keep(model) for model in models]
        assert len(set(names)) == 2
        for model, name in zip(models, names):
            assert [one.source for one in known(facts(model)).calibrations] == [name]
            assert load(name).check_model(facts(model)) is None
            assert attached(model, "kascade")[0] == f'kascade:calibration="{name}"'
            assert attached(model)[0] == f'kascade:top_k=0.2,calibration="{name}"'

    def test_other_weights_of_the_shape_are_told_of(self):
        name = keep(tiny_model())
        found = known(facts(tiny_model(seed=1)))
        assert found.calibrations == []
        (obstacle,) = found.obstacles
        assert f"{name!r} is for another model of the same shape: its weights differ" in obstacle
        assert known(facts(tiny_model("gemma3"))) == ([], [])  # of another shape

    def test_the_newest_comes_first_and_those_of_the_same_settings_are_replaced(self):
        model = tiny_model()
        first, second = keep(model, anchors=(0, 2)), keep(model, PAPER)
        for age, name in ((10, first), (20, second)):
            path = kept_folder() / f"{name.removeprefix('kept:')}.json"
            os.utime(path, (1e9 - age, 1e9 - age))
        assert [one.source for one in known(facts(model)).calibrations] == [first, second]
        assert keep(model) == first
        assert load(first).anchors == (0, 1)

    def test_before_those_that_come_with_foveate(self, monkeypatch, tmp_path):
        monkeypatch.setattr(artefact, "SHIPPED", tmp_path)
        model = tiny_model()
        Calibration(facts(model), (0, 2), {"1": [0, 0]}).write(tmp_path / "tiny.json")
        assert attached(model)[0] == 'kascade:top_k=0.2,calibration="shipped:tiny"'
        name = keep(model)
        assert attached(model, "kascade")[0] == f'kascade:calibration="{name}"'
        assert attached(model)[0] == f'kascade:top_k=0.2,calibration="{name}"'

    def test_a_damaged_one_is_told_of(self):
        model = tiny_model()
        (kept_folder() / f"{keep(model).removeprefix('kept:')}.json").write_text("{")
        spec, said = attached(model)
        assert spec == "pages"
        assert "malformed JSON" in said[0]


class TestKascadeAlone:
    def test_takes_the_one_of_its_settings(self):
        model = tiny_model()
        ours, paper = keep(model), keep(model, PAPER)
        for method, name in (("kascade", ours), ("kascade_paper", paper)):
            spec, said = attached(model, method)
            assert spec == f'{method}:calibration="{name}"'
            assert said == [
                f"{method}: 2 anchors of calibration {name!r}, which `foveate calibrate` has kept for these weights; "
                "anchors=3 spaces 3 evenly"
            ]

    def test_takes_one_of_other_settings_and_says_which_differ(self):
        model = tiny_model()
        name = keep(model, PAPER)
        spec, said = attached(model, "kascade")
        assert spec == f'kascade:calibration="{name}"'
        assert said[1:] == [
            f"kascade: the anchors of calibration {name!r} were chosen under pool=kv_head, pooling=post_softmax, "
            "and may lose more under pool=layer, pooling=sqrt (docs/guide/calibrate.md)"
        ]
        assert attached(model, "kascade")[1] == []

    def test_without_one_says_that_its_anchors_are_evenly_spaced_and_what_is_there(self, monkeypatch):
        monkeypatch.setattr("foveate.methods.kascade._ANCHORS", 2)
        name = keep(tiny_model())
        spec, said = attached(tiny_model(seed=1), "kascade")
        assert spec == "kascade:anchors=2"
        assert said[0].startswith(f"kascade: calibration {name!r} is for another model of the same shape")


class TestAuto:
    def test_without_a_calibration_is_pages(self):
        model = tiny_model()
        spec, said = attached(model)
        why = "auto: pages, because no calibration is known for these weights (foveate calibrate)"
        assert (spec, said) == ("pages", [f"{why}; sparse at any length on a CPU"])
        say_once.cache_clear()
        assert attached(model, "auto") == (spec, said)
        assert attached(model, methods.make("auto")) == (spec, [])

    def test_with_one_is_kascade_and_stats_repeat_it(self):
        model = tiny_model()
        name = keep(model)
        why = f"auto: kascade, with 20% of the keys and calibration {name!r}, which `foveate calibrate` has kept"
        why += " for these weights"
        with pytest.warns(UserWarning, match=why):
            foveate.attach(model)
        model.generate(tokens(60), max_new_tokens=3)
        stats = foveate.stats(model)
        assert stats.chosen == stats.to_dict()["chosen"] == why
        assert stats.short_contexts == "sparse at any length on a CPU"
        assert f"\n{why}\nsparse at any length on a CPU\n" in str(stats)

    @pytest.mark.parametrize(
        ("settings", "names"), [(PAPER, "pool and pooling"), (OURS | {"decode_only": False}, "decode_only")]
    )
    def test_leaves_one_of_other_settings_and_says_why(self, settings, names):
        model = tiny_model()
        name = keep(model, settings)
        spec, said = attached(model)
        assert spec == "pages"
        assert said[0].startswith(
            f"auto: pages, because calibration {name!r} is for another {names} than kascade's; sparse"
        )

    def test_when_the_weights_have_changed_says_so(self):
        model = tiny_model()
        name = keep(model)
        model.model.layers[1].self_attn.q_proj.weight.data += 0.1
        spec, said = attached(model)
        assert spec == "pages"
        assert f"calibration {name!r} is for another model of the same shape: its weights differ" in said[0]

    def test_has_no_settings_and_is_of_no_layers(self):
        with pytest.raises(ValueError, match="settings need a method: top_k"):
            foveate.attach(tiny_model(), top_k=0.1)
        with pytest.raises(ValueError, match="auto has no setting 'top_k'; it has none"):
            foveate.attach(tiny_model(), "auto", top_k=0.1)
        with pytest.raises(ValueError, match="name a method"):
            methods.make("auto").for_layer(0, 3)
        assert "auto" not in methods.names()

    @pytest.mark.parametrize(
        ("method", "tokens"), [("kascade", 32768), ("pages", 65536), ("luka", 131072), ("h2o", 0), ("dense", 0)]
    )
    def test_short_contexts_are_told_in_tokens(self, monkeypatch, method, tokens):
        """Of eight KV heads of 128 as they are; a token of the tiny model has 1/32 of their bytes."""
        monkeypatch.setattr("foveate.runtime.policy.runs_kernel", lambda verb: True)
        gpu = types.SimpleNamespace(device=torch.device("cuda"))
        settings = {"anchors": [0]} if method == "kascade" else {}
        with foveate.attached(tiny_model(), method, **settings) as attachment:
            found = attachment.short_contexts(gpu)
            assert found == (f"dense below {32 * tokens:,} tokens, or 4,096 each, on this GPU" if tokens else "")
        with foveate.attached(tiny_model(), method, dense_below=0, **settings) as attachment:
            assert attachment.short_contexts(gpu) == ("sparse at any length on this GPU" if tokens else "")

    def test_a_method_of_ones_own_is_sparse_at_any_length_on_a_gpu(self, monkeypatch, imported_methods):
        """A built-in one that no length makes faster says so, and how to have it sparse."""
        monkeypatch.setattr("foveate.runtime.policy.runs_kernel", lambda verb: True)
        gpu = types.SimpleNamespace(device=torch.device("cuda"))

        @methods.register
        class Mine(methods.ReadsChosen):
            name = "mine_on_a_gpu"

            def choose(self, cache, q, scaling):
                return cache.positions % 2 == 0

        with foveate.attached(tiny_model(), Mine()) as attachment:
            assert attachment.short_contexts(gpu) == "sparse at any length on this GPU"
        with foveate.attached(tiny_model(), Mine(), dense_below=9) as attachment:
            assert attachment.short_contexts(gpu) == "dense below 9 tokens (dense_below)"
        for name in ("twilight", "sparq"):
            with foveate.attached(tiny_model(), name) as attachment:
                assert attachment.short_contexts(gpu).startswith("dense at any length on this GPU, where it is not")

    def test_a_method_that_is_named_tells_where_its_steps_are_dense(self, monkeypatch):
        monkeypatch.setattr(
            "foveate.integrations.transformers.attachment.dense_until", lambda method, below, *where: 32768
        )
        assert attached(tiny_model(), "pages")[1] == ["pages: dense below 32,768 tokens, or 4,096 each, on a CPU"]
        assert attached(tiny_model(), "pages", dense_below=9)[1] == []

    def test_options_are_those_of_any_method(self):
        model = tiny_model()
        assert attached(model, cuda_graph=False, dense_below=100)[0] == "pages"
        foveate.attach(model, dense_below=100_000)
        assert foveate.stats(model).short_contexts == "dense below 100,000 tokens (dense_below)"
        foveate.attach(model, "h2o")
        assert (foveate.stats(model).short_contexts, foveate.stats(model).chosen) == ("", "")

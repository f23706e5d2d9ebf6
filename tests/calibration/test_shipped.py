"""Calibrations that come with foveate, found by a model's weights."""

import itertools
import types
import warnings
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model

import foveate
from foveate import calibration, methods
from foveate.calibration import artefact
from foveate.integrations.transformers import model_folder
from foveate.integrations.transformers.facts import folder_weights, model_facts
from foveate.integrations.vllm.settings import Settings, check_early, check_folder, served
from tests.helpers import tiny_model, tokens

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "calibrations"
SHIPPED = sorted(artefact.SHIPPED.glob("*.json"))
FOUND = 'kascade:top_k=9,calibration="shipped:tiny"'
EVEN = "kascade:top_k=9,anchors=2"


@pytest.fixture(autouse=True)
def two_anchors(monkeypatch):
    """Evenly spaced in a model of three layers."""
    monkeypatch.setattr("foveate.methods.kascade._ANCHORS", 2)
    artefact.say_once.cache_clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With a calibration of the tiny model, and one of another model before it."""
    monkeypatch.setattr(artefact, "SHIPPED", tmp_path)
    write(tmp_path / "another.json", tiny_model(seed=1))
    write(tmp_path / "tiny.json", tiny_model())
    return tmp_path


def write(path, model, **more):
    facts = model_facts(model.config, {n: layer.self_attn for n, layer in enumerate(model.model.layers)})
    calibration.Calibration(facts | more, (0, 1), {"2": [1, 1]}).write(path)


def attached_spec(model, method="kascade", **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with foveate.attached(model, method, top_k=9, **settings) as attachment:
            return attachment.method.spec


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_each_shipped_file_is_one_of_the_results(path):
    assert path.read_bytes() in [one.read_bytes() for one in RESULTS.glob("*/*.json")]
    method = methods.make("kascade", calibration=f"shipped:{path.stem}")
    assert methods.parse(method.spec) == method
    assert calibration.shipped(method._artefact.model) == method._artefact
    layers = range(method._artefact.model["layers"])
    assert [n for n in layers if method.role_of(n, layers).chooses] == list(method.anchors)


def test_no_two_shipped_files_are_of_one_model():
    """Which of them would be used would depend on their names."""
    assert SHIPPED
    for one, other in itertools.permutations([calibration.load(path) for path in SHIPPED], 2):
        with pytest.raises(ValueError, match="is for a"):
            one.check_model(other.model)


class TestAttach:
    def test_uses_the_one_of_the_model_and_says_so_once(self, folder):
        model, ids = tiny_model(), tokens(60)
        with pytest.warns(UserWarning, match="kascade_paper: 2 anchors of calibration 'shipped:tiny'") as said:
            attachment = foveate.attach(model, "kascade_paper:tile=12", top_k=9)
        assert not any("evenly spaced anchors lose" in str(one.message) for one in said)
        settings = methods.settings_of(attachment.method)
        assert (settings["calibration"], settings["heads"]) == ("shipped:tiny", {"2": [1, 1]})
        assert list(settings["anchors"]) == [0, 1]
        assert {layer.method for layer in foveate.stats(model).layers} == {attachment.method.spec}
        with torch.no_grad():
            found = model(ids).logits
            foveate.attach(model, "kascade_paper:tile=12", top_k=9, calibration=str(folder / "tiny.json"))
            assert torch.equal(found, model(ids).logits)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            foveate.attach(model, "kascade_paper:tile=12", top_k=9)

    @pytest.mark.parametrize("method", ["kascade:pool=kv_head,pooling=post_softmax", "kascade_pages"])
    def test_uses_it_under_other_settings(self, folder, method):
        assert 'calibration="shipped:tiny"' in attached_spec(tiny_model(), method)

    def test_a_spec_that_names_it_is_the_same_method(self, folder):
        assert attached_spec(tiny_model()) == FOUND
        assert attached_spec(tiny_model(), FOUND) == FOUND

    def test_in_another_number_format_too(self, folder):
        assert attached_spec(tiny_model().to(torch.bfloat16)) == FOUND

    def test_gives_a_prompt_read_for_several_methods_what_their_layers_have(self, folder):
        shared = methods.SharedPrompt((methods.parse("kascade:top_k=9"),))
        with foveate.attached(tiny_model(), shared) as attachment:
            assert attachment.method.spec == FOUND

    @pytest.mark.parametrize(
        "spec", ['per_layer:layers={"rest": "kascade"}', "mixed:clustered=kascade", "kascade:anchors=2"]
    )
    def test_nothing_is_said_of_a_method_before_it_has_a_model(self, spec):
        artefact.say_once.cache_clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            methods.parse(spec)

    @pytest.mark.parametrize("seed", [2, 3])
    def test_leaves_other_weights_evenly_spaced_and_warns(self, folder, seed):
        artefact.say_once.cache_clear()
        with pytest.warns(UserWarning, match="kascade without a calibration: evenly spaced anchors lose"):
            assert foveate.attach(tiny_model(seed=seed), "kascade:top_k=9").method.spec == EVEN

    @pytest.mark.parametrize(
        "settings", [{"anchors": 2}, {"anchors": 1}, {"anchors": [0, 2]}, {"heads": {"1": [0, 0]}, "pool": "kv_head"}]
    )
    def test_keeps_what_was_given(self, folder, settings):
        assert "shipped" not in attached_spec(tiny_model(), **settings)
        assert methods.make("kascade", anchors=2).spec == "kascade:anchors=2"

    @pytest.mark.parametrize(
        "config",
        [
            LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"),
            IA3Config(target_modules=["v_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
        ],
        ids=["lora", "ia3"],
    )
    def test_knows_nothing_of_an_adapted_model(self, folder, config):
        """Also where the adapter leaves the compared weights as they are."""
        model = get_peft_model(tiny_model(), config)
        assert attached_spec(model) == EVEN
        with model.disable_adapter():
            assert attached_spec(model) == FOUND

    @pytest.mark.parametrize("weights", [[], [None] * 3, [[0.1] * 4, None, None]])
    def test_wants_weights_of_every_layer(self, folder, weights):
        write(folder / "tiny.json", tiny_model(), weights=weights)
        assert attached_spec(tiny_model()) == EVEN

    def test_spaces_anchors_of_some_layers_evenly(self, folder):
        """A calibration is of all layers."""
        composed = methods.make("per_layer", layers={"rest": "kascade:top_k=9"})
        found, even = (foveate.attach(tiny_model(), one).policies for one in (composed, EVEN))
        assert [one.method.role for one in found.values()] == [one.method.role for one in even.values()]
        assert found[1].method._artefact is None


class TestBeforeWeightsAreLoaded:
    @pytest.fixture(params=["float32", "bfloat16"])
    def model(self, tmp_path, request):
        tiny_model().to(getattr(torch, request.param)).save_pretrained(tmp_path / "model", max_shard_size="100KB")
        return tmp_path / "model"

    def test_a_folder_has_the_weights_of_the_model(self, model):
        layers = {n: layer.self_attn for n, layer in enumerate(tiny_model().model.layers)}
        for read, own in zip(folder_weights(model), model_facts(tiny_model().config, layers)["weights"], strict=True):
            assert read == pytest.approx(own, rel=2**-8)

    def test_a_folder_finds_the_calibration(self, folder, model):
        method = methods.parse("kascade:top_k=9")
        with pytest.warns(UserWarning, match="shipped:tiny"):
            assert model_folder.method_for(model, method).spec == FOUND

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_a_folder_with_windows_finds_what_attach_finds(self, folder, tmp_path):
        """Both look at the layers that keep all keys."""
        gemma = tiny_model("gemma3")
        gemma.save_pretrained(tmp_path / "gemma")
        method, full = methods.parse("kascade:top_k=9"), [1, 3]
        assert model_folder.method_for(tmp_path / "gemma", method).spec == attached_spec(gemma) == EVEN
        facts = model_facts(gemma.config, {at: gemma.model.layers[at].self_attn for at in full})
        heads = {"3": [0] * facts["kv_heads"]}
        calibration.Calibration(facts, (1,), heads, {"layers": full}).write(folder / "tiny.json")
        assert model_folder.method_for(tmp_path / "gemma", method).spec == attached_spec(gemma) == FOUND
        engine = Settings(methods.parse(FOUND))
        check_folder(engine, tmp_path / "gemma")
        tiny_model("gemma3", seed=1).save_pretrained(tmp_path / "other")
        with pytest.raises(ValueError, match="weights differ"):
            check_folder(engine, tmp_path / "other")

    def test_an_engine_finds_it_but_not_for_models_with_adapters(self, folder, model):
        parts = dict.fromkeys(("lora_config", "speculative_config", "kv_transfer_config"))
        parallel = {
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "tensor_parallel_size": 1,
            "data_parallel_size": 1,
        }
        config = types.SimpleNamespace(
            additional_config={"foveate": "kascade:top_k=9"},
            model_config=types.SimpleNamespace(
                model=str(model), use_mla=False, dtype=torch.bfloat16, hf_text_config=tiny_model().config
            ),
            cache_config=types.SimpleNamespace(cache_dtype="auto", block_size=16),
            parallel_config=types.SimpleNamespace(**parallel),
            **parts,
        )
        with pytest.warns(UserWarning, match="shipped:tiny"):
            assert served(config).method.spec == FOUND
        check_early(config)
        config.parallel_config.tensor_parallel_size = 2
        assert served(config).method.spec == FOUND
        config.additional_config["foveate"] += ",pool=kv_head"  # whose heads may be another rank's
        assert "shipped:tiny" in served(config).method.spec
        config.additional_config["foveate"] = "kascade:top_k=9"
        config.parallel_config.tensor_parallel_size = 1
        config.lora_config = object()
        assert served(config).method.spec == EVEN

    def test_an_engine_looks_for_a_name_of_the_hub_among_what_was_loaded(self, folder, model, tmp_path):
        config = types.SimpleNamespace(
            additional_config={"foveate": "kascade:top_k=9"},
            model_config=types.SimpleNamespace(model="some/model", revision=None, hf_text_config=tiny_model().config),
            load_config=types.SimpleNamespace(download_dir=str(tmp_path / "hub")),
            parallel_config=types.SimpleNamespace(tensor_parallel_size=1),
            lora_config=None,
        )
        assert served(config).method.spec == EVEN
        config.model_config.model = "s3://place/of/model"
        assert served(config).method.spec == EVEN
        config.model_config.model = "some/model"
        cached = tmp_path / "hub" / "models--some--model"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text("1234")
        (cached / "snapshots").mkdir()
        model.rename(cached / "snapshots" / "1234")
        with pytest.warns(UserWarning, match="shipped:tiny"):
            assert served(config).method.spec == FOUND

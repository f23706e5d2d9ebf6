"""What a config.json tells before torch and Transformers are imported: it agrees with what they tell."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import foveate
from foveate.errors import UserError
from foveate.integrations import early
from foveate.integrations.transformers import csa
from foveate.lab.bench import commands, models
from tests.helpers import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
NOVEL = ROOT / "examples" / "data"
COMMANDS = {
    "plan": ["plan", "--context", "9", "--gpu", "h200", "--model"],
    "chat": ["chat", "--model"],
    "generate": ["generate", "--prompt", "x", "--model"],
    "serve": ["serve", "--check"],
    "check": ["check", "--method", "pages", "--model"],
    "compare": ["compare", "--task", "probes", "--out", "rows.jsonl", "--model"],
    "calibrate": ["calibrate", "--model"],
    "tune": ["tune", "--data", NOVEL, "--model"],
    "train lte": ["train", "lte", "--text", NOVEL, "--out", "lte.safetensors", "--model"],
    "bench decode-model": ["bench", "decode-model", "--model"],
    "bench prefill-model": ["bench", "prefill-model", "--model"],
}
NEED_DATA = {
    "compare": ["compare", "--task", "hotpotqa", "--out", "rows.jsonl"],
    "calibrate": ["calibrate", "--task", "hotpotqa"],
    "tune": ["tune"],
}


def folder_of(tmp_path, **config):
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


def run(*arguments):
    """What a command says in a process of its own, and whether it has imported torch or Transformers."""
    code = (
        f"import sys; sys.argv = ['foveate', *{[str(one) for one in arguments]!r}]; from foveate.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert time.monotonic() - begun < 20
    assert done.stdout == "2 False False\n", done.stderr
    return done.stderr.strip()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_is_missing_is_told_before_torch_is_imported(tmp_path, name):
    said = run(*COMMANDS[name], tmp_path / "none")
    if name.startswith("bench"):
        assert said == f"error: unknown model '{tmp_path / 'none'}'. Allowed: llama-3.1-8b, qwen3-8b, a model folder"
    else:
        assert said.startswith(f"error: {tmp_path / 'none'}: no such ")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_model_that_nothing_knows_is_told_before_torch_is_imported(tmp_path, name):
    said = run(*COMMANDS[name], folder_of(tmp_path, model_type="nonesuch"))
    assert "not the configuration of a known model" in said
    assert "'nonesuch'" in said


@pytest.mark.parametrize("name", NEED_DATA)
def test_data_that_are_missing_are_told_before_torch_is_imported(tmp_path, name):
    folder = folder_of(tmp_path, model_type="llama")
    (folder / "model.safetensors").touch()
    said = run(*NEED_DATA[name], "--model", folder, "--data", tmp_path / "none")
    assert said.startswith(f"error: {tmp_path / 'none'}: no such ")


def test_text_that_is_missing_is_told_before_torch_is_imported(tmp_path):
    folder = folder_of(tmp_path, model_type="llama")
    (folder / "model.safetensors").touch()
    said = run("train", "lte", "--model", folder, "--text", tmp_path / "none", "--out", tmp_path / "lte.safetensors")
    assert said == f"error: {tmp_path / 'none'}: no such folder"


@pytest.mark.parametrize("name", ["compare", "calibrate", "tune"])
def test_a_folder_without_weights_is_told_before_torch_is_imported(tmp_path, name):
    said = run(*COMMANDS[name], folder_of(tmp_path, model_type="llama"))
    assert said.startswith(f"error: {tmp_path}: no weights in the model folder")


@pytest.mark.parametrize("name", ["plan", "serve", "compare", "calibrate", "tune"])
def test_latent_attention_is_told_before_torch_is_imported(tmp_path, name):
    said = run(*COMMANDS[name], folder_of(tmp_path, model_type="deepseek_v3", kv_lora_rank=512))
    assert said == f"error: {tmp_path}: DeepseekV3ForCausalLM is not supported: {early.LATENT}"


def test_an_encoder_is_told_before_torch_is_imported(tmp_path):
    said = run(*COMMANDS["plan"], folder_of(tmp_path, model_type="t5"))
    assert said == f"error: {tmp_path}: not a causal language model (Transformers has none of model_type 't5')"


def test_types_are_those_that_transformers_knows():
    types, causal = early._known()
    assert {name: types.get(name) for name in CONFIG_MAPPING_NAMES} == dict(CONFIG_MAPPING_NAMES)
    assert causal.keys() == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()


def test_no_type_is_refused_where_transformers_is_written_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(early, "_known", lambda: ({}, {}))
    monkeypatch.delitem(sys.modules, "transformers")
    early.check_model(folder_of(tmp_path, model_type="nonesuch"))


def test_types_that_a_program_has_made_known_are_left_to_transformers(tmp_path):
    assert "transformers" in sys.modules
    early.check_model(folder_of(tmp_path, model_type="nonesuch"))


def test_models_with_sparse_attention_of_their_own_are_those_that_foveate_runs():
    assert set(early._OWN) == set(csa.MODELS)
    for kind in early._OWN:
        assert early.refusal({"model_type": kind, "kv_lora_rank": 8}) == ""


@pytest.mark.parametrize("kind", early._WINDOWS)
def test_models_of_windows_alone_are_refused_in_the_words_of_attach(kind):
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, sliding_window=16, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError) as refused:
        foveate.attach(model)
    saved = json.loads(config.to_json_string())
    assert str(refused.value) == f"{type(model).__name__} is not supported: {early.refusal(saved)}"


@pytest.mark.parametrize("family", CONFIGS)
def test_families_that_are_attached_to_are_not_refused(family):
    assert early.refusal(json.loads(CONFIGS[family]().to_json_string())) == ""


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"is_encoder_decoder": True}, early.ENCODER),
        ({"text_config": {"num_kv_shared_layers": 4}}, early.SHARED),
        ({"num_kv_shared_layers": 0}, ""),
        ({"kv_lora_rank": None}, ""),
        ({"kv_lora_rank": 8, "index_topk": 4}, ""),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, early.all_unchanged("sliding-window")),
        ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, ""),
        ({"sliding_window": None, "model_type": "mistral"}, ""),
        ({"sliding_window": 8, "model_type": "mistral"}, early.all_unchanged("sliding-window")),
        ({"sliding_window": 8, "model_type": "llama"}, ""),
    ],
)
def test_settings_that_refuse_a_model(config, reason):
    assert early.refusal(config) == reason


def test_methods_decide_whether_compare_refuses_a_model(tmp_path):
    folder = folder_of(tmp_path, model_type="deepseek_v3", kv_lora_rank=512)
    said = [run(*COMMANDS["compare"], folder, *more) for more in (("--method", "own"), ("--method", "pages"))]
    assert said[0].startswith(f"error: {tmp_path}: no weights in the model folder")
    assert said[1].endswith(early.LATENT)


def test_a_model_as_it_is_is_not_refused(tmp_path):
    folder = folder_of(tmp_path, model_type="deepseek_v3", kv_lora_rank=512)
    with pytest.raises(UserError, match="latent attention"):
        early.check_model(folder)
    early.check_model(folder, attached=False)


def test_shapes_of_the_benchmarks_have_the_names_that_their_commands_know():
    assert tuple(models.SHAPES) == commands.SHAPES


def test_weights_are_asked_for_where_they_are_needed(tmp_path):
    folder = folder_of(tmp_path, model_type="llama")
    early.check_model(folder)
    with pytest.raises(UserError, match="no weights in the model folder"):
        early.check_model(folder, needs_weights=True)
    (folder / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(UserError, match="expected an object"):
        early.check_model(folder)

import importlib.util
import json
import shutil

import pytest
from transformers.integrations import hub_kernels

from foveate.errors import UserError
from foveate.integrations.transformers import loading, model_folder


def test_facts_and_positions(tiny_folder):
    facts = model_folder.model_facts(tiny_folder)
    assert facts == {
        "model_type": "llama",
        "layers": 2,
        "hidden_size": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "max_positions": 2048,
    }
    model_folder.check_positions(2048, facts, "it needs")
    with pytest.raises(UserError, match="it needs 2,049 positions, the model has 2,048"):
        model_folder.check_positions(2049, facts, "it needs")
    model_folder.check_positions(10**9, {}, "it needs")


def test_facts_that_a_configuration_leaves_out(tmp_path):
    (tmp_path / "model.safetensors").touch()

    def facts(**config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = model_folder.model_facts(tmp_path)
        return [found[name] for name in ("model_type", "layers", "heads", "kv_heads", "head_dim")]

    llama = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4}
    assert facts(**llama, num_key_value_heads=None) == ["llama", 3, 4, 4, 16]
    assert facts(**llama) == ["llama", 3, 4, 4, 16]
    text = {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560}
    assert facts(model_type="gemma3", text_config=text) == ["gemma3", 34, 8, 4, 256]
    for config in ({}, {"model_type": "no such model"}):
        with pytest.raises(UserError, match=r"config\.json: not the configuration of a known model"):
            facts(**config)


def test_digest_follows_weights_and_config(tiny_folder, tmp_path):
    copy = tmp_path / "another-name"
    shutil.copytree(tiny_folder, copy)
    digest = model_folder.model_digest(tiny_folder)
    assert model_folder.model_digest(copy) == digest
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    changed = model_folder.model_digest(copy)
    assert changed != digest
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "transformers_version": "0"}))
    assert model_folder.model_digest(copy) == changed
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert model_folder.model_digest(copy) != changed
    (copy / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: malformed JSON"):
        model_folder.model_digest(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": "4"}, "config.json: .*num_attention_heads"),
        ({"hidden_size": 32.5}, "config.json: .*hidden_size"),
        ({"num_key_value_heads": "two"}, "config.json: .*num_key_value_heads"),
    ],
)
def test_numbers_of_another_kind_are_refused(tiny_folder, tmp_path, change, message):
    copy = shutil.copytree(tiny_folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=message):
        model_folder.model_facts(copy)


@pytest.mark.parametrize("part", [None, "text_config"])
@pytest.mark.parametrize("name", ["_attn_implementation", "attn_implementation", "_experts_implementation_internal"])
@pytest.mark.parametrize(
    "kernel", ["kernels-community/flash-attn2", "evil/kernel@main:fn", "paged|evil/kernel", {"": "evil/kernel"}]
)
def test_kernels_of_a_hub_are_refused(tiny_folder, tmp_path, monkeypatch, part, name, kernel):
    def asked(*args, **kwargs):
        raise AssertionError("a hub was asked")

    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda *args, **kwargs: True, raising=False)
    monkeypatch.setattr(hub_kernels, "get_kernel_hub", asked, raising=False)
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | ({part: {name: kernel}} if part else {name: kernel})))
    for read in (
        model_folder.model_facts,
        loading.load_tokenizer,
        lambda one: loading.load_model(one, "float32", "cpu"),
    ):
        with pytest.raises(
            UserError, match=r"config.json: .*implementation.* must not be .* code from a hub; remove it"
        ):
            read(folder)


def test_implementations_of_this_machine_are_read(tiny_folder, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())

    def read(kernel):
        (folder / "config.json").write_text(json.dumps(config | {"_attn_implementation": kernel}))
        return model_folder.read_config(folder)

    for kernel in (None, "sdpa", "eager", "flex_attention", {"text_config": "sdpa"}):
        assert read(kernel)["_attn_implementation"] == kernel
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="must not be 'flash_attention_2'"):  # whose package a hub would stand in for
        read("flash_attention_2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "flash_attn" or None)
    read("flash_attention_2")

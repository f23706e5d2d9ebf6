import json
import shutil

import pytest

from foveate.inputs import model_folder
from foveate.results.errors import UserError


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

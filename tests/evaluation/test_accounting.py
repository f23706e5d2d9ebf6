import json
import shutil
import subprocess

import pytest
import torch

from foveate.evaluation import accounting
from foveate.evaluation.errors import UserError


def test_facts_and_positions(tiny_folder):
    facts = accounting.model_facts(tiny_folder)
    assert facts == {
        "model_type": "llama",
        "layers": 2,
        "hidden_size": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "max_positions": 2048,
    }
    accounting.check_positions(2048, facts, "it needs")
    with pytest.raises(UserError, match="it needs 2,049 positions, the model has 2,048"):
        accounting.check_positions(2049, facts, "it needs")
    accounting.check_positions(10**9, {}, "it needs")


def test_facts_that_a_configuration_leaves_out(tmp_path):
    (tmp_path / "model.safetensors").touch()

    def facts(**config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = accounting.model_facts(tmp_path)
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
    digest = accounting.model_digest(tiny_folder)
    assert accounting.model_digest(copy) == digest
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    changed = accounting.model_digest(copy)
    assert changed != digest
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "transformers_version": "0"}))
    assert accounting.model_digest(copy) == changed
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert accounting.model_digest(copy) != changed
    (copy / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: malformed JSON"):
        accounting.model_digest(copy)


def test_peak_memory_sees_what_was_freed_again():
    memory = accounting.PeakMemory("cpu")
    torch.ones(60_000_000).sum()
    memory.start()
    before = memory.peak()
    torch.ones(25_000_000).sum()  # 100 MB, gone at once
    during = memory.peak()
    assert "RSS" in memory.kind
    assert during - before > 80_000_000 or "since the process began" in memory.kind
    memory.start()
    assert memory.peak() < during or "since the process began" in memory.kind


def batch(steps, read, share, prefill, token):
    stats = {
        "decode_steps": steps,
        "keys_read_per_step": read,
        "keys_read_share": share,
        "kv_bytes_per_step": 10 * read,
        "resident_bytes": 7 * steps,
        "tokens_evicted": 2,
        "pages_refined": 0,
        "notes": ["layer 1 stays as it is"],
    }
    times = {"prefill_ms": prefill, "decode_ms_per_token": token, "timing": "generate"}
    return {"stats": stats, **times, "peak_bytes": steps, "peak_kind": "x", "commit": f"c{steps % 2}"}


def test_costs_are_weighted_by_steps():
    total = accounting.add_up(
        [batch(10, 50.0, 0.5, 1.0, 3.0), batch(30, 10.0, 0.1, 9.0, None), batch(0, 0.0, 1.0, 2.0, 4.0)]
    )
    assert total["keys_read_share"] == pytest.approx((10 * 50 + 30 * 10) / (10 * 100 + 30 * 100))
    assert total["kv_bytes_per_step"] == pytest.approx((10 * 500 + 30 * 100) / 40)
    assert total["decode_steps"] == 40
    assert total["resident_bytes"] == 210
    assert total["tokens_evicted"] == 6
    assert total["indices_reused"] == 0
    assert total["notes"] == ["layer 1 stays as it is"]
    assert (total["prefill_ms"], total["decode_ms_per_token"]) == (2.0, 3.5)
    assert total["commit"] == "c0"
    shared = {**batch(10, 50.0, 0.5, None, 3.0), "timing": "generate, shared prompt"}
    mixed = accounting.add_up([shared, batch(10, 50.0, 0.5, 1.0, 3.0), shared])
    assert (mixed["timing"], mixed["prefill_ms"]) == ("generate, shared prompt / generate", 1.0)
    assert accounting.add_up([shared])["prefill_ms"] is None
    idle = accounting.add_up([batch(0, 0.0, 1.0, 2.0, None)])
    assert idle["keys_read_share"] is idle["kv_bytes_per_step"] is idle["decode_ms_per_token"] is None


def test_rows_have_the_fields_of_the_schema():
    row = dict.fromkeys(reversed(accounting.ROW_FIELDS))
    assert list(accounting.ordered(row)) == list(accounting.ROW_FIELDS)
    with pytest.raises(ValueError, match="scored"):
        accounting.ordered({**row, "scored": 1})
    del row["seed"]
    with pytest.raises(ValueError, match="seed"):
        accounting.ordered(row)


def test_versions_device_and_commit(monkeypatch):
    assert {"python", "foveate", "torch", "transformers"} <= accounting.versions().keys()
    assert accounting.device_name("cpu").startswith("cpu: ")

    def fail(*args, **kwargs):
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(subprocess, "run", fail)
    assert accounting.commit() == "unknown"

"""What a decode step's attention costs: which layers are timed, what they read, what is refused."""

import json
import sys
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig
from typer.testing import CliRunner

from foveate import ops
from foveate.bench import decode, decode_model, dense_peers, rows
from foveate.cli import app
from foveate.evaluation.errors import UserError
from foveate.methods import parse
from foveate.report import decode as report

SMALL = {"batches": (2,), "heads": 8, "kv_heads": 2, "head_dim": 16, "layers": 12, "dtype": "float32", "device": "cpu"}
METHODS = ("dense", "kascade:min_k=16,decode_only=true", "luka:page_size=16,top_k=2", "quest", "omnikv")
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_SECONDS", 0.0)
        return {
            row["case"]["method"]: row for row in decode.run(decode.Plan(METHODS, (400,), **SMALL), say=lambda _: None)
        }


def test_every_layer_is_counted_in_the_kind_it_is_of(found):
    assert {name: kind["layers"] for name, kind in found[METHODS[1]]["layers"].items()} == {
        "dense, choosing": 1,
        "choosing": 4,
        "reading": 7,
    }
    assert {name: kind["layers"] for name, kind in found["quest"]["layers"].items()} == {"dense": 2, "quest": 10}
    for name, row in found.items():
        if name != "sdpa":
            kinds = row["layers"].values()
            assert sum(kind["layers"] for kind in kinds) == 12
            assert row["ms"] == pytest.approx(sum(kind["layers"] * kind["ms"] for kind in kinds) / 12)


def test_bytes_are_those_that_a_kind_reads(found):
    a_key = 2 * 2 * 16 * 4  # of two KV heads, key and value
    everything = 2 * 400 * a_key
    kinds = found[METHODS[1]]["layers"]
    assert kinds["dense, choosing"]["bytes"] == found["dense"]["layers"]["dense"]["bytes"] == everything
    assert kinds["reading"]["bytes"] == 2 * 40 * a_key
    assert kinds["choosing"]["bytes"] == 2 * (40 + 400 / 2) * a_key
    assert found["dense"]["floor_ms"] == pytest.approx(everything / found["dense"]["copy_gb_per_s"] / 1e6)
    assert found["luka:page_size=16,top_k=2"]["layers"]["luka"]["bytes"] <= everything / 2


def test_rows_are_beside_the_fastest_library_and_complete(found):
    assert found["sdpa"]["speedup"] == 1.0
    for row in found.values():
        assert row["baseline"] == "sdpa"
        assert row["speedup"] == pytest.approx(found["sdpa"]["ms"] / row["ms"])
        assert set(rows.FIELDS) <= set(row)
    assert found["omnikv"]["case"]["share"] == 0.1
    assert found["sdpa"]["case"]["share"] is None


def test_a_reading_layer_reads_what_its_chooser_chose(monkeypatch):
    chosen, attend = [], ops.attend_indices
    monkeypatch.setattr(ops, "attend_indices", lambda *args, **more: chosen.append(args[3]) or attend(*args, **more))
    (reading,) = (kind for kind in decode._kinds(parse(METHODS[1]), 12) if kind.name == "reading")
    plan = decode.Plan(METHODS[1:2], (400,), **SMALL)
    (cache,) = decode._drawn(plan, 2, 400)
    queries = torch.randn(2, 8, 64, 16)
    branch = decode._prepared(plan, reading, cache, queries)
    decode._choose(reading, branch, queries[:, :, -1:], plan.scaling)
    reading.policy.decode(branch, queries[:, :, -1:], plan.scaling)
    by_chooser, by_reader = chosen
    assert torch.equal(by_chooser, by_reader)
    assert branch.counters.decode_steps == 1


def test_libraries_give_dense_attention(monkeypatch):
    module = ModuleType("flash_attn_interface")

    def flash_attn_func(q, k, v, softmax_scale, causal):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=softmax_scale, enable_gqa=True).mT

    module.flash_attn_func = lambda *args, **more: flash_attn_func(*args, **more).mT.transpose(1, 2)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    dense_peers._flash_attention_3.cache_clear()
    q, k, v = torch.randn(2, 8, 1, 16), torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 16)
    expected = ops.attend(q, k, v, scaling=0.3).out
    for attend in (dense_peers._flash_attention_3(), dense_peers.available("cpu")["sdpa"]):
        torch.testing.assert_close(attend(q, k, v, 0.3), expected)
    dense_peers._flash_attention_3.cache_clear()


def test_layers_decode_token_after_token():
    methods = ("dense", "h2o:top_k=16,window=16", METHODS[1])
    plan = decode.Plan(methods, (100,), **SMALL | {"level": "layer"})
    found = {row["case"]["method"]: row for row in decode.run(plan, say=lambda _: None)}
    a_key, tokens = 2 * 2 * 16 * 4, [100 + step for step in range(1, 41)]
    assert found["dense"]["layers"]["dense"]["bytes"] == pytest.approx(2 * sum(tokens) / len(tokens) * a_key)
    assert found[methods[1]]["layers"]["h2o"]["bytes"] == 2 * 33 * a_key  # and the token that has just come
    kinds = found[METHODS[1]]["layers"]
    assert kinds["reading"]["bytes"] < kinds["choosing"]["bytes"] < kinds["dense, choosing"]["bytes"]
    assert not found["dense"]["cuda_graph"]
    told = report.table(list(found.values()))
    assert told.startswith("8 query and 2 KV heads of 16, float32, layer (")
    assert "; 7 reading " in told


def test_tokens_of_a_model(monkeypatch):
    monkeypatch.setitem(decode_model.SHAPES, "tiny", LlamaConfig(**TINY))
    method = "kascade:anchors=2,decode_only=true,min_k=16"
    how = {"contexts": (60,), "batches": (2,), "steps": 3, "dtype": "float32", "device": "cpu"}
    found = decode_model.run(decode_model.Plan("tiny", (method,), **how), say=lambda _: None)
    assert [row["case"]["method"] for row in found] == ["dense", parse(method).spec, "transformers-sdpa"]
    for row in found:
        assert set(rows.FIELDS) <= set(row)
        assert row["speedup"] == pytest.approx(found[0]["ms"] / row["ms"])
        assert row["tokens_per_s"] == pytest.approx(2000 / row["ms"])
    assert found[0]["stats"]["decode_steps"] == 3 + 8
    assert 0.2 < found[1]["stats"]["keys_read_share"] < 0.9
    assert found[2]["stats"] is None
    assert report.table(found).startswith("tiny (random weights), float32, model (")
    with pytest.raises(UserError, match="tiny: kascade: anchors must be at most 4"):
        decode_model.run(decode_model.Plan("tiny", ("kascade",), **how), say=lambda _: None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "lama-3.1-8b"}, "unknown model 'lama-3.1-8b'. Did you mean 'llama-3.1-8b'"),
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"contexts": ()}, "contexts must be at least 1, not none"),
        ({"methods": ("h3o",)}, "did you mean 'h2o'"),
        ({"dtype": "int8"}, "dtype must be one of bfloat16, float16, float32, not 'int8'"),
    ],
)
def test_models_that_cannot_be_measured(changed, message):
    plan = decode_model.Plan(**{"model": "qwen3-8b", "device": "cpu", **changed})
    with pytest.raises(UserError, match=message):
        decode_model.run(plan, say=lambda _: None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"methods": ("kascada",)}, "did you mean 'kascade'"),
        ({"methods": ("h2o",)}, "h2o gives up tokens"),
        ({"heads": 9}, "heads must be a multiple of kv-heads, 2, not 9"),
        ({"contexts": (0,)}, "context must be at least 1, not 0"),
        ({"batches": ()}, "batch must be at least 1, not none"),
        ({"dtype": "float8"}, "dtype must be one of float16, bfloat16, float32, not 'float8'"),
        ({"device": "tpu"}, "device must be cuda or cpu, not 'tpu'"),
        ({"level": "model"}, "level must be one of kernel, layer, not 'model'"),
    ],
)
def test_plans_that_cannot_be(changed, message):
    with pytest.raises(UserError, match=message):
        decode.run(decode.Plan(**{"methods": METHODS, "contexts": (64,), **SMALL, **changed}), say=lambda _: None)


def test_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "_SECONDS", 0.0)
    out = tmp_path / "decode.jsonl"
    shape = "--context 64 --batch 1 --heads 4 --kv-heads 2 --head-dim 16 --layers 4"
    how = ["--level", "kernel", "--dtype", "float32", "--device", "cpu", "--method", "dense", "--out", str(out)]
    done = CliRunner().invoke(app, ["bench", "decode", *shape.split(), *how])
    assert done.exit_code == 0, done.output
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["case"]["method"] for row in written] == ["sdpa", "dense"]

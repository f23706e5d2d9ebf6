"""What a decode step's attention costs: which layers are timed, what they read, what is refused."""

import json
import sys
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from foveate import ops
from foveate.bench import decode, dense_peers, rows
from foveate.cli import app
from foveate.evaluation.errors import UserError
from foveate.methods import parse

SMALL = {"batches": (2,), "heads": 8, "kv_heads": 2, "head_dim": 16, "layers": 12, "dtype": "float32", "device": "cpu"}
METHODS = ("dense", "kascade:min_k=16,decode_only=true", "luka:page_size=16,top_k=2", "quest", "omnikv")


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
    ],
)
def test_plans_that_cannot_be(changed, message):
    with pytest.raises(UserError, match=message):
        decode.run(decode.Plan(**{"methods": METHODS, "contexts": (64,), **SMALL, **changed}), say=lambda _: None)


def test_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "_SECONDS", 0.0)
    out = tmp_path / "decode.jsonl"
    size = "--context 64 --batch 1 --heads 4 --kv-heads 2 --head-dim 16 --layers 4 --dtype float32 --device cpu"
    done = CliRunner().invoke(app, ["bench", "decode", *size.split(), "--method", "dense", "--out", str(out)])
    assert done.exit_code == 0, done.output
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["case"]["method"] for row in written] == ["sdpa", "dense"]

"""What a prompt costs: which layers are timed, beside what, and what is refused."""

import dataclasses
import functools
import shlex
import sys
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig
from typer.testing import CliRunner

from benchmarks import dense_peers, layer, layer_kinds, prefill
from benchmarks.layer_tables import prefill_table
from foveate import ops
from foveate.errors import UserError
from foveate.lab.bench import breakdown, models, prefill_model
from foveate.lab.report.tables import general as markdown
from foveate.lab.results import measurements
from foveate.methods import parse
from foveate.ops import KV, Logits

SMALL = {"heads": 8, "kv_heads": 2, "head_dim": 16, "layers": 12, "repeats": 1, "dtype": "float32"}
SMALL |= {"seed": 0, "device": "cpu"}
METHODS = (
    "kascade_paper:min_k=16",
    "kascade_paper:decode_only=true",
    "h2o",
    "snapkv",
    "streaming:window=64",
)
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 80,
}


@pytest.fixture(scope="module")
def found():
    measured = prefill.run(prefill.Plan(METHODS, (300,), **SMALL), say=lambda _: None)
    return {row["case"]["method"]: row for row in measured}


def test_every_layer_is_of_the_kind_that_it_is_in_a_prompt(found):
    kinds = {name: {kind: its["layers"] for kind, its in (row["layers"] or {}).items()} for name, row in found.items()}
    assert kinds == {
        "sdpa": {},
        "dense": {"dense": 12},
        "kascade_paper:min_k=16": {"dense, choosing": 1, "choosing": 4, "reading": 7},
        "kascade_paper:decode_only=true": {"dense": 12},
        "h2o": {"dense, learning": 12},
        "snapkv": {"dense, learning": 12},
        "streaming:window=64": {"streaming": 12},
    }


@pytest.mark.parametrize(("exact", "expected"), [(True, [2, 1, 1]), (False, [1, 2, 1])])
def test_anchors_that_choose_for_nobody_are_dense(exact, expected):
    """Nobody reads the choice of layers 0 and 3."""
    method = parse(f"kascade_paper:anchors=[0,1,3],dense_anchor_prefill={exact}")
    counts = {kind.name: kind.number for kind in layer_kinds.kinds(method, 4, layer_kinds.in_prompt)}
    assert [counts.get(name, 0) for name in ("dense", "choosing", "reading")] == expected


def test_a_method_s_time_is_the_mean_of_its_layers_and_all_that_they_do(found):
    for row in found.values():
        kinds = (row["layers"] or {}).values()
        for kind in kinds:
            assert kind["ms"] == pytest.approx(kind["attend_ms"] + kind["learn_ms"] + kind["end_ms"])
            assert kind["surcharge"] == pytest.approx((kind["learn_ms"] + kind["end_ms"]) / row["baseline_ms"])
        if kinds:
            assert row["ms"] == pytest.approx(sum(kind["layers"] * kind["ms"] for kind in kinds) / 12)
    (h2o,), (snapkv,), (dense,) = (found[name]["layers"].values() for name in ("h2o", "snapkv", "dense"))
    assert h2o["learn_ms"] > 0, "column sums"
    assert snapkv["end_ms"] > 0, "the last window's sums"
    assert dense["learn_ms"] == dense["end_ms"] == dense["surcharge"] == 0


def test_rows_are_beside_the_fastest_dense_and_complete(found):
    fastest = min(("sdpa", "dense"), key=lambda name: found[name]["ms"])
    for name, row in found.items():
        assert set(measurements.FIELDS) <= set(row)
        assert (row["baseline"], row["baseline_ms"]) == (fastest, found[fastest]["ms"])
        assert row["speedup"] == pytest.approx(found[fastest]["ms"] / row["ms"])
        assert (row["tflop_per_s"] is not None) == (name in ("sdpa", "dense"))
        assert row["dense_prompts"] == (None if name == "sdpa" else "PyTorch")
        case = row["case"]
        assert (case["level"], case["context"], case["batch"], case["heads"]) == ("kernel", 300, 1, 8)
        shares = dict.fromkeys(METHODS[:2], 0.1) | {"h2o": 0.125, "snapkv": 0.125}
        assert case["share"] == shares.get(name)
    flops = 4 * 8 * 16 * 300 * 301 / 2
    assert found["dense"]["tflop_per_s"] == pytest.approx(flops / found["dense"]["ms"] / 1e9)


def test_a_reading_layer_reads_what_another_chose(monkeypatch):
    """And what is timed is the method's own prompt."""
    (kind,) = (kind for kind in layer_kinds.kinds(parse(METHODS[0]), 12, layer_kinds.in_prompt) if kind.chooser)
    assert kind.name == "reading"
    plan, outs = prefill.Plan((), (300,), **SMALL), []
    prompt = prefill._drawn(plan, 300)
    monkeypatch.setattr(prefill, "_peak", lambda plan, step: outs.append(step().out) or 0)
    prefill._kind(plan, kind, prompt)
    chosen, forward = [], {}
    for policy in (kind.chooser, kind.policy):
        branch = prefill._branch(policy, prompt, forward)
        chosen.append(policy.prompt(branch, prompt.q, plan.scaling).out)
    assert torch.equal(outs[0], chosen[1])
    dense = ops.attend_causal(prompt.q, KV(prompt.cache.keys, prompt.cache.values), logits=Logits(plan.scaling)).out
    assert not torch.allclose(outs[0], dense, atol=1e-2)


def test_libraries_attend_causally(monkeypatch):
    module = ModuleType("flash_attn_interface")

    def flash_attn_func(q, k, v, softmax_scale, causal, window_size=(-1, -1)):
        assert causal
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if window_size == (-1, -1):
            return ops.attend_causal(q, KV(k, v), logits=Logits(softmax_scale)).out.transpose(1, 2)
        assert window_size[1] == 0
        lower = torch.arange(q.shape[2]) - window_size[0]
        return ops.attend_window(q, KV(k, v), logits=Logits(softmax_scale), lower=lower).out.transpose(1, 2)

    q, k, v = torch.randn(1, 8, 40, 16), torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
    expected = ops.attend_causal(q, KV(k, v), logits=Logits(0.3)).out
    for returned in (flash_attn_func, lambda *x, **how: (flash_attn_func(*x, **how), None)):
        module.flash_attn_func = returned
        monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
        known = dense_peers.causal("cuda", "float16")
        assert set(known) == {"sdpa-cudnn", "sdpa-flash", "flash-attention-3"}
        torch.testing.assert_close(known["flash-attention-3"](q, k, v, 0.3), expected)
        windowed = ops.attend_window(q, KV(k, v), logits=Logits(0.3), lower=torch.arange(40) - 7 + 1).out
        torch.testing.assert_close(known[dense_peers.FLASH_ATTENTION_3](q, k, v, 0.3, window=7), windowed)
    torch.testing.assert_close(dense_peers.causal("cpu", "float32")["sdpa"](q, k, v, 0.3), expected)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    said = []
    assert set(dense_peers.causal("cuda", "float16", said.append)) == {"sdpa-cudnn", "sdpa-flash"}
    assert dense_peers.causal("cuda", "float32", said.append) == {}
    assert [line.split(" ")[0] for line in said] == ["FlashAttention-3", "no"]


def test_without_any_library_the_baseline_is_our_own(monkeypatch):
    def fails(*given):
        raise RuntimeError("no plan\nfor these")

    monkeypatch.setattr(dense_peers, "causal", lambda device, dtype, say: {"one": fails})
    said = []
    (row,) = prefill.run(prefill.Plan((), (64,), **SMALL), say=said.append)
    assert (row["case"]["method"], row["baseline"], row["speedup"]) == ("dense", "dense", 1.0)
    assert said[0] == "one: left out at 64 tokens, no plan for these"
    assert said[1].startswith("no library attends densely to 64 tokens in float32 here")


def test_kernels_of_libraries_are_of_attention():
    parts = breakdown.by_part(
        {
            "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90": 3.0,
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": 2.0,
            "fmha_cutlassF_f16_aligned": 1.0,
            "vectorized_elementwise_kernel": 0.5,
        }
    )
    assert parts == {"score": 0.0, "select": 0.0, "attend": 6.0, "other": 0.5}


def test_tables(found):
    text = prefill_table(list(found.values()))
    assert "prefill, a layer of 8 query and 2 KV heads, 300 tokens, float32" in text
    assert "| `h2o` | 300 | 12 | dense, learning |" in text
    assert "| `kascade_paper:min_k=16` | 300 | 7 | reading |" in text


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"heads": 7}, "heads must be a multiple of kv-heads, 2, not 7"),
        ({"dtype": "int8"}, "unknown dtype 'int8'. .*Allowed: bfloat16, float16, float32"),
        ({"device": "tpu"}, "unknown device 'tpu'. Did you mean 'cpu'"),
        ({"methods": ("h3o",)}, "did you mean 'h2o'"),
    ],
)
def test_plans_that_cannot_be(changed, message):
    with pytest.raises(UserError, match=message):
        prefill.run(prefill.Plan(**{"methods": (), "contexts": (64,), **SMALL, **changed}))


# A model


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(models.SHAPES, "tiny", LlamaConfig(**TINY))
    how = {"contexts": (60,), "repeats": 2, "dtype": "float32", "seed": 0, "device": "cpu"}
    return functools.partial(prefill_model.Plan, "tiny", **how)


def test_the_first_token_of_a_model(tiny):
    method, said = "kascade_paper:anchors=2,min_k=16", []
    plan = tiny(methods=(method, "snapkv"), chunks=(0, 16))
    measured = prefill_model.run(plan, say=said.append)
    spec = parse(method).spec
    assert [(row["case"]["method"], row["case"]["chunk"]) for row in measured] == [
        (name, chunk) for chunk in (0, 16) for name in ("dense", spec, "snapkv", "transformers-sdpa")
    ]
    for row in measured:
        assert set(measurements.FIELDS) <= set(row)
        dense = measured[0 if row["case"]["chunk"] == 0 else 4]
        assert row["speedup"] == pytest.approx(dense["ms"] / row["ms"])
        assert row["first_ms"] > 0
        case = row["case"]
        assert (case["level"], case["weights"], case["model"]) == ("model", "random", "tiny")
        assert case["share"] == {spec: 0.1, "snapkv": 0.125}.get(case["method"])
        library = "" if case["method"] == "transformers-sdpa" else "PyTorch"
        assert (row["dense_prompts"] or "") == library
    title = "prefill, tiny (random weights), 60 tokens"
    assert f"{title}, float32" in markdown.tables(measured)
    assert f"{title} in chunks of 16, float32" in prefill_table(measured)


def test_chunks_are_what_is_read_at_once(tiny, monkeypatch):
    lengths, attend = [], ops.attend_causal

    def counted(q, *given, **how):
        lengths.append((q.shape[2], how["offset"]))
        return attend(q, *given, **how)

    monkeypatch.setattr(ops, "attend_causal", counted)
    prefill_model.run(tiny(methods=(), chunks=(25,), repeats=1), say=lambda _: None)
    layers, times = 4, 2
    assert lengths == [one for one in [(25, 0), (25, 25), (10, 50)] for _ in range(layers)] * times


def test_a_method_that_reads_a_prompt_in_one_piece_is_left_out_of_chunks(tiny):
    said = []
    measured = prefill_model.run(tiny(methods=("h2o_as_published",), chunks=(0, 16)), say=said.append)
    found = [(row["case"]["method"], row["case"]["chunk"]) for row in measured]
    assert (("h2o_as_published", 0) in found, ("h2o_as_published", 16) in found) == (True, False)
    assert [line for line in said if "one piece" in line] == [
        "h2o_as_published: left out in chunks of 16, it reads a prompt in one piece"
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "lama-3.1-8b"}, "unknown model 'lama-3.1-8b'. Did you mean 'llama-3.1-8b'"),
        ({"dtype": "int8"}, "unknown dtype 'int8'. .*Allowed: bfloat16, float16, float32"),
        ({"methods": ("h3o",)}, "did you mean 'h2o'"),
    ],
)
def test_models_that_cannot_be_measured(tiny, changed, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(tiny(methods=(), chunks=(0,)), **changed).check()


# The command line


def invoke(*words):
    return CliRunner().invoke(layer.app, ["prefill", *words])


def test_the_command_of_a_row_makes_its_case_again(tmp_path):
    plan = prefill.Plan(("streaming:window=64",), (64,), **SMALL)
    (row, *_) = prefill.run(plan, say=lambda _: None)
    program, words = row["command"].split()[:3], shlex.split(row["command"])[3:]
    assert program == ["python", "-m", "benchmarks.layer"]
    out = tmp_path / "rows.jsonl"
    done = CliRunner().invoke(layer.app, [*words, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "| `streaming:window=64` | 64 | 12 | streaming |" in done.output
    assert len(out.read_text().splitlines()) == 3
    assert f'"command": "{row["command"]}"' in out.read_text()

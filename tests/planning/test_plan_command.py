"""`foveate plan`: its lines, its refusals, and the output that the guide shows."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

import foveate
from foveate.cli import app
from foveate.integrations.vllm import launch
from foveate.lab.bench.models import SHAPES
from foveate.planning.gpus import GPUS, gpu_of
from foveate.planning.lines import lines_of
from foveate.planning.machine import machine_facts
from foveate.planning.model import model_of
from foveate.planning.plan import Asked, plan_of
from foveate.runtime import sparse_from_length
from foveate.state import Geometry
from tests.helpers import CONFIGS, tiny_model
from tests.integrations.test_vllm_launch import SIZES
from tests.integrations.test_vllm_settings import engine

ROOT = Path(__file__).resolve().parents[2]
H200 = GPUS["h200"]


@pytest.fixture(scope="module")
def eight_billion(tmp_path_factory):
    """A folder with the configuration of the 8B's shape alone."""
    folder = tmp_path_factory.mktemp("models") / "llama-3.1-8b"
    shape = SHAPES["llama-3.1-8b"].to_dict() | {"dtype": "bfloat16"}
    transformers.LlamaConfig(**shape).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def without_kept_calibrations(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def call(folder, *options, gpu="h200", context=30000, sequences=8):
    how = [
        "--model",
        folder,
        "--context",
        context,
        "--sequences",
        sequences,
        *(["--gpu", gpu] if gpu else []),
        *options,
    ]
    return CliRunner().invoke(app, ["plan", *map(str, how)])


def lines(folder, *options, **how):
    done = call(folder, *options, **how)
    assert done.exit_code == 0, done.output
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


def config_of(tmp_path, family, **more):
    CONFIGS[family](**more).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_guide_shows_what_the_command_prints(eight_billion, monkeypatch):
    page = (ROOT / "docs" / "guide" / "choose.md").read_text(encoding="utf-8")
    shown = re.search(r"```\n\$ foveate (plan .*?)\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(eight_billion.parent)
    done = CliRunner().invoke(app, shown[1].split())
    assert done.exit_code == 0
    assert done.stdout == shown[2]


def test_sizes_are_those_of_the_shape(eight_billion):
    model = model_of(eight_billion)
    plan = plan_of(eight_billion, Asked(30000, 8, H200, kv_cache_dtype="fp8", method="kascade:anchors=10"))
    assert model.parameters == 8_030_261_248  # as the model's card says
    assert model.weights == 2 * model.parameters
    assert model.read == model.weights - 2 * 128256 * 4096
    assert plan.memory.kept == 8 * 30000 * 32 * 8 * (128 + 128)
    assert plan.memory.summaries == 0


@pytest.mark.parametrize(("method", "share"), [("pages", 0.07), ("luka", 0.26), ("kascade:anchors=10", 0.0)])
def test_summaries_are_what_the_methods_declare(method, share, eight_billion):
    plan = plan_of(eight_billion, Asked(131072, 1, H200, method=method))
    assert plan.memory.summaries / plan.memory.kept == pytest.approx(share, abs=0.006)


def test_memory_is_what_a_cache_takes(tmp_path):
    folder = config_of(tmp_path, "llama")
    model = tiny_model("llama")
    foveate.attach(model, "pages:page_size=4,top_k=8")
    model.generate(torch.ones(2, 40, dtype=torch.long), max_new_tokens=8, do_sample=False)
    plan = plan_of(folder, Asked(47, 2, H200, method="pages:page_size=4,top_k=8"), "float32")
    assert plan.memory.kept + plan.memory.summaries == foveate.stats(model).resident_bytes


def test_layers_with_windows_hold_the_window(tmp_path):
    plan = plan_of(
        config_of(tmp_path, "gemma3", max_position_embeddings=4096), Asked(3000, 2, H200, method="dense", ranks=2)
    )
    token = 2 * 2 * 16 * plan.model.shape["kv_heads"] // 2  # bytes of a layer on one of two GPUs, in bfloat16
    assert list(plan.model.chosen) == [1, 3]
    assert {index: window for index, (_, window) in plan.model.windows.items()} == {0: 8, 2: 8}
    assert plan.memory.kept == 2 * token * (2 * 3000 + 2 * 8)


def test_an_embedding_is_read_where_it_is_the_head(tmp_path):
    tied, apart = (model_of(config_of(tmp_path / str(tie), "llama", tie_word_embeddings=tie)) for tie in (True, False))
    assert tied.read == tied.weights == apart.read < apart.weights


def test_quantised_weights_take_what_is_stored(tmp_path):
    folder = config_of(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    index = {"metadata": {"total_size": 123_456}, "weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert model_of(folder).weights == 123_456
    assert "(as stored)" in lines(folder, context=100)["weights"]


def test_few_sequences_read_few_experts(tmp_path):
    config = transformers.Qwen3MoeConfig(
        **{
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
        **{
            "moe_intermediate_size": 32,
            "intermediate_size": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 90,
        },
    )
    config.save_pretrained(tmp_path)
    model = model_of(tmp_path)
    assert model.experts == 2 * 2 * 8 * 3 * 64 * 32
    assert model.read_by(1) == model.read + model.experts / 4
    assert model.read_by(100) == pytest.approx(model.read + model.experts)


def test_the_bound_is_that_of_attach_and_of_serve(eight_billion):
    for method, sequences in (("pages", 8), ("pages", 1), ("kascade:anchors=10", 2), ("kascade:anchors=10", 64)):
        plan = plan_of(eight_billion, Asked(30000, sequences, H200, method=method))
        own = list(plan.transformers.layers.values())
        bound = max(4096, own[0].sparse_from_tokens // sequences)
        assert plan.transformers.sparse_from == bound == sparse_from_length(own, Geometry(32, 8, 128, 128), sequences)
        assert plan.transformers.acts == (bound <= 30000)


def test_the_bound_over_several_gpus_is_that_of_the_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    method = "kascade_paper:top_k=0.1,anchors=[0,2],decode_only=true"
    config = engine(method, **{**SIZES, "parallel_config__tensor_parallel_size": 2})
    (dense,) = (line for line in launch.startup_summary(config) if line.startswith("dense: "))
    folder = config_of(tmp_path, "llama", max_position_embeddings=1 << 26)
    found = plan_of(folder, Asked(30000, 1, H200, ranks=2, method=method)).vllm.sparse_from
    assert f"fewer than {found:,} tokens" in dense


def test_a_calibration_is_found_by_the_weights(tmp_path):
    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)
    assert plan_of(folder, Asked(100, 1, H200)).why.startswith("pages, because no calibration is known")
    (folder / "model.safetensors").unlink()
    assert plan_of(folder, Asked(100, 1, H200)).why.startswith("pages, because the folder holds no weights")


def test_what_does_not_fit_says_what_to_do(eight_billion):
    found = lines(eight_billion, gpu="h100", context=131072, sequences=4)
    assert found["does not fit"].endswith("more than 72.0 GB (H100 SXM, 80 GB, 10% of it left free)")
    assert re.search(r"^\d sequences at once \(--sequences \d\); or keys and values in fp8", found["instead"])
    assert "GB of host memory" in found["instead"]
    assert found["Transformers"] == "foveate.attach(model, offload=True)"
    most = int(re.search(r"--sequences (\d)", found["instead"])[1])
    assert "fits" in lines(eight_billion, gpu="h100", context=131072, sequences=most)
    assert "does not fit" in lines(eight_billion, gpu="h100", context=131072, sequences=most + 1)
    assert "fits" in lines(eight_billion, "--kv-cache-dtype", "fp8", gpu="h100", context=131072, sequences=4)


@pytest.mark.parametrize(("context", "spec"), [(115_000, ""), (190_000, ', "pages:top_k=0.125"')])
def test_host_memory_takes_as_much_as_the_guide_says(context, spec, tmp_path):
    """memory.md: with 24 GB 120K tokens under `pages`, 197K with an eighth of the keys."""
    shape = SHAPES["llama-3.1-8b"].to_dict() | {"dtype": "bfloat16", "max_position_embeddings": 1 << 20}
    transformers.LlamaConfig(**shape).save_pretrained(tmp_path)
    found = lines(tmp_path, gpu="24GB", context=context, sequences=1)
    assert found["Transformers"] == f"foveate.attach(model{spec}, offload=True)"
    assert found["a step"] == "not estimated, because this does not fit"
    assert lines(tmp_path, gpu="24GB", context=210_000, sequences=1)["Transformers"] == "does not fit"


def test_weights_that_do_not_fit_need_other_gpus(eight_billion):
    assert "the weights alone do not fit" in lines(eight_billion, gpu="16GB")["instead"]
    assert "on each GPU" in lines(eight_billion, "--tp", 2, gpu="16GB", context=4000, sequences=1)["weights"]


def test_commands_are_those_to_type(eight_billion):
    found = lines(eight_billion, "--method", "kascade:anchors=10", "--dtype", "float16")
    assert found["Transformers"] == 'foveate.attach(model, "kascade:anchors=10")'
    assert found["vLLM"] == (
        f"foveate serve {eight_billion} --method kascade:anchors=10 --max-model-len 30000 --max-num-seqs 8 "
        "--dtype float16"
    )
    command = lines(eight_billion, "--tp", 2, "--kv-cache-dtype", "fp8", context=131072)["vLLM"]
    assert command.endswith("--max-num-seqs 8 --tensor-parallel-size 2 --kv-cache-dtype fp8")


def test_short_contexts_stay_dense(eight_billion):
    found = lines(eight_billion, context=3000)
    assert found["acts"] == "no, from 8,192 tokens a sequence with 8 at once; these have 3,000"
    assert found["Transformers"] == "stay with dense attention, because the method acts from 8,192 tokens on"
    assert re.search(r"^stay with dense attention, because .*: vllm serve ", found["vLLM"])
    assert "dense_below=0" in found["a step in Transformers, estimated"]


def test_methods_that_no_estimate_knows_say_so(eight_billion):
    found = lines(eight_billion, "--method", "snapkv:top_k=0.25")
    assert "its time is not estimated" in found["a step in Transformers, estimated"]
    assert found["vLLM"].startswith("no, snapkv evicts tokens")


def test_a_method_that_is_never_faster_says_so_whatever_the_number_of_sequences(eight_billion):
    for sequences in (1, 8):
        found = lines(eight_billion, "--method", "twilight", sequences=sequences)
        assert found["acts"] == "no, it is not faster on a GPU at any length; dense_below=0 makes it sparse"
        why = "because the method is not faster on a GPU at any length"
        assert found["Transformers"] == f"stay with dense attention, {why}"


@pytest.mark.parametrize(("method", "name"), [("snapkv:top_k=0.25", "snapkv"), ("snapkv+quest", "snapkv+quest")])
def test_what_a_method_evicts_is_not_taken_off_and_the_plan_says_so(method, name, eight_billion):
    found = lines(eight_billion, "--method", method, gpu="h100", context=131072)
    assert found["keys and values"].endswith(f"and room to grow; what {name} evicts is not taken off)")
    assert f"or {name} itself, if the tokens that it keeps fit" in found["instead"]
    assert "a method that evicts" not in found["instead"]
    other = lines(eight_billion, gpu="h100", context=131072)
    assert "evicts" not in other["keys and values"]
    assert other["instead"].endswith("or a method that evicts (docs/guide/choose.md)")


def test_other_gpus_are_estimated_by_their_data_sheets(eight_billion):
    found = lines(eight_billion, gpu="h100")
    assert "scaled to the H100 SXM by the bandwidth" in found["estimates"]
    assert "bandwidth is not known" in lines(eight_billion, gpu="80GB")["a step"]
    assert gpu_of("24 gb").memory == 24 * 10**9


def test_numbers_come_as_json(eight_billion):
    found = json.loads(call(eight_billion, "--json").stdout)
    assert found["memory"]["fits"] is True
    assert found["engines"]["vLLM"]["method"] == "pages:weighted=false"
    assert found["engines"]["Transformers"]["sparse_from"] == 8192


@pytest.mark.parametrize(
    ("options", "how", "why"),
    [
        ([], {"sequences": 0}, "sequences must be at least 1, got 0"),
        ([], {"context": 0}, "context must be at least 1, got 0"),
        (["--tp", 0], {}, "tp must be at least 1, got 0"),
        (["--tp", 3], {}, "tp must be a divisor of the model's 32 query heads, got 3"),
        ([], {"gpu": "h20"}, "unknown GPU 'h20'. Did you mean 'h200'?"),
        ([], {"context": 200_000}, "context needs 200,000 positions, the model has 131,072; ask for less"),
        (["--kv-cache-dtype", "int8"], {}, "kv-cache-dtype must be one of auto, fp8, fp8_e4m3, got int8"),
        (["--dtype", "int8"], {}, "unknown dtype 'int8'"),
        (["--method", "kascad"], {}, "unknown method 'kascad'"),
    ],
)
def test_bad_input_is_one_line(options, how, why, eight_billion):
    done = call(eight_billion, *options, **how)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {why}")
    assert done.stderr.count("\n") == 1


def test_without_a_gpu_one_is_named(eight_billion, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "error: no GPU is here: name one with --gpu" in call(eight_billion, gpu=None).stderr


def test_models_that_attach_refuses_are_refused_alike(tmp_path):
    config = transformers.MistralConfig(
        **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"intermediate_size": 64, "vocab_size": 90, "sliding_window": 8},
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not supported") as refused:
        foveate.attach(transformers.MistralForCausalLM(config))
    assert call(tmp_path, context=100).stderr == f"error: {tmp_path}: {refused.value}\n"
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}', encoding="utf-8")
    assert "not the configuration of a known model" in call(tmp_path).stderr


def test_a_machine_is_told_by_the_arithmetic_of_plans(eight_billion):
    facts = machine_facts(H200)
    plan = plan_of(eight_billion, Asked(30000, 1, H200, method="pages"))
    verdict = next(line for line in lines_of(plan, "DIR") if line.startswith("fits"))
    assert facts["memory"].removesuffix(" for weights, keys and values") in verdict
    assert f"pages from {plan.transformers.sparse_from:,} tokens" in facts["acts"]
    assert machine_facts(None)["acts"].startswith("at any length")


def test_a_folder_that_is_missing_is_known_before_torch_is_loaded(tmp_path):
    code = (
        "import sys; from foveate.cli import app\n"
        f"try: app(['plan', '--model', {str(tmp_path / 'none')!r}, '--context', '9', '--gpu', 'h200'])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "2 False False\n"
    assert done.stderr.strip().endswith("no such model folder")
    assert time.monotonic() - begun < 20


def test_gpus_that_share_each_layer_hold_their_part_of_weights_keys_and_summaries(eight_billion):
    one, two = (json.loads(call(eight_billion, "--json", "--tp", ranks).stdout)["memory"] for ranks in (1, 2))
    assert two["weights"] == one["weights"] / 2
    served = json.loads(call(eight_billion, "--json", "--kv-cache-dtype", "fp8").stdout)[
        "memory"
    ]  # without room to grow
    assert two["kept"] == served["kept"], "half of the heads, as eight bits are half of the bytes"
    assert 0 < two["summaries"] < 0.51 * one["summaries"]


def test_a_composition_is_named_by_both_of_its_methods(eight_billion):
    said = call(eight_billion, "--method", "snapkv+quest").stdout
    assert "snapkv+quest reads is not known before a step" in said
    assert "composed" not in said

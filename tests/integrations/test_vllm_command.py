"""Commands of vLLM's server as its own parser reads them, and the mistakes that end them before an engine starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from foveate.integrations.vllm import launch
from foveate.integrations.vllm.options import OTHERWISE
from tests.helpers import CONFIGS
from tests.integrations.test_vllm_launch import DEFAULTS
from tests.integrations.test_vllm_settings import KASCADE
from tests.integrations.vllm_engine import ENVIRONMENT

CUSTOM = ["--attention-backend", "CUSTOM"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    CONFIGS["llama"]().save_pretrained(path)
    return str(path)


def with_method(method):
    return ["--additional-config", json.dumps({"foveate": method})]


def test_options_have_the_names_and_defaults_that_other_tests_assume(folder):
    parsed, changed = launch._parsed(["serve", folder])
    assert changed <= {"model_tag"}
    assert parsed.model == folder
    assert parsed.attention_config.backend is None
    found = {name: getattr(parsed, name) for name in DEFAULTS if name != "attention_config"}
    found["enable_lora"] = bool(found["enable_lora"])  # 0.32 has None for False
    assert found == {name: value for name, value in DEFAULTS.items() if name != "attention_config"}
    assert vars(parsed).keys() >= OTHERWISE


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([*CUSTOM, *with_method("kascad")], "did you mean 'kascade'"),
        (["--attention_backend=custom", *with_method("kascad")], "did you mean 'kascade'"),
        (["--attention-config.backend", "CUSTOM", *with_method("kascad")], "did you mean 'kascade'"),
        ([*CUSTOM, "--additional-config.foveate", "kascad"], "did you mean 'kascade'"),
        ([*CUSTOM, "--additional_config.foveate.method=kascad"], "did you mean 'kascade'"),
        (["--additional-config.foveate", KASCADE], "add --attention-backend CUSTOM"),
        ([*CUSTOM, *with_method(KASCADE), "-pp", "2"], "pipeline parallelism"),
        ([*CUSTOM, *with_method(KASCADE), "-dcp=2"], "decode context parallelism"),
        ([*CUSTOM, *with_method(KASCADE), "--speculative-config.method", "eagle"], "speculative decoding by eagle"),
        ([*CUSTOM, *with_method(KASCADE), "-sc", '{"method": "eagle"}'], "speculative decoding by eagle"),
        ([*CUSTOM, *with_method(KASCADE), "--spec-method", "eagle"], "speculative decoding by eagle"),
        ([*CUSTOM, *with_method(KASCADE), "--kv_cache_dtype", "fp8_e5m2"], "--kv-cache-dtype fp8_e5m2"),
        ([*CUSTOM, *with_method(KASCADE), "--runner=pooling"], "pooling models"),
        ([*CUSTOM, *with_method("pages:weighted=false,page_size=12"), "--block-size", "32"], "do not divide"),
    ],
)
def test_options_are_read_as_vllm_reads_them(folder, options, why):
    for command in (["serve", folder, *options], ["--model", folder, *options], [*options, "--model", folder]):
        with pytest.raises(ValueError, match=why):
            launch.check_command(command)


def test_options_in_a_file_are_read_too(folder, tmp_path):
    path = tmp_path / "options.yaml"
    lines = [f"model: {folder}", "attention-backend: CUSTOM", "additional-config:", f'  foveate: "{KASCADE}"']
    path.write_text("\n".join(lines), encoding="utf-8")
    for begin in (["serve"], []):
        launch.check_command([*begin, "--config", str(path)])
        with pytest.raises(ValueError, match="pipeline parallelism"):
            launch.check_command([*begin, "--config", str(path), "-pp", "2"])
    path.write_text("\n".join([*lines, "pipeline-parallel-size: 2"]), encoding="utf-8")
    with pytest.raises(ValueError, match="pipeline parallelism"):
        launch.check_command(["serve", "--config", str(path)])


@pytest.mark.parametrize(
    "options",
    [
        [*CUSTOM, "--additional-config", "{not json"],
        [*CUSTOM, *with_method("kascad"), "--no-such-option"],
        [*CUSTOM, "--config", "nowhere.yaml"],
        [*CUSTOM, "--help"],
    ],
)
def test_what_vllm_refuses_or_prints_is_left_to_it(folder, options, capsys):
    launch.check_command(["serve", folder, *options])
    assert capsys.readouterr().out == ""


def test_an_option_that_vllm_does_not_know_is_told_with_one_that_it_knows(folder):
    with pytest.raises(
        ValueError, match=r"unrecognized arguments: --max-model-length 9; did you mean --max-model-len\?"
    ):
        launch._parsed(["serve", folder, "--max-model-length", "9"])


def run(*command, **environment):
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(Path(__file__).parents[2])} | environment
    return subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, check=False
    )


def test_vllms_own_command_ends_before_an_engine_starts(folder):
    command = ["vllm.entrypoints.openai.api_server", "--model", folder, *CUSTOM, *with_method(KASCADE), "-pp", "2"]
    done = run(*command, VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_LOGGING_LEVEL="INFO")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: foveate does not support pipeline parallelism")
    for sign in ("EngineCore", "Traceback"):
        assert sign not in done.stdout + done.stderr


def test_the_plan_is_printed_and_says_what_is_slow(folder):
    done = run("foveate", "serve", folder, "--method", KASCADE, "--check", "--enforce-eager")
    assert done.returncode == 0, done.stderr
    *plan, last = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in plan[-6:-2]] == ["method", "dense, choosing", "dense", "slow"]
    assert plan[-2].startswith("weights: ")
    assert plan[-1].startswith("a request of 512 tokens: ")
    assert last.endswith("--enforce-eager")

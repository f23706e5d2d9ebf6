"""Options of benches: declared once, they are what plans check, what commands take and what rows name."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foveate.bench import commands, options, plan
from foveate.cli import app
from foveate.results.errors import UserError

PLANS = [
    options.CpuDecode(Path("model"), Path("data"), steps=3, methods=("quest", "luka:page_size=16,top_k=3")),
    options.Prefill(("h2o",), (64, 128), heads=4, kv_heads=2, dtype="float32", device="cpu"),
    options.PrefillModel("qwen3-8b", ("quest",), chunks=(0, 64), device="cpu"),
    options.Decode(("quest",), (64,), batches=(1, 2), level="layer", device="cpu"),
    options.DecodeModel(methods=("quest",), liger=True, dense_below="auto", device="cpu"),
    options.DecodeModel(dense_below=4096, device="cpu"),
    options.Indexer((64,), ("foveate", "chunked"), dtype="float8_e4m3fn", device="cpu"),
    options.IndexerStudy(500, small=400, device="cpu"),
    options.CsaLayer((64,), ("foveate",), index_heads=16, device="cpu"),
    options.CsaModel((70,), small=0, device="cpu"),
    options.PageScores(Path("model"), Path("data"), ("niah:length=300", "perplexity"), budgets=(0.5,)),
]


@pytest.mark.parametrize("asked", PLANS, ids=lambda one: type(one).__name__)
def test_the_command_of_a_plan_asks_for_it(asked, monkeypatch):
    runs = []
    monkeypatch.setattr(commands, "measure", lambda out, *some, markdown=None: runs.extend(some))
    done = CliRunner().invoke(app, shlex.split(asked.command())[1:])
    assert done.exit_code == 0, done.output
    ((_, made),) = runs
    assert isinstance(made, type(asked))
    found, expected = (
        {name: list(value) if isinstance(value, (list, tuple)) else value for name, value in vars(one).items()}
        for one in (made, asked)
    )
    assert found == expected


def test_each_phase_of_hybrids_gets_its_options(monkeypatch):
    runs = []
    monkeypatch.setattr(commands, "measure", lambda out, *some, markdown=None: runs.extend(some))
    words = "--phase prefill --phase memory --phase training --context 4096 --context 16384 --steps 3 --no-compile"
    done = CliRunner().invoke(app, ["bench", "hybrids", *words.split(), "--share", "0.5", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    (_, attention), (_, memory), (_, training) = runs
    assert (attention.phases, attention.contexts, attention.share) == (("prefill",), [4096, 16384], 0.5)
    assert (memory.contexts, memory.steps, memory.presets) == ([4096, 16384], 3, ("gdn_attn", "lalte"))
    assert (training.steps, training.compile, training.profile) == (3, False, False)


def test_the_help_names_defaults_and_the_choices_that_have_an_option():
    text = " ".join(CliRunner().invoke(app, ["bench", "decode", "--help"], env={"COLUMNS": "300"}).output.split())
    assert "Tokens so far. May be repeated. [default: (8192, 32768, 131072; with model 32768)]" in text
    assert "Query heads (kernel, layer). [default: (32)]" in text
    assert "--seed <int> Seed of the inputs. [default: 0]" in text
    text = " ".join(CliRunner().invoke(app, ["bench", "hybrids", "--help"], env={"COLUMNS": "300"}).output.split())
    assert "--compile --no-compile <bool> Compile the layers (training). [default: (--compile)]" in text
    assert "KV heads of native sparse attention (decode)." in text


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"contexts": (64, 0)}, "context must be at least 1, not 0"),
        ({"contexts": ()}, "context must be at least 1, not none"),
        ({"seed": -1}, "seed must be at least 0 and below 2.64, got -1"),
        ({"kv_heads": 0}, "kv-heads must be at least 1, not 0"),
        ({"dtype": "int8"}, "dtype must be one of bfloat16, float16, float32, not 'int8'"),
        ({"device": "tpu"}, "device must be cuda or cpu, not 'tpu'"),
        ({"methods": ("quest", "h3o")}, "did you mean 'h2o'"),
    ],
)
def test_values_that_are_not_allowed_are_named_by_their_flags(changed, message):
    with pytest.raises(UserError, match=message):
        options.Prefill(**({"device": "cpu"} | changed)).check()


def test_several_values_are_checked_against_the_choices():
    for names, message in ((("dense",), "impl must be among foveate, reference, not dense"), ((), "not none")):
        with pytest.raises(UserError, match=message):
            options.CsaLayer(implementations=names, device="cpu").check()


def test_a_number_that_is_no_multiple_is_named_with_its_flag():
    with pytest.raises(UserError, match="heads must be a multiple of kv-heads, 3, not 8"):
        options.Prefill(heads=8, kv_heads=3).check_multiple("heads", "kv_heads")


def test_methods_are_spelled_out_after_dense():
    assert options.Prefill(("quest", "dense", "quest:")).specs() == ["dense", "quest"]
    with pytest.raises(UserError, match="did you mean 'quest'"):
        plan.parsed("qest")


def test_options_are_known_without_torch():
    code = "import sys, foveate.bench.commands; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

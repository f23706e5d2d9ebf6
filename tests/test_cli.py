import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import foveate
from foveate.calibration import kept_folder
from foveate.cli import app, terminal
from foveate.integrations.transformers import releases
from foveate.lab.results import resultfile
from foveate.methods import base
from tests import tiny
from tests.helpers import full_disk

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "rows.jsonl"


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def compare(model, out, *more):
    settings = ["--model", model, "--data", tiny.SAMPLE, "--out", out, "--task", "niah:max_new_tokens=3"]
    return ["compare", *settings, "--length", 300, "--limit", 3, *more]


def rows(out):
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_methods_tell_their_settings():
    entries = {entry["name"]: entry for entry in json.loads(call("methods", "--json").stdout)}
    assert {"dense", "h2o", "luka", "streaming"} <= entries.keys()
    for entry in entries.values():
        assert entry["summary"]
        assert entry["source"]
        assert all(setting["help"] for setting in entry["settings"])
    page_size = next(setting for setting in entries["luka"]["settings"] if setting["name"] == "page_size")
    assert page_size["default"] == [8, 32]
    assert [name for name, entry in entries.items() if "  " in entry["summary"]] == []
    text = call("methods").stdout
    assert "page_size" in text
    assert "``" not in text


@pytest.mark.parametrize("value", [0, 1, 128, 0.0, 1.0, 2.0, 0.05, 0.125, 1 / 3])
def test_a_default_is_shown_as_a_number_or_a_share(value):
    """As in specs, where 1 is one key and 1.0 all of them."""
    setting = {"name": "top_k", "default": value, "help": "keys read"}
    entry = {"name": "mine", "summary": "A method.", "source": "None.", "settings": [setting]}
    console = terminal.console()
    with console.capture() as shown:
        console.print(terminal.methods([entry]))
    found = json.loads(shown.get().split()[-3])
    assert type(found) is type(value)
    assert found == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize("name", ["dense", "kascade", "lte", "pages", "per_layer"])
def test_one_method_has_an_example(name):
    done = call("methods", name)
    assert done.exit_code == 0
    (entry,) = json.loads(call("methods", name, "--json").stdout)
    assert entry["name"] == name
    assert done.stdout.startswith(f"{name}  ")
    assert f"foveate.attach(model, {entry['example']!r})" in done.stdout
    command = done.stdout.partition("foveate generate")[2]
    assert shlex.split(command)[-1] == entry["example"]
    assert foveate.methods.spelled(entry["example"]).startswith(name)
    assert all(setting["name"] in done.stdout for setting in entry["settings"])


def test_an_unknown_method_names_the_nearest():
    done = call("methods", "page")
    assert done.exit_code == 2
    assert "unknown method 'page' (did you mean 'pages'?)" in done.stderr


def test_the_version():
    done = subprocess.run([sys.executable, "-m", "foveate", "--version"], capture_output=True, text=True, check=False)
    assert done.stdout == f"foveate {foveate.__version__}\n"


def test_doctor_tells_devices_and_versions():
    facts = json.loads(call("doctor", "--json").stdout)
    assert facts["devices"][0].startswith("cpu: ")
    assert {"python", "torch", "transformers", "foveate"} <= facts["versions"].keys()
    assert "cpu float32: PyTorch, cpu bfloat16: PyTorch" in facts["prompts"]
    assert facts["dense libraries"] == "none but PyTorch: no GPU"
    assert facts["transformers"] == f"tested with {releases.OLDEST} to {releases.NEWEST}"
    assert "references (torch)" in call("doctor").stdout


def test_a_method_of_the_users_own_file_is_compared(model, out, tmp_path):
    file = tmp_path / "my_methods.py"
    file.write_text(
        "from foveate.methods import register\n"
        "from foveate.methods.streaming import Streaming\n"
        "@register\n"
        "class Mine(Streaming):\n"
        "    name = 'mine_alone'\n",
        encoding="utf-8",
    )
    try:
        done = call(*compare(model, out, "--method", "mine_alone:window=32", "--import", file))
        assert done.exit_code == 0, done.output
        assert [row["method"] for row in rows(out)] == ["dense", "mine_alone"]
        done = call(*compare(model, out, "--method", "mine_alone", "--import", tmp_path / "other.py"))
        assert "other.py: no such file" in done.output.replace("\n", "")
    finally:
        base.REGISTRY.pop("mine_alone", None)


def test_generate_answers_and_says_what_was_read(model, tmp_path):
    (tmp_path / "prompt.txt").write_text("Call me Ishmael. " * 20, encoding="utf-8")
    arguments = ["generate", "--model", model, "--max-new-tokens", 9, "--prompt-file", tmp_path / "prompt.txt"]
    dense, h2o = (call(*arguments, "--method", method) for method in ("dense", "h2o:top_k=4,window=8"))
    assert dense.exit_code == h2o.exit_code == 0
    assert call(*arguments).stderr.startswith("pages · "), "what attach would choose without a calibration"
    assert dense.stdout.strip()
    assert dense.stdout != h2o.stdout
    assert "8 decode steps · 100.0 % of the keys read" in dense.stderr
    assert "h2o:top_k=4,window=8 · " in h2o.stderr
    assert "tokens of each sequence evicted (mean over layers)" in h2o.stderr
    chat = call("generate", "--model", model, "--prompt", "Call me", "--chat", "--max-new-tokens", 2)
    assert chat.exit_code == 0
    assert "3 prompt tokens" not in chat.stderr
    refused = call("generate", "--model", model, "--prompt", "Call me", "--thinking")
    assert "--thinking and --date are for chat templates: give --chat, too" in refused.stderr


def test_compare_measures_recall(model, out, tmp_path):
    """Into rows, the table and a picture."""
    asked = ("--method", "streaming:sinks=2,window=8", "--recall", 1)
    done = call(*compare(model, out, *asked))
    assert done.exit_code == 0, done.output
    dense, sparse = (row["recall"] for row in rows(out))
    assert set(dense) == set(sparse) == {"0", "1"}
    assert 0 < sparse["1"] < dense["1"] == pytest.approx(1, abs=1e-3)
    assert "recall: the share of exact attention" in " ".join(done.stdout.split())
    assert call("plot", "recall", out, "--out", tmp_path / "recall.png").exit_code == 0
    wrong = call(*compare(model, tmp_path / "other.jsonl", "--recall", -1))
    assert "recall must be a number of items, or 0, got -1" in wrong.stderr


def test_compare_from_items_to_table(model, out):
    methods = ["--method", "h2o:window=16", "--method", "luka:page_size=[8,32],top_k=0.11"]
    done = call(*compare(model, out, *methods, "--batch-size", 2, "--split", "single"))
    assert done.exit_code == 0, done.output
    assert "dense runs too" in done.stderr
    said = [line for line in done.stderr.splitlines() if " of 9 answers, the last by " in line]
    assert said[-1] == "9 of 9 answers, the last by luka"
    assert "niah / single · 300 tokens · 3 items · tiny-llama · float32 · cpu · batch 2" in done.stdout
    assert [row["spec"] for row in rows(out)] == ["dense", "h2o:window=16", "luka"]
    assert all(row["n"] == 3 and row["task_settings"]["max_new_tokens"] == 3 for row in rows(out))
    assert str(model.parent) not in out.read_text(encoding="utf-8")

    before = out.read_bytes()
    again = call(*compare(model, out, *methods, "--batch-size", 2, "--split", "single"))
    assert again.exit_code == 0
    assert "is complete; nothing to run" in again.stderr
    assert out.read_bytes() == before
    assert again.stdout.strip() == done.stdout.split("Answers")[0].strip()


def test_prompts_are_shared_unless_prefill_is_to_be_timed(model, out):
    done = call(*compare(model, out, "--method", "h2o"))
    assert "--no-share-prompt" in done.stdout
    assert [row["prefill_ms"] for row in rows(out)] == [None, None]
    timed = out.with_name("timed.jsonl")
    done = call(*compare(model, timed, "--method", "h2o", "--no-share-prompt"))
    assert "--no-share-prompt" not in done.stdout
    for row, shared in zip(rows(timed), rows(out)):
        assert row["prefill_ms"] > 0
        assert row["command"].endswith(" --no-share-prompt")
        assert row["item_values"] == shared["item_values"]
        assert row["run"] == shared["run"]


@pytest.mark.parametrize(
    "task",
    [
        "wikisalad:max_new_tokens=2",
        "perplexity:length=50,continuation=5",
        "recall:max_new_tokens=2",
        "mqar:length=60,pairs=8",
    ],
)
def test_other_tasks(model, out, task):
    done = call("compare", "--model", model, "--data", tiny.SAMPLE, "--out", out, "--task", task, "--limit", 1)
    assert done.exit_code == 0, done.output
    assert len(rows(out)) == 1


def test_a_model_runs_as_it_is(model, out):
    done = call(*compare(model, out, "--method", "own"))
    assert done.exit_code == 0, done.output
    (row,) = rows(out)
    assert row["method"] == "own"
    reported = call("report", out)
    assert reported.exit_code == 0, reported.output
    assert "| `own` |" in reported.stdout


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--method", "h20"], "h2o"),
        (["--method", "luka:pagesize=3"], "page_size"),
        (["--method", "luka:page_size=0"], "page_size"),
        (["--task", "nihah"], "unknown task 'nihah'. Did you mean 'niah'? Allowed: 2wiki, choice, documents, hotpotqa"),
        (["--split", "singel"], "unknown split 'singel'. Did you mean 'single'? Allowed: single, multi"),
        (["--length", 100], "length must be at least 256"),
        (["--length", 4000], "needs 4,003 positions, the model has 2,048"),
        (["--length", 2048], "needs 2,051 positions"),
        (["--limit", 0], "limit must be at least 1, got 0"),
        (["--seed", -1], "seed must be at least 0 and below 2^64, got -1"),
        (["--seed", 1 << 64], "seed must be at least 0 and below 2^64, got 18446744073709551616"),
        (["--batch-size", 0], "batch-size must be at least 1"),
        (["--data", "nowhere"], "nowhere: no such folder"),
        (["--model", "nowhere"], "nowhere: no such model folder"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--device", "gpu"], "unknown device 'gpu'"),
    ],
)
def test_bad_input_is_one_line(model, out, more, message, monkeypatch):
    import foveate.integrations.transformers.loading

    monkeypatch.setattr(foveate.integrations.transformers.loading, "load_model", None)
    done = call(*compare(model, out, *more))
    assert done.exit_code == 2
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not out.exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "give either --prompt or --prompt-file"),
        (["--prompt", "a", "--prompt-file", "b"], "give either --prompt or --prompt-file"),
        (["--prompt", " "], "the prompt is empty"),
        (["--prompt", "a\udc80b"], "the prompt is not UTF-8: its character 2 is '\\udc80'"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--prompt", "a", "--max-new-tokens", 0], "max-new-tokens must be at least 1"),
        (["--prompt", "a", "--max-new-tokens", 3000], "prompt and answer need 3,001 positions"),
        (["--prompt", "a", "--method", "densee"], "dense"),
    ],
)
def test_bad_prompts_are_one_line(model, more, message):
    done = call("generate", "--model", model, *more)
    assert done.exit_code == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_malformed_data_names_file_and_line(model, out, tmp_path):
    (tmp_path / "easy_2topic_short.json").write_text('[\n{"prompt": }]')
    done = call("compare", "--model", model, "--data", tmp_path, "--out", out, "--task", "wikisalad")
    assert done.exit_code == 2
    assert "easy_2topic_short.json:2: malformed JSON" in done.stderr


def test_rows_of_another_run_are_not_overwritten(model, out):
    assert call(*compare(model, out)).exit_code == 0
    before = out.read_bytes()
    done = call(*compare(model, out, "--seed", 1, "--batch-size", 3))
    assert done.exit_code == 2
    assert "seed is 0 there, 1 here" in done.stderr
    assert "batch_size is 1 there, 3 here" in done.stderr
    assert "Choose another --out" in done.stderr
    assert out.read_bytes() == before


def test_a_new_folder_is_made_and_told(model, tmp_path):
    """By each command that writes; a folder that is there is not spoken of."""
    deep = tmp_path / "deep" / "er"
    lines = []
    for name, command in {"rows.jsonl": compare, "tiny.json": calibrate}.items():
        done = call(*command(model, deep / name))
        assert done.exit_code == 0, done.output
        lines += [line for line in done.stderr.splitlines() if "new folder" in line]
    assert lines == [f"{deep} is a new folder: it is made"]
    picture = tmp_path / "new" / "picture.png"
    done = call("plot", "calibration", deep / "tiny.json", "--out", picture)
    assert f"{picture.parent} is a new folder: it is made" in done.stderr
    assert picture.is_file()


@pytest.mark.parametrize("device", ["/dev/full", "/dev/zero"])
@pytest.mark.parametrize(
    "command",
    [
        lambda model, out: compare(model, out),
        lambda model, out: calibrate(model, out),
        lambda model, out: ["bench", "decode-model", "--model", model, "--device", "cpu", "--out", out],
        lambda model, out: ["salad", "--squad", tiny.SAMPLE / "squad" / "squad_v2_dev_sample.json", "--out", out],
        lambda model, out: ["fetch", "smollm2-135m", "--out", out],
    ],
    ids=["compare", "calibrate", "bench", "salad", "fetch"],
)
def test_a_device_is_refused_before_any_work(model, device, command, monkeypatch):
    import foveate.integrations.transformers.loading

    monkeypatch.setattr(foveate.integrations.transformers.loading, "load_model", None)
    monkeypatch.setattr(foveate.integrations.transformers.loading, "load_tokenizer", None)
    done = call(*command(model, device))
    assert done.exit_code == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"error: {device}: ")


def test_a_full_disk_is_one_line(model, out):
    with full_disk(2000):
        done = call(*compare(model, out, "--limit", 5))
    assert done.exit_code == 2
    *progress, line = done.stderr.strip().splitlines()
    assert not any("error" in one for one in progress)
    assert line.startswith(f"error: {resultfile.partial_path(out)}: cannot be written to (File too large); the results")
    assert call(*compare(model, out, "--limit", 5)).exit_code == 0

    file = out.with_name("tiny.json")
    with full_disk(400):
        done = call(*calibrate(model, file))
    assert done.exit_code == 2
    *_, line = done.stderr.strip().splitlines()
    assert f"error: {file}.partial" in line
    assert "cannot be written to (" in line


@pytest.mark.full
def test_debug_lets_the_traceback_through(model, out):
    done = call("--debug", *compare(model, out, "--limit", 0))
    assert type(done.exception).__name__ == "UserError"
    command = [sys.executable, "-m", "foveate", "methods", "--debug", "--json"]  # in any place
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)


def test_faults_of_the_program_are_not_taken_for_bad_input(monkeypatch):
    import foveate

    monkeypatch.setattr(foveate.methods, "names", lambda: [].pop())
    assert isinstance(call("methods").exception, IndexError)


def test_running_out_of_memory_is_one_line(model, out, monkeypatch):
    import torch

    import foveate.lab.evaluation.generation

    def run_batch(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(foveate.lab.evaluation.generation, "run_batch", run_batch)
    done = call(*compare(model, out))
    assert done.exit_code == 2
    assert done.stderr.strip() == "error: out of memory; try fewer sequences at once, or shorter ones"


LONG = ("--limit", 24, "--method", "h2o", "--dtype", "float32")


@pytest.fixture(scope="module")
def uninterrupted(model, tmp_path_factory):
    """The rows of a command that ran to its end."""
    out = tmp_path_factory.mktemp("uninterrupted") / "rows.jsonl"
    assert call(*compare(model, out, *LONG)).exit_code == 0
    return rows(out)


@pytest.mark.full
@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_an_ended_command_goes_on_where_it_was(model, out, blow, uninterrupted):
    arguments = [str(part) for part in compare(model, out, *LONG)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "foveate", *arguments],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where the tests run in background
    )
    partial = resultfile.partial_path(out)
    until = time.monotonic() + 60
    while not (partial.exists() and partial.read_bytes().count(b"\n") > 4) and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(blow)
    _, said = process.communicate(timeout=60)
    assert not out.exists(), "the run was over before it could be ended"
    kept = partial.read_bytes().count(b"\n") - 1
    assert 4 <= kept < 48
    if blow == signal.SIGINT:
        assert process.returncode == 130
        assert "the same command goes on from there" in " ".join(said.split())
        assert "Traceback" not in said
    done = call(*arguments)
    assert done.exit_code == 0, done.output
    assert f"resuming: {kept} of 48 answers are there" in done.stderr
    for ours, theirs in zip(rows(out), uninterrupted, strict=True):
        assert ours["examples"] == theirs["examples"]
        assert ours["item_values"] == theirs["item_values"]
    assert not partial.exists()


def calibrate(model, out, *more):
    settings = ["--model", model, "--data", tiny.SAMPLE, "--out", out, "--task", "niah", "--length", 300]
    return ["calibrate", *settings, "--limit", 2, "--anchors", 1, "--keys", 16, "--tile", 24, *more]


def test_calibrate_makes_a_file_that_generate_and_compare_take(model, out, tmp_path):
    file = tmp_path / "deep" / "tiny.json"
    done = call(*calibrate(model, file))
    assert done.exit_code == 0, done.output
    (kept,) = kept_folder().iterdir()
    assert done.stdout == f"anchors [0], kept in {kept}; use them as --method\nkascade:calibration={file}\n"
    told = [line for line in done.stderr.splitlines() if line.startswith("calibrating: ")]
    assert [line.split()[1] for line in (told[0], told[-1])] == ["0", told[-1].split()[5]], done.stderr
    assert 3 <= len(told) <= 11
    assert kept.read_bytes() == file.read_bytes()
    assert json.loads(file.read_text(encoding="utf-8"))["anchors"] == [0]
    before = file.read_bytes()
    again = call(*calibrate(model, file))
    assert (again.exit_code, again.stdout) == (0, done.stdout)
    assert "is complete; nothing to run" in again.stderr
    assert file.read_bytes() == before

    method = f"kascade:calibration={file},top_k=9"
    (tmp_path / "prompt.txt").write_text("Call me Ishmael. " * 20, encoding="utf-8")
    arguments = ["generate", "--model", model, "--max-new-tokens", 5, "--prompt-file", tmp_path / "prompt.txt"]
    answer = call(*arguments, "--method", method)
    assert answer.exit_code == 0, answer.output
    assert "4 indices reused" in " ".join(answer.stderr.split())

    assert call(*compare(model, out, "--method", method)).exit_code == 0
    row = rows(out)[1]
    assert (row["settings"]["anchors"], row["settings"]["calibration"]) == ([0], str(file))
    assert list(row["settings"]["heads"]) == ["1"]
    assert row["indices_reused"] > 0

    other = tiny.build(tmp_path / "tiny-llama", seed=1)
    for command in ([*arguments[:2], other, *arguments[3:]], compare(other, tmp_path / "other.jsonl")):
        done = call(*command, "--method", method)
        assert done.exit_code == 2
        assert "is for another model of the same shape" in done.stderr.strip().splitlines()[-1]


def test_calibrations_are_kept_and_found_again(model, out, tmp_path):
    """Without a file of one's own; each by kascade, and by auto."""
    arguments = [*calibrate(model, "-")[:5], *calibrate(model, "-")[7:]]
    assert "--out" not in arguments
    done = call(*arguments)
    assert done.exit_code == 0, done.output
    (kept,) = kept_folder().iterdir()
    first, spec = done.stdout.splitlines()
    assert (first, spec) == (
        f"anchors [0], kept in {kept}; use them as --method",
        f"kascade:calibration=kept:{kept.stem}",
    )
    assert "--out" not in json.loads(kept.read_text(encoding="utf-8"))["found"]["command"]
    assert "is complete; nothing to run" in call(*arguments).stderr
    again = call(*arguments, "--seed", 1)
    assert again.exit_code == 0, again.output
    assert "is another calibration (it differs in seed, items" in again.stderr
    assert "is replaced when this one is complete" in again.stderr
    assert list(kept_folder().iterdir()) == [kept]
    assert json.loads(kept.read_text(encoding="utf-8"))["found"]["run"]["seed"] == 1

    with pytest.warns(UserWarning, match=r"kascade, with 20% of the keys and calibration 'kept:"):
        assert call(*compare(model, out, "--method", "auto", "--method", "kascade", "--method", spec)).exit_code == 0
    named = f'calibration="kept:{kept.stem}"'
    assert [row["spec"] for row in rows(out)] == ["dense", f"kascade:top_k=0.2,{named}", f"kascade:{named}"]
    other = tiny.build(tmp_path / "tiny-llama", seed=1)
    with pytest.warns(UserWarning, match=r"pages, because calibration 'kept:.*' is for another model"):
        assert call(*compare(other, tmp_path / "o.jsonl", "--method", "auto")).exit_code == 0
    assert [row["spec"] for row in rows(tmp_path / "o.jsonl")] == ["dense", "pages"]

    done = call(*arguments, "--by", "similarity")
    assert done.exit_code == 0, done.output
    assert len(list(kept_folder().iterdir())) == 2, "which kascade is not served by"
    assert done.stdout.splitlines()[-1].startswith("kascade_paper:calibration=kept:")


def test_a_cache_folder_that_cannot_be_written_is_one_line(model, tmp_path, monkeypatch):
    (tmp_path / "cache").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "tiny.json"
    done = call(*calibrate(model, file))
    assert done.exit_code == 0, done.output
    first, spec = done.stdout.splitlines()
    assert first.startswith("anchors [0], not kept for attach to find: ")
    assert "cache/foveate/calibrations/" in first
    assert spec == f"kascade:calibration={file}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foveate.integrations.transformers.loading.load_model", None)  # nothing is lost
        done = call(*calibrate(model, file)[:5], *calibrate(model, file)[7:])
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.strip().splitlines()
    assert f"{tmp_path / 'cache'} is no folder" in line


def test_documents_are_calibrated_on_in_the_usual_way(model, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("Call me Ishmael. Some years ago. " * 60, encoding="utf-8")
    arguments = ["--task", "documents", "--data", tmp_path / "docs", "--length", 300, "--limit", 2]
    done = call("calibrate", "--model", model, *arguments, "--keys", 16, "--tile", 24)
    assert done.exit_code == 0, done.output
    (kept,) = kept_folder().iterdir()
    found = json.loads(kept.read_text(encoding="utf-8"))
    assert found["settings"] == {"pool": "layer", "pooling": "sqrt", "decode_only": True}
    chosen = found["found"]["chosen_by"]
    assert (chosen["by"], chosen["anchors"], chosen["rounds"], chosen["method"]) == ("together", 1, 0, "kascade")


def test_calibrate_by_divergence_on_several_tasks(model, tmp_path):
    file = tmp_path / "tiny.json"
    more = [
        "--task",
        "ruler:split=niah_single_2,length=360",
        "--by",
        "divergence",
        "--method",
        "kascade:pooling=post_softmax",
    ]
    done = call(*calibrate(model, file, *more, "--answer-tokens", 3, "--batch-size", 4))
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == f"kascade:pooling=post_softmax,calibration={file}"
    found = json.loads(file.read_text(encoding="utf-8"))["found"]
    assert found["divergence"][0][1] > 0
    assert [len(found["run"]["tokens"]), found["run"]["answers"]["answer_tokens"]] == [4, 3]
    picture = tmp_path / "tiny.png"
    assert call("plot", "calibration", file, "--out", picture).exit_code == 0


@pytest.mark.parametrize("name", ["of a model.json", "one,top_k=2.json", 'it\'s ["1"].json', "Größe", "plain"])
def test_what_calibrate_says_can_be_pasted_whatever_the_file_is_called(model, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    done = call(*calibrate(model, name))
    assert done.exit_code == 0, done.output
    (spec,) = shlex.split(done.stdout.splitlines()[-1])
    answer = call("generate", "--model", model, "--max-new-tokens", 2, "--prompt", "Call me", "--method", spec)
    assert answer.exit_code == 0, answer.output
    assert Path(name).is_file()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--anchors", 3], "anchors must be a number from 1 to 2"),
        (["--anchors", 0], "anchors must be at least 1, got 0"),
        (["--limit", 1], "limit must be at least 2, got 1"),
        (["--keys", 400], "is too short to calibrate on, which takes at least"),
        (["--by", "divergence", "--rounds", 1], "rounds has no effect when anchors are chosen by divergence"),
        (["--method", "kascade:pool=row"], "kascade: pool must be one of kv_head, layer"),
        (["--time-share", 2], "time-share must be a share in (0, 1]"),
        (["--task", "nihah"], "unknown task 'nihah'"),
        (["--split", "singel"], "unknown split 'singel'"),
        (["--length", 4000], "positions, the model has 2,048"),
        (["--data", "nowhere"], "nowhere: no such folder"),
        (["--model", "nowhere"], "nowhere: no such model folder"),
    ],
)
def test_bad_calibrations_are_one_line(model, tmp_path, more, message, monkeypatch):
    import foveate.integrations.transformers.loading

    monkeypatch.setattr(foveate.integrations.transformers.loading, "load_model", None)
    done = call(*calibrate(model, tmp_path / "tiny.json", *more))
    assert done.exit_code == 2
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_calibration_goes_on_where_it_was(model, tmp_path, monkeypatch):
    import foveate.lab.evaluation.calibration.calibrate as module

    file, studied, read = tmp_path / "tiny.json", module._studied, []

    def stopping(*args):
        read.append(args)
        if len(read) == 2:
            raise KeyboardInterrupt
        return studied(*args)

    monkeypatch.setattr(module, "_studied", stopping)
    done = call(*calibrate(model, file))
    assert done.exit_code == 130
    assert f"what is read so far is in {file}.partial, the same command goes on from there" in done.stderr
    done = call(*calibrate(model, file))
    assert done.exit_code == 0, done.output
    assert "resuming: 1 of 2 prompts are there" in done.stderr
    assert len(read) == 3
    assert list(tmp_path.iterdir()) == [file]


def test_fetch_names_what_it_can_fetch(tmp_path):
    done = call("fetch", "smollm", "--out", tmp_path / "x")
    assert done.exit_code == 2
    assert "unknown model 'smollm'. Did you mean 'smollm2-135m'?" in done.stderr


def test_help_names_all_commands():
    text = call("--help").stdout
    for command in ("methods", "doctor", "generate", "compare", "calibrate", "fetch", "bench"):
        assert command in text


def paths_of(command, path=()):
    """The names of a command and of those within it, as they are typed."""
    yield path
    for name, one in getattr(command, "commands", {}).items():
        yield from paths_of(one, (*path, name))


COMMANDS = list(paths_of(get_command(app)))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_wide_descriptions_at_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = call(*command, "--help").stdout
    entries = [line for line in text.splitlines() if re.match(r"  \S", line) and not line.startswith("  ...")]
    rows = [found for line in entries if (found := re.match(r"  (\S(?: ?\S)*)  +(?=\S)", line))]
    assert "--help" in [row[1] for row in rows]
    assert min(80 - row.end() for row in rows) >= 36
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_cuts_nothing_off(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = call(*command, "--help").stdout
    usage, *lines = text.splitlines()
    assert usage.startswith("Usage: ")
    assert [line for line in lines if line.endswith("...")] == []


def test_commands_ask_no_hub_for_kernels(monkeypatch):
    monkeypatch.setenv("USE_HUB_KERNELS", "1")
    assert call("methods").exit_code == 0
    assert os.environ["USE_HUB_KERNELS"] == "1"
    monkeypatch.delenv("USE_HUB_KERNELS")
    assert call("methods").exit_code == 0
    assert os.environ["USE_HUB_KERNELS"] == "0"

"""The examples run."""

import contextlib
import io
import itertools
import json
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from foveate.lab.report.markdown import context_length
from foveate.methods import base, spec
from tests import tiny

ROOT = Path(__file__).parents[1]
DECODE = ROOT / "benchmarks" / "results" / "decode.jsonl"
NOVEL = tiny.SAMPLE / "books" / "moby_dick.txt"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("models") / "tiny-llama")


def run_by_itself(name: str, *arguments) -> list[str]:
    """The lines that an example prints."""
    command = [sys.executable, ROOT / "examples" / name, *arguments]
    done = subprocess.run([str(one) for one in command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run(name: str, *arguments) -> list[str]:
    """The same within this process: a new one takes seconds to import what it needs."""
    command, printed = [str(one) for one in (ROOT / "examples" / name, *arguments)], io.StringIO()
    with contextlib.redirect_stdout(printed), mock.patch.object(sys, "argv", command):
        runpy.run_path(command[0], run_name="__main__")
    return printed.getvalue().splitlines()


def test_a_method_of_ones_own_is_checked_and_compared(model, monkeypatch):
    monkeypatch.setattr(base, "REGISTRY", base.REGISTRY.copy())
    monkeypatch.setattr(spec, "REGISTRY", base.REGISTRY)
    said = run("new_method.py", "--model", model, "--tokens", 512, "--items", 2)
    assert any(line.startswith("passed  padded batch") for line in said)
    assert any(line.startswith("long_values over snapkv: ") for line in said)
    assert any(line.startswith("it reads ") and "least in layer" in line for line in said)


def losses(lines: list[str]) -> list[float]:
    return [float(re.search(r"'loss': '?([0-9.]+)", line)[1]) for line in lines if line.startswith("{'loss'")]


@pytest.mark.full
def test_a_trainer_in_two_processes_trains_as_one_does(tmp_path):
    """As many rows a step, by DDP and by FSDP: the same losses and λ; one process logs."""
    one = run("train_with_trainer.py", "--out", tmp_path / "one", "--steps", 4, "--accumulate", 4)
    assert len(losses(one)) == 2
    assert losses(one)[1] < losses(one)[0] < 8, "a mean over the step's tokens"
    for name, more in (("ddp", ()), ("fsdp", ("--fsdp",))):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
        example = [ROOT / "examples" / "train_with_trainer.py", "--out", tmp_path / name, "--steps", 4, *more]
        command = [str(part) for part in (sys.executable, *launch, *example)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stderr
        two = done.stdout.splitlines()
        assert losses(two) == pytest.approx(losses(one), rel=2e-3)
        assert two[-1].partition(";")[2].split()[:2] == one[-1].partition(";")[2].split()[:2]
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).config.model_type == "foveate_hybrid"


def test_every_example_is_explained_and_run():
    explained = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    tested = Path(__file__).read_text(encoding="utf-8")
    for path in (ROOT / "examples").glob("*.py"):
        assert f"| `{path.name}` |" in explained, path
        assert re.search(rf'run(_by_itself)?\(\s*"{path.name}"', tested), path


NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def cells_of(path, kind):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_has_code_and_no_outputs(path):
    assert f"[`{path.name}`]({path.name})" in (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    for cell in cells_of(path, "code"):
        compile("".join(cell["source"]), path.name, "exec")
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
    text = "".join(line for cell in cells_of(path, "markdown") for line in cell["source"])
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (path.parent / link).exists(), link


@pytest.mark.full
def test_the_notebook_goes_from_an_idea_to_a_picture(monkeypatch, capsys):
    """All of its cells run, on the real model; IPython, which every notebook has, is stood in for."""
    monkeypatch.setattr(base, "REGISTRY", base.REGISTRY.copy())
    monkeypatch.setattr(spec, "REGISTRY", base.REGISTRY)
    monkeypatch.chdir(ROOT / "examples")
    shown = []
    display = types.SimpleNamespace(Image=lambda filename: shown.append(filename.read_bytes()))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(display=display, version_info=(9, 0)))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    names: dict = {}
    for cell in cells_of(ROOT / "examples" / "new_method.ipynb", "code"):
        exec("".join(cell["source"]), names)
    assert len(shown) == 2
    assert all(content.startswith(b"\x89PNG") for content in shown)
    run, said = names["run"], capsys.readouterr().out
    assert "passed  padded batch" in said
    assert run.row("dense")["score"] > 50, "needles that dense attention does not find compare nothing"
    assert len(run.rows) == 7
    assert set(run.recall("weighed_votes:top_k=0.12")) == set(range(30))


@pytest.mark.full
def test_a_method_beside_dense_attention(model):
    said = run_by_itself(
        "quickstart.py", "--model", model, "--file", NOVEL, "--tokens", 300, "--method", "streaming:window=32"
    )
    assert [line.partition(":")[0] for line in said if line.startswith(("dense:", "streaming"))] == [
        "dense",
        "streaming",
    ]
    read = [float(line.split(" % of the keys")[0].split()[-1]) for line in said if "of the keys read" in line]
    assert read[0] == 100 > read[1]


def test_questions_about_a_document_that_is_read_once(model, tmp_path):
    kept = tmp_path / "read.safetensors"
    asked = ["--question", "His name is", "--question", "He went"]
    said = []
    for _ in range(2):
        lines = run("questions.py", "--model", model, "--kept", kept, "--characters", 500, "--file", NOVEL, *asked)
        assert kept.exists()
        said.append([line for line in lines if line.startswith(("His name is", "He went"))])
    assert len(said[0]) == 2
    assert said[0] == said[1], "the cache on disk answers as the one in memory does"


def test_documents_that_wait_on_disk(model, tmp_path):
    asked = ["--ask", NOVEL, "His name is", "--ask", ROOT / "README.md", "foveate makes", "--ask", NOVEL, "He went"]
    said = run("documents.py", "--model", model, "--folder", tmp_path / "read", "--characters", 500, *asked)
    starts = [str(NOVEL), str(ROOT / "README.md"), str(NOVEL)]
    assert [start for line in said for start in dict.fromkeys(starts) if line.startswith(f"{start}: ")] == starts
    assert sorted(path.name.rpartition("-")[0] for path in (tmp_path / "read").iterdir()) == ["README", "moby_dick"]


def test_documents_of_one_name_are_not_mixed_up(model, tmp_path):
    asked, files = [], [tmp_path / name / "same.txt" for name in "ab"]
    for file, text in zip(files, ("The word is BANANA. " * 8, "The word is WINTER. " * 8)):
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")
        asked += ["--ask", file, "The word is"]
    run("documents.py", "--model", model, "--folder", tmp_path / "read", *asked)
    kept = [path.name.rpartition("-") for path in (tmp_path / "read").iterdir()]
    assert [stem for stem, _, _ in kept] == ["same", "same"]


def test_a_batch_of_unequal_prompts(model):
    prompts = ["The whale", "It was a clear steel-blue day, and the sky was"]
    together, *alone = (
        run("batch.py", "--model", model, *(word for prompt in some for word in ("--prompt", prompt)))
        for some in (prompts, prompts[:1], prompts[1:])
    )
    answers = [list(itertools.takewhile(lambda line: "decode steps" not in line, one)) for one in (together, *alone)]
    assert answers[0] == answers[1] + answers[2]
    assert len(answers[0]) < len(together)


def test_the_demo_is_a_story_of_one_screen(model, tmp_path):
    out = tmp_path / "demo"
    said = run("demo.py", "--model", model, "--out", out, "--kascade", "kascade:anchors=1")
    assert len(said) <= 24
    assert max(map(len, said[:-1])) <= 80
    text = " ".join(" ".join(said).split())
    (value,) = re.findall(r"One of the special magic numbers for \S+ is: (\d{7})\.", text)
    assert re.search(r"Question: What is the special magic number for \S+ mentioned", text)
    row = re.compile(r"(dense|kascade|pages|snapkv) +(.*?) *(\d) of 4 +(\d+)% +([\d.]+ [kM]B) ")
    found = {match[1]: match for match in map(row.match, said) if match}
    assert list(found) == ["dense", "kascade", "pages", "snapkv"]
    assert found["dense"][4] == "100"
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows[0]["examples"][0]["gold"] == [value]
    speeds = re.search(
        r"a decode step of (\S+) with (\d+) sequences? of (\S+) tokens takes ([\d.]+) ms.* ([\d.]+) ms", text
    )
    measured = [json.loads(line) for line in DECODE.read_text(encoding="utf-8").splitlines()]
    case = {"model": speeds[1], "batch": int(speeds[2])}
    assert any(
        case.items() <= one["case"].items()
        and context_length(one["case"]["context"]) == speeds[3]
        and [f"{one[name]:.1f}" for name in ("ms", "baseline_ms")] == [speeds[4], speeds[5]]
        for one in measured
        if one["case"]["level"] == "model" and one["case"]["method"].startswith("kascade")
    )
    assert text.count("Dense attention answers none of 4 items, so they compare nothing: ") == (
        found["dense"][3] == "0"
    )
    picture = Path(said[-1].rpartition(" ")[2])
    assert picture == out / "read.html"
    assert picture.read_text(encoding="utf-8").count('"kind": "lens of foveate"') == 2
    again = run("demo.py", "--model", model, "--out", out, "--kascade", "kascade:anchors=1")
    assert again == said, "finished rows are not measured again"


def test_an_adapter(model, tmp_path):
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    said = run("adapter.py", "--model", model, "--adapter", tmp_path / "adapter", "--prompt", "The whale")
    (with_it, without) = (line.partition(": ")[2] for line in said if line.startswith(("with the", "without it")))
    assert with_it != without

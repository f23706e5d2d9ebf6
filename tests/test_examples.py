"""The examples run."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from evaluation import tiny
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[1]
NOVEL = tiny.SAMPLE / "books" / "moby_dick.txt"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("models") / "tiny-llama")


def run(name: str, *arguments) -> list[str]:
    """The lines that an example prints."""
    command = [sys.executable, ROOT / "examples" / name, *arguments]
    done = subprocess.run([str(one) for one in command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_example_is_explained_and_run():
    explained = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    tested = Path(__file__).read_text(encoding="utf-8")
    for path in (ROOT / "examples").glob("*.py"):
        assert f"| `{path.name}` |" in explained, path
        assert f'run("{path.name}"' in tested, path


def test_a_method_beside_dense_attention(model):
    said = run("quickstart.py", "--model", model, "--file", NOVEL, "--tokens", 300, "--method", "streaming:window=32")
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


def test_the_demo_in_words(tmp_path):
    rows = [
        {
            "method": spec.partition(":")[0],
            "spec": spec,
            "settings": settings,
            "n": 8,
            "score": score,
            "keys_read_share": share,
        }
        for spec, settings, score, share in (
            ("dense", {}, 87.5, 1.0),
            ("kascade:anchors=8", {"anchors": 8}, 0.0, 0.4),
            ("kascade:calibration=a.json", {"calibration": "a.json"}, 75.0, 0.4),
            ("luka", {}, 100.0, 0.38),
            ("snapkv", {}, 0.0, 0.15),
        )
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert run("seen.py", tmp_path / "rows.jsonl") == [
        "Seen: dense attention reads all keys and finds 7 of 8 hidden numbers.",
        "As many or more: luka (8, 38% of the keys).",
        "Some: kascade with calibrated anchors (6, 40% of the keys).",
        "None: kascade with evenly spaced anchors (0, 40% of the keys), snapkv (0, 15% of the keys).",
    ]


def test_an_adapter(model, tmp_path):
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    said = run("adapter.py", "--model", model, "--adapter", tmp_path / "adapter", "--prompt", "The whale")
    (with_it, without) = (line.partition(": ")[2] for line in said if line.startswith(("with the", "without it")))
    assert with_it != without

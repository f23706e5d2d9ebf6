"""`benchmarks/serving_accuracy.py`: questions, grades and differences of two engines, which are left out."""

import json

import pytest

from benchmarks import serving, serving_accuracy
from foveate.integrations.transformers import loading
from foveate.lab.report import rows
from tests import tiny

CONTEXT = "The gate is green. The key is under the third stone. Nobody knows who built the wall. "
QUESTIONS = [("What colour has the gate?", "green"), ("Where is the key?", "third stone"), ("Who built it?", "nobody")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def data(tmp_path):
    lines = [json.dumps({"context": CONTEXT, "question": asked, "answer": said}) for asked, said in QUESTIONS]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_answers_are_graded_as_compare_does_beside_vllms_own(folder, data, tmp_path, monkeypatch, capsys):
    tokenizer = loading.load_tokenizer(folder)
    said = {None: ["green", "under the third stone", "a giant"], "oracle_topk": ["red", "the third stone", "a giant"]}

    def run(job, program):
        assert program == serving_accuracy.PROGRAM
        assert not job["dummy"]
        ((spec, asked),) = job["questions"].items()
        assert [new for _, new in asked] == [8, 8, 8]
        order = ["gate?", "key?", "built it?"]
        found = []
        for prompt, _ in asked:
            text = tokenizer.decode(prompt)
            (number,) = (n for n, word in enumerate(order) if word in text)
            answer = tokenizer(said[job["method"]][number], add_special_tokens=False)["input_ids"]
            after = tokenizer(QUESTIONS[number][1], add_special_tokens=False)["input_ids"]  # what is said too late
            found.append([*answer, job["ends"][0], *after])
        return {spec: {"answers": found, "device": "cpu", "keys_read_share": 0.5 if job["method"] else None}}

    monkeypatch.setattr(serving, "run", run)
    out = tmp_path / "rows.jsonl"
    arguments = ["--model", str(folder), "--data", str(data), "--task", "documents:max_new_tokens=8", "--limit", "3"]
    for _ in range(2):
        serving_accuracy.main([*arguments, "--method", "oracle_topk", "--out", str(out)])
    (row,) = rows.read_bench([out], "serving-accuracy")
    assert (row["n"], row["baseline"], row["same_answers"]) == (3, "vllm", 1)
    ours, own = 100 * 1 / 3, 100 * 2 / 3
    assert (row["score"], row["baseline_score"], row["diff"]) == pytest.approx((ours, own, ours - own))
    assert row["diff_low"] <= row["diff"] <= row["diff_high"] <= 0
    assert "oracle_topk" in capsys.readouterr().out


def test_questions_without_greedy_answers_are_refused(folder, data, tmp_path, capsys):
    arguments = ["--model", str(folder), "--data", str(data), "--limit", "1", "--out", str(tmp_path / "rows.jsonl")]
    with pytest.raises(SystemExit):
        serving_accuracy.main([*arguments, "--task", "documents:question=after"])
    assert "chosen greedily" in capsys.readouterr().err

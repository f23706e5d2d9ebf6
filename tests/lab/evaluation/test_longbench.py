"""LongBench's tasks from files of the published form, and its metrics against what the published code gives."""

import builtins
import importlib
import itertools
import json
import re
import sys
from types import SimpleNamespace

import pytest

from foveate.errors import DataError, UserError
from foveate.lab.evaluation import longbench_metrics as by
from foveate.lab.evaluation import tasks
from foveate.lab.evaluation.tasks.base import Output
from foveate.lab.evaluation.tasks.longbench import METRICS

RAW = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, sample):
    """A file of each task, one question a file, beside the published prompts and lengths."""
    root = tmp_path_factory.mktemp("data") / "longbench"
    root.mkdir()
    for name in ("dataset2prompt.json", "dataset2maxlen.json"):
        (root / name).write_bytes((sample / "longbench" / name).read_bytes())
    for split in METRICS:
        classes = ["it", "its", "no"] if split in ("trec", "lsht") else None
        record = {"context": f"The context of {split}.", "input": "What {is} it?", "answers": ["Paragraph 3", "it"]}
        record |= {"length": 5, "dataset": split, "language": "en", "all_classes": classes, "_id": "a"}
        (root / f"{split}.jsonl").write_text(json.dumps(record), encoding="utf-8")
    return root.parent


def make(data, tokenizer, split, limit=1, **settings):
    task = tasks.parse("longbench", split=split, **settings)
    return task, task.items(data, tokenizer, limit, 0)


def test_there_are_21_tasks():
    assert len(METRICS) == len(tasks.get("longbench").splits) == 21


@pytest.mark.parametrize("split", METRICS)
def test_every_task_is_asked_by_its_published_prompt(folder, tokenizer, split):
    task, (item,) = make(folder, tokenizer, split)
    prompts, lengths = (
        json.loads((folder / "longbench" / name).read_text(encoding="utf-8"))[split]
        for name in ("dataset2prompt.json", "dataset2maxlen.json")
    )
    text = prompts.replace("{context}", f"The context of {split}.").replace("{input}", "What {is} it?")
    assert item.prompt == (text if split in RAW else ({"role": "user", "content": text},))
    assert (item.max_new_tokens, item.answers) == (lengths, ("Paragraph 3", "it"))
    assert item.stop == ("\n" if split == "samsum" else "")
    assert 0 <= task.grade(item, Output(text="it"))["score"] <= 1
    assert task.grade(item, Output(text="")) == {"score": 0}


def test_real_records(sample, tokenizer):
    task, items = make(sample, tokenizer, "multi_news", limit=9)
    assert len(items) == 2
    for item in items:
        (message,) = item.prompt
        assert message["content"].startswith("You are given several news passages.")
        assert item.max_new_tokens == 512
        assert task.grade(item, Output(text=item.answers[0]))["score"] == pytest.approx(1)
        assert 0 < task.grade(item, Output(text=message["content"]))["score"] < 1


def test_long_prompts_lose_their_middle(folder, tokenizer, sample):
    _, (whole,) = make(folder, tokenizer, "lcc")
    _, (cut,) = make(folder, tokenizer, "lcc", max_length=20)
    ids = tokenizer.encode(whole.prompt)
    assert len(ids) > 20
    assert cut.prompt == tokenizer.decode(ids[:10], skip_special_tokens=True) + tokenizer.decode(ids[-10:])


@pytest.mark.parametrize(
    ("split", "text", "score"),
    [
        ("trec", "\nit and its\nno", 0.5),
        ("triviaqa", "\n\nit\nParagraph 9", 1),
        ("passage_retrieval_en", "Paragraph 3, or 4", 0.5),
    ],
)
def test_first_lines_and_best_answers(folder, tokenizer, split, text, score):
    task, (item,) = make(folder, tokenizer, split)
    assert task.grade(item, Output(text=text)) == {"score": pytest.approx(score)}


# Metrics


@pytest.mark.parametrize(
    ("metric", "prediction", "answer", "score"),
    [
        (by.qa_f1, "The red house.", "a red barn", 0.5),
        (by.qa_f1, "house", "barn", 0),
        (by.qa_f1_zh, "北京，中国", "中国北京", 1),
        (by.qa_f1_zh, "上海", "北京", 0),
        (by.rouge, "the cat sat", "the cat sat", 1),
        (by.rouge, "the cat sat down", "the cat lay down", 0.75),
        (by.rouge, "", "the cat", 0),
        (by.rouge, "...", "the cat", 0),
        (by.rouge_zh, "北京是中国的首都", "北京是中国的首都", 1),
        (by.count, "There are 3, not 4 or 3.", "3", 2 / 3),
        (by.count, "none", "3", 0),
        (by.retrieval, "Paragraph 13", "Paragraph 3", 0),
        (by.retrieval, "段落3", "段落3", 1),
        (by.code_sim, "# a comment\n`code`\nx = 1\ny = 2", "x = 1", 1),
        (by.code_sim, "\n\nreturn a", "return b", 0.88),
        (by.code_sim, "// none", "x", 0),
    ],
)
def test_metrics_by_hand(metric, prediction, answer, score):
    assert metric(prediction, answer, ()) == pytest.approx(score, abs=1e-6)


SAID = (
    "",
    "...",
    "the",
    "The red house.",
    "a red barn",
    "Paragraph 3, or 4",
    "段落3",
    "北京，中国",
    "中国北京",
    "it and its\nno",
    "３ 3",
)


def test_metrics_are_those_of_another_implementation(monkeypatch):
    """lm-eval's, of all pairs of texts; it refuses to be imported without a package that only `code_sim` needs."""
    monkeypatch.setitem(sys.modules, "fuzzywuzzy", SimpleNamespace(fuzz=None))
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.longbench.metrics", raising=False)
    others = importlib.import_module("lm_eval.tasks.longbench.metrics")
    pairs = {
        by.qa_f1: others.qa_f1_score,
        by.qa_f1_zh: others.qa_f1_zh_score,
        by.rouge: others.rouge_score,
        by.rouge_zh: others.rouge_zh_score,
        by.count: others.count_score,
        by.classification: others.classification_score,
    }
    classes = ["it", "its", "no", "the"]
    for ours, theirs in pairs.items():
        for said, answer in itertools.product(SAID, SAID):
            got, expected = ours(said, answer, classes), theirs(said, answer, all_classes=classes)
            assert got == pytest.approx(expected), (ours.__name__, said, answer)
    for said in SAID:
        assert by.retrieval(said, "Paragraph 3") == others.retrieval_score(said, "Paragraph 3")
        assert by.retrieval(said, "段落3") == others.retrieval_zh_score(said, "段落3")


@pytest.mark.parametrize(
    ("prediction", "answer", "classes", "score"),
    [
        ("Other entity", "Other entity", ["Other entity", "Food"], 1),
        ("Other entity, Food", "Other entity", ["Other entity", "Food"], 0.5),
        ("Other entity", "Other entity", ["entity", "Food", "Other entity"], 1),  # a part of the answer's name
        ("a part of it", "it", ["a", "it"], 0.5),
        ("all of it", "of it", ["it", "of", "of it"], 0.5),  # what follows a removed one is passed over
        ("nothing", "it", ["it"], 0),
    ],
)
def test_classes_by_hand(prediction, answer, classes, score):
    assert by.classification(prediction, answer, classes) == score


# Errors


def test_files_that_are_missing(tmp_path, sample):
    task = tasks.parse("longbench", split="qasper")
    with pytest.raises(DataError, match=r"dataset2prompt.json: no such file .*/config/dataset2prompt.json"):
        task.files(tmp_path)
    with pytest.raises(DataError, match=r"qasper.jsonl: no such file .* data.zip, unpacked"):
        task.files(sample)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 3}, "expected an object with 'context' (text)"),
        ({"answers": []}, "expected texts in 'answers', at least one, and in 'all_classes'"),
        ({"all_classes": [3]}, "expected texts in 'answers', at least one, and in 'all_classes'"),
    ],
)
def test_records_that_cannot_be_asked(folder, tmp_path, tokenizer, change, message):
    for file in (folder / "longbench").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    record = json.loads((tmp_path / "trec.jsonl").read_text(encoding="utf-8"))
    (tmp_path / "trec.jsonl").write_text(f"\n{json.dumps(record | change)}", encoding="utf-8")
    with pytest.raises(DataError, match=re.escape(f"trec.jsonl:2: {message}")):
        make(tmp_path, tokenizer, "trec")


@pytest.mark.parametrize(("split", "package"), [("samsum", "rouge"), ("vcsum", "jieba"), ("multifieldqa_zh", "jieba")])
def test_packages_that_are_missing_are_named_before_a_model_is_loaded(folder, tokenizer, monkeypatch, split, package):
    real = builtins.__import__

    def refusing(name, *more):
        if name == package:
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", refusing)
    with pytest.raises(
        UserError, match=rf"needs {package}, which is not installed: pip install 'foveate\[longbench\]'"
    ):
        make(folder, tokenizer, split)

import builtins
import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from foveate.cli import app
from foveate.errors import DataError, UserError
from foveate.lab.evaluation import tasks
from foveate.lab.evaluation.tasks.base import Output
from foveate.lab.evaluation.tasks.mathematics import is_right

SYSTEM = r"Please reason step by step, and put your final answer within \boxed{}."
FILES = {"math500": "math500.jsonl", "aime24": "aime24.jsonl"}


def write(folder, split, records):
    (folder / "aime").mkdir(parents=True, exist_ok=True)
    path = folder / "aime" / FILES[split]
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for split in FILES:
        records = [{"question": f"What is ${n} + {n}$ ({split})?", "answer": f"{2 * n:03}"} for n in range(6)]
        write(folder, split, records)
    return folder


def make(data, tokenizer, limit=3, seed=0, **settings):
    return tasks.parse("math", **settings).items(data, tokenizer, limit, seed)


@pytest.mark.parametrize(("split", "longest"), [("math500", 1024), ("aime24", 8192)])
def test_problems_are_asked_as_qwen_is(problems, tokenizer, split, longest):
    items = make(problems, tokenizer, split=split)
    assert [item.id for item in items] == ["0/0", "1/0", "2/0"]
    assert tokenizer.decode(items[2].prompt_ids) == (
        f"<|system|>{SYSTEM}<|end|><|user|>What is $2 + 2$ ({split})?<|end|><|assistant|>"
    )
    assert (items[2].answers, items[2].stop, items[2].sampling) == (("004",), "", None)
    assert {item.max_new_tokens for item in items} == {longest}
    (item,) = make(problems, tokenizer, limit=1, split=split, max_new_tokens=7)
    assert item.max_new_tokens == 7
    assert make(problems, tokenizer, seed=1, split=split) == items  # greedy: nothing is drawn
    assert tasks.parse("math", split=split).ceiling(items) == 100


def test_every_sample_is_an_item_with_draws_of_its_own(problems, tokenizer):
    settings = {"samples": 4, "temperature": 0.6, "top_p": 0.95}
    items = make(problems, tokenizer, **settings)
    assert [item.id for item in items] == [f"{number}/{sample}" for number in range(3) for sample in range(4)]
    assert len({item.sampling.seed for item in items}) == 12
    assert {(item.sampling.temperature, item.sampling.top_p) for item in items} == {(0.6, 0.95)}
    assert len({item.prompt_ids for item in items}) == 3
    assert make(problems, tokenizer, limit=2, **settings) == items[:8]
    fewer = make(problems, tokenizer, **{**settings, "samples": 1})
    assert fewer == items[::4]
    other = make(problems, tokenizer, seed=1, **settings)
    assert not {item.sampling.seed for item in other} & {item.sampling.seed for item in items}


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        (r"So it is \boxed{25}.", "025", True),
        (r"$\boxed{\dfrac{14}{3}}$", r"\frac{14}{3}", True),
        (r"\[\boxed{14/3}\]", r"\frac{14}{3}", True),
        (r"\boxed{4.67}", r"\frac{14}{3}", False),
        (r"\boxed{Evelyn}", r"\text{Evelyn}", True),
        (r"\boxed{\text{Evelyn}}", r"\text{Angela}", False),
        (r"\boxed{90}", r"90^\circ", True),
        (r"\boxed{(3,\pi/2)}", r"\left( 3, \frac{\pi}{2} \right)", True),
        (r"\boxed{5}", "x=5", True),
        (r"\boxed{-2, 1}", "1,-2", True),
        (r"\boxed{3}, no, \boxed{2}", "2", True),
        (r"\boxed{2}, no, \boxed{3}", "2", False),
        (r"\boxed{2} as $3 - 1 = 2$, unlike 7", "2", True),
        (r"\boxed{2}" + " or 7" * 5000, "2", True),
        ("It is 2.", "2", False),
        ("", "2", False),
        (r"\boxed{", "2", False),
        (r"\boxed{\frac{1}{", "2", False),
        (r"\boxed{2", "2", False),
        (r"The answer is \boxed{}. 7", "7", False),
        (r"\boxed{} so the answer is 5", "5", False),
        (r"\boxed{ } $5$", "5", False),
        (r"\boxed{5}, or $\boxed{}$", "5", False),
        (r"\boxed and 5", "5", False),
        (r"\boxed so {5}", "5", False),
        (r"\boxed{\text{none}} of 5", "5", False),
        (r"\boxed{3} and $5$", "5", False),
        (r"\boxed {5} and $3$", "5", True),
        (r"\boxed{\left\{ 1, 2 \right\}} or 3", r"\{1, 2\}", True),
        (r"\boxed{\{1\}, 2} or 1", "1", False),
    ],
)
def test_grading(problems, tokenizer, text, answer, right):
    assert is_right(text, answer) == right
    (item,) = make(problems, tokenizer, limit=1)
    object.__setattr__(item, "answers", (answer,))
    graded = tasks.parse("math").grade(item, Output(text=text, tokens=12))
    assert graded == {"correct": right, "answer_tokens": 12}


def test_metrics():
    task = tasks.parse("math")
    values = {"correct": np.array([1.0, 0, 0, 0]), "answer_tokens": np.array([10.0, 20, 30, 40])}
    assert task.metrics[task.main](values) == 25
    assert task.metrics["answer_tokens"](values) == 25
    assert list(task.metrics) == ["correct", "answer_tokens"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 1, got -1"),
        ({"temperature": -0.1}, "temperature must be 0 or more, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be 0 or more, got nan"),
        ({"temperature": 1, "top_p": 0}, "top_p must be above 0 and at most 1, got 0"),
        ({"temperature": 1, "top_p": 1.1}, "top_p must be above 0 and at most 1, got 1.1"),
        ({"samples": 2}, "samples and top_p need a temperature above 0"),
        ({"top_p": 0.9}, "samples and top_p need a temperature above 0"),
        ({"temperature": "hot"}, "temperature must be of type float, got 'hot'"),
        ({"split": "aime25"}, "unknown split 'aime25'. Did you mean 'aime24'?"),
        ({"length": -1}, "length must be at least 0, got -1"),
        ({"width": 100}, "unknown setting 'width'"),
    ],
)
def test_what_cannot_be(problems, tokenizer, settings, message):
    with pytest.raises(UserError, match=re.escape(message)):
        make(problems, tokenizer, **settings)


def test_data_that_cannot_be(tokenizer, tmp_path):
    with pytest.raises(DataError, match="none: no such folder"):
        make(tmp_path / "none", tokenizer)
    with pytest.raises(
        DataError, match=r"aime24\.jsonl: no such file \(nor .*xz\); it should hold a JSON object a line"
    ):
        make(tmp_path, tokenizer, split="aime24")
    write(tmp_path, "aime24", [{"question": "a", "answer": "b"}, {"question": "a", "answer": 3}])
    with pytest.raises(DataError, match=r"aime24\.jsonl:2: expected an object with 'answer' \(text\)"):
        make(tmp_path, tokenizer, split="aime24")
    write(tmp_path, "math500", [{"question": "a", "answer": "b"}]).write_text("{")
    with pytest.raises(DataError, match=r"math500\.jsonl:1: malformed JSON"):
        make(tmp_path, tokenizer)


def test_without_the_library(problems, tokenizer, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "math_verify":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"task 'math' needs math-verify, .*: pip install 'foveate\[math\]'"):
        make(problems, tokenizer)


def test_the_command_line_runs_it(tiny_folder, problems, tmp_path):
    out = tmp_path / "rows.jsonl"
    spec = "math:samples=3,temperature=2,top_p=0.9"
    arguments = ["compare", "--model", tiny_folder, "--data", problems, "--out", out, "--task", spec, "--limit", 2]
    methods = ["--method", "streaming:window=9", "--batch-size", 4, "--max-new-tokens", 9]
    done = CliRunner().invoke(app, [str(word) for word in [*arguments, *methods]])
    assert done.exit_code == 0, done.output
    dense, streaming = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert (dense["n"], dense["limit"], dense["split"], dense["score"]) == (6, 2, "math500", 0)
    assert dense["metrics"]["answer_tokens"]["value"] == pytest.approx(np.mean(dense["item_values"]["answer_tokens"]))
    assert all(0 < tokens <= 9 for row in (dense, streaming) for tokens in row["item_values"]["answer_tokens"])
    texts = [[example["answer"] for example in row["examples"]] for row in (dense, streaming)]
    assert len(set(texts[0])) == 6
    assert texts[0] != texts[1]


def test_a_length_puts_a_passage_of_a_novel_before_the_problem(problems, tokenizer, tmp_path):
    (tmp_path / "aime").symlink_to(problems / "aime")
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "novel.txt").write_text("It was a long road. " * 400)
    one, other = (make(tmp_path, tokenizer, limit=1, **more)[0] for more in ({}, {"length": 500}))
    assert 485 <= len(other.prompt_ids) <= 500
    assert other.prompt[0] == one.prompt[0]
    assert other.prompt[1]["content"].endswith(f"\n\n---\n\n{one.prompt[1]['content']}")

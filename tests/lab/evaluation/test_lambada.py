import dataclasses
import json
import math

import pytest
import torch

from foveate.errors import DataError
from foveate.integrations.transformers import loading
from foveate.lab.evaluation import generation, tasks
from foveate.lab.evaluation.metrics import columns, estimate
from foveate.lab.evaluation.tasks.base import Output

RECORDS = [
    {"context": "Call me Ishmael. Some years ago I went to", "continuation": "sea"},
    {"context": "The whale, the whale, he cried, and saw the ", "continuation": " harpooneers"},
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "commonsense").mkdir()
    path = tmp_path / "commonsense" / "lambada_openai.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)), encoding="utf-8")
    return tmp_path


def test_items(folder, tokenizer):
    items = tasks.parse("lambada").items(folder, tokenizer, 2, 0)
    assert {item.id: tokenizer.decode(item.target_ids) for item in items} == {"1": " sea", "2": " harpooneers"}
    for item in items:
        record = RECORDS[int(item.id) - 1]
        assert tokenizer.decode(item.prompt_ids) == record["context"].strip() == item.prompt
        assert item.answers == (record["continuation"].strip(),)


def test_items_do_not_depend_on_the_limit(folder, tokenizer):
    path = folder / "commonsense" / "lambada_openai.jsonl"
    path.write_text("\n".join([json.dumps(RECORDS[0])] * 90), encoding="utf-8")
    some, all_ = (tasks.parse("lambada").items(folder, tokenizer, limit, 0) for limit in (4, 90))
    assert all_[:4] == some
    assert len({item.id for item in all_}) == 90


def test_grading_by_hand(folder, tokenizer):
    task = tasks.parse("lambada")
    items = task.items(folder, tokenizer, 2, 0)
    outputs = [Output(nll=math.log(4.0), hits=(True, True)), Output(nll=math.log(9.0), hits=(True, False))]
    graded = columns(map(task.grade, items, outputs))
    assert estimate(task.metrics["accuracy"], graded).value == 50.0
    assert estimate(task.metrics["perplexity"], graded).value == pytest.approx(6.0)  # of words: sqrt(4 * 9)
    assert [*map(task.said, items, outputs)] == ["right, perplexity 4.00", "wrong, perplexity 9.00"]


def test_a_word_is_right_if_each_token_is_the_likeliest(folder, tokenizer, tiny_folder):
    model, task = loading.load_model(tiny_folder, "float32", "cpu"), tasks.parse("lambada")
    item = task.items(folder, tokenizer, 1, 0)[0]
    ids = list(item.prompt_ids)
    for _ in range(2):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    greedy = tuple(ids[-2:])
    words = [dataclasses.replace(item, target_ids=word) for word in (greedy, (greedy[0], greedy[1] ^ 1))]
    batch = generation.run_batch(model, tokenizer, words)
    assert [task.grade(*pair)["right"] for pair in zip(words, batch.outputs)] == [1.0, 0.0]


@pytest.mark.parametrize("name", ["context", "continuation"])
def test_malformed_records(folder, tokenizer, name):
    path = folder / "commonsense" / "lambada_openai.jsonl"
    path.write_text(json.dumps(RECORDS[0] | {name: 3}), encoding="utf-8")
    with pytest.raises(DataError, match=rf"lambada_openai\.jsonl:1: expected an object with '{name}' \(text\)"):
        tasks.parse("lambada").items(folder, tokenizer, 1, 0)


def test_missing_data(folder, tokenizer, tmp_path_factory):
    with pytest.raises(DataError, match=r"lambada_openai\.jsonl: no such file .*llm-foundry"):
        tasks.parse("lambada").items(tmp_path_factory.mktemp("empty"), tokenizer, 1, 0)
    assert len(tasks.parse("lambada").items(folder, tokenizer, 3, 0)) == 2, "a limit is a maximum"

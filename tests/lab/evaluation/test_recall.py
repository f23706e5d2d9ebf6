import json

import pytest

from foveate.errors import DataError, UserError
from foveate.io.squad import find_squad, read_squad
from foveate.lab.evaluation import tasks
from foveate.lab.evaluation.tasks import recall
from foveate.lab.evaluation.tasks.base import Output

DROP = {"context": "Passage: In 1512 Brescia fell.\nQuestion: What fell\nAnswer:", "ref_text": "Brescia|the city"}
NQ = {"question": "who won", "answers": ["Ann"], "ctxs": [{"text": "Bob lost."}, {"text": "Ann won.", "isgold": True}]}
TRIVIAQA = {
    "context": "[DOC] [TLE] Onions [PAR] An onion grows. what grows?",
    "question": "What grows?",
    "answers": ["Onion", "Leek"],
}
FDA = {"text": "K012\nA device. It warms blood.\nDevice name:", "value": "Warmer ", "key": "Device name"}
RECORDS = {
    "drop": ("drop/drop_v0_dev.jsonl", DROP),
    "nq": ("nq/nq-open-oracle.jsonl", NQ),
    "triviaqa": ("evaporate/triviaqa.jsonl", TRIVIAQA),
    "fda": ("evaporate/fda.jsonl", FDA),
    "swde": ("evaporate/swde.jsonl", FDA | {"text": "A film. Director:"}),
}
ASKED = {
    "drop": ("In 1512 Brescia fell. What fell", ("Brescia", "the city")),
    "nq": ("Ann won. who won", ("Ann",)),
    "triviaqa": ("Onions  An onion grows. What grows?", ("Onion", "Leek")),
    "fda": ("K012\nA device. It warms blood.\nDevice name:", ("Warmer",)),
    "swde": ("A film. Director:", ("Warmer",)),
}


def write(root, split, *records):
    path = root / RECORDS[split][0]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")


@pytest.mark.parametrize("split", ASKED)
def test_prompts_are_passage_and_question(tmp_path, tokenizer, split):
    write(tmp_path, split, RECORDS[split][1])
    (item,) = tasks.parse("recall", split=split).items(tmp_path, tokenizer, 1, 0)
    assert (item.prompt, item.answers) == ASKED[split]
    assert tokenizer.decode(item.prompt_ids) == item.prompt
    assert (item.max_new_tokens, item.stop, item.id) == (48, "\n", "1")


def test_squad(sample, tokenizer):
    items = tasks.parse("recall").items(sample, tokenizer, 20, 0)
    assert len({item.id for item in items}) == 20
    assert all(any(answer in item.prompt for answer in item.answers) for item in items)
    squad = read_squad(find_squad(sample))
    paragraphs = [paragraph for article in squad.articles for paragraph in article.paragraphs]
    prompts = {
        question.id: f"{paragraph.text.strip().strip('.')}. {question.text.strip()}"
        for paragraph in paragraphs
        for question in paragraph.questions
    }
    assert [item.prompt for item in items] == [prompts[item.id] for item in items]
    assert items[:5] == tasks.parse("recall").items(sample, tokenizer, 5, 0)
    assert items[:5] != tasks.parse("recall").items(sample, tokenizer, 5, 1)


def test_drop_leaves_out_what_does_not_stand_in_the_passage(tmp_path, tokenizer):
    counted = DROP | {"ref_text": "2|15"}  # 15 is no word of 1512
    write(tmp_path, "drop", counted, DROP)
    (item,) = tasks.parse("recall:split=drop").items(tmp_path, tokenizer, 1, 0)
    assert item.id == "2"
    assert tasks.parse("recall:split=drop").items(tmp_path, tokenizer, 2, 0) == [item], "a limit is a maximum"


@pytest.mark.parametrize(
    ("text", "found"),
    [("It was the ONION.", 1), ("leeks", 1), ("a leak", 0), ("", 0)],
)
def test_grading_by_hand(tmp_path, tokenizer, text, found):
    write(tmp_path, "triviaqa", TRIVIAQA)
    task = tasks.parse("recall:split=triviaqa")
    (item,) = task.items(tmp_path, tokenizer, 1, 0)
    assert task.grade(item, Output(text=text)) == {"contains": found}


def long_passage(place, words=400):
    return " ".join("pump" if number == place else f"w{number}" for number in range(words))


@pytest.mark.parametrize("place", [0, 13, 200, 390])
@pytest.mark.parametrize("max_length", [120, 300])
def test_long_passages_are_cut_around_the_answer(tmp_path, tokenizer, place, max_length):
    write(tmp_path, "nq", NQ | {"ctxs": [{"text": long_passage(place), "isgold": True}], "answers": ["Pump"]})
    (item,) = tasks.parse(f"recall:split=nq,max_length={max_length}").items(tmp_path, tokenizer, 1, 0)
    assert len(item.prompt_ids) <= max_length - 48
    assert item.positions == len(item.prompt_ids) + 48
    assert item.prompt.endswith(". who won")
    assert tokenizer.decode(item.prompt_ids) == item.prompt
    before, pump, behind = item.prompt.removesuffix(". who won").partition("pump")
    assert pump
    sizes = [len(tokenizer.encode(part)) for part in (before, behind)]
    half = (max_length - 48) / 2
    if place == 200:  # half of the window before the answer, the rest after
        assert sizes == pytest.approx([half, half], abs=8)
        assert len(item.prompt_ids) >= max_length - 48 - 2
    if place == 0:
        assert not before
        assert sizes[1] > 2 * half - 12
    if place == 390 and max_length == 300:
        assert item.prompt.endswith("w399. who won")


def test_the_window_of_drop_begins_with_the_passage(tmp_path, tokenizer):
    text = long_passage(30).replace("w300", "none")
    write(tmp_path, "drop", DROP | {"context": f"Passage: {text}\nQuestion: What\nAnswer:", "ref_text": "none"})
    (item,) = tasks.parse("recall:split=drop,max_length=150").items(tmp_path, tokenizer, 1, 0)
    assert item.prompt.startswith("w0 w1 ")


@pytest.mark.parametrize("line", ["\n", " "])
def test_texts_to_be_continued_keep_their_end(tmp_path, tokenizer, line):
    text = f"{long_passage(200)}{line}Its name:"
    write(tmp_path, "fda", FDA | {"text": text, "value": "pump"})
    (item,) = tasks.parse("recall:split=fda,max_length=250").items(tmp_path, tokenizer, 1, 0)
    assert item.prompt.endswith(f"{line}Its name:" if line == "\n" else text[-200:])
    assert " pump " in item.prompt
    assert len(item.prompt_ids) <= 250 - 48


def test_what_fits_is_not_cut(tmp_path, tokenizer):
    passage = long_passage(390)
    write(tmp_path, "nq", NQ | {"ctxs": [{"text": passage, "isgold": True}], "answers": ["pump"]})
    tokens = len(tokenizer.encode(f"{passage}. who won"))
    (item,) = tasks.parse(f"recall:split=nq,max_length={tokens + 48}").items(tmp_path, tokenizer, 1, 0)
    assert len(item.prompt_ids) == tokens
    (item,) = tasks.parse(f"recall:split=nq,max_length={tokens + 47}").items(tmp_path, tokenizer, 1, 0)
    assert len(item.prompt_ids) < tokens


def test_no_room(tmp_path, tokenizer):
    write(tmp_path, "nq", NQ | {"question": "who " * 60})
    with pytest.raises(UserError, match=r"question 1 leaves no room for its passage within 12 tokens"):
        tasks.parse("recall:split=nq,max_length=60").items(tmp_path, tokenizer, 1, 0)
    with pytest.raises(UserError, match="max_length must be at least 49, got 48"):
        tasks.parse("recall:max_length=48")


@pytest.mark.parametrize(
    ("split", "change", "message"),
    [
        ("drop", {"context": "What?"}, "expected 'context' to hold a passage, a question and 'Answer:'"),
        ("drop", {"ref_text": " "}, "expected texts, none of them empty, in 'ref_text'"),
        ("nq", {"ctxs": [{"text": "a"}]}, "expected a passage with 'isgold' in 'ctxs'"),
        ("nq", {"ctxs": [{"isgold": True}]}, r"ctxs: expected an object with 'text' \(text\)"),
        ("nq", {"answers": []}, "expected texts, none of them empty, in 'answers'"),
        ("triviaqa", {"context": None}, r"expected an object with 'context' \(text\)"),
    ],
)
def test_malformed_records(tmp_path, tokenizer, split, change, message):
    write(tmp_path, split, RECORDS[split][1] | change)
    with pytest.raises(DataError, match=rf"\.jsonl:1: .*{message}|\.jsonl:1: {message}"):
        tasks.parse("recall", split=split).items(tmp_path, tokenizer, 1, 0)


@pytest.mark.parametrize("split", RECORDS)
def test_missing_data(tmp_path, tokenizer, split):
    name = RECORDS[split][0].split("/")[1]
    with pytest.raises(
        DataError, match=rf"{name}: no such file \(nor {name}\.xz\); it should hold .*; source: https://"
    ):
        tasks.parse("recall", split=split).items(tmp_path, tokenizer, 1, 0)


@pytest.mark.parametrize("split", ["drop", "nq", "triviaqa"])
def test_an_empty_question_is_refused(tmp_path, tokenizer, split):
    empty = {"context": "Passage: In 1512 Brescia fell.\nQuestion: \nAnswer:"} if split == "drop" else {"question": " "}
    write(tmp_path, split, RECORDS[split][1], RECORDS[split][1] | empty)
    with pytest.raises(DataError, match=rf"{RECORDS[split][0]}:2: the question is empty"):
        tasks.parse("recall", split=split).items(tmp_path, tokenizer, 1, 0)


def test_an_empty_question_of_squad_is_refused(tmp_path):
    question = {"id": "q7", "question": "", "answers": [{"text": "Ann", "answer_start": 0}]}
    squad = {"version": "1.1", "data": [{"title": "T", "paragraphs": [{"context": "Ann won.", "qas": [question]}]}]}
    (tmp_path / "dev.json").write_text(json.dumps(squad), encoding="utf-8")
    with pytest.raises(DataError, match=r"dev\.json: question q7: the question is empty"):
        list(recall._squad(tmp_path / "dev.json"))

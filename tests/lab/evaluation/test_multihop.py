import json
import random
import re

import pytest
from typer.testing import CliRunner

from foveate.cli import app
from foveate.errors import DataError, UserError
from foveate.io.multihop import Passage, read_records
from foveate.lab.evaluation import tasks
from foveate.lab.evaluation.tasks.base import Output

FILES = {
    "hotpotqa": {"dev": "migres_hotpot.jsonl", "train": "hipporag_hotpotqa_train.json"},
    "musique": {"dev": "migres_musique.jsonl", "train": "hipporag_musique_train.json"},
    "2wiki": {"dev": "migres_wikihop.jsonl", "train": "migres_2wiki_train_preprocess.json"},
}
ASKED = "Answer the question based on the given passages. Only give me the answer and do not output any other words."


def sentences(topic, number):
    """Of a passage: the first is the answer to a question, the others are up to sixteen."""
    more = random.Random(f"{topic}{number}").randrange(9)
    return [f"House {number} of {topic} was built by Mr. {topic}{number}.", *["It was sold.", "Nobody came."] * more]


def hotpot(topic, number, passages=6):
    """A record in HotpotQA's form: the second and the fourth passage are gold."""
    context = [
        [f"House {n} ({topic})", [" " * (n > 0) + text for text in sentences(topic, n)]] for n in range(passages)
    ]
    return {
        "_id": f"{topic}{number}",
        "question": f" Who built house {number % 2 * 2 + 1} of {topic}, question {number}?",
        "answer": f"Mr. {topic}{number % 2 * 2 + 1}",
        "context": context,
        "supporting_facts": [[f"House {n} ({topic})", 0] for n in (1, 3)],
    }


def musique(topic, number, passages=6):
    """The same in MuSiQue's form, with an alias."""
    plain = hotpot(topic, number, passages)
    paragraphs = [
        {"idx": n, "title": title, "paragraph_text": " ".join(map(str.strip, texts)), "is_supporting": n in (1, 3)}
        for n, (title, texts) in enumerate(plain["context"])
    ]
    answers = {"answer": plain["answer"], "answer_aliases": ["The Builder", plain["answer"]]}
    return {
        "id": plain["_id"],
        "question": plain["question"],
        **answers,
        "answerable": True,
        "paragraphs": paragraphs,
    }


FORMS = {"hotpotqa": hotpot, "2wiki": hotpot, "musique": musique}


def write(folder, name, records):
    (folder / "multihop").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) for record in records]
    text = "\n".join(lines) if name.endswith(".jsonl") else f"[{','.join(lines)}]"
    (folder / "multihop" / name).write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def houses(tmp_path_factory):
    """All six files, 30 records each, of topics D0.. and T0.., the last two of each without a context."""
    folder = tmp_path_factory.mktemp("data")
    for name, files in FILES.items():
        for split, file in files.items():
            records = [FORMS[name](f"{split[0].upper()}{number}", number) for number in range(30)]
            for record in records[28:]:
                record.pop("context", None)
                record.pop("paragraphs", None)
            write(folder, file, records)
    return folder


def make(data, tokenizer, name="hotpotqa", limit=8, seed=0, **settings):
    return tasks.parse(name, **settings).items(data, tokenizer, limit, seed)


def passages(item):
    """The passages of an item's prompt, the number of each checked."""
    (message,) = item.prompt
    pattern = rf"{ASKED}\n\nThe following are given passages\.\n(.*)\n\n{ASKED}\n\nQuestion: (.*)\nAnswer:"
    context, question = re.fullmatch(pattern, message["content"], re.S).groups()
    assert question == item.meta["question"]
    head, *parts = re.split(r"(?:^|\n)Passage (\d+):\n", context)
    assert head == ""
    assert [int(number) for number in parts[::2]] == list(range(1, len(parts) // 2 + 1))
    return parts[1::2]


@pytest.mark.parametrize("name", FILES)
def test_the_prompt_is_longbenchs_with_the_records_passages_in_their_order(houses, tokenizer, name):
    items = make(houses, tokenizer, name)
    for item in items:
        topic = re.match(r"D\d+", item.meta["question"].split(" of ")[1]).group()
        assert passages(item) == [f"House {n} ({topic})\n{' '.join(sentences(topic, n))}" for n in range(6)]
        assert item.prompt[0]["role"] == "user"
        assert item.answers[0] == f"Mr. {topic}{1 if 'house 1 ' in item.meta['question'] else 3}"
        assert tokenizer.decode(item.prompt_ids).endswith(f"{item.meta['question']}\nAnswer:<|end|><|assistant|>")
        assert (item.max_new_tokens, item.stop, item.sampling, item.meta["passages"]) == (32, "", None, 6)
    assert items[0].answers[1:] == (("The Builder",) if name == "musique" else ())


@pytest.mark.parametrize("length", [1777, 12_000])
@pytest.mark.parametrize("name", FILES)
def test_prompts_are_filled_to_the_length(houses, tokenizer, name, length):
    task = tasks.parse(name, length=length)
    own = {record.id: record for record in read_records(task.files(houses)[0])}
    known = {passage.text for record in own.values() for passage in record.passages}
    items = task.items(houses, tokenizer, 5, seed=0)
    for item in items:
        assert 0.97 * length <= len(item.prompt_ids) <= length
        texts, record = passages(item), own[item.id]
        assert len(set(texts)) == len(texts) == item.meta["passages"]
        assert set(texts) <= known
        assert {passage.text for passage in record.passages if passage.gold} <= set(texts)
        if length > 3000:  # there is room for all of its own
            assert {passage.text for passage in record.passages} <= set(texts)
    assert task.ceiling(items) == 100
    places = [passages(item).index(own[item.id].passages[1].text) / item.meta["passages"] for item in items]
    assert len(set(places)) > 2


def test_a_length_can_leave_out_passages_of_the_record_but_not_the_gold_ones(tokenizer, tmp_path):
    records = [hotpot(f"D{number}", number, passages=30) for number in range(3)]
    write(tmp_path, FILES["hotpotqa"]["dev"], records)
    for item in make(tmp_path, tokenizer, limit=3, length=1500):
        texts = passages(item)
        topic = re.search(r" of (D\d+),", item.meta["question"])[1]
        assert 4 < len(texts) < 30
        assert all(topic in text for text in texts)  # its own come before those of others
        assert sum(text.startswith(("House 1 ", "House 3 ")) for text in texts) == 2


def test_items_depend_on_the_seed_and_not_on_the_limit(houses, tokenizer):
    for length in (0, 2000):
        few, many = (make(houses, tokenizer, limit=limit, length=length) for limit in (3, 9))
        assert many[:3] == few
        assert len({item.id for item in many}) == 9
        other = make(houses, tokenizer, limit=9, seed=1, length=length)
        assert [item.id for item in other] != [item.id for item in many]
    prompts = {item.id: item.prompt for item in many}
    assert all(prompts.get(item.id) != item.prompt for item in other)


@pytest.mark.parametrize("name", FILES)
def test_no_question_is_in_both_splits(houses, tokenizer, tmp_path, name):
    train = make(houses, tokenizer, name, limit=28, split="train")
    assert not {item.meta["question"] for item in train} & {
        item.meta["question"] for item in make(houses, tokenizer, name, limit=28)
    }
    records = [FORMS[name](f"T{number}", number) for number in range(6)]
    twin = {**records[2], "id": "twin", "_id": "twin", "question": f"{records[2]['question']} "}
    write(tmp_path, FILES[name]["train"], records)
    write(tmp_path, FILES[name]["dev"], [twin])
    items = make(tmp_path, tokenizer, name, limit=6, split="train")
    assert sorted(item.id for item in items) == ["T00", "T11", "T33", "T44", "T55"]
    assert len(tasks.parse(name, split="train").files(tmp_path)) == 2
    write(tmp_path, FILES[name]["train"], [records[2]])
    with pytest.raises(UserError, match="no record can be asked; of 1, 1 are of dev, too, and 0 have"):
        make(tmp_path, tokenizer, name, limit=6, split="train")


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("split", ["dev", "train"])
def test_an_empty_data_set_is_told_as_such(tokenizer, tmp_path, name, split):
    for other in ("dev", "train"):
        write(tmp_path, FILES[name][other], [] if other == split else [FORMS[name](other, 0)])
    with pytest.raises(UserError, match=rf"{re.escape(FILES[name][split])}: holds no records"):
        make(tmp_path, tokenizer, name, limit=3, split=split)


@pytest.mark.parametrize(
    ("said", "answers", "f1", "em", "lenient"),
    [
        ("The Eiffel Tower.", ("Eiffel Tower",), 1, 1, 1),
        ("It is the Eiffel Tower", ("Eiffel Tower",), 2 * 2 / (4 + 2), 0, 1),
        ("an Iron-Lady", ("Eiffel Tower", "the IronLady"), 1, 1, 1),
        ("Gustave Eiffel", ("Eiffel Tower", "Gustave"), 2 * 1 / (2 + 1), 0, 1),
        ("Yes.", ("yes",), 1, 1, 1),
        ("Yes, both are", ("yes",), 2 * 1 / (3 + 1), 0, 1),
        ("no", ("yes",), 0, 0, 0),
        ("Paris Paris", ("Paris France",), 2 * 1 / (2 + 2), 0, 0),
    ],
)
def test_grading(houses, tokenizer, said, answers, f1, em, lenient):
    task = tasks.parse("2wiki")
    (item,) = make(houses, tokenizer, "2wiki", limit=1)
    object.__setattr__(item, "answers", answers)
    assert task.grade(item, Output(text=said)) == {"f1": pytest.approx(f1), "em": em, "em_paper": lenient}
    assert task.main == "f1"


@pytest.mark.parametrize(
    ("answer", "reachable"),
    [("Mr. D01", True), ("THE mr d01", True), ("question 0", True), ("Mr. D0", False), ("no", True), ("not it", False)],
)
def test_the_ceiling_counts_answers_in_the_prompt(tokenizer, tmp_path, answer, reachable):
    write(tmp_path, FILES["hotpotqa"]["dev"], [{**hotpot("D0", 0), "answer": answer}, hotpot("D1", 1)])
    items = make(tmp_path, tokenizer, limit=2)
    assert tasks.parse("hotpotqa").ceiling(items) == (100 if reachable else 50)


def test_aliases_count_for_the_ceiling(tokenizer, tmp_path):
    record = {**musique("D0", 0), "answer": "nowhere", "answer_aliases": ["nobody", "Mr. D05"]}
    write(tmp_path, FILES["musique"]["dev"], [record])
    (item,) = make(tmp_path, tokenizer, "musique", limit=1)
    assert item.answers == ("nowhere", "nobody", "Mr. D05")
    assert tasks.parse("musique").ceiling([item]) == 100


def test_reading(tmp_path):
    twice = {
        **hotpot("A", 0, passages=1),
        "context": [["A", ["One.", " Two."]], ["B", ["x"]], ["A", ["One.", "Two. "]]],
    }
    twice["supporting_facts"] = [["A", 0]]
    unanswerable = {**musique("B", 1), "answerable": False}
    write(tmp_path, "some.json", [twice, unanswerable, {**hotpot("C", 2), "context": []}])
    first, *others = read_records(tmp_path / "multihop" / "some.json")
    assert first.passages == (Passage("A\nOne. Two.", True), Passage("B\nx", False))
    assert [record.passages for record in others] == [(), ()]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], r":1: expected an object with 'question' (text)"),
        ({"answer": 3}, r":1: expected an object with 'answer' (text)"),
        ({"_id": 3}, r":1: expected an object with '_id' (text)"),
        ({"context": {}}, r":1: expected an object with 'context' (list)"),
        ({"context": [["a", ["b"]], ["a"]]}, r":1.context[1]: expected a title and a list of sentences"),
        ({"context": [["a", "b"]]}, r":1.context[0]: expected a title"),
        ({"context": [["a", ["b", 3]]]}, r":1.context[0]: expected a title"),
        ({"supporting_facts": None}, r":1: expected an object with 'supporting_facts' (list)"),
        ({"answer_aliases": [3]}, r":1: expected texts in 'answer_aliases'"),
        ({"paragraphs": [{"title": "a"}]}, r":1.paragraphs[0]: expected an object with 'paragraph_text' (text)"),
    ],
)
def test_malformed_records(tokenizer, tmp_path, record, message):
    content = {**hotpot("D0", 0), **record} if isinstance(record, dict) else record
    write(tmp_path, FILES["hotpotqa"]["dev"], [content])
    with pytest.raises(DataError, match=re.escape(f"migres_hotpot.jsonl{message}")):
        make(tmp_path, tokenizer)


def test_malformed_files(tokenizer, tmp_path):
    with pytest.raises(DataError, match="none: no such folder"):
        make(tmp_path / "none", tokenizer)
    with pytest.raises(
        DataError,
        match=r"migres_musique\.jsonl: no such file \(nor .*\.xz\); it should hold MuSiQue \(answerable\), dev: its "
        r"records as JSON, an object a line; source: https://github.com/AdelWang/MIGRES, data/musique.json \(docs/",
    ):
        make(tmp_path, tokenizer, "musique")
    write(tmp_path, FILES["hotpotqa"]["dev"], [hotpot("D0", 0), hotpot("D0", 0)])
    with pytest.raises(DataError, match=r"migres_hotpot\.jsonl:2: the id 'D00' stands twice"):
        make(tmp_path, tokenizer)
    (tmp_path / "multihop" / FILES["hotpotqa"]["dev"]).write_text(json.dumps(hotpot("D0", 0)) + "\n{")
    with pytest.raises(DataError, match=r"migres_hotpot\.jsonl:2: malformed JSON"):
        make(tmp_path, tokenizer)
    write(tmp_path, FILES["hotpotqa"]["dev"], [hotpot("D0", 0)])
    with pytest.raises(DataError, match=r"hipporag_hotpotqa_train\.json: no such file"):
        make(tmp_path, tokenizer, split="train")
    (tmp_path / "multihop" / FILES["hotpotqa"]["train"]).write_text('{"a": 1}')
    with pytest.raises(DataError, match=r"hipporag_hotpotqa_train\.json: expected a list of records"):
        make(tmp_path, tokenizer, split="train")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 1499}, "length must be at least 1500, got 1499"),
        ({"length": -1}, "length must be at least 1500, got -1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"split": "test"}, "unknown split 'test'"),
        ({"length": 90_000}, "tokens; a length of 90,000 needs more of them, or"),
    ],
)
def test_what_cannot_be(houses, tokenizer, settings, message):
    with pytest.raises(UserError, match=re.escape(message)):
        make(houses, tokenizer, **settings)


def test_gold_passages_that_do_not_fit(tokenizer, tmp_path):
    record = hotpot("D0", 0)
    record["context"][3][1] *= 60
    write(tmp_path, FILES["hotpotqa"]["dev"], [record])
    with pytest.raises(
        UserError, match=r"a length of 1,500 tokens is too short: question and gold passages of record D00 alone take"
    ):
        make(tmp_path, tokenizer, limit=1, length=1500)


def test_the_command_line_runs_it(tiny_folder, houses, tmp_path):
    out = tmp_path / "rows.jsonl"
    arguments = ["compare", "--model", tiny_folder, "--data", houses, "--out", out, "--task", "musique", "--limit", 2]
    done = CliRunner().invoke(app, [str(word) for word in [*arguments, "--max-new-tokens", 2]])
    assert done.exit_code == 0, done.output
    (row,) = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert (row["n"], row["ceiling"], row["split"], row["task_settings"]["length"]) == (2, 100, "dev", 0)
    assert 300 < row["length"] < 1200  # the prompts' mean
    assert next(iter(row["metrics"])) == "f1"

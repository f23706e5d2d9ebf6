import itertools
import json
import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from foveate.cli import app
from foveate.errors import DataError, UserError
from foveate.lab.evaluation import tasks
from foveate.lab.evaluation.tasks import wikisalad_long as long
from foveate.lab.evaluation.tasks.base import Output
from tests.combinations import in_turn

NAMES = ("Abel", "Bath", "Cork", "Dole", "Edam", "Faro", "Gent", "Hove", "Iasi", "Jena", "Kiel", "Linz", "Metz", "Nara")
TITLES = tuple(f"Town_of_{name}" for name in NAMES)
IMPOSSIBLE = {"id": "never", "question": "Who lives there?", "answers": [], "is_impossible": True}


def paragraph(title, number):
    """A paragraph of one to three lines, with questions that it does not answer, badly answers, and answers."""
    year, rng = 1000 + number, random.Random(f"{title}{number}")
    text = f"House {number} of {title} was built in {year}." + " It was sold again." * rng.randrange(4, 16)
    place = text.index(f"{year}")
    answers = [{"text": f"{year}", "answer_start": place}, {"text": f"in {year}", "answer_start": place - 3}]
    asked = {
        "id": f"{title}.{number}",
        "question": f" When was house {number} built? ",
        "answers": [*answers, answers[0]],
    }
    stop = {"id": "stop", "question": "What ends it?", "answers": [{"text": ".", "answer_start": text.index(".")}]}
    return {"context": f"{text}\n", "qas": [IMPOSSIBLE, stop, asked] if number % 5 else [IMPOSSIBLE]}


def write(folder, titles=TITLES, paragraphs=12, name="dev-v2.0.json", version="v2.0"):
    data = [{"title": title, "paragraphs": [paragraph(title, n) for n in range(paragraphs)]} for title in titles]
    data[0]["paragraphs"].append(data[0]["paragraphs"][0])  # a repeated one
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps({"version": version, "data": data}))
    return folder


@pytest.fixture(scope="module")
def towns(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "squad").parent


def make(data, tokenizer, limit=3, seed=0, **settings):
    return tasks.parse("wikisalad_long", **settings).items(data, tokenizer, limit, seed)


def read(item):
    """The segments of an item, each (topic, paragraph), and its question."""
    system, user = item.prompt
    assert system["role"] == "system"
    context, question = re.fullmatch(r"(.*)\n\nQuestion: (.*)\nAnswer:", user["content"], re.S).groups()
    assert context.startswith("# ")
    return [tuple(part.split("\n\n")) for part in context[2:].split("\n\n# ")], question


def fake(sizes):
    return [[long.Segment(f"{a}", f"{a}.{p}", (), 1) for p in range(size)] for a, size in enumerate(sizes)]


@in_turn(("pattern", ["A", "ABAB", "AABBAABB", "ABCABC", "AAABBBCCC", "ABCDEF"]), ("length", [1500, 1777, 4000]))
def test_prompts_have_the_length_asked_for(towns, tokenizer, length, pattern):
    items = make(towns, tokenizer, length=length, pattern=pattern)
    assert [item.id for item in items] == [f"{example}.{index}" for example in range(3) for index in range(5)]
    assert all(0.97 * length <= len(item.prompt_ids) <= length for item in items)


@pytest.mark.parametrize("split", ["test", "dev"])
def test_the_sample_has_prompts_of_real_text(sample, tokenizer, split):
    items = make(sample, tokenizer, length=2000, split=split)
    assert all(1940 <= len(item.prompt_ids) <= 2000 for item in items)
    assert tasks.parse("wikisalad_long").ceiling(items) == 100
    assert len({item.meta["topic"] for item in items}) > 3


def test_segments_are_whole_paragraphs_and_none_repeats(towns, tokenizer):
    texts = {paragraph(title, n)["context"].strip() for title in TITLES for n in range(12)}
    for item in make(towns, tokenizer, length=6000, limit=2):
        segments, _ = read(item)
        assert all(text in texts and topic.replace(" ", "_") in text for topic, text in segments)
        assert max(Counter(segments).values()) == 1
        assert len({topic for topic, _ in segments}) > 4  # articles ran out


def test_a_question_names_its_topic_and_is_answered_there(towns, tokenizer):
    for item in make(towns, tokenizer, length=3000):
        segments, question = read(item)
        topic, number = re.fullmatch(
            r'According to the article "(.+)": When was house (\d+) built\?', question
        ).groups()
        assert topic == item.meta["topic"]
        assert item.answers == (f"{1000 + int(number)}", f"in {1000 + int(number)}")
        (evidence,) = [text for title, text in segments if title == topic and f"House {number} " in text]
        assert all(answer in evidence for answer in item.answers)
        assert item.meta["question"] == question
        assert "When was" not in item.prompt[1]["content"].replace(question, "")


def test_questions_are_spread_over_the_depth(towns, tokenizer):
    items = make(towns, tokenizer, length=4000, limit=12, questions=4)
    for start in range(0, len(items), 4):
        example = items[start : start + 4]
        assert len({read(item)[1] for item in example}) == 4
        assert [read(item)[0] for item in example] == [read(example[0])[0]] * 4
        for index, item in enumerate(example):
            assert 25 * index - 8 < item.meta["depth"] < 25 * (index + 1) + 8
    assert len({item.meta["depth"] for item in items}) > 12


def test_the_ceiling_is_computed(towns, tokenizer):
    task = tasks.parse("wikisalad_long", length=1500)
    items = task.items(towns, tokenizer, 1, seed=0)
    assert task.ceiling(items) == 100
    items.append(task.ask(tokenizer, "x", "no context", "Why?", ("because",)))
    assert task.ceiling(items) == pytest.approx(100 * 5 / 6)
    assert task.grade(items[0], Output(text=f"It was {items[0].answers[0]}.")) == {
        "em_paper": 1,
        "em": 0,
        "f1": pytest.approx(0.5),
    }


def test_items_depend_on_the_seed_and_not_on_the_limit(towns, tokenizer):
    few, many = make(towns, tokenizer, length=1500, limit=2), make(towns, tokenizer, length=1500, limit=4)
    assert many[:10] == few
    assert len({item.prompt_ids for item in many}) == 20
    other = make(towns, tokenizer, length=1500, limit=2, seed=1)
    assert not {item.prompt_ids for item in other} & {item.prompt_ids for item in few}


def test_dev_and_test_share_no_article(towns, tokenizer, tmp_path):
    older = write(tmp_path, TITLES[:9], paragraphs=20, name="dev-v1.1.json", version="1.1")
    topics = {
        split: {
            topic
            for data in (towns, older)
            for item in make(data, tokenizer, limit=12, split=split, length=1500, pattern="AB", questions=2)
            for topic, _ in read(item)[0]
        }
        for split in ("test", "dev")
    }
    assert not topics["test"] & topics["dev"]
    assert len(topics["test"] | topics["dev"]) == len(TITLES)
    assert len(topics["test"]) > len(topics["dev"]) >= 2


def test_the_file_can_be_named(towns, tokenizer, tmp_path):
    write(tmp_path, TITLES[:9])
    write(tmp_path, name="mine.json")
    assert tasks.parse("wikisalad_long").files(tmp_path) == [tmp_path / "dev-v2.0.json"]
    mine = make(tmp_path, tokenizer, length=1500, squad="mine.json")
    assert mine == make(towns, tokenizer, length=1500)
    assert mine != make(tmp_path, tokenizer, length=1500)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=3, max_size=9),
    pattern=st.text("ABC", min_size=1, max_size=9),
    seed=st.integers(0, 99),
)
def test_interleaving_keeps_to_the_pattern_and_gives_every_segment_once(sizes, pattern, seed):
    articles = fake(sizes)
    segments = list(long.interleave(articles, pattern, random.Random(seed)))
    assert Counter(segments) == Counter(segment for article in articles for segment in article)
    for index, article in enumerate(articles):  # in its order, in a circle
        numbers = [int(segment.text.split(".")[1]) for segment in segments if segment.topic == f"{index}"]
        assert numbers == [(numbers[0] + step) % len(article) for step in range(len(article))]
    start = list(zip(itertools.cycle(pattern), segments))[: min(sizes)]  # no article has run out yet
    topics = {letter: segment.topic for letter, segment in start}
    assert all(topics[letter] == segment.topic for letter, segment in start)
    assert len(set(topics.values())) == len(topics)


def test_a_fresh_article_takes_the_letter_of_one_that_is_used_up():
    topics = [segment.topic for segment in long.interleave(fake([2, 2, 2]), "AAB", random.Random(0))]
    first, _, second, third, *_ = topics
    assert topics == [first, first, second, third, third, second]
    assert len({first, second, third}) == 3


def test_taking_and_spreading():
    (segments,) = fake([6])
    assert long.take(iter(segments), 4) == segments[:4]
    assert long.take(iter(segments), 9) == segments
    rng = random.Random(0)
    assert long.spread(segments, 1, rng) == []
    asked = [long.Segment("", "", ("?",) if place in (1, 2, 5) else (), 1) for place in range(6)]
    assert long.spread(asked, 3, rng) == [1, 2, 5]
    assert long.spread(asked, 6, rng) == long.spread(asked, 7, rng) == long.spread([], 1, rng) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 1499}, "length must be at least 1500, got 1499"),
        ({"questions": 0}, "questions must be at least 1, got 0"),
        ({"pattern": ""}, "pattern must be letters, such as ABAB, got ''"),
        ({"pattern": "AB AB"}, "pattern must be letters"),
        ({"split": "train"}, "unknown split 'train'. Did you mean"),
        ({"pattern": "ABCDEFGHIJKLMN"}, "is too small for the 14 topics of pattern ABCDEFGHIJKLMN"),
        ({"length": 90_000}, "tokens at most; a length of 90,000 needs more"),
        ({"length": 1500, "questions": 40}, "with 40 questions on different paragraphs"),
        ({"squad": "none.json"}, "none.json: no such file (nor none.json.xz)"),
    ],
)
def test_what_cannot_be(towns, tokenizer, settings, message):
    with pytest.raises(UserError, match=re.escape(message).replace("Did\\ you\\ mean", "")):
        make(towns, tokenizer, **settings)


def test_data_that_cannot_be(tokenizer, tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        make(tmp_path / "none", tokenizer)
    with pytest.raises(DataError, match="no SQuAD file found"):
        make(tmp_path, tokenizer)
    write(tmp_path, TITLES[1:2])
    with pytest.raises(UserError, match=r"the dev part of .*, 0 articles, is too small for the 1 topics of pattern A"):
        make(tmp_path, tokenizer, split="dev", pattern="A")
    content = (write(tmp_path) / "dev-v2.0.json").read_text()
    (tmp_path / "dev-v2.0.json").write_text(content.replace('"text": "1003"', '"text": "1004"'))
    with pytest.raises(DataError, match=r"dev-v2\.0\.json: question Town_of_\w+\.3: the answer '1004' is not at char"):
        make(tmp_path, tokenizer)


def test_the_command_line_runs_it(tiny_folder, sample, tmp_path):
    spec, out = "wikisalad_long:questions=2,pattern=ABC,max_new_tokens=2", tmp_path / "rows.jsonl"
    arguments = ["compare", "--model", tiny_folder, "--data", sample, "--out", out, "--task", spec]
    done = CliRunner().invoke(
        app, [str(word) for word in [*arguments, "--length", 1500, "--limit", 1, "--split", "dev"]]
    )
    assert done.exit_code == 0, done.output
    (row,) = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert (row["n"], row["ceiling"], row["length"], row["split"]) == (2, 100, 1500, "dev")
    assert row["task_settings"]["pattern"] == "ABC"

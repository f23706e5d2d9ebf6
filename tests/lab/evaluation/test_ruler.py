import itertools
import json
import math
import random
import re
import shutil
from collections import Counter

import pytest
from typer.testing import CliRunner

from foveate.cli import app
from foveate.errors import DataError, UserError
from foveate.hybrids.training.words import ADJECTIVES, NOUNS
from foveate.lab.evaluation import tasks
from foveate.lab.evaluation.tasks.base import Output
from foveate.lab.evaluation.tasks.ruler import counting, draft
from tests import tiny

NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\.")
NUMBER, UUID, WORD = (
    r"[1-9]\d{6}",
    r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    r"[a-z]+-[a-z]+",
)
NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
SPLITS = (
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
)
VERBS = [f"{verb}{ending}" for verb in ("walk", "mend", "jump", "paint", "toss") for ending in ("", "s", "er", "ing")]
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def paragraph(number, place):
    size = random.Random(f"{number}.{place}").randrange(1, 9)
    sentences = [f"Town {number} has bridge {place}.", *[" It is old and made of stone."] * size]
    return [f"Town {number}, part {place}", sentences]


def hotpot(number):
    """A question on ten paragraphs, two of them shared with the next question."""
    return {
        "_id": f"q{number}",
        "question": f"Which bridge has town {number}?",
        "answer": f"bridge {number % 10}",
        "supporting_facts": [[f"Town {number}, part 0", 0]],
        "context": [*(paragraph(number, place) for place in range(8)), *(paragraph(number + 1, p) for p in range(2))],
    }


@pytest.fixture(scope="module")
def folder(sample, tmp_path_factory):
    """A data folder with everything that the splits need, small."""
    data = tmp_path_factory.mktemp("data")
    for name in ("books", "squad"):
        shutil.copytree(sample / name, data / name)
    (data / "multihop").mkdir()
    (data / "multihop" / "hotpot_train.json").write_text("[]")
    (data / "multihop" / "my_hotpot.jsonl").write_text("\n".join(json.dumps(hotpot(n)) for n in range(40)))
    (data / "ruler").mkdir()
    for name, words in (("adjective", ADJECTIVES), ("noun", NOUNS), ("verb", VERBS)):
        (data / "ruler" / f"{name}list.txt").write_text("\n".join(words) + "\n")
    return data


def make(data, tokenizer, split, length=2048, limit=4, seed=0, **settings):
    return tasks.parse("ruler", split=split, length=length, **settings).items(data, tokenizer, limit, seed)


def message(item):
    (said,) = item.prompt
    assert said["role"] == "user"
    return said["content"]


def context(item):
    """The text between the first and the last line of a needle prompt."""
    return message(item).partition("\n")[2].rpartition("\n")[0]


def entries(text):
    """The words of a numbered list, checked to be numbered from 1."""
    numbered = re.findall(r"(\d+)\. ([^\d]+?)(?= \d|$)", text)
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    return [word for _, word in numbered]


def test_the_splits_are_the_published_ones(folder, tokenizer):
    task = tasks.get("ruler")
    assert task.splits == SPLITS
    assert tasks.parse("ruler").split == "niah_single_1"
    for split in SPLITS:
        (item,) = make(folder, tokenizer, split, limit=1)
        assert item.max_new_tokens == NEW_TOKENS[split.split("_")[0]]
        assert (item.id, item.stop, item.target_ids) == ("0", "", ())
        assert item.positions == len(item.prompt_ids) + item.max_new_tokens
        assert tasks.parse("ruler").ceiling([item]) == 100
    (item,) = make(folder, tokenizer, "vt", limit=1, max_new_tokens=77)
    assert item.max_new_tokens == 77


@pytest.mark.parametrize("length", [1900, 5003])
@pytest.mark.parametrize("split", SPLITS)
def test_prompts_have_the_length_asked_for(folder, tokenizer, split, length):
    unit = {
        "niah_multikey_2": 60,
        "niah_multikey_3": 130,
        "niah_single_1": 60,
        "vt": 60,
        "cwe": 45,
        "qa_1": 130,
        "qa_2": 130,
    }
    for item in make(folder, tokenizer, split, length):
        assert max(0, length - max(unit.get(split, 40), length // 100)) <= len(item.prompt_ids) <= length


@pytest.mark.parametrize("split", SPLITS)
def test_a_prompt_is_what_the_model_reads(folder, tokenizer, split):
    for item in make(folder, tokenizer, split, limit=2):
        read = tokenizer.decode(item.prompt_ids)
        assert read == f"<|user|>{message(item)}<|end|><|assistant|>{item.answer_prefix}"


def test_a_prompt_without_a_chat_template(folder):
    plain = tiny.make_tokenizer(chat_template=None)
    for split in ("niah_multivalue", "vt", "cwe", "qa_1"):
        (item,) = make(folder, plain, split, limit=1)
        assert plain.decode(item.prompt_ids) == f"{message(item)} {item.answer_prefix}"


@pytest.mark.parametrize("split", SPLITS)
def test_items_depend_on_the_seed_and_not_on_the_limit(folder, tokenizer, split):
    few, many = make(folder, tokenizer, split, limit=2), make(folder, tokenizer, split, limit=5)
    assert many[:2] == few
    assert len({item.prompt_ids for item in many}) == 5
    assert len({item.answers for item in many}) > 1
    other = make(folder, tokenizer, split, limit=2, seed=1)
    assert not {item.prompt_ids for item in other} & {item.prompt_ids for item in few}


class TestNeedles:
    @pytest.mark.parametrize(
        ("split", "keys", "values", "asked", "key", "value"),
        [
            ("niah_single_1", 1, 1, 1, WORD, NUMBER),
            ("niah_single_2", 1, 1, 1, WORD, NUMBER),
            ("niah_single_3", 1, 1, 1, WORD, UUID),
            ("niah_multikey_1", 4, 1, 1, WORD, NUMBER),
            ("niah_multikey_2", None, 1, 1, WORD, NUMBER),
            ("niah_multikey_3", None, 1, 1, UUID, UUID),
            ("niah_multivalue", 1, 4, 1, WORD, NUMBER),
            ("niah_multiquery", 4, 1, 4, WORD, NUMBER),
        ],
    )
    def test_needles_and_answers(self, folder, tokenizer, split, keys, values, asked, key, value):
        for item in make(folder, tokenizer, split, limit=6):
            found = NEEDLE.findall(context(item))
            kinds, found_keys, found_values = zip(*found)
            assert set(kinds) == {"uuids" if value is UUID else "numbers"}
            assert all(re.fullmatch(key, word) for word in found_keys)
            assert all(re.fullmatch(value, word) for word in found_values)
            assert len(set(found_values)) == len(found_values)
            assert set(Counter(found_keys).values()) == {values}
            assert len(set(found_keys)) == keys or (keys is None and len(found) > 10)
            assert len(item.meta["keys"]) == len(set(item.meta["keys"])) == asked
            assert len(item.answers) == asked * values
            given = [(word, number) for _, word, number in found if word in item.meta["keys"]]
            assert sorted(item.answers) == sorted(number for _, number in given)
            assert [dict(given)[word] for word in item.meta["keys"]] == list(item.answers) or values > 1
            assert all(message(item).count(answer) == 1 for answer in item.answers)

    @pytest.mark.parametrize("split", ["niah_single_1", "niah_multikey_2", "niah_multikey_3"])
    def test_haystacks_of_lines_are_whole(self, folder, tokenizer, split):
        places = []
        for item in make(folder, tokenizer, split, limit=20):
            lines = context(item).split("\n")
            (place,) = [number for number, line in enumerate(lines) if item.answers[0] in line]
            places.append(place / len(lines))
            assert NEEDLE.fullmatch(lines.pop(place))
            assert all(line == NOISE if split == "niah_single_1" else NEEDLE.fullmatch(line) for line in lines)
        assert min(places) < 0.3
        assert max(places) > 0.6

    def test_keys_do_not_repeat_where_words_are_few(self, tokenizer, tmp_path):
        (tmp_path / "ruler").mkdir()
        for name, words in (("adjective", ADJECTIVES[:20]), ("noun", NOUNS[:15]), ("verb", VERBS)):
            (tmp_path / "ruler" / f"{name}list.txt").write_text("\n".join(words))
        for item in make(tmp_path, tokenizer, "niah_multikey_2", 1900, limit=20):
            keys = [key for _, key, _ in NEEDLE.findall(context(item))]
            assert len(set(keys)) == len(keys) > 30

    @pytest.mark.parametrize("split", ["niah_single_2", "niah_multikey_1", "niah_multiquery"])
    def test_needles_in_an_essay_stand_between_sentences(self, folder, tokenizer, split):
        novel = " ".join((folder / "books" / "moby_dick.txt").read_text(encoding="utf-8").split())
        for item in make(folder, tokenizer, split, limit=6):
            text = context(item)
            before = [text[: match.start()] for match in NEEDLE.finditer(text)]
            assert all(re.search(r"(^|[.!?][\"'”’)_]* )$", part) for part in before)
            assert " ".join(NEEDLE.sub("", text).split()) in f"{novel} {novel}"

    def test_wording_is_the_published_one(self, folder, tokenizer):
        one, two, many = (
            make(folder, tokenizer, split, limit=1)[0]
            for split in ("niah_single_3", "niah_multivalue", "niah_multiquery")
        )
        (key,) = one.meta["keys"]
        assert message(one).startswith(
            "A special magic uuid is hidden within the following text. Make sure to memorize it. "
            "I will quiz you about the uuid afterwards.\n"
        )
        assert message(one).endswith(f"\nWhat is the special magic uuid for {key} mentioned in the provided text?")
        assert one.answer_prefix == f"The special magic uuid for {key} mentioned in the provided text is"
        (key,) = two.meta["keys"]
        assert message(two).startswith(
            "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
            "I will quiz you about the numbers afterwards.\n"
        )
        assert message(two).endswith(
            f"\nWhat are all the special magic numbers for {key} mentioned in the provided text?"
        )
        a, b, c, d = many.meta["keys"]
        assert many.answer_prefix == (
            f"The special magic numbers for {a}, {b}, {c}, and {d} mentioned in the provided text are"
        )
        assert f"numbers for {a}, {b}, {c}, and {d} mentioned" in message(many)

    def test_words_are_from_the_lists_or_our_own(self, folder, sample, tokenizer, tmp_path):
        for name, words in (("adjective", "red\nad hoc\n"), ("noun", "fox \n"), ("verb", "run")):
            (tmp_path / "ruler").mkdir(exist_ok=True)
            (tmp_path / "ruler" / f"{name}list.txt").write_text(words)
        keys = {item.meta["keys"][0] for item in make(tmp_path, tokenizer, "niah_single_1", 400, limit=20)}
        assert keys == {"red-fox", "ad hoc-fox"}
        with pytest.raises(UserError, match="the word lists make 2 keys; a length of 900 needs more words"):
            make(tmp_path, tokenizer, "niah_multikey_2", 900, limit=1)
        with pytest.raises(UserError, match="have 4 different words; the example of cwe needs more"):
            make(tmp_path, tokenizer, "cwe", limit=1)
        (item,) = make(sample, tokenizer, "niah_single_1", 400, limit=1)
        adjective, noun = item.meta["keys"][0].split("-")
        assert adjective in ADJECTIVES
        assert noun in NOUNS


class TestVariableTracking:
    QUESTION = "\nQuestion: Find all variables that are assigned the value {} in the text above."

    def parts(self, item):
        """The lines of the example and of the text, and what follows each."""
        head = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        empty, example, real = message(item).split(head)
        assert empty == ""
        assert example.endswith("\n\n")
        return [part.partition("\nQuestion: ")[::2] for part in (example.removesuffix("\n\n"), real)]

    def solve(self, text):
        """The variables by the number that they come to hold, the lines read in their order."""
        values, holders = {}, {}
        for line in text.split("\n"):
            if line == NOISE:
                continue
            name, source = re.fullmatch(r"VAR ([A-Z]+) = (?:VAR ([A-Z]+) |\d+)", line).groups()
            assert name not in values
            assert source == next(reversed(values), None)  # a chain, not a star
            values[name] = values[source] if source else line.split()[-1]
            holders.setdefault(values[name], []).append(name)
        return holders

    def test_chains_resolve_to_the_value_asked_for(self, folder, tokenizer):
        for item in make(folder, tokenizer, "vt", limit=8):
            (example, solved), (text, question) = self.parts(item)
            holders = self.solve(text)
            assert holders == {item.meta["value"]: list(item.answers)}
            assert [len(name) for name in item.answers] == [5] * 5
            assert f"\nQuestion: {question}" == self.QUESTION.format(item.meta["value"])
            assert item.answer_prefix == (
                "Answer: According to the chain(s) of variable assignment in the text above, 5 variables are assigned "
                f"the value {item.meta['value']}, they are: "
            )
            ((value, names),) = self.solve(example).items()
            assert value != item.meta["value"]
            assert [len(name) for name in names] == [3] * 5
            assert f"\nQuestion: {solved}" == self.QUESTION.format(value) + " " + item.answer_prefix.replace(
                item.meta["value"], value
            ) + " " + " ".join(names)

    def test_the_example_is_as_long_as_published_or_as_short_as_it_can_be(self, folder, tokenizer):
        (item,) = make(folder, tokenizer, "vt", 3000, limit=1)
        example = self.parts(item)[0][0].split("\n")
        assert example.count(NOISE) == 5  # the tiny tokenizer takes more than 500 tokens for them
        coarse = type("", (), {"__call__": lambda self, texts, **_: {"input_ids": [text.split() for text in texts]}})()
        lines = tasks.ruler.VariableTracking()._example_lines(coarse)
        sizes = [
            len(tasks.ruler.VariableTracking()._example(random.Random(0), "12345", count).split())
            for count in (lines, lines + 1)
        ]
        assert sizes[0] <= 500 < sizes[1]


class TestCounting:
    @pytest.mark.parametrize(
        ("length", "common", "other", "example"), [(2500, 6, 1, (3, 1, 20)), (5003, 30, 3, (10, 3, 40))]
    )
    def test_common_words_are_the_most_common(self, folder, tokenizer, length, common, other, example):
        head = (
            "Below is a numbered list of words. In these words, some appear more often than others. "
            "Memorize the ones that appear most often.\n"
        )
        question = "\nQuestion: What are the 10 most common words in the above list?"
        prefix = "Answer: The top 10 words that appear most often in the list are:"
        for item in make(folder, tokenizer, "cwe", length):
            empty, shown, asked = message(item).split(head)
            assert (empty, item.answer_prefix) == ("", prefix)
            counts = Counter(entries(asked.removesuffix(question)))
            assert asked.endswith(question)
            assert sorted(word for word, _ in counts.most_common(10)) == sorted(item.answers)
            assert {counts.pop(word) for word in item.answers} == {common}
            assert set(counts.values()) == {other}
            shown, _, answer = shown.partition(f"{question} {prefix} ")
            counts = Counter(entries(shown))
            assert len(counts) == example[2]
            assert {counts.pop(word) for word in entries(answer.removesuffix("\n"))} == {example[0]}
            assert set(counts.values()) == {example[1]}
            assert len(entries(answer.removesuffix("\n"))) == 10

    @pytest.mark.parametrize("length", [450, 1000, 4096])
    def test_the_three_most_frequent_coded_words_are_unique(self, folder, tokenizer, length):
        for item in make(folder, tokenizer, "fwe", length):
            text, _, question = message(item).partition("\nQuestion: ")
            head = (
                "Read the following coded text and track the frequency of each coded word. "
                "Find the three most frequently appeared coded words. "
            )
            assert text.startswith(head)
            assert question == (
                "Do not provide any explanation. Please ignore the dots '....'. "
                "What are the three most frequently appeared words in the above coded text?"
            )
            assert item.answer_prefix == (
                "Answer: According to the coded text above, the three most frequently appeared words are:"
            )
            ranked = Counter(text.removeprefix(head).split(" ")).most_common()
            assert ranked[0][0] == "..."
            assert tuple(word for word, _ in ranked[1:4]) == item.answers
            assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])
            counts = [count for _, count in ranked]
            assert len(set(counts[:4])) == 4
            assert counts[3] > sum(counts[4:5])
            assert abs(counts[0] / counts[1] - 4) < 1.5

    def test_zeta_counts_are_the_published_ones(self):
        assert counting.zeta_counts(1000)[:6] == [607, 151, 67, 37, 24, 16]  # int(1000 k**-2 / zeta(2))
        for size in range(counting._FEWEST_CODED, 3000):
            counts = counting.zeta_counts(size)
            assert len(set(counts[:5])) == 5
            ranks = (int(size * 6 / math.pi**2 / rank**2) for rank in range(1, size))
            assert counts == list(itertools.takewhile(bool, ranks))


class TestQuestions:
    def documents(self, item):
        middle = (
            "Answer the question based on the given documents. "
            "Only give me the answer and do not output any other words.\n\n"
        )
        text = message(item)
        assert text.startswith(f"{middle}The following are given documents.\n\nDocument 1:\n")
        body, _, question = text.rpartition(f"\n\n{middle}Question: ")
        assert item.answer_prefix == "Answer:"
        parts = re.split(r"(?:^|\n\n)Document (\d+):\n", body.split("given documents.\n\n", 1)[1])[1:]
        assert [int(number) for number in parts[::2]] == list(range(1, len(parts) // 2 + 1))
        return parts[1::2], question

    @pytest.mark.parametrize("length", [2048, 4000])
    def test_squad(self, folder, tokenizer, length):
        (path,) = (folder / "squad").iterdir()
        articles = [
            [part["context"] for part in article["paragraphs"]] for article in json.loads(path.read_text())["data"]
        ]
        asked = {
            question["question"]: (
                part["context"],
                article["title"],
                {answer["text"] for answer in question["answers"]},
            )
            for article in json.loads(path.read_text())["data"]
            for part in article["paragraphs"]
            for question in part["qas"]
            if not question["is_impossible"]
        }
        places = set()
        for item in make(folder, tokenizer, "qa_1", length, limit=10):
            documents, question = self.documents(item)
            gold, _, answers = asked[question]
            assert set(item.answers) == answers
            assert documents.count(gold) == 1
            assert len(set(documents)) == len(documents)
            (own,) = [article for article in articles if gold in article]
            others = [document for document in documents if document not in own]
            if others:  # those of the article go first
                assert length < 3000 or set(own) <= set(documents)
            assert all(any(document in article for article in articles) for document in others)
            places.add(documents.index(gold))
        assert len(places) > 2

    def test_hotpotqa(self, folder, tokenizer):
        numbers = set()
        for item in make(folder, tokenizer, "qa_2", 2500, limit=20):
            documents, question = self.documents(item)
            number = int(re.fullmatch(r"Which bridge has town (\d+)\?", question)[1])
            numbers.add(number)
            own = [f"{title}\n{''.join(sentences)}" for title, sentences in hotpot(number)["context"]]
            assert set(own) < set(documents)
            assert len(set(documents)) == len(documents)
            assert item.answers == (f"bridge {number % 10}",)
        assert len(numbers) == 20

    def test_every_question_is_asked_once_and_no_more(self, folder, tokenizer):
        items = make(folder, tokenizer, "qa_2", 1900, limit=50)
        assert len({self.documents(item)[1] for item in items}) == len(items) == 40


def test_grading():
    said = Output(text="They are 1234567 and\nABC.")
    item = tasks.Item(id="0", prompt="", prompt_ids=(), answers=("1234567", "abc", "x-ray", "7654321"))
    assert tasks.parse("ruler").grade(item, said) == {"string_match": 0.5, "begun": 0.5}
    for split, score in (("vt", 0.5), ("cwe", 0.5), ("fwe", 0.5), ("qa_1", 1.0), ("qa_2", 1.0)):
        assert tasks.parse("ruler", split=split).grade(item, said)["string_match"] == score
        assert tasks.parse("ruler", split=split).grade(item, Output(text="no"))["string_match"] == 0.0
    assert tasks.get("ruler").main == "string_match"


@pytest.mark.parametrize(
    ("said", "found"), [("1234567", 1), ("It is 1239999.", 1), ("124", 0), ("12", 0), ("123 and the", 2), ("", 0)]
)
def test_a_begun_answer_has_its_first_three_characters(said, found):
    item = tasks.Item(id="0", prompt="", prompt_ids=(), answers=("1234567", "The Nile"))
    assert tasks.parse("ruler:split=niah_multivalue").grade(item, Output(text=said))["begun"] == found / 2


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("1234567", 1),
        ("It is **1234567**.", 1),
        ("91234567", 1),  # RULER asks for nothing but that the answer is contained
        ("123456", 0),
        ("234567", 0),
        ("1234576", 0),
        ("1,234,567", 0),
        ("123 4567", 0),
        ("12345\n67", 0),
        ("1234567 1234567", 1),  # once, however often it is said
        ("", 0),
        ("the NILE", 1),
        ("Nile", 0),  # a part of an answer
        ("The  Nile", 0),
        ("the-Nile", 0),
        ("1234567 is beside the nile", 2),
    ],
)
def test_near_misses_are_no_matches(said, found):
    """Of two answers: each counts whole, as it is written but for case, and once."""
    item = tasks.Item(id="0", prompt="", prompt_ids=(), answers=("1234567", "the Nile"))
    for split, score in (("niah_multivalue", found / 2), ("qa_1", float(found > 0))):
        assert tasks.parse("ruler", split=split).grade(item, Output(text=said))["string_match"] == score


def test_pieces_are_put_before_different_lines():
    for where in range(20):
        mixed = draft.at_random(where, list("abcd"), ["1", "2", "3"])
        assert [piece for piece in mixed if piece.isdigit()] == ["1", "2", "3"]
        assert "".join(piece for piece in mixed if piece.isalpha()) == "abcd"
        assert not re.search(r"\d\d|\d$", "".join(mixed))
    assert draft.at_random(3, list("abcdef"), ["1"]) == draft.at_random(3, list("abcdef"), ["1"])
    letters = iter("abacabd")
    assert counting.distinct(3, lambda: next(letters), taken="b") == ["a", "c", "d"]


@pytest.mark.parametrize(
    ("split", "length", "message"),
    [
        ("niah", 4096, "unknown split 'niah'. Did you mean"),
        ("vt", 255, "length must be at least 256, got 255"),
        ("vt", 600, "a length of 600 tokens is too short: example, question and chain alone take"),
        ("cwe", 500, "a length of 500 tokens is too short: example, question and common words alone take"),
        ("fwe", 256, "a length of 256 tokens is too short: question and the shortest text alone take"),
        ("niah_multiquery", 300, "a length of 300 tokens is too short: question and needles alone take"),
        ("niah_multikey_3", 256, "a length of 256 tokens is too short: question and needles alone take"),
        ("qa_2", 900, "a length of 900 tokens is too short: the question 'Which bridge has town"),
        ("cwe", 20_000, "RULER's word lists give a prompt of"),
        ("niah_single_2", 200_000, "the novels give a prompt of"),
        ("qa_1", 90_000, "tokens in all; a length of 90,000 needs more"),
    ],
)
def test_lengths_that_cannot_be(folder, tokenizer, split, length, message):
    with pytest.raises(UserError, match=re.escape(message).replace("Did\\ you\\ mean", "")):
        make(folder, tokenizer, split, length, limit=1)


@pytest.mark.parametrize("split", ["niah_single_1", "niah_single_3", "niah_multikey_1"])
def test_needles_beyond_a_distance(folder, tokenizer, split):
    """The same items where the needle is far enough; the others are drawn anew."""
    plain, far = (make(folder, tokenizer, split, 1024, limit=12, beyond=beyond) for beyond in (0, 400))
    same = 0
    for one, other in zip(plain, far):
        (answer,) = other.answers
        text = tokenizer.decode(other.prompt_ids)
        after = tokenizer.encode(text[text.rindex(answer) :], add_special_tokens=False)
        assert len(after) >= 400
        same += one.prompt_ids == other.prompt_ids
    assert 0 < same < 12


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ruler:split=vt,beyond=5", r"beyond is for niah_single_\* and niah_multikey_\*, not for vt"),
        ("ruler:length=512,beyond=256", "beyond must be below half of the length, 512, got 256"),
        ("ruler:beyond=-1", "beyond must be at least 0, got -1"),
    ],
)
def test_distances_that_cannot_be(spec, message):
    with pytest.raises(UserError, match=message):
        tasks.parse(spec)


def test_the_longest_answer_cannot_be_negative():
    with pytest.raises(UserError, match="max_new_tokens must be at least 0, got -1"):
        tasks.parse("ruler:max_new_tokens=-1")


def test_data_that_is_missing(folder, sample, tokenizer, tmp_path):
    for split in SPLITS:
        with pytest.raises(DataError, match="none: no such folder"):
            tasks.parse("ruler", split=split).files(tmp_path / "none")
    for split, message in (
        ("niah_single_2", "no novels found"),
        ("qa_1", "no SQuAD file found"),
        ("qa_2", "no HotpotQA file found; expected .json or .jsonl"),
    ):
        with pytest.raises(DataError, match=message):
            tasks.parse("ruler", split=split).files(tmp_path)
    for split in ("niah_single_1", "vt", "fwe", "niah_multikey_3"):
        assert tasks.parse("ruler", split=split).files(tmp_path) == []
    with pytest.raises(UserError, match=r"the built-in words \(RULER's lists go into ruler/\) give a prompt of"):
        make(sample, tokenizer, "cwe", 20_000, limit=1)
    (tmp_path / "ruler").mkdir()
    (tmp_path / "ruler" / "adjectivelist.txt").write_text("red\n")
    with pytest.raises(DataError, match=r"nounlist\.txt: no such file \(nor nounlist\.txt\.xz\)"):
        tasks.parse("ruler", split="cwe").files(tmp_path)
    names = [path.name for path in tasks.parse("ruler", split="niah_single_2").files(folder)]
    assert names == ["moby_dick.txt", "adjectivelist.txt", "nounlist.txt", "verblist.txt"]
    assert [path.name for path in tasks.parse("ruler", split="qa_2").files(folder)] == ["my_hotpot.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("hotpot.json", "[", r"hotpot\.json:1: malformed JSON"),
        ("hotpot.json", "{}", r"hotpot\.json: expected a list"),
        ("hotpot.jsonl", '{"question": "Why?"}', r"hotpot\.jsonl:1: expected an object with 'answer'"),
        (
            "hotpot.json",
            json.dumps([hotpot(0) | {"context": [["Town"]]}]),
            r"hotpot\.json: \[0\]\.context\[0\]: expected",
        ),
        (
            "hotpot.json",
            json.dumps([hotpot(0) | {"context": []}]),
            r"hotpot\.json: question q0 comes without paragraphs",
        ),
        ("hotpot.jsonl.xz", "not compressed", r"hotpot\.jsonl\.xz: damaged \.xz file"),
    ],
)
def test_data_that_is_corrupt(tmp_path, tokenizer, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        make(tmp_path, tokenizer, "qa_2", limit=1)


def test_word_lists_that_are_corrupt(folder, tokenizer, tmp_path):
    shutil.copytree(folder / "ruler", tmp_path / "ruler")
    (tmp_path / "ruler" / "nounlist.txt").write_text("\n \n")
    with pytest.raises(DataError, match=r"nounlist\.txt: no words; expected one a line"):
        make(tmp_path, tokenizer, "niah_single_1", limit=1)


def test_the_command_line_runs_it(tiny_folder, sample, tmp_path):
    out = tmp_path / "rows.jsonl"
    arguments = ["compare", "--model", tiny_folder, "--data", sample, "--out", out, "--task", "ruler"]
    done = CliRunner().invoke(
        app, [str(word) for word in [*arguments, "--split", "fwe", "--length", 600, "--limit", 2, "--batch-size", 2]]
    )
    assert done.exit_code == 0, done.output
    (row,) = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert (row["n"], row["ceiling"], row["length"], row["split"]) == (2, 100, 600, "fwe")
    assert row["task_settings"] == {"split": "fwe", "length": 600, "max_new_tokens": 0}

import json
import re

import pytest

from foveate.errors import DataError, UserError
from foveate.io.reading import read_novels
from foveate.lab.evaluation import tasks
from foveate.lab.evaluation.tasks import niah
from foveate.lab.evaluation.tasks.base import Output

NEEDLE = re.compile(r"One of the special magic numbers for ([a-z]+-[a-z]+) is: (\d{7})\.")


def context(item):
    """The text that the needles were hidden in."""
    lines = item.prompt[0]["content"].split("\n")
    assert len(lines) == 3
    return lines[1]


class TestParsing:
    def test_settings_come_from_the_spec_and_from_keywords(self):
        task = tasks.parse("niah:length=512, max_new_tokens=3", split="multi", seed=None)
        assert task.settings() == {"split": "multi", "length": 512, "max_new_tokens": 3}
        assert tasks.parse("wikisalad").split == "easy"
        ours = ["2wiki", "hotpotqa", "math", "musique", "niah", "perplexity", "wikisalad", "wikisalad_long"]
        assert [name for name in tasks.names() if name in ours] == ours

    @pytest.mark.parametrize(
        ("spec", "settings", "message"),
        [
            (
                "nia",
                {},
                "unknown task 'nia'. Did you mean 'niah'. Allowed: 2wiki, choice, documents, hotpotqa, lambada",
            ),
            ("wikisalad", {"split": "esy"}, "task 'wikisalad': unknown split 'esy'. Did you mean 'easy'"),
            ("niah:lenght=512", {}, "task 'niah': unknown setting 'lenght'. Did you mean 'length'"),
            ("niah:length", {}, "'length' is not of the form key=value"),
            ("niah:length=512", {"length": 512}, "length is given twice"),
            ("niah:length=much", {}, "length must be of type int, got 'much'"),
            ("niah:length=255", {}, "length must be at least 256, got 255"),
            ("niah:max_new_tokens=0", {}, "max_new_tokens must be at least 1"),
            ("perplexity:continuation=0", {}, "continuation must be at least 1"),
            ("wikisalad", {"length": 100}, "unknown setting 'length'"),
        ],
    )
    def test_errors_name_what_is_allowed(self, spec, settings, message):
        with pytest.raises(UserError, match=re.escape(message).replace("'\\.", "'.")):
            tasks.parse(spec, **settings)

    def test_a_name_is_registered_once(self):
        with pytest.raises(ValueError, match="registered twice"):
            tasks.register(niah.NeedleInAHaystack)


class TestNeedle:
    @pytest.mark.parametrize("length", [256, 301, 512, 1024, 1999])
    @pytest.mark.parametrize("split", ["single", "multi"])
    def test_prompts_have_the_length_asked_for(self, sample, tokenizer, split, length):
        if split == "multi":
            length += 512
        for item in tasks.parse("niah", split=split, length=length).items(sample, tokenizer, 6, seed=3):
            assert 0.99 * length <= len(item.prompt_ids) <= length
            assert item.positions == len(item.prompt_ids) + 16

    @pytest.mark.parametrize(("split", "count"), [("single", 1), ("multi", 10)])
    def test_needles_stand_whole_between_sentences(self, sample, tokenizer, split, count):
        for item in tasks.parse("niah", split=split, length=2000).items(sample, tokenizer, 12, seed=0):
            text = context(item)
            found = NEEDLE.findall(text)
            assert len(found) == len(dict(found)) == count
            assert dict(found)[item.meta["key"]] == item.answers[0]
            assert tokenizer.decode(item.prompt_ids).count(item.answers[0]) == 1
            before = [text[: match.start()] for match in NEEDLE.finditer(text)]
            assert all(re.search(r"(^|[.!?][\"'”’)_]* )$", part) for part in before)

    def test_question_and_prefix_are_rulers(self, sample, tokenizer):
        (item,) = tasks.parse("niah", length=400).items(sample, tokenizer, 1, seed=0)
        key = item.meta["key"]
        head, _, question = item.prompt[0]["content"].split("\n")
        assert head == (
            "A special magic number is hidden within the following text. Make sure to memorize it. "
            "I will quiz you about the number afterwards."
        )
        assert question == f"What is the special magic number for {key} mentioned in the provided text?"
        read = tokenizer.decode(item.prompt_ids)
        assert read.endswith(
            f"{question}<|end|><|assistant|>The special magic number for {key} mentioned in the provided text is"
        )

    def test_forty_items_visit_every_depth_and_few_are_spread(self, sample, tokenizer):
        items = tasks.parse("niah", length=300).items(sample, tokenizer, 40, seed=0)
        depths = [item.meta["depth"] for item in items]
        assert sorted(depths) == sorted(niah.DEPTHS)
        assert niah.DEPTHS[0] == 0
        assert niah.DEPTHS[-1] == 100
        for count in (4, 8, 20):
            gaps = sorted(depths[:count])
            assert max(b - a for a, b in zip([0, *gaps], [*gaps, 100])) <= 250 / count

    def test_the_needle_is_as_deep_as_it_says(self, sample, tokenizer):
        for item in tasks.parse("niah", length=2000).items(sample, tokenizer, 10, seed=1):
            text = context(item)
            at = text.index("One of the special magic")
            assert abs(100 * at / len(text) - item.meta["depth"]) < 8

    def test_items_depend_on_the_seed_and_not_on_the_limit(self, sample, tokenizer):
        task = tasks.parse("niah", length=400)
        few, many = task.items(sample, tokenizer, 3, seed=0), task.items(sample, tokenizer, 6, seed=0)
        assert many[:3] == few
        assert len({NEEDLE.sub("", context(item)).strip()[:30] for item in many}) == 6
        assert task.items(sample, tokenizer, 3, seed=1) != few

    def test_too_little_room_or_too_little_text(self, sample, tokenizer, tmp_path):
        wordy = niah.NEEDLE * 20
        with pytest.raises(UserError, match="a length of 300 tokens is too short: question and needles alone take"):
            niah.fit("some text", 300, lambda chars: tokenizer.encode(wordy))
        (tmp_path / "short.txt").write_text("It was short. " * 20)
        with pytest.raises(UserError, match="a length of 900 needs more text"):
            tasks.parse("niah", length=900).items(tmp_path, tokenizer, 1, seed=0)

    def test_grading(self, sample, tokenizer):
        task = tasks.parse("niah", length=300)
        (item,) = task.items(sample, tokenizer, 1, seed=0)
        assert task.grade(item, Output(text=f"{item.answers[0]}.")) == {"string_match": 1, "number_match": 1}
        assert task.grade(item, Output(text=f"{item.answers[0]}6.")) == {"string_match": 1, "number_match": 0}
        assert task.grade(item, Output(text=item.answers[0][:-1])) == {"string_match": 0, "number_match": 0}
        assert task.ceiling([item]) == 100


class TestWikiSalad:
    @pytest.mark.parametrize(("split", "questions", "ceiling"), [("easy", 40, 82.5), ("hard", 60, 61.7)])
    def test_ceilings_of_the_first_ten_examples_are_those_published(self, sample, tokenizer, split, questions, ceiling):
        task = tasks.parse("wikisalad", split=split)
        items = task.items(sample, tokenizer, 10, seed=0)
        assert len(items) == questions
        assert round(task.ceiling(items), 1) == ceiling

    def test_every_question_of_an_example_is_an_item(self, sample, tokenizer):
        items = tasks.parse("wikisalad").items(sample, tokenizer, 2, seed=0)
        assert [item.id for item in items] == ["0.0", "0.1", "0.2", "0.3", "1.0", "1.1", "1.2", "1.3"]
        example = json.loads((sample / "wikisalad" / "easy_2topic_short.json").read_text(encoding="utf-8"))[0]
        read = tokenizer.decode(items[3].prompt_ids)
        assert read == (
            "<|system|>You are a helpful assistant that answers questions based on the given context. "
            "Answer in a few words or a short phrase. Do not include explanations.<|end|>"
            f"<|user|>{example['prompt']}\n\nQuestion: How many votes did Kerry receive, in the Electoral College?"
            "\nAnswer:<|end|><|assistant|>"
        )
        assert items[3].answers == ("252",)
        assert items[2].answers == ()

    def test_grading(self, sample, tokenizer):
        task = tasks.parse("wikisalad:max_new_tokens=100")
        items = task.items(sample, tokenizer, 1, seed=0)
        assert items[0].max_new_tokens == 100
        assert task.grade(items[3], Output(text=" 252 votes ")) == {"em_paper": 1, "em": 0, "f1": pytest.approx(2 / 3)}
        assert task.grade(items[2], Output(text="")) == {"em_paper": 0, "em": 1, "f1": 1}

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("[", r"easy_2topic_short\.json:1: malformed JSON"),
            ("[]", "expected a list of examples"),
            ('[{"questions": []}]', r"example 0 .*text 'prompt'"),
            ('[{"prompt": "a", "questions": 3}]', "expected a list 'questions'"),
            ('[{"prompt": "a", "questions": [{"question": "b", "answers": {"text": "c"}}]}]', "question 0 needs"),
        ],
    )
    def test_malformed_files(self, tmp_path, tokenizer, content, message):
        (tmp_path / "easy_2topic_short.json").write_text(content)
        with pytest.raises(DataError, match=message):
            tasks.parse("wikisalad").items(tmp_path, tokenizer, 1, seed=0)

    def test_missing_files(self, tmp_path):
        with pytest.raises(DataError, match=r"medium_2topic_medium\.json: no such file \(nor .*\.xz\)"):
            tasks.parse("wikisalad", split="medium").files(tmp_path)
        with pytest.raises(DataError, match="no such folder"):
            tasks.parse("wikisalad").files(tmp_path / "none")


class TestPerplexity:
    def test_windows_are_pieces_of_the_novel(self, sample, tokenizer):
        (novel,) = read_novels(sample)
        items = tasks.parse("perplexity:continuation=40", length=100).items(sample, tokenizer, 5, seed=0)
        assert len({item.id for item in items}) == 5
        for item in items:
            assert (len(item.prompt_ids), len(item.target_ids)) == (100, 40)
            text = tokenizer.decode(item.prompt_ids + item.target_ids)
            start = item.meta["start"]
            assert novel.text[start : start + len(text)] == text
            assert item.meta["bytes"] == len(tokenizer.decode(item.target_ids).encode())
            assert start == 0 or novel.text[start - 1].isspace()

    def test_metrics(self, sample, tokenizer):
        import numpy as np

        task = tasks.parse("perplexity:continuation=10", length=10)
        items = task.items(sample, tokenizer, 2, seed=0)
        graded = [task.grade(item, Output(nll=nll)) for item, nll in zip(items, (10.0, 30.0))]
        values = {key: np.array([row[key] for row in graded]) for key in graded[0]}
        assert task.metrics["nll"](values) == pytest.approx(2.0)
        assert task.metrics["perplexity"](values) == pytest.approx(np.exp(2))
        assert task.metrics[task.main](values) == pytest.approx(100 / np.exp(2))
        spent = sum(item.meta["bytes"] for item in items)
        assert task.metrics["bits_per_byte"](values) == pytest.approx(40 / np.log(2) / spent)
        assert task.said(items[0], Output(nll=10.0)) == "perplexity 2.72"

    def test_a_prompt_of_one_token(self, sample, tokenizer, monkeypatch):
        task = tasks.parse("perplexity:continuation=30", length=1)
        (item,) = task.items(sample, tokenizer, 1, seed=0)
        assert tokenizer.decode(item.prompt_ids) == item.prompt
        assert (len(item.prompt_ids), len(item.target_ids)) == (1, 30)
        monkeypatch.setattr("foveate.lab.evaluation.tasks.perplexity.leading_ids", lambda tokenizer: [2])
        (led,) = task.items(sample, tokenizer, 1, seed=0)
        assert (led.prompt_ids, led.prompt) == ((2,), "")
        assert led.target_ids == (item.prompt_ids + item.target_ids)[:30]
        assert led.meta["bytes"] == len(tokenizer.decode(led.target_ids).encode())

    def test_wikitext_is_read_from_its_own_file(self, tmp_path, tokenizer):
        task = tasks.parse("perplexity:split=wikitext,continuation=8", length=16)
        with pytest.raises(DataError, match=r"wiki\.test\.raw: no such file .*wikitext-2-raw-v1"):
            task.files(tmp_path)
        (tmp_path / "wikitext2").mkdir()
        (tmp_path / "wikitext2" / "wiki.test.raw").write_text(" = A title = \n" + " It was short ." * 200)
        items = task.items(tmp_path, tokenizer, 3, seed=0)
        assert {item.meta["novel"] for item in items} == {"wiki.test.raw"}
        assert all((len(item.prompt_ids), len(item.target_ids)) == (16, 8) for item in items)

    def test_a_novel_that_is_too_short(self, tmp_path, tokenizer):
        (tmp_path / "short.txt").write_text("It was short. " * 20)
        with pytest.raises(UserError, match=r"the text 'short' has \d+ tokens; length \+ continuation need 612"):
            tasks.parse("perplexity", length=100).items(tmp_path, tokenizer, 1, seed=0)

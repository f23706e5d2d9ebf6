"""The generator against published examples: ten each of two sets, which the project ships, and articles of a third."""

import dataclasses
import hashlib
import json
import re

import pytest
from typer.testing import CliRunner

from foveate.cli import app
from foveate.errors import UserError
from foveate.io.squad import Answer, Article, Paragraph, Question
from foveate.lab.evaluation import salad

TRAIN_ARTICLES = 442
TRAIN_PLACES = {"Frédéric_Chopin": 1, "The_Legend_of_Zelda:_Twilight_Princess": 4}
"""Places of two articles of the sample in SQuAD 2.0's training file, counted from 0."""
EXAMPLE_ARTICLES = {
    **{(0, 0): "Energy", (0, 1): "Universal_Studios", (1, 1): "Greeks", (2, 1): "Federal_Aviation_Administration"},
    **{(5, 1): "Greeks", (6, 0): "Tibet", (12, 0): "Time", (14, 1): "Tibet", (15, 1): "Grape", (25, 0): "Napoleon"},
    **{(44, 1): "Geological_history_of_Earth", (45, 0): "Greece", (46, 0): "East_India_Company"},
}
"""Some articles of wikisalad_eval_example.json that the sample has, too, by example and topic."""


def make_article(title, questions=18):
    return Article(title, tuple(Paragraph("", (Question("", f"{n}?", ()),)) for n in range(questions)))


@pytest.fixture(scope="module")
def published(sample):
    sets = {name: sample / "wikisalad" / salad.SETS[name].file for name in ("easy", "hard")}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in sets.items()}


@pytest.fixture(scope="module")
def places(published):
    """(place in the training file, title) of every article drawn, by comparing the draws with what was published."""
    drawn = salad.make_sets([make_article(str(number)) for number in range(TRAIN_ARTICLES)])
    return [
        (int(place), title)
        for name, examples in published.items()
        for ours, theirs in zip(drawn[name], examples)
        for place, title in zip(ours["metadata"]["articles"], theirs["metadata"]["articles"], strict=True)
    ]


def squad_file(path, version="v2.0", articles=5, questions=9):
    paragraph = {"context": "It is so. It is not. It may be. It was.", "qas": []}
    answers = [{"text": "so", "answer_start": 6}]
    paragraph["qas"] = [{"id": f"{n}", "question": f"What is {n}?", "answers": answers} for n in range(questions)]
    data = [{"title": f"Title_{number}", "paragraphs": [paragraph]} for number in range(articles)]
    path.write_text(json.dumps({"version": version, "data": data}), encoding="utf-8")
    return path


def call(squad, out, *more):
    return CliRunner().invoke(app, ["salad", "--squad", str(squad), "--out", str(out), *map(str, more)])


def test_draws_are_those_of_the_published_examples(places):
    titles = dict(places)
    assert len(places) == 50
    assert len(set(places)) == len(titles) == len(set(titles.values()))
    assert {title: place for place, title in places if title in TRAIN_PLACES} == TRAIN_PLACES


def test_draws_are_those_of_the_published_example_file(places):
    drawn = salad.make_sets([make_article(str(number)) for number in range(TRAIN_ARTICLES)])["example"]
    places_of = {title: place for place, title in places}
    for (number, topic), title in EXAMPLE_ARTICLES.items():
        assert int(drawn[number]["metadata"]["articles"][topic]) == places_of[title]
    assert {example["metadata"]["pattern"] for example in drawn} == {"AABBAABB"}


def test_examples_are_the_published_ones(published, places):
    pieces = {
        (question["article"], index): (text, question)
        for examples in published.values()
        for example in examples
        for index, (text, question) in enumerate(
            zip(re.findall(r"# Segment .*?\n\n(.*?)\n\n\nQuestion", example["prompt"], re.S), example["questions"])
        )
    }
    articles = [make_article(str(number)) for number in range(TRAIN_ARTICLES)]
    for place, title in places:
        paragraphs = list(articles[place].paragraphs)
        for index in range(len(paragraphs)):
            if (title, index) in pieces:
                text, asked = pieces[title, index]
                answers = tuple(map(Answer, asked["answers"]["text"], asked["answers"]["answer_start"]))
                paragraphs[index] = Paragraph(text, (Question("", asked["question"], answers),))
        articles[place] = Article(title, tuple(paragraphs))
    made = salad.make_sets(articles)
    assert {name: len(examples) for name, examples in made.items()} == {
        **{"example": 50, "easy": 100, "medium": 100, "hard": 100, "very_hard": 50}
    }
    for name, examples in published.items():
        assert made[name][: len(examples)] == examples


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("One. Two! Three? Four. Five. Six.", "One. Two! Three? Four. Five."),
        ("One. Two. Three", "One. Two. Three"),
        ("One. Two. Three.", "One. Two. Three."),
        ("Or St. Barts or St. Barth's in English. More.", "Or St. Barts or St. Barth's in English."),
        ("", ""),
    ],
)
def test_first_sentences(text, first):
    assert salad.first_sentences(text) == first


def test_questions_are_counted_over_the_example_and_modulo_those_of_the_article():
    made = salad.make_sets([make_article("few", 6), make_article("some", 7), make_article("many", 30)])
    for example in made["very_hard"]:
        counts = {"few": 6, "some": 7, "many": 30}
        asked = [f"{index % counts[question['article']]}?" for index, question in enumerate(example["questions"])]
        assert [question["question"] for question in example["questions"]] == asked
    assert len({tuple(example["metadata"]["articles"]) for example in made["very_hard"]}) == 6


def test_articles_with_too_few_questions_are_not_drawn():
    made = salad.make_sets([make_article(f"{number}", questions) for number, questions in enumerate([3, 4, 6, 6, 6])])
    assert {title for example in made["easy"] for title in example["metadata"]["articles"]} == set("01234")
    assert {title for example in made["medium"] for title in example["metadata"]["articles"]} == set("1234")
    with pytest.raises(
        UserError, match=r"pattern AAABBBCCC.* takes 3 articles with at least 6 questions each; there are 2"
    ):
        salad.make_sets([make_article(f"{number}", questions) for number, questions in enumerate([4, 6, 6])])


def test_command_writes_the_five_files(tmp_path, monkeypatch):
    squad, out = squad_file(tmp_path / "train.json"), tmp_path / "out" / "sets"
    done = call(squad, out)
    assert done.exit_code == 0, done.output
    written = {"wikisalad_eval_example.json", *(recipe.file for recipe in salad.SETS.values())}
    assert {path.name for path in out.iterdir()} == written
    assert done.stdout.count("differs from the published file") == 5
    content = (out / "hard_3topic_short.json").read_bytes()
    assert content.startswith(b'[\n  {\n    "example_id": 0,\n    "prompt": "# Segment 1: Title_')
    assert content.endswith(b"\n  }\n]")
    assert json.dumps(json.loads(content), indent=2).encode() == content

    published = {"hard": "hard_3topic_short.json", "example": "wikisalad_eval_example.json"}
    for name, file in published.items():
        sha256 = hashlib.sha256((out / file).read_bytes()).hexdigest()
        monkeypatch.setitem(salad.FILES, name, dataclasses.replace(salad.FILES[name], sha256=sha256))
    again = call(squad, out)
    assert again.exit_code == 0
    for file in published.values():
        assert f"{file}: as published" in again.stdout
    assert again.stdout.count("differs") == 3


def test_every_published_file_is_known_by_its_bytes():
    digests = {recipe.sha256 for recipe in salad.FILES.values()}
    assert len(digests) == 5
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)


def test_files_of_another_content_are_left_alone(tmp_path):
    squad, out = squad_file(tmp_path / "train.json"), tmp_path / "out"
    out.mkdir()
    (out / "very_hard_3topic_long.json").write_text("mine")
    refused = call(squad, out, "--seed", 7)
    assert refused.exit_code == 2
    assert "very_hard_3topic_long.json exists with another content" in refused.stderr
    assert [path.read_text() for path in out.iterdir()] == ["mine"]
    assert call(squad, tmp_path / "a", "--seed", 7).exit_code == call(squad, tmp_path / "b").exit_code == 0
    for recipe in salad.FILES.values():
        assert (tmp_path / "a" / recipe.file).read_bytes() != (tmp_path / "b" / recipe.file).read_bytes()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"version": "1.1"}, "train.json: SQuAD 1.1; WikiSalad is made of SQuAD 2.0"),
        ({"version": "v3"}, "unknown SQuAD version 'v3'"),
        ({"articles": 2}, "takes 3 articles with at least 2 questions each; there are 2"),
        ({"articles": 0}, "no articles"),
    ],
)
def test_other_files_are_refused(tmp_path, settings, message):
    refused = call(squad_file(tmp_path / "train.json", **settings), tmp_path / "out")
    assert refused.exit_code == 2
    assert message in refused.stderr
    assert not (tmp_path / "out").exists()
    assert call(tmp_path / "none.json", tmp_path / "out").exit_code == 2

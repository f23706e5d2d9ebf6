"""WikiSalad's generator: from SQuAD 2.0's training articles to the five published files of the LuKA paper.

Facts of the recipe, checked against the published files:

- One stream of random numbers makes all sets, in their order. A set of 50 comes first, which the paper publishes as an
  example of the format; the paper's results are on the other four.
- An example draws one article for each letter of its pattern, A first. An article can be drawn if it has a question for
  each A of the pattern.
- Segment i, counted over the whole example, takes question i of its article (modulo their number) and the first three
  sentences of the paragraph asked about. Questions on one paragraph follow each other, so segments repeat.
- Questions stand in the context, each below its segment. The boundaries in `metadata` count the characters of texts and
  questions, not of headings.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foveate.errors import DataError, UserError
from foveate.io import infile, outfile
from foveate.io.squad import Article, read_squad

SEED = 42  # the seed of the published files
_SENTENCES = 3


@dataclass(frozen=True)
class Recipe:
    """One set: its file, the pattern and number of its examples, and the sha256 of the published file."""

    file: str
    pattern: str
    examples: int
    sha256: str


_PUBLISHED = {
    "example": "2ea98356388ca2d765cdec452a11a553773cedf362276b81eee64a3430ad244a",
    "easy": "3e006bad8264096cefd6ff3a7d986cc0be97da7fc360b51ca1b95f76569c3924",
    "medium": "d22dd273ea9573d390441226113236bf323258a5ed6282792bb7f3e745a0c5a8",
    "hard": "3b12c3c732970d241c563fd8f250c4e7fd2c601f1e299203832809013f940ef2",
    "very_hard": "27ee978cfa134c4684a017e703906761af16894891410c6738fa871cee78a08c",
}
FILES = {
    "example": Recipe("wikisalad_eval_example.json", "AABBAABB", 50, _PUBLISHED["example"]),
    "easy": Recipe("easy_2topic_short.json", "ABAB", 100, _PUBLISHED["easy"]),
    "medium": Recipe("medium_2topic_medium.json", "AABBAABB", 100, _PUBLISHED["medium"]),
    "hard": Recipe("hard_3topic_short.json", "ABCABC", 100, _PUBLISHED["hard"]),
    "very_hard": Recipe("very_hard_3topic_long.json", "AAABBBCCCAAABBBCCC", 50, _PUBLISHED["very_hard"]),
}
"""All published files, in the order in which they are drawn."""
SETS = {name: recipe for name, recipe in FILES.items() if name != "example"}


def make_sets(articles: Sequence[Article], seed: int = SEED) -> dict[str, list[dict[str, Any]]]:
    """The examples of every file of `FILES`, as published. Raises `UserError` if there are too few articles."""
    rng = random.Random(seed)
    return {name: _make_set(articles, recipe, rng) for name, recipe in FILES.items()}


def write_sets(squad: Path, out: Path, seed: int = SEED) -> dict[Path, bool]:
    """Makes the sets of a SQuAD 2.0 file, writes them to the folder `out`, and says of each file: is it as published?

    Raises `DataError` for a file that is not SQuAD 2.0, and `UserError` if it holds too few articles, a file of another
    content is in the way or the folder cannot be written to; nothing is written then.
    """
    outfile.check_folder(Path(out))
    document = read_squad(squad)
    if document.version != "2.0":
        raise DataError(f"{squad}: SQuAD {document.version}; WikiSalad is made of SQuAD 2.0")
    sets = make_sets(document.articles, seed)
    contents = {Path(out) / FILES[name].file: json.dumps(sets[name], indent=2).encode() for name in FILES}
    for path, content in contents.items():
        if path.exists() and infile.read(path) != content:
            raise UserError(f"{path} exists with another content")
    for path, content in contents.items():
        outfile.write(path, content)
    digests = [hashlib.sha256(content).hexdigest() for content in contents.values()]
    return {path: digest == recipe.sha256 for path, digest, recipe in zip(contents, digests, FILES.values())}


def first_sentences(text: str) -> str:
    """The first three sentences as the recipe counts them: a sentence ends at ". ", so abbreviations end one, too."""
    sentences = text.split(". ")
    return text if len(sentences) <= _SENTENCES else ". ".join(sentences[:_SENTENCES]) + "."


def _make_set(articles: Sequence[Article], recipe: Recipe, rng: random.Random) -> list[dict[str, Any]]:
    topics = sorted(set(recipe.pattern))
    asked = [sum(len(paragraph.questions) for paragraph in article.paragraphs) for article in articles]
    eligible = [article for article, count in zip(articles, asked) if count >= recipe.pattern.count("A")]
    if len(eligible) < len(topics):
        raise UserError(
            f"pattern {recipe.pattern} takes {len(topics)} articles with at least {recipe.pattern.count('A')} "
            f"questions each; there are {len(eligible)}"
        )
    return [
        _example(number, recipe.pattern, dict(zip(topics, rng.sample(eligible, len(topics)))))
        for number in range(recipe.examples)
    ]


def _example(number: int, pattern: str, articles: dict[str, Article]) -> dict[str, Any]:
    asked = {
        topic: [(paragraph, question) for paragraph in article.paragraphs for question in paragraph.questions]
        for topic, article in articles.items()
    }
    blocks, questions, boundaries, position = [], [], [], 0
    for index, topic in enumerate(pattern):
        paragraph, question = asked[topic][index % len(asked[topic])]
        place = {"segment_id": index, "topic": topic, "article": articles[topic].title}
        text = first_sentences(paragraph.text)
        asking = f"\nQuestion {index + 1}: {question.text}\n"
        blocks += [f"# Segment {index + 1}: {articles[topic].title}\n\n{text}\n", asking]
        answers = {
            "text": [answer.text for answer in question.answers],
            "answer_start": [answer.start for answer in question.answers],
        }
        questions.append({"question": question.text, "answers": answers, **place})
        boundaries.append({**place, "start_char": position, "end_char": position + len(text)})
        position += len(text) + len(asking)
    return {
        "example_id": number,
        "prompt": "\n".join(blocks),
        "questions": questions,
        "metadata": {
            "pattern": pattern,
            "articles": [article.title for article in articles.values()],
            "segment_boundaries": boundaries,
        },
    }

"""WikiSalad made harder: any length, no repeated segment, every question answerable, and none of them in the context.

Segments are whole paragraphs of a SQuAD file under their article's title, interleaved by a pattern that is repeated
until the prompt has `length` tokens. A letter stands for one article at a time: its paragraphs in their order, in a
circle from a random one. When they are used up, a fresh article takes the letter; when there is no fresh article, the
other letters go on. The context is divided into equal stretches, one for each question of the example. Each question is
asked on a paragraph of its own stretch, and names the article. Protocol and grading equal `wikisalad`'s; `limit` counts
examples.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foveate.errors import DataError, UserError
from foveate.io.squad import Paragraph, Question, find_squad, read_squad
from foveate.lab.evaluation.metrics import normalize
from foveate.lab.evaluation.tasks import register
from foveate.lab.evaluation.tasks.base import Item
from foveate.lab.evaluation.tasks.wikisalad import ContextQuestions, messages
from foveate.prompting import encode

QUESTION = 'According to the article "{topic}": {question}'
SHORTEST = 1500
FULLNESS = 0.97  # the least share of `length` that a prompt has
_BREAK = "\n\n"
_ATTEMPTS = 300


class Segment(NamedTuple):
    """A paragraph under its article's title, the questions that it answers, and the tokens that it adds to a prompt."""

    topic: str
    text: str
    questions: tuple[Question, ...]
    tokens: int


@register
class WikiSaladLong(ContextQuestions):
    """Answerable questions on interleaved articles, any length, no repeats. Score: as in `wikisalad` (`em_paper`)."""

    name = "wikisalad_long"
    splits = ("test", "dev")
    """`dev` is for choosing settings, `test` for reporting: no article is in both, whichever files they come from."""
    least = {"max_new_tokens": 1, "length": SHORTEST, "questions": 1}

    length: int = 4096  # tokens of the whole prompt, at least 1500
    pattern: str = "ABCD"  # topics in turn, such as ABAB or AAABBBCCC
    questions: int = 5  # questions of an example, an item each
    squad: str = ""  # name of the SQuAD file; a v2 dev file if left out

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.pattern.isalpha():
            raise UserError(f"task '{self.name}': pattern must be letters, such as ABAB, got '{self.pattern}'")

    def files(self, data: Path) -> list[Path]:
        return [find_squad(data, self.squad)]

    def items(self, data: Path, tokenizer: Any, limit: int, seed: int) -> list[Item]:
        (path,) = self.files(data)
        articles = read_articles(path, self.split, tokenizer)
        part = f"the {self.split} part of {path}, {len(articles)} articles,"
        if len(articles) < len(set(self.pattern)):
            raise UserError(f"{part} is too small for the {len(set(self.pattern))} topics of pattern {self.pattern}")
        frame = len(encode(tokenizer, messages("", "")))
        most = frame + sum(segment.tokens for article in articles for segment in article)
        if most < FULLNESS * self.length:
            raise UserError(f"{part} gives a prompt of {most:,} tokens at most; a length of {self.length:,} needs more")
        return [
            item
            for number in range(limit)
            for item in self._example(tokenizer, articles, self.length - frame, number, seed)
        ]

    def _example(
        self, tokenizer: Any, articles: Sequence[Sequence[Segment]], room: int, number: int, seed: int
    ) -> list[Item]:
        """The items of one example, drawn anew until every prompt has the length."""
        rng = random.Random(f"{self.name}/{seed}/{number}")
        for _ in range(_ATTEMPTS):
            items: list[Item] = []
            segments = take(interleave(articles, self.pattern, rng), room)
            for place in spread(segments, self.questions, rng):
                item = self._item(tokenizer, segments, place, f"{number}.{len(items)}", rng)
                if not FULLNESS * self.length <= len(item.prompt_ids) <= self.length:
                    break
                items.append(item)
            if len(items) == self.questions:
                return items
        raise UserError(
            f"in {_ATTEMPTS} draws, paragraphs gave no prompt within {1 - FULLNESS:.0%} of {self.length:,} tokens with "
            f"{self.questions} questions on different paragraphs; ask for a greater length or fewer questions"
        )

    def _item(self, tokenizer: Any, segments: Sequence[Segment], place: int, name: str, rng: random.Random) -> Item:
        segment = segments[place]
        question = rng.choice(segment.questions)
        before, whole = (sum(part.tokens for part in parts) for parts in (segments[:place], segments))
        return self.ask(
            tokenizer,
            name,
            context=_BREAK.join(part.text for part in segments),
            question=QUESTION.format(topic=segment.topic, question=question.text.strip()),
            answers=question.texts,
            topic=segment.topic,
            depth=round(100 * before / whole),
        )


def read_articles(path: Path, split: str, tokenizer: Any) -> list[list[Segment]]:
    """The articles of a SQuAD file that belong to a split, as segments; a paragraph that repeats another is left out.

    An article is in "dev", about a fifth of all, by the CRC-32 of its title. Raises `DataError` if an answer does not
    stand where the file says.
    """
    seen = {""}
    articles = []
    for article in read_squad(path).articles:
        paragraphs = {paragraph.text.strip(): paragraph for paragraph in article.paragraphs}
        fresh = [paragraph for text, paragraph in paragraphs.items() if text not in seen]
        seen |= paragraphs.keys()
        if fresh and (zlib.crc32(article.title.encode()) % 5 == 4) == (split == "dev"):
            articles.append(_segments(path, article.title.replace("_", " "), fresh, tokenizer))
    return articles


def interleave(articles: Sequence[Sequence[Segment]], pattern: str, rng: random.Random) -> Iterator[Segment]:
    """Every segment of all articles once, the topics in turn as the letters of the pattern."""
    drawn = ((article, rng.randrange(len(article))) for article in rng.sample(articles, len(articles)))
    fresh = ([*article[start:], *article[:start]] for article, start in drawn)  # in a circle
    topics = {letter: itertools.chain.from_iterable(fresh) for letter in pattern}  # an exhausted one takes a fresh one
    while turn := [segment for letter in pattern if (segment := next(topics[letter], None))]:
        yield from turn


def take(segments: Iterator[Segment], room: int) -> list[Segment]:
    """The first segments that together have at most `room` tokens."""
    taken = []
    for segment in segments:
        room -= segment.tokens
        if room < 0:
            break
        taken.append(segment)
    return taken


def spread(segments: Sequence[Segment], count: int, rng: random.Random) -> list[int]:
    """Places of segments with questions, one in each of `count` equal stretches; none at all if a stretch has none."""
    bounds = [len(segments) * part // count for part in range(count + 1)]
    stretches = [
        [place for place in range(*stretch) if segments[place].questions] for stretch in itertools.pairwise(bounds)
    ]
    return [rng.choice(stretch) for stretch in stretches] if all(stretches) else []


def _segments(path: Path, topic: str, paragraphs: Sequence[Paragraph], tokenizer: Any) -> list[Segment]:
    """The paragraphs with their title, and with their tokens after the end of a sentence."""
    texts = [f"# {topic}{_BREAK}{paragraph.text.strip()}" for paragraph in paragraphs]
    before = len(tokenizer.encode(".", add_special_tokens=False))
    ids = tokenizer([f".{_BREAK}{text}" for text in texts], add_special_tokens=False)["input_ids"]
    return [
        Segment(topic, text, _answered(path, paragraph), len(tokens) - before)
        for text, paragraph, tokens in zip(texts, paragraphs, ids)
    ]


def _answered(path: Path, paragraph: Paragraph) -> tuple[Question, ...]:
    """The questions that a paragraph answers, without SQuAD's questions whose answer is a full stop."""
    for question in paragraph.questions:
        for answer in question.answers:
            if not paragraph.text.startswith(answer.text, answer.start):
                where = f"{path}: question {question.id}"
                raise DataError(f"{where}: the answer '{answer.text}' is not at character {answer.start}")
    return tuple(
        question
        for question in paragraph.questions
        if question.answers and all(normalize(answer.text) for answer in question.answers)
    )

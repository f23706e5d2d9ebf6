"""Novels as one text, where its sentences begin, and statements set between them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from foveate.io.reading import Novel

_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)\]_]*\s")
_ABBREVIATION = re.compile(r"(?:^|[\s(\"'“‘])(?:[A-Z]|Mrs?|Ms|Messrs|Dr|St|Mme|Mlle|No|vol|viz|etc|i\.e|e\.g)\.$")


class Library:
    """All novels as one text, in their order, white space made single, read in a circle."""

    def __init__(self, novels: list[Novel]):
        self.text = " ".join(" ".join(novel.text.split()) for novel in novels)

    def window(self, where: float, chars: int) -> str:
        """Up to `chars` characters from the sentence that begins after the share `where` in [0, 1) of the text."""
        start = next(sentence_starts(self.text, int(where * len(self.text))), 0)
        text = self.text[start : start + chars]
        if len(text) < chars:
            text = f"{text} {self.text[: min(start, chars - len(text))]}".rstrip()
        return text


def sentence_starts(text: str, begin: int = 0) -> Iterator[int]:
    """Positions after `begin` at which a sentence starts: after . ! or ?, but not after an abbreviation."""
    for match in _SENTENCE_END.finditer(text, begin):
        if not _ABBREVIATION.search(text, max(0, match.start() - 10), match.start()):
            yield match.end()


def insert(text: str, needles: list[str], places: list[float]) -> str:
    """`text` with each needle set at the start of a sentence, the nearest to its place, a share in [0, 1] of the text.

    A last sentence that is cut counts as none: at place 1 the needle follows the last whole sentence.
    """
    starts = [0, *sentence_starts(text + " ")]
    wanted = [place * len(text) for place in places]
    nearest = [(min((abs(start - at), start) for start in starts)[1], number) for number, at in enumerate(wanted)]
    pieces, last = [], 0
    for start, number in sorted(nearest):
        pieces += [text[last:start].strip(), needles[number]]
        last = start
    return " ".join(filter(None, [*pieces, text[last:].strip()]))

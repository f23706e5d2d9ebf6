"""Whether a text gives an answer: the rule behind a user's own questions.

An answer is a sequence of tokens (:func:`tokens`), and a text gives it if it holds these tokens in a row. Words are
compared without case and punctuation; numbers by value, with their sign; scripts written without spaces character by
character. Two kinds of answers have a rule of their own: a single letter, such as in a multiple choice, and code.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import regex

from foveate.lab.evaluation.metrics import token_f1

_ARTICLES = frozenset(("a", "an", "the"))
_WORDS_OF_A_LETTER = frozenset("aeiouyàéóúаивкосуя")
"""Letters that are also words of some language, so that a capital alone does not show which one is meant."""
_EXPONENTS = str.maketrans({mark: f"^{unicodedata.digit(mark)}" for mark in "⁰¹²³⁴⁵⁶⁷⁸⁹"})
_UNSPACED = "".join(
    rf"\p{{scx={name}}}" for name in ("Han", "Hiragana", "Katakana", "Hangul", "Thai", "Lao", "Khmer", "Myanmar")
)
"""Scripts written without spaces; and Hangul, where particles are written onto the word."""
_LETTER = rf"[\p{{L}}--[{_UNSPACED}]]\p{{M}}*"
_TOKEN = regex.compile(
    rf"""
    (?P<literal> \d+(?:[.:]\d+){{2,}}(?![.,:]?\d) | \d+:\d+ | \d+/\d+(?![/\d]) | \d+(?:\.\d+)?e[+-]?\d+(?!\w) )
  | (?P<number> (?: (?<![\w)\]])-)?
      (?: \d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?(?!,?\d) | \d{{1,3}}(?:\.\d{{3}})+,\d+(?!\d) | \d+[.,]\d+(?!,?\d)
        | (?<!\d)\.\d+ | \d+ )
      (?= (?:{_LETTER})*(?!_*[\p{{L}}\d]) | [{_UNSPACED}] ) )
  | (?P<word> {_LETTER}[+#-](?![\w+#]) | (?:{_LETTER}|\d)+(?:_+(?:{_LETTER}|\d)+)*(?:[+#]+(?!\w))? )
  | (?P<character> [{_UNSPACED}]\p{{M}}* )
  | (?P<symbol> [\p{{S}}#@&*\\_%] )
    """,
    regex.VERBOSE | regex.VERSION1,
)
_CODE = regex.compile(r"[_\\<>{}\[\]=@|~]|::|\(\)|^--?\p{L}|^[.~]?/\w|\w/\w+/|\p{L}[\w-]*\.\p{L}\w+", regex.VERSION1)
"""What code, paths, addresses and names of files have, and other words do not."""


def tokens(text: str) -> list[str]:
    """What of a text is compared: its words, numbers, characters of scripts without spaces, and symbols.

    Compatible forms of a character are one (``ﬁ`` is ``fi``), and so are all dashes. Punctuation separates tokens.
    ``1,000`` is ``1000``, and ``3.50`` and ``3,5`` are ``3.5``; zeros before an integer stay, as they are part of a
    code. A unit is a word of its own, also in ``5km``, and ``%`` is the word percent. Times, versions, fractions and
    powers are tokens as they stand.
    """
    text = unicodedata.normalize("NFKC", text.translate(_EXPONENTS)).casefold()
    text = regex.sub(r"[\p{Pd}\u2212]", "-", unicodedata.normalize("NFKC", regex.sub(r"\p{Cf}", "", text)))
    found = ((match[0], match.lastgroup) for match in _TOKEN.finditer(text))
    return [_number(one) if kind == "number" else "percent" if one == "%" else one for one, kind in found]


def gives(text: str, answers: Sequence[str]) -> bool:
    """Whether a text gives one of the answers. An empty text gives none."""
    return any(_gives(text, answer.strip()) for answer in answers)


def overlap(text: str, answers: Sequence[str]) -> float:
    """The F1 of the tokens of a text and an answer without articles, 0..1: the best answer's.

    0 of an empty text, and without answers.
    """
    given = _without_articles(tokens(text))
    return max((token_f1(given, _without_articles(tokens(one))) for one in answers), default=0.0) if given else 0.0


def undecided(answer: str) -> str:
    """Why no rule tells for certain whether a text gives this answer; empty where one does."""
    answer = answer.strip()
    if _is_letter(answer) and answer.lower() in _WORDS_OF_A_LETTER:
        return "a letter that is a word, too"
    if regex.fullmatch(rf"[{_UNSPACED}]\p{{M}}*", answer, regex.VERSION1):
        return "a single character, which is a part of many words"
    if regex.fullmatch(r"[-+]?\d{1,3}[.,]\d{3}", answer):
        return "a mark that separates thousands in some languages and decimals in others"
    return ""


def _gives(text: str, answer: str) -> bool:
    if _is_letter(answer):
        return _gives_letter(text.strip(), answer)
    if not regex.search(r"\s", answer) and _CODE.search(answer):
        before = r"(?<!\w)" if regex.match(r"\w", answer) else ""
        after = r"(?!\w)" if regex.search(r"\w$", answer) else ""
        normal, text = unicodedata.normalize("NFC", answer), unicodedata.normalize("NFC", text)
        return regex.search(before + regex.escape(normal) + after, text) is not None
    wanted = tokens(answer)
    wanted = _without_articles(wanted[:-1]) + wanted[-1:]  # "Vitamin A" does not end in an article
    said = [one for one in tokens(text) if regex.search(r"\w", one) or one in wanted]  # without symbols of markup
    starts = [place for place, one in enumerate(said) if wanted and one == wanted[0]]
    return any(_begins_with(said[place:], wanted) for place in starts)


def _is_letter(answer: str) -> bool:
    return len(answer) == 1 and answer.lower() != answer.upper()


def _gives_letter(text: str, letter: str) -> bool:
    """A letter is given where it is the whole text in either case, or stands alone and is no word: as a capital, or as
    the answer writes it."""
    if text.strip(" \n.:()[]*\"'") in (letter.lower(), letter.upper()):
        return True
    for match in regex.finditer(rf"(?<![\w'’+#-])[{letter.upper()}{letter}](?![\w'’+#-])", text):
        before, after = text[: match.start()].rstrip(" *("), text[match.end() :]
        if letter.lower() not in _WORDS_OF_A_LETTER or not regex.match(r" +\w", after):
            return True
        if match[0] not in _WORDS_OF_A_LETTER | {"I"} and regex.search(
            r"[\w:,]$", before
        ):  # within a sentence a word has no capital
            return True
    return False


def _begins_with(said: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether `said` begins with `wanted`, articles between its tokens passed over."""
    place = 0
    for one in said:
        if one == wanted[place]:
            place += 1
        elif one not in _ARTICLES:
            return False
        if place == len(wanted):
            return True
    return False


def _without_articles(found: Sequence[str]) -> list[str]:
    return [one for one in found if one not in _ARTICLES] or list(found)


def _number(written: str) -> str:
    """One form of a number: without marks of thousands, a point before decimals, no zeros at their end."""
    sign = "-" if written.startswith("-") else ""
    digits = written.removeprefix("-")
    if regex.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", digits):
        digits = digits.replace(",", "")
    elif "," in digits:
        digits = digits.replace(".", "").replace(",", ".")
    whole, point, decimals = digits.partition(".")
    decimals = decimals.rstrip("0")
    if point:
        whole = whole.lstrip("0") or "0"
    number = f"{whole}.{decimals}" if decimals else whole
    return sign + number if number.strip("0.") else number

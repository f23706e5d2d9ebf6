"""RULER's word lists, those of the package wonderwords, in the folder `ruler` of a data folder; else our own words."""

from __future__ import annotations

from pathlib import Path

from foveate.errors import DataError
from foveate.lab.inputs import reading
from foveate.lab.inputs.words import ADJECTIVES, NOUNS

_LISTS = ("adjectivelist.txt", "nounlist.txt", "verblist.txt")


def files(data: Path) -> list[Path]:
    """The three lists in `data/ruler`, plain or .xz; none if there is no such folder.

    Raises `DataError` naming the list that the folder lacks.
    """
    folder = data / "ruler"
    what = ("a word a line", "the Python package wonderwords")
    return [reading.find_data_file(folder, name, *what) for name in _LISTS] if folder.is_dir() else []


def read(data: Path) -> tuple[list[str], list[str], list[str]]:
    """Adjectives, nouns and verbs, one a line in the lists; without lists our own, and no verbs.

    Raises `DataError` for a list that is missing, damaged or empty.
    """
    paths = files(data)
    if not paths:
        return ADJECTIVES, NOUNS, []
    lists = [[line.strip() for line in reading.read_text(path).split("\n") if line.strip()] for path in paths]
    for path, words in zip(paths, lists):
        if not words:
            raise DataError(f"{path}: no words; expected one a line")
    adjectives, nouns, verbs = lists
    return adjectives, nouns, verbs

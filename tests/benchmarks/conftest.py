"""The fixtures of pictures, and of needles that hybrids are asked for."""

import copy
import shutil

import pytest

from foveate.hybrids.training.words import ADJECTIVES, NOUNS
from tests.lab.conftest import coarse, pages_of  # noqa: F401


@pytest.fixture(scope="session")
def ruler_data(sample, tmp_path_factory):
    """A folder with what RULER's needles in novels are made of."""
    folder = tmp_path_factory.mktemp("ruler-data")
    shutil.copytree(sample / "books", folder / "books")
    (folder / "ruler").mkdir()
    for name, words in (("adjective", ADJECTIVES), ("noun", NOUNS), ("verb", ["walk"])):
        (folder / "ruler" / f"{name}list.txt").write_text("\n".join(words) + "\n")
    return folder


@pytest.fixture(scope="session")
def untemplated(tokenizer):
    """A tokenizer that has no chat template. Tokenizers of `foveate train` have none, either."""
    found = copy.deepcopy(tokenizer)
    found.chat_template = None
    return found

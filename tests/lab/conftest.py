"""What tests of the laboratory share: pictures, and questions about documents."""

import contextlib
import json

import pytest

from foveate.lab.report.plots import figure


@pytest.fixture
def coarse(monkeypatch):
    """Small pictures, which are drawn fast."""
    monkeypatch.setattr(figure, "DPI", 40)


@pytest.fixture
def pages_of(monkeypatch):
    """Gives the figures that will be drawn by a module's `drawing`, to look into."""

    def keep(module):
        kept, drawing = [], figure.drawing

        @contextlib.contextmanager
        def keeping(*args, **more):
            with drawing(*args, **more) as page:
                kept.append(page)
                yield page

        monkeypatch.setattr(module, "drawing", keeping)
        return kept

    return keep


@pytest.fixture
def doors(tmp_path):
    """Questions about three texts; a batch holds two of them."""
    data = tmp_path / "qa.jsonl"
    texts = [f"The code of door {n} is {n * 7}. " * 20 for n in range(3)]
    pairs = [{"context": text, "question": "Which?", "answer": "7"} for text in texts]
    data.write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    return data

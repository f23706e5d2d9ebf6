"""What the tests of pictures share."""

import contextlib

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

"""How foveate's warnings are shown: one line each, and other warnings as Python shows them."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import foveate
from foveate import errors
from foveate.calibration import say_once
from foveate.ops.dispatch import KernelWarning

ROOT = Path(__file__).resolve().parents[1]


def shown(code, *options):
    """What a program writes to stderr."""
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr


def test_attach_says_what_it_chose_in_one_line():
    said = shown(
        "import foveate\nfrom tests.helpers import tiny_model\n"
        "model = tiny_model('llama')\nfoveate.attach(model)\nfoveate.detach(model)\nfoveate.attach(model)"
    )
    assert said.startswith("foveate: auto: pages, because ")
    assert said.count("\n") == 1
    assert "Warning" not in said


def test_other_warnings_are_shown_as_before():
    said = shown("import foveate, warnings\nwarnings.warn('theirs')")
    assert said.startswith("<string>:2: UserWarning: theirs")


def test_filters_and_logging_apply():
    code = "from foveate.calibration import say_once\nsay_once('something chosen')"
    assert shown(code) == "foveate: something chosen\n"
    assert shown(code, "-W", "ignore") == ""
    captured = (
        f"import logging\nlogging.basicConfig(format='%(name)s|%(message)s')\nlogging.captureWarnings(True)\n{code}"
    )
    assert shown(captured).startswith("py.warnings|foveate: something chosen")


@pytest.fixture
def display(monkeypatch):
    """As in a fresh process: commands that other tests run in this one show warnings otherwise."""
    monkeypatch.setattr(warnings, "formatwarning", lambda message, *where, **line: f"theirs: {message}\n")
    errors.show_plainly()


def test_a_name_that_a_text_begins_with_is_not_repeated(display):
    assert warnings.formatwarning("foveate: a text", UserWarning, "file", 1) == "theirs: foveate: a text\n"
    for category in (errors.FoveateWarning, KernelWarning):
        assert warnings.formatwarning("foveate: a text", category, "file", 1) == "foveate: a text\n"


def test_the_display_is_installed_once(display):
    before = warnings.formatwarning
    errors.show_plainly()
    assert warnings.formatwarning is before
    assert issubclass(errors.FoveateWarning, UserWarning)
    assert foveate.errors is errors
    assert say_once.__doc__


def test_every_warning_has_a_category_of_its_own():
    calls = []
    for path in (ROOT / "foveate").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
                named = ast.unparse(node.args[1]) if len(node.args) > 1 else None
                calls.append((path.name, named))
    assert len(calls) > 12
    assert [one for one in calls if one[1] not in ("FoveateWarning", "KernelWarning", "DeprecationWarning")] == []

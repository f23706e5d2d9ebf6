"""Former places of packages."""

import importlib

import pytest

import foveate


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("foveate.layers", "foveate.hybrids.layers"),
        ("foveate.models.presets", "foveate.hybrids.models"),
        ("foveate.training", "foveate.hybrids.training"),
        ("foveate.evaluation.runner", "foveate.lab.evaluation"),
        ("foveate.report", "foveate.lab.report"),
        ("foveate.bench", "foveate.lab.bench"),
        ("foveate.results", "foveate.lab.results"),
        ("foveate.inputs", "foveate.lab.inputs"),
    ],
)
def test_an_import_of_a_former_place_names_the_new_one(old, new):
    package = ".".join(old.split(".")[:2])
    with pytest.raises(ImportError, match=f"^{package} is now {new}($|, and its csa foveate.csa$)"):
        importlib.import_module(old)
    importlib.import_module(new)


def test_an_empty_folder_of_a_former_place_is_no_package(tmp_path, monkeypatch):
    """As an update leaves one, with compiled files in it."""
    (tmp_path / "training" / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr(foveate, "__path__", [*foveate.__path__, str(tmp_path)])
    with pytest.raises(ImportError, match=r"foveate\.training is now foveate\.hybrids\.training"):
        importlib.import_module("foveate.training")


def test_names_that_never_were_are_unknown():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'foveate\.nothing'"):
        importlib.import_module("foveate.nothing")
    with pytest.raises(ImportError, match=r"is now foveate\.lab\.evaluation"):
        from foveate import evaluation  # noqa: F401

"""The list of faults stays plantable, and `tests.faults` sees what tests see."""

import collections
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import faults

PLAIN = "def twice(x):\n    return 2 * x\n"
TEST = """
import pytest
from foveate.twice import twice

def test_it():
    assert twice(1) == 2

@pytest.mark.full
def test_more():
    assert twice(3) == 6
"""


def test_every_text_occurs_once_and_its_replacement_is_another():
    listed, sources = faults.read(), {}
    assert len(listed) >= 60
    for one in listed:
        source = sources.setdefault(one.file, (faults.ROOT / one.file).read_text(encoding="utf-8"))
        assert source.count(one.text) == 1, one
        assert one.text != one.replacement, one
        assert one.what, one
    assert len({(one.file, one.text, one.replacement) for one in listed}) == len(listed)


def test_every_room_has_faults_and_every_fault_has_tests():
    rooms = collections.Counter(Path(one.file).parts[1] for one in faults.read())
    assert rooms.keys() >= {"ops", "csa", "state", "calibration", "methods", "runtime", "integrations", "io"}
    assert rooms.keys() >= {"cli", "lab", "hybrids"}
    for file in {one.file for one in faults.read()}:
        assert faults.mirrors(file), file


def test_tests_mirror_a_file_by_its_name_or_its_folder():
    def of(file):
        return {path.name for path in faults.mirrors(file)}

    assert of("foveate/ops/select/bits_kernel.py") >= {"test_bits_kernel.py", "interpreted_bits.py", "test_select.py"}
    assert of("foveate/methods/rocketkv.py") == {"test_rocketkv.py", "matrix.py"}
    assert of("foveate/lab/evaluation/tune.py") == {"test_tune.py"}
    assert of("foveate/hybrids/training/documents.py") >= {"test_prepare.py", "test_loop.py"}


def test_tests_of_a_file_are_those_that_import_it_too():
    def of(file):
        return [path.name for path in faults.mirrors(file)]

    assert of("foveate/ops/score/reference.py")[0] == "test_score.py"
    assert "interpreted_column_mass.py" in of("foveate/ops/score/reference.py")
    assert "test_divergence.py" in of("foveate/lab/evaluation/generation.py")
    assert of("foveate/hybrids/state/native_sparse.py")[0] == "test_nsa.py", "of no test that is named like it"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree of one module and its tests."""
    for name, text in {"foveate/__init__.py": "", "foveate/twice.py": PLAIN, "tests/test_twice.py": TEST}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full\n gpu\n")
    monkeypatch.setattr(faults, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("replacement", "found"),
    [
        pytest.param(
            "return 3 * x",
            {"test": "seen", "test-all": "seen", "by": "tests/test_twice.py::test_it"},
            marks=pytest.mark.full,
        ),
        ("return 2 if x == 1 else 7", {"test": "not seen", "test-all": "seen", "by": "tests/test_twice.py::test_more"}),
        pytest.param("return x + x", {"test": "not seen", "test-all": "not seen", "by": ""}, marks=pytest.mark.full),
        ("import os; os.abort()", {"test": "seen", "test-all": "seen", "by": "a crash"}),
        ("while True: pass", {"test": "not in time", "test-all": "not in time", "by": ""}),
    ],
)
def test_what_is_seen(tree, replacement, found):
    fault = faults.Fault("foveate/twice.py", "return 2 * x", replacement, "wrong")
    assert faults.look(tree, fault, 2.0 if "while" in replacement else 60.0) == found
    assert (tree / "foveate/twice.py").read_text() == PLAIN


def test_a_module_is_read_again_though_its_size_and_its_second_are_those_of_its_bytecode(tree):
    path = tree / "foveate" / "twice.py"
    for text in (PLAIN, PLAIN.replace("2", "3"), PLAIN):
        faults.write(path, text)
        os.utime(path, (1_000_000_000, 1_000_000_000))
        said = [sys.executable, "-c", "from foveate.twice import twice; print(twice(1))"]
        run = subprocess.run(said, cwd=tree, env={"PYTHONPATH": str(tree)}, capture_output=True, text=True, check=True)
        assert run.stdout == ("2\n" if text == PLAIN else "3\n")


@pytest.mark.full
def test_what_fails_anyway_is_told(tree):
    (tree / "tests" / "test_twice.py").write_text("def test_it():\n    assert False\n")
    fault = faults.Fault("foveate/twice.py", "return 2 * x", "return 3 * x", "wrong")
    with pytest.raises(RuntimeError, match=r"test_twice\.py::test_it fails without a fault, too"):
        faults.look(tree, fault, 60.0)


def test_a_text_that_is_not_there_once_is_refused(tree):
    for text in ("x", "y"):
        with pytest.raises(ValueError, match=r"must occur once in foveate/twice\.py"):
            faults.Fault("foveate/twice.py", text, "z", "wrong").plant(tree)


def test_the_copy_has_all_but_the_models(tree, tmp_path_factory):
    """Which are linked. A package's folder of that name is none of them."""
    for name in ("models/config.json", "foveate/models/one.py", "runs/big", ".git/HEAD"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).touch()
    copy = faults.copy_of_the_tree(tmp_path_factory.mktemp("copy"))
    assert (copy / "models").readlink() == tree / "models"
    files = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert files - {"models/config.json"} == {
        *("pytest.ini", "foveate/__init__.py", "foveate/twice.py", "foveate/models/one.py", "tests/test_twice.py")
    }


@pytest.mark.full
def test_a_run_goes_on_where_it_was(tree, monkeypatch, capsys):
    (tree / "models").mkdir()
    (tree / "faults.tsv").write_text(
        "file\ttext\treplacement\twhat is wrong\n"
        "foveate/twice.py\t(x):\\n    return 2\t(x):\\n    return 3\tthree times\n"
        "foveate/twice.py\t2 * x\tx + x\tthe same\n"
    )
    monkeypatch.setattr(faults, "read", lambda read=faults.read: read(tree / "faults.tsv"))
    results = ["--results", str(tree / "runs" / "faults.jsonl")]
    faults.main([*results, "three"])
    assert "make test sees 1 of 1" in capsys.readouterr().out
    looked = []

    def look(root, fault, seconds):
        looked.append(fault.what)
        return {"test": "not seen", "test-all": "not seen", "by": ""}

    monkeypatch.setattr(faults, "look", look)
    faults.main(results)
    assert looked == ["the same"]
    assert "make test sees 1 of 2" in capsys.readouterr().out

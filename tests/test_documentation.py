"""What the documentation says is what the result files and the program say."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import foveate
from benchmarks import tables
from foveate import methods
from foveate.evaluation import tasks
from foveate.results.errors import DataError
from foveate.results.measurements import needed
from foveate.results.rows import LATER_FIELDS, ROW_FIELDS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
_MADE = {"model", "device", "versions", "commit"}
KINDS = {
    "hybrid-curves": _MADE | {"tokens", "loss", "held_out", "held_out_tokens", "retention", "parameters"},
    "sparse-prompts": _MADE
    | {"task", "task_settings", "spec", "n", "score", "dense_score", "diff_to_dense", "diff_low"},
}
"""What rows of programs in `benchmarks/` have, beside those of commands."""


def test_tables_are_those_of_the_result_files():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tables", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"stale: {done.stdout}{done.stderr}; run `make tables`"


@pytest.mark.parametrize("kind", ["decode-speedup", "decode-table decode-kinds"])
def test_marks_have_one_known_kind(kind):
    with pytest.raises(
        ValueError, match=f"a mark has one kind at most, of summary, .*; found {kind.replace(' ', ', ')}"
    ):
        tables.written(f"<!-- report: benchmarks/results/decode.jsonl {kind} -->\n<!-- end -->\n")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_result_rows_have_the_fields_that_they_must(path):
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "cell" in row:  # of recheck.py: a comparison of two rows
            row |= row["new"]
            assert row["old"]["commit"] != row["commit"]
        else:
            assert (
                KINDS[row["kind"]]
                if "kind" in row
                else set(needed(row))
                if "bench" in row
                else ROW_FIELDS.keys() - LATER_FIELDS
            ) <= row.keys()
        assert row["commit"] != "unknown"
        assert not row["commit"].endswith("-dirty")
        assert not re.search(r'"(/[a-z]+)+/', line), "a path of one machine"


def test_every_result_file_is_explained():
    explained = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert all(f"results/{path.name}" in explained for path in RESULTS)


def test_the_demos_calibration_is_of_its_model_and_made_as_described():
    file = ROOT / "examples" / "calibrations" / "smollm2-135m.json"
    assert f"calibration={file.relative_to(ROOT)}" in (ROOT / "Makefile").read_text(encoding="utf-8")
    artefact = json.loads(file.read_text(encoding="utf-8"))
    assert artefact["found"]["run"]["model"] == "smollm2-135m"
    made = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    for option in ("--anchors", "--limit", "--seed", "--answer-tokens", "--batch-size", "--rounds"):
        (value,) = re.findall(rf"{option} (\d+)", artefact["found"]["command"])
        assert f"{option} {value} " in made, option


def test_every_method_has_its_line():
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in methods.names())


def test_packages_are_named_without_the_host_of_a_registry():
    """A package is had from whichever index a machine uses; its name and release say what it is."""
    files = [*PAGES, *sorted((ROOT / "foveate").rglob("*.py"))]
    hosts = re.compile(r"pypi\.org|pythonhosted|anaconda\.org|registry\.npmjs")
    assert [str(path) for path in files if hosts.search(path.read_text(encoding="utf-8"))] == []
    assert methods.get("locks").source.endswith("Python package locks-kv, release 0.1.4")


def test_every_extra_has_its_line():
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    extras = importlib.metadata.metadata("foveate").get_all("Provides-Extra")
    assert {"dev", "plot"} <= set(extras)
    assert all(f"| `{name}` |" in page for name in extras)


def test_the_readme_is_one_page_that_leads_to_all_others():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 120
    assert all(f"](docs/{path.name})" in readme for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_within_the_repository_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        name, _, part = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        if part:
            heads = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert part in [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads], link


def test_changelog_and_citation_are_of_this_version():
    changelog, citation = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    assert re.search(r"^## \[(.*?)\]", changelog, re.MULTILINE)[1] == foveate.__version__
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == foveate.__version__


def test_every_task_has_its_files_explained(tmp_path):
    """By the page on data, which every error names, and by the error: format and public source."""
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    for name in tasks.names():
        for split in tasks.get(name).splits:
            task = tasks.parse(name, split=split)
            try:
                task.files(tmp_path)
            except DataError as error:
                message = str(error)
                assert "docs/data.md" in message, message
                assert "source: " in message, message
                assert (named := re.search(r"([\w.-]+): no such file", message)) is None or f"`{named[1]}`" in page
            else:
                assert name == "ruler", "needs no file"
        assert f"`{name}`" in page

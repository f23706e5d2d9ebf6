"""The age of rows, counted in a history of a few commits."""

import json
import shutil
import subprocess

import pytest

from benchmarks import age, tables


@pytest.fixture
def git(tmp_path, monkeypatch):
    """A repository whose file of results has a row of its first commit; commits touch the given files."""
    root = tmp_path / "repository"
    (root / "benchmarks" / "results").mkdir(parents=True)

    def call(*words):
        who = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", "-C", str(root), *who, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(path, message=""):
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.read_text() + "x" if file.exists() else "x")
        call("add", "-A")
        call("commit", "-qm", f"{path}\n\n{message}")
        return call("rev-parse", "--short=7", "HEAD")

    call("init", "-q")
    first = commit("foveate/ops/a.py")
    monkeypatch.setattr(age, "KERNELS", commit("foveate/ops/kernel.py"))
    row = json.dumps({"commit": first})
    (root / "benchmarks" / "results" / "luka.jsonl").write_text(f"{row}\n{row}\n")
    (root / "benchmarks" / "results" / "serving.jsonl").write_text(json.dumps({"commit": f"{age.KERNELS}, {first}"}))
    commit.root, commit.git, commit.first = root, call, first
    return commit


def line(table, name):
    (found,) = (one for one in table.splitlines() if one.startswith(f"| `{name}` |"))
    return [cell.strip() for cell in found.strip("|").split("|")][1:]


def test_commits_count_that_touch_what_rows_ran(git):
    git("foveate/methods/b.py")
    git("docs/c.md")
    head = git("foveate/integrations/vllm/d.py")
    table = age.table(git.root)
    assert table.startswith(f"Commits up to `{head}`, ")
    rows, oldest, since, newest, also, before = line(table, "luka")
    assert (rows, since, also, before) == ("2", "2", "2", "2"), "of kernel.py and methods/b.py"
    assert oldest.startswith(f"`{git.first}`, 20")
    rows, oldest, since, newest, also, before = line(table, "serving")
    assert (rows, since, also, before) == ("1", "3", "2", "1"), "vLLM's plugin counts, too"
    assert newest.startswith(f"`{age.KERNELS}`")


def test_commits_that_only_move_files_do_not_count(git):
    git("foveate/methods/b.py", "Runs: unchanged")
    assert line(age.table(git.root), "luka")[2] == "1", "of kernel.py alone"
    git("foveate/methods/b.py", "What runs: unchanged")
    assert line(age.table(git.root), "luka")[2] == "2"


def test_a_table_may_count_to_a_commit_that_is_a_little_behind(git, monkeypatch):
    there = age.table(git.root)
    git("foveate/ops/a.py")
    assert age.kept(git.root, f"<!-- report: age -->\n{there}") == there
    assert age.kept(git.root, there.replace("| 1 |", "| 7 |")) == there, "a count that somebody edited"
    monkeypatch.setattr(age, "FRESH", 0)
    assert age.kept(git.root, there) == age.table(git.root) != there
    assert age.kept(git.root, "Commits up to `1234567`, 2026-01-01:") == age.table(git.root), "of no history"


def test_rows_of_unknown_commits_are_named(git):
    (git.root / "benchmarks" / "results" / "luka.jsonl").write_text(json.dumps({"commit": "1234567"}))
    with pytest.raises(ValueError, match="no commit 1234567 in the history"):
        age.table(git.root)


def test_without_a_history_the_table_stays_and_that_is_said(git, tmp_path, monkeypatch, capsys):
    git("foveate/ops/a.py")
    shallow, export = tmp_path / "shallow", tmp_path / "export"
    subprocess.run(["git", "clone", "-q", "--depth", "1", git.root.as_uri(), str(shallow)], check=True)
    shutil.copytree(git.root, export, ignore=shutil.ignore_patterns(".git"))
    text = "<!-- report: age -->\nCommits up to `1234567`\n<!-- end -->"
    for root, why in ((shallow, "a shallow clone"), (export, "no git repository")):
        monkeypatch.setattr(tables, "ROOT", root)
        assert tables.written(text, check=True) == text
        assert f"the age of rows is not counted: {why}" in capsys.readouterr().err
    inside = git.root / "inside"
    shutil.copytree(export, inside)
    with pytest.raises(age.NoHistoryError, match="of its own"):
        age.table(inside)
    monkeypatch.setattr(age, "KERNELS", "1234567")
    with pytest.raises(age.NoHistoryError, match="another history"):
        age.table(git.root)

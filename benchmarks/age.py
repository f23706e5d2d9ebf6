"""How old the rows of `results/` are: commits since theirs that touch what they ran, counted by git.

`python -m benchmarks.tables` writes the table, which names the commit to which it counts. With --check the counts must
be those to that commit, and that commit must be at most `FRESH` commits behind. Where there is no history, such as in
an export or a shallow clone, nothing can be counted and the table stays as it is.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from foveate.lab.report.markdown import markdown_table

FRESH = 100
"""Commits after which the table has to be made anew."""
KERNELS = "3df4fed"
"""The commit with the first kernels for decode steps, which PyTorch references ran until then."""
UNCHANGED = "^Runs: unchanged$"
"""A line in the message of a commit that changes files, but not what runs: it moves them, for example."""
_OPS, _TRANSFORMERS = "ops", "integrations/transformers"
_FORMER_HYBRIDS = ("state", "layers", "models", "modules", "training")
_METHODS = ("methods", "state", "runtime", "cache.py", "layer_state.py", "row_numbers.py", "moving_rows.py")
RAN: dict[str, tuple[str, ...]] = {
    "hybrids": (_OPS, "hybrids", *_FORMER_HYBRIDS),
    "indexer": (_OPS, "layers/csa", "csa"),
    "csa": (_OPS, "layers/csa", "csa", f"{_TRANSFORMERS}/csa", f"{_TRANSFORMERS}/dsa"),
    "serving": (_OPS, *_METHODS, "integrations/vllm"),
    "page-scores": (_OPS, "methods"),
    "": (_OPS, *_METHODS, _TRANSFORMERS),
}
"""What rows ran, as folders of `foveate/` and files that are in these by now, by how the name of their file begins."""


class NoHistoryError(Exception):
    """There is no git repository, or only a part of its history."""


class History:
    """The git history of a folder.

    Raises:
        NoHistoryError: where commits cannot be counted.
    """

    def __init__(self, root: Path):
        self._root, self._git = root, functools.cache(self._run)
        try:
            top, shallow = self._git("rev-parse", "--show-toplevel", "--is-shallow-repository").splitlines()
        except (OSError, subprocess.CalledProcessError):
            raise NoHistoryError("no git repository") from None
        if Path(top).resolve() != root.resolve():
            raise NoHistoryError("no git repository of its own")
        if shallow == "true":
            raise NoHistoryError("a shallow clone")
        try:
            self.name(KERNELS)
        except ValueError:
            raise NoHistoryError("another history") from None

    def _run(self, *words: str) -> str:
        done = subprocess.run(["git", "-C", str(self._root), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def name(self, commit: str) -> str:
        """A commit's short name. Raises ValueError for one that did not lead to the present one."""
        try:
            self._git("merge-base", "--is-ancestor", commit, "HEAD")
            return self._git("rev-parse", "--short=7", commit)
        except subprocess.CalledProcessError:
            raise ValueError(f"no commit {commit} in the history") from None

    def date(self, commit: str) -> str:
        return self._git("log", "-1", "--format=%cs", commit)

    def count(self, since: str, until: str, paths: Iterable[str] = ()) -> int:
        """Commits after one, up to another, that touch some paths, or any; those of `UNCHANGED` do not count."""
        words = ("--count", "--invert-grep", f"--grep={UNCHANGED}")
        return int(self._git("rev-list", *words, f"{since}..{until}", "--", *paths))

    def before(self, commit: str, other: str) -> bool:
        return self.count(other, commit) == 0 and self.count(commit, other) > 0


def table(root: Path, until: str = "HEAD") -> str:
    """A line for each file of results: its rows, and the age of the oldest and of the newest.

    Raises:
        NoHistoryError: where commits cannot be counted.
        ValueError: for rows, or an end, of commits that are not in the history.
    """
    history = History(root)
    until = history.name(until)
    lines = [("rows of", "rows", "oldest", "commits since", "newest", "commits since", f"before `{KERNELS}`")]
    for path in sorted((root / "benchmarks" / "results").glob("*.jsonl")):
        ran = next(paths for start, paths in RAN.items() if path.stem.startswith(start))
        rows = [_commits(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        ages = {
            history.name(commit): history.count(commit, until, [f"foveate/{one}" for one in ran])
            for commit in sorted({commit for of_row in rows for commit in of_row})
        }
        ends = max(ages, key=ages.__getitem__), min(ages, key=ages.__getitem__)
        cells = (cell for end in ends for cell in (f"`{end}`, {history.date(end)}", str(ages[end])))
        old = {commit for commit in ages if history.before(commit, KERNELS)}
        before = sum(any(history.name(one) in old for one in of_row) for of_row in rows)
        lines.append((f"`{path.stem}`", f"{len(rows):,}", *cells, f"{before:,}"))
    return f"Commits up to `{until}`, {history.date(until)}:\n\n{markdown_table(lines)}"


def counted_to(text: str) -> str:
    """The commit to which a table counts; HEAD where there is none yet."""
    found = re.search(r"Commits up to `(\w+)`", text)
    return found[1] if found else "HEAD"


def kept(root: Path, text: str) -> str:
    """The table as it should be if it stands in the text: to the same commit, unless that is too far behind."""
    until = counted_to(text)
    try:
        fresh = History(root).count(History(root).name(until), "HEAD") <= FRESH
    except ValueError:
        fresh = False
    return table(root, until if fresh else "HEAD")


def _commits(row: dict) -> list[str]:
    return row.get("new", row)["commit"].split(", ")

"""Which faults the tests see: `make faults`.

Each line of `tests/faults.tsv` is a fault: a file of the package, a text that occurs once in it, its replacement, and
what is wrong then. A backslash before n is the end of a line, and one before a backslash a backslash. A fault is
planted in a copy of the tree, and the tests run that mirror its file: first what `make test` runs of them and, if that
passes, all of them.

Results are written as they come, so that a run that was ended goes on where it was; a fault or a test that has changed
since needs ``--again``.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".tsv")
ROOMS_OF_THE_MATRIX = ("methods", "state", "runtime")
SELECTIONS = {"test": "not gpu and not full", "test-all": "not gpu"}
"""Of each target the marks by which it chooses tests."""
SEEN, MISSED, LATE = "seen", "not seen", "not in time"
CRASH = "a crash"
"""In the place of a test, where a signal ended the process."""


class Fault(NamedTuple):
    """A text of a file, by what it is replaced, and what is then wrong."""

    file: str
    text: str
    replacement: str
    what: str

    def plant(self, root: Path) -> None:
        """Raises ValueError unless the text occurs exactly once in the file."""
        path = root / self.file
        source = path.read_text(encoding="utf-8")
        if (times := source.count(self.text)) != 1:
            raise ValueError(f"{self.what}: the text must occur once in {self.file}, not {times} times")
        write(path, source.replace(self.text, self.replacement))


def write(path: Path, source: str) -> None:
    """Writes a module and removes its bytecode, which Python takes for current by whole seconds and the file's size."""
    path.write_text(source, encoding="utf-8")
    Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)


def read(path: Path = LIST) -> list[Fault]:
    """The faults of a list, whose first line names its columns."""
    _, *lines = path.read_text(encoding="utf-8").splitlines()
    return [Fault(*map(_unescaped, line.split("\t"))) for line in lines]


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: {"n": "\n"}.get(found[1], found[1]), text)


def mirrors(file: str) -> list[Path]:
    """The tests of a file of the package: named like it or like folders around it, else those that are named like it
    elsewhere and all of the folder, where those that have its name in their text come first; then those that import it.

    Methods, what they keep, and what runs them have the matrix too.
    """
    *folders, name = Path(file).with_suffix("").parts[1:]
    depth = next(n for n in range(len(folders), -1, -1) if (ROOT / "tests").joinpath(*folders[:n]).is_dir())
    folder = (ROOT / "tests").joinpath(*folders[:depth])
    names = [re.sub(r"(_hopper)?(_gather)?(_kernel)?$", "", name), *reversed(folders[depth:])]
    everywhere = _files(ROOT / "tests")
    tests = [path for path in everywhere if folder in path.parents]
    found = [path for one in names for path in tests if f"_{one.strip('_')}_" in f"{path.stem}_"]
    if not found:
        around = [path for path in tests if path.parent == folder] or tests
        around.sort(key=lambda path: name not in _text(path))
        found = [*[path for path in everywhere if path.name == f"test_{name}.py"], *around]
    package = ".".join(("foveate", *folders))
    imports = re.compile(rf"\b{package}\.{name}\b|from {package} import (\([^)]*|[^\n]*)\b{name}\b")
    found += [path for path in everywhere if imports.search(_text(path)) and path.parent.name != "gpu"]
    matrix = [ROOT / "tests" / "matrix.py"] if folders[:1] and folders[0] in ROOMS_OF_THE_MATRIX else []
    return list(dict.fromkeys([*found, *matrix]))


@functools.cache
def _files(tests: Path) -> list[Path]:
    return [path for kind in ("test", "interpreted") for path in sorted(tests.rglob(f"{kind}_*.py"))]


@functools.cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def run(root: Path, tests: list[str], marks: str, seconds: float) -> tuple[str, str]:
    """Whether one of the tests fails, or ends the process, within the time, and which.

    Args:
        root: of the tree that is tested.
        tests: paths or names of tests, as pytest takes them.
        marks: an expression by which tests are chosen.
        seconds: after which nothing was seen.

    Returns:
        One of :data:`SEEN`, :data:`MISSED` and :data:`LATE`; and the name of the test that failed, or :data:`CRASH`.
    """
    end = time.monotonic() + seconds
    for interpreted in (False, True):
        some = [test for test in tests if Path(test.partition("::")[0]).name.startswith("interpreted_") == interpreted]
        if not some:
            continue
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", "-m", marks, *some]
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if interpreted else {}
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=max(end - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            return LATE, ""
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
        if failed:
            return SEEN, failed[0]
        if process.returncode < 0:
            return SEEN, CRASH
        if process.returncode not in (0, 5):  # 5: the marks left no test
            raise RuntimeError(f"pytest ended with {process.returncode} without a failed test:\n{said[-2000:]}")
    return MISSED, ""


def copy_of_the_tree(folder: Path) -> Path:
    """What tests read, in a folder of its own, with a link to the models."""
    everywhere = shutil.ignore_patterns("__pycache__", ".git", ".venv*", ".*_cache")

    def left_out(here: str, names: list[str]) -> set[str]:
        return everywhere(here, names) | ({"models", "runs"} if Path(here) == ROOT else set())

    root = Path(shutil.copytree(ROOT, folder / "tree", ignore=left_out))
    (root / "models").symlink_to((ROOT / "models").resolve())
    return root


def look(root: Path, fault: Fault, seconds: float) -> dict[str, str]:
    """For each target whether it sees a fault, and the first test that does. The tree is left as it was.

    Raises:
        RuntimeError: for a test that fails without the fault, too.
    """
    source = (root / fault.file).read_text(encoding="utf-8")
    tests = [str(path.relative_to(ROOT)) for path in mirrors(fault.file)]
    found: dict[str, str] = {}
    for target, marks in SELECTIONS.items():
        try:
            fault.plant(root)
            found[target], found["by"] = run(root, tests, marks, seconds)
        finally:
            write(root / fault.file, source)
        if found[target] == SEEN:
            if run(root, tests if found["by"] == CRASH else [found["by"]], marks, seconds)[0] == SEEN:
                raise RuntimeError(f"{found['by']} fails without a fault, too: mend it first")
            return dict.fromkeys(SELECTIONS, SEEN) | found
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only faults that have one of these words in their line")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "faults.jsonl", help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=75.0, help="of each run of tests (%(default)s)")
    parser.add_argument("--again", action="store_true", help="repeat faults that have a result")
    chosen = parser.parse_args(arguments)
    chosen.results.parent.mkdir(parents=True, exist_ok=True)
    known = {}
    if chosen.results.exists():
        rows = map(json.loads, chosen.results.read_text(encoding="utf-8").splitlines())
        known = {Fault(*row["fault"]): row for row in rows}
    faults = [one for one in read() if not chosen.words or any(word in "\t".join(one) for word in chosen.words)]
    with tempfile.TemporaryDirectory() as folder, chosen.results.open("a", encoding="utf-8") as results:
        root = copy_of_the_tree(Path(folder))
        for number, fault in enumerate(faults, 1):
            if chosen.again or fault not in known:
                known[fault] = {"fault": list(fault)} | look(root, fault, chosen.seconds)
                print(json.dumps(known[fault]), file=results, flush=True)
            row = known[fault]
            by = f" by {row['by']}" if row["by"] else ""
            print(
                f"{number}/{len(faults)} {fault.file}: {fault.what}: {row['test']}, {row['test-all']}{by}", flush=True
            )
    for target in SELECTIONS:
        seen = sum(known[fault][target] == SEEN for fault in faults)
        print(f"make {target} sees {seen} of {len(faults)}")


if __name__ == "__main__":
    main()

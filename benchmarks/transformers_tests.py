"""Transformers' own tests of generation on attached models: which pass, and why others do not.

    python -m benchmarks.transformers_tests benchmarks/results/transformers-tests.jsonl --tests PATH

PATH is the source tree of Transformers at the tag of the installed release; its tests need `pytest`, `parameterized`
and `httpx`. Each test of the ``GenerationTesterMixin`` in ``tests/generation/test_utils.py`` runs on a model class as
it is, and with a method attached to every model that the test makes, whose budget leaves nothing out. A test

- passes, or is skipped by Transformers;
- is refused, where foveate raises an error on purpose, whose first line is the reason;
- fails, with any other error.

Most tests ask for attention weights, or pad their batch on the right, which foveate never does. Tests that are refused
run once more without both, by switches of Transformers' own. The command ends with 1 if tests cannot be imported, or if
a test fails that passes without a method.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import sys
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import pytest
import transformers
import typer
from transformers.testing_utils import torch_device

import foveate
from foveate import methods
from foveate.errors import UserError, unknown
from foveate.io import circumstances, outfile
from foveate.lab.report.rows import Row

KIND = "transformers-tests"
MODELS = {
    "llama": "LlamaModelTest",
    "qwen3": "Qwen3ModelTest",
    "gemma3": "Gemma3TextModelTest",  # has a layer of full attention and one with a sliding window
    "qwen3_next": "Qwen3NextModelTest",
}
"""Folders of ``tests/models/`` with the class of their tests."""
UNATTACHED = "unattached"
METHODS = (UNATTACHED, "dense", "kascade", "pages", "luka", "snapkv")
GENERATION = "tests.generation.test_utils"
DELIBERATE = (ValueError, RuntimeError)
"""The kinds of errors by which foveate refuses."""
_FOVEATE = str(Path(foveate.__file__).parent)


def spec_of(method: str) -> str:
    """The spec of a method whose budget leaves nothing out."""
    return method if method == UNATTACHED else methods.make(method, **methods.get(method).about.full_budget).spec


@contextmanager
def attaching(spec: str) -> Iterator[None]:
    """Every model that can generate attaches the method at the end of its construction, as long as the block runs."""
    post_init = transformers.PreTrainedModel.post_init

    def attached(model: transformers.PreTrainedModel) -> None:
        post_init(model)
        if spec != UNATTACHED and model.can_generate():
            foveate.attach(model, spec, dense_below=0)

    with mock.patch.object(transformers.PreTrainedModel, "post_init", attached):
        yield


def is_refusal(error: BaseException) -> bool:
    """Whether a statement ``raise`` of foveate's own raised an error that is of a deliberate kind."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        isinstance(error, DELIBERATE) and last.filename.startswith(_FOVEATE) and (last.line or "").startswith("raise ")
    )


def reason_of(error: BaseException, tests: Path) -> str:
    """The first line of an error's message, and, of an assertion, the line of the tests that makes it."""
    reason = next(iter(str(error).strip().splitlines()), "")
    if not isinstance(error, AssertionError):
        return reason
    lines = [frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(tests))]
    return f"{reason}, at `{lines[-1]}`"


@contextmanager
def plain_inputs() -> Iterator[None]:
    """Tests ask for no attention weights and give no mask, as long as the block runs."""
    base = sys.modules["tests.causal_lm_tester"].CausalLMModelTest
    set_up = base.setUp

    def changed(test: Any) -> None:
        set_up(test)
        test.has_attentions = test.model_tester.use_input_mask = False

    with mock.patch.object(base, "setUp", changed):
        yield


class Outcomes:
    """A plugin of pytest that runs tests of the mixin, all or some, and notes how each of them ends."""

    def __init__(self, seed: int, only: Collection[str] | None = None):
        self.seed, self.only = seed, only
        self.passed: list[str] = []
        self.skipped: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.unread: list[str] = []
        """Errors of tests that cannot be imported."""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.unread.append(str(report.longrepr).strip().splitlines()[-1])

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        names = self.only or vars(sys.modules[GENERATION].GenerationTesterMixin)
        items[:] = [item for item in items if item.name in names]

    def pytest_runtest_setup(self) -> None:
        transformers.set_seed(self.seed)
        drawn = getattr(sys.modules.get("tests.test_modeling_common"), "global_rng", random)  # inputs come from it
        drawn.seed(self.seed)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if report.skipped:
            self.skipped[item.name] = str(report.longrepr[2]).removeprefix("Skipped: ")
        elif report.failed:
            error = call.excinfo.value
            reason = reason_of(error, item.config.rootpath)
            if is_refusal(error):
                self.refused[item.name] = reason
            else:
                self.failed[item.name] = f"{type(error).__name__}: {reason}"
        elif report.when == "call":
            self.passed.append(item.name)
        return report

    def noted(self) -> Row:
        """The fields of a row."""
        found = {name: dict(sorted(getattr(self, name).items())) for name in ("refused", "failed", "skipped")}
        return {"passed": sorted(self.passed), **found}


def run(tests: Path, model: str, method: str, seed: int = 0) -> Row:
    """The row of a model and a method. Raises `UserError`, with all reasons, if its tests cannot be imported."""
    file = Path("tests", "models", model, f"test_modeling_{model}.py")
    generation = tests / f"{GENERATION.replace('.', os.sep)}.py"
    if missing := [path for path in (generation, tests / file) if not path.is_file()]:
        raise UserError(f"--tests {tests}: there is no file {missing[0].relative_to(tests)}")
    outcomes = Outcomes(seed)
    what = f"{tests / file}::{MODELS[model]}"
    how = (
        "--noconftest",
        "-c",
        os.devnull,
        "--rootdir",
        str(tests),
        "--assert",
        "plain",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:terminal",
    )
    with attaching(spec_of(method)):
        pytest.main([what, *how], [outcomes])
        plain = Outcomes(seed, outcomes.refused)
        if outcomes.refused:
            with plain_inputs():
                pytest.main([what, *how], [plain])
    if outcomes.unread or not outcomes.passed:
        reasons = "; ".join(outcomes.unread) or f"no test of {MODELS[model]} passes"
        raise UserError(f"{file}: {reasons}")
    return {
        "kind": KIND,
        "model": model,
        "method": spec_of(method),
        "tests": {"release": _release(tests), "generation": _digest(generation), "model": _digest(tests / file)},
        **outcomes.noted(),
        "plain": plain.noted(),
        "seed": seed,
        **circumstances.of(torch_device),
    }


def _digest(file: Path) -> str:
    """The first 12 characters of a file's SHA-256."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def _release(tests: Path) -> str | None:
    """The release of Transformers that a source tree is of; None where it does not say."""
    file = tests / "src" / "transformers" / "__init__.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = re.search(r'^__version__ = "(.*)"', text, re.MULTILINE)
    return found and found[1]


def own_failures(rows: Sequence[Row]) -> list[str]:
    """Failures that a model has with a method alone, a line each."""
    plain = {row["model"]: row["failed"] for row in rows if row["method"] == UNATTACHED}
    return [
        f"{row['model']}, {row['method']}, {name}: {reason}"
        for row in rows
        if row["method"] != UNATTACHED
        for name, reason in (row["failed"] | row["plain"]["failed"]).items()
        if name not in plain.get(row["model"], ())
    ]


def main(
    out: Annotated[Path, typer.Argument(help="File of the rows, which replace those of the same model and method.")],
    tests: Annotated[Path, typer.Option(help="Source tree of Transformers, with its tests.")],
    model: Annotated[list[str], typer.Option(help=f"Of {', '.join(MODELS)}; repeatable.")] = list(MODELS),  # noqa: B006
    method: Annotated[list[str], typer.Option(help="A method, or unattached; repeatable.")] = list(METHODS),  # noqa: B006
    seed: int = 0,
) -> None:
    """Run the tests and write their rows."""
    for one in set(model) - MODELS.keys():
        raise unknown("model", one, MODELS)
    specs = {one: spec_of(one) for one in method}
    outfile.check(out)
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
    wrong = []
    for name in model:
        for one, spec in specs.items():
            try:
                row = run(tests.resolve(), name, one, seed)
            except UserError as error:
                wrong.append(f"{error}")
                break
            rows = [*(old for old in rows if (old["model"], old["method"]) != (name, spec)), row]
            outfile.write(out, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
            counts = ", ".join(f"{len(row[how])} {how}" for how in ("passed", "refused", "failed", "skipped"))
            print(f"{name}, {spec}: {counts}; of the refused, {len(row['plain']['passed'])} pass plainly", flush=True)
    wrong += own_failures(rows)
    for line in wrong:
        print(line, file=sys.stderr)
    raise typer.Exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)

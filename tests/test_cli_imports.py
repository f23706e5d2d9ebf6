"""Files of methods that `--import` runs: their rows, their names and their errors."""

import json
import sys

import pytest
from typer.testing import CliRunner

from foveate import methods
from foveate.cli import app
from foveate.methods import base
from tests import tiny

METHOD = """
from typing import ClassVar
from foveate.methods import register
from foveate.methods.streaming import Streaming

@register{how}
class Mine(Streaming):
    name: ClassVar[str] = "{name}"

    def choose(self, cache, q, scaling):
        {body}
"""
SUPER = "return Streaming.choose(self, cache, q, scaling)"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(base, "REGISTRY", base.REGISTRY)
    before = dict(base.REGISTRY)
    yield
    base.REGISTRY.clear()
    base.REGISTRY.update(before)


@pytest.fixture
def mine(tmp_path):
    def write(body=SUPER, name="mine", how="", file="mine.py"):
        path = tmp_path / file
        path.write_text(METHOD.format(body=body, name=name, how=how), encoding="utf-8")
        return path

    return write


@pytest.fixture
def compare(model, tmp_path):
    def call(file, *more, method="mine", out="rows.jsonl"):
        arguments = ["--model", model, "--data", tiny.SAMPLE, "--task", "niah:max_new_tokens=3", "--length", 300]
        arguments += ["--limit", 2, "--method", method, "--import", file, "--out", tmp_path / out, *more]
        return CliRunner().invoke(app, ["compare", *map(str, arguments)])

    return call


def said(done):
    return " ".join(done.output.split())


def test_rows_of_a_file_that_was_edited_belong_to_another_run(mine, compare, tmp_path):
    file = mine()
    assert compare(file).exit_code == 0
    before = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all("foveate compare --import mine.py --model" in row["command"] for row in before)
    again = compare(file)
    assert "is complete; nothing to run" in said(again)
    mine(SUPER + " or None")
    edited = compare(file)
    assert edited.exit_code == 2
    assert "belongs to another run: imports is ['mine.py " in said(edited)
    assert compare(file, out="new.jsonl").exit_code == 0
    after = [json.loads(line) for line in (tmp_path / "new.jsonl").read_text(encoding="utf-8").splitlines()]
    assert before[1]["run"]["imports"] != after[1]["run"]["imports"]


def test_a_module_beside_the_file_is_part_of_what_ran(mine, compare, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    helper = tmp_path / "helper_of_mine.py"
    file = mine()
    file.write_text("import helper_of_mine\n" + file.read_text(encoding="utf-8"), encoding="utf-8")
    for content, code in (("x = 1", 0), ("x = 12", 2)):
        helper.write_text(content, encoding="utf-8")
        sys.modules.pop("helper_of_mine", None)
        assert compare(file).exit_code == code


def test_several_files_are_imported(mine, compare):
    first, second = mine(), mine(name="mine_too", file="too.py")
    done = compare(first, "--import", second, "--method", "mine_too")
    assert done.exit_code == 0, done.output


def test_the_name_of_a_shipped_method_is_taken(mine, compare):
    done = compare(mine(name="h2o"), method="h2o")
    assert done.exit_code == 2
    assert "mine.py:6: Mine of " in said(done)
    assert "the name 'h2o' belongs to H2O of foveate.methods.h2o" in said(done)
    assert "@register(replaces=True)" in said(done)
    assert methods.get("h2o").__module__ == "foveate.methods.h2o"


def test_a_shipped_method_is_replaced_when_that_is_asked_for(mine, compare):
    done = compare(mine(name="h2o", how="(replaces=True)"), method="h2o:window=32")
    assert done.exit_code == 0, done.output
    assert methods.get("h2o").__name__ == "Mine"


def test_another_version_of_a_file_takes_its_names(mine):
    from foveate.cli import imports

    imports.run(mine())
    first = methods.get("mine")
    imports.run(mine())
    assert methods.get("mine") is not first


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("import sys\nsys.exit(0)", "mine.py:2: SystemExit(0): a file of methods must not end the program"),
        ("\nraise SystemExit(3)", "mine.py:2: SystemExit(3)"),
        ("x = 1\ndef (", "mine.py:2: invalid syntax"),
        ("def f():\n    raise RuntimeError('boo')\nf()", "mine.py:2: RuntimeError: boo"),
        ("import nope_xyz", "mine.py:1: ModuleNotFoundError: No module named 'nope_xyz'"),
        ("x: int = {}\nx['a']", "mine.py:2: KeyError: 'a'"),
    ],
)
def test_a_file_that_fails_is_named_with_its_line(content, message, compare, tmp_path):
    (tmp_path / "mine.py").write_text(content, encoding="utf-8")
    done = compare(tmp_path / "mine.py", method="streaming")
    assert done.exit_code == 2
    assert message in said(done)
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ZeroDivisionError('own')", "mine.py:11: ZeroDivisionError: own"),
        ("return {}[self]", "mine.py:11: KeyError: "),
        ("raise ValueError('wrong width')", "mine.py:11: wrong width"),
        ("raise SystemExit(0)", "mine.py:11: SystemExit(0)"),
    ],
)
@pytest.mark.parametrize("command", ["compare", "generate"])
def test_an_error_in_a_users_method_is_named_with_its_line(body, message, command, mine, compare, model):
    file = mine(body)
    how = ["generate", "--model", model, "--import", file, "--method", "mine", "--prompt", "Call me"]
    done = compare(file) if command == "compare" else CliRunner().invoke(app, [str(one) for one in how])
    assert done.exit_code == 2, done.output
    assert message in said(done)


def test_tune_searches_methods_of_a_file(model, mine, tmp_path):
    arguments = [
        "tune",
        "--model",
        model,
        "--data",
        tiny.chapter(tmp_path / "books"),
        "--out",
        tmp_path / "foveate.json",
    ]
    arguments += ["--limit", 3, "--max-loss", 80, "--task", "documents:length=120,max_new_tokens=3"]
    arguments += ["--objective", "memory", "--minutes", 1e-6, "--import"]
    done = CliRunner().invoke(app, [str(one) for one in [*arguments, mine()]])
    assert "mine.py has no top_k, the share that is searched" in said(done)
    file = mine()
    file.write_text(file.read_text(encoding="utf-8").replace("streaming", "h2o").replace("Streaming", "H2O"))
    done = CliRunner().invoke(app, [str(one) for one in [*arguments, file]])
    assert "tova:top_k=0.12, mine:top_k=0.12" in said(done)
    row = json.loads((tmp_path / "foveate.tune.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert row["run"]["imports"][0].startswith("mine.py ")


def test_chat_takes_methods_of_a_file(model, mine):
    arguments = ["chat", "--model", model, "--import", mine(), "--method", "mine:window=32", "--max-new-tokens", 3]
    done = CliRunner().invoke(app, list(map(str, arguments)), input="hello\n\n")
    assert done.exit_code == 0, done.output

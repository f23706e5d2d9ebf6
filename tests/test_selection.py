"""What is left out by `make test`, never a value of a parameter nor a test without parameters, and what CI names."""

import itertools
import re
import subprocess
import types
from pathlib import Path

import pytest

from foveate import methods
from tests.selection import ONE_OF_A_KIND, mark_full, representative


class Item:
    """What the rule sees of a test's case."""

    def __init__(self, path, parameters=None, marks=()):
        self.nodeid, self.path, self.marks = f"{path}::test[{parameters}]", Path(path), {*marks}
        if parameters is not None:
            self.callspec = types.SimpleNamespace(params=parameters)

    def iter_markers(self, name):
        return self.marks & {name}

    def add_marker(self, name):
        self.marks.add(name)


def kept(path, cases):
    items = [Item(path, case) for case in cases]
    mark_full(items)
    return [item.callspec.params for item in items if not item.iter_markers("full")]


@pytest.mark.parametrize("sizes", [(5,), (2, 3), (4, 4, 2), (1, 7, 3)])
def test_every_value_comes_up_in_few_cases(sizes):
    cases = [dict(enumerate(values)) for values in itertools.product(*map(range, sizes))]
    chosen = [cases[index] for index in representative(cases)]
    assert len(chosen) == max(sizes)
    for name, size in enumerate(sizes):
        assert {case[name] for case in chosen} == {*range(size)}


def test_values_without_a_hash_are_each_their_own():
    a, b = {"x": 1}, {"x": 1}
    assert len(representative([{"settings": a}, {"settings": b}, {"settings": a}])) == 2
    within = (["one"], "two")  # a tuple of a list
    assert len(representative([{"rows": within}, {"rows": (["one"], "two")}, {"rows": within}])) == 2


def test_tests_without_parameters_and_marked_ones_are_left_alone():
    items = [Item("tests/test_a.py"), Item("tests/test_b.py", {"x": 1}, ["gpu"]), Item("tests/test_b.py", {"x": 1})]
    mark_full(items)
    assert [item.marks for item in items] == [set(), {"gpu"}, set()]


def test_in_the_interpreter_there_are_four():
    assert len(kept("tests/ops/interpreted_x.py", [{"x": x} for x in range(9)])) == 4


def test_a_method_has_one_setting_and_models_one_of_each_kind():
    small = [methods.make(name, **methods.get(name).about.small_budget) for name in ("h2o", "tova", "quest")]
    more = [methods.make("h2o", top_k=5, window=2), methods.make("quest", top_k=8, page_size=2)]
    assert kept("tests/matrix.py", [{"method": one} for one in (*small, *more)]) == [{"method": one} for one in small]
    assert len(kept("tests/methods/test_x.py", [{"method": one} for one in (*small, *more)])) == 5
    specs = ["h2o:top_k=9,window=8", "tova", "quest", "twilight"]
    found = kept("tests/integrations/test_x.py", [{"spec": spec} for spec in specs])
    assert [case["spec"].partition(":")[0] for case in found] == ["h2o", "quest"]
    assert {"h2o", "quest"} <= ONE_OF_A_KIND
    assert len(kept("tests/matrix.py", [{"name": spec} for spec in specs])) == 4


def test_what_the_continuous_integration_names_is_there():
    """Where one of many paths is missing, pytest runs none of them, and CI fails after half an hour."""
    root = Path(__file__).parents[1]
    lines = (root / ".ci/run").read_text().split("\n")
    first, last = (
        lines.index(next(line for line in lines if line.startswith(start))) for start in ("BOTH=", "make test-oldest")
    )
    script = "\n".join([*lines[first:last], 'echo "$BOTH $ONCE"'])
    named = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert len(named) > 20
    for argument in named:
        path, _, test = re.sub("^--[a-z]+=", "", argument).partition("::")
        assert (root / path).exists(), argument
        assert not test or f"def {test}(" in (root / path).read_text(), argument

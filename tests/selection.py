"""Which cases of a test `make test` runs. The others are `full`: `make test-all` runs them too (CONTRIBUTING.md)."""

from __future__ import annotations

import collections
import sys
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import pytest

IN_THE_INTERPRETER = 4
"""Cases of a test under Triton's interpreter, where a kernel takes seconds."""

ONE_OF_A_KIND = {
    *("dense", "h2o", "h2o_in_prompt", "evict_every", "snapkv", "quest", "pages_offloaded"),
    *("kascade_anchors", "kascade_paper", "kascade_pages", "luka", "luka_levels", "mixed", "per_layer"),
}
"""Evict in decode, in prompts, at their end; choose pages, keys across layers, summaries; are made of others."""


def mark_full(items: Sequence[pytest.Item]) -> None:
    """Mark the cases that `make test` leaves out, of all tests that do not need a GPU.

    - In few cases every value of every parameter comes up; in the interpreter there are at most four.
    - Except in `tests/methods`, settings of a method count as one value. Except in the matrix too, one of each kind is
      tried of methods that are given by name or spec.
    """
    tests = collections.defaultdict(list)
    for item in items:
        if not any(item.iter_markers("gpu")) and not any(item.iter_markers("full")):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        path = cases[0].path
        parameters = [item.callspec.params if hasattr(item, "callspec") else {} for item in cases]
        if not cases[0].nodeid.startswith("tests/methods/"):
            parameters = parameters if path.stem == "matrix" else _one_of_each_kind(parameters)
            parameters = [case and {name: _method(value) for name, value in case.items()} for case in parameters]
        most = IN_THE_INTERPRETER if path.name.startswith("interpreted_") else sys.maxsize
        for index in {*range(len(cases))} - {*representative(parameters, most)}:
            cases[index].add_marker("full")


def representative(cases: Sequence[Mapping[str, Any]], most: int = sys.maxsize) -> list[int]:
    """Indices of few cases in which every value of every parameter comes up, or as many values as can in ``most``.

    Each next one is the first of the cases with most of the values that are still missing, so that every process
    chooses the same. A case that is None is not chosen.
    """
    left = {index: {("", None), *_values(case)} for index, case in enumerate(cases) if case is not None}
    missing, chosen = set().union(*left.values()), []
    while missing and len(chosen) < most:
        best = max(left, key=lambda index: len(left[index] & missing))
        chosen.append(best)
        missing -= left.pop(best)
    return chosen


def _values(case: Mapping[str, Any]) -> Iterator[tuple[str, Hashable]]:
    for name, value in case.items():
        try:
            hash(value)
        except TypeError:  # a list, or a tuple that holds one
            value = id(value)
        yield name, value


def _method(value: Any) -> Any:
    from foveate.methods import Method

    return value.name if isinstance(value, Method) else value


def _one_of_each_kind(cases: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any] | None]:
    """The cases, None for one of a method that is not one of a kind; all of them if no method is one of a kind."""
    from foveate.methods import REGISTRY

    named = [{one.partition(":")[0] for one in case.values() if isinstance(one, str)} for case in cases]
    if not any(names & ONE_OF_A_KIND for names in named):
        return cases
    others = REGISTRY.keys() - ONE_OF_A_KIND
    return [None if names & others else case for case, names in zip(cases, named)]


def in_full(values: Collection[Any], kept: Collection[Any]) -> list[Any]:
    """Values of a parameter, those that are not in ``kept`` marked ``full``."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.full) for value in values]

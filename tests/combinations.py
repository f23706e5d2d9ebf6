"""Few combinations of parameters in which every value meets every other, where all combinations would be too many."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import pytest


def covering(sizes: Sequence[int], strength: int = 2) -> list[tuple[int, ...]]:
    """Combinations of indices below ``sizes`` that hold all values of any ``strength`` parameters together.

    Each combination in turn is the first of all that hold most of what is still missing, so that the list is the same
    in every process.
    """
    places = list(itertools.combinations(range(len(sizes)), min(strength, len(sizes))))
    everything = list(itertools.product(*map(range, sizes)))
    held = [{(some, tuple(one[place] for place in some)) for some in places} for one in everything]
    missing, chosen = set().union(*held), []
    while missing:
        best = max(range(len(everything)), key=lambda index: len(held[index] & missing))
        chosen.append(everything[best])
        missing -= held[best]
    return sorted(chosen)


def _few(combinations: Sequence[tuple[int, ...]], together: int) -> list[tuple[int, ...]]:
    """Of combinations of indices so few that each index comes up, and all of the first so many places together."""
    held = {one: {("first", one[:together]), *enumerate(one)} for one in combinations}
    missing, chosen = set().union(*held.values()), []
    while missing:
        chosen.append(max(combinations, key=lambda one: len(held[one] & missing)))
        missing -= held[chosen[-1]]
    return sorted(chosen)


def every_pair(
    *parameters: tuple[Any, Collection[Any]],
    strength: int = 2,
    indirect: Sequence[str] = (),
    besides: Collection[tuple] = (),
    together: int | None = None,
) -> pytest.MarkDecorator:
    """Parametrise a test by combinations in which any two values of different parameters meet.

    A kernel is compiled for each combination of dtype, head dim, group and the like, which takes longer than the test.

    Args:
        parameters: of each a name and its values, or a tuple of names and tuples of values.
        strength: how many parameters meet in all their values: 3 where a kernel distinguishes triples.
        indirect: names of fixtures among the parameters.
        besides: cases to run as well, each with a value for every name.
        together: so few of these combinations that every value comes up, and all values of the first so many
            parameters together: of kernels of which one takes seconds to compile.
    """
    names = [name if isinstance(name, tuple) else (name,) for name, _ in parameters]
    values = [[one if isinstance(name, tuple) else (one,) for one in given] for name, given in parameters]
    combinations = covering([len(of) for of in values], strength)
    cases = [
        tuple(itertools.chain.from_iterable(of[index] for of, index in zip(values, combination)))
        for combination in (combinations if together is None else _few(combinations, together))
    ]
    cases += besides
    ids = ["-".join(str(value).removeprefix("torch.") for value in case) for case in cases]
    names = list(itertools.chain.from_iterable(names))
    return pytest.mark.parametrize(names, cases, ids=ids, indirect=indirect)


def in_turn(first: tuple[str, Collection[Any]], *others: tuple[str, Collection[Any]]) -> pytest.MarkDecorator:
    """Parametrise a test by each value of the first parameter once, beside values of the others in turn.

    Any two values of the others meet where there are enough of the first.
    """
    names, values = [first[0], *(name for name, _ in others)], [list(given) for _, given in others]
    turns = itertools.cycle(covering([len(of) for of in values]))
    cases = [(one, *(of[index] for of, index in zip(values, next(turns)))) for one in first[1]]
    return pytest.mark.parametrize(names, cases)

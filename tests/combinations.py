"""Few combinations of parameters in which every value meets every other, where all combinations would be too many."""

from __future__ import annotations

import itertools
import math
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


def every_pair(
    *parameters: tuple[Any, Collection[Any]],
    strength: int = 2,
    indirect: Sequence[str] = (),
    besides: Collection[tuple] = (),
) -> pytest.MarkDecorator:
    """Parametrise a test by combinations in which any two values of different parameters meet.

    A kernel is compiled for each combination of dtype, head dim, group and the like, which takes longer than the test.

    Args:
        parameters: of each a name and its values, or a tuple of names and tuples of values.
        strength: how many parameters meet in all their values: 3 where a kernel distinguishes triples.
        indirect: names of fixtures among the parameters.
        besides: cases to run as well, each with a value for every name.
    """
    cases = covering([len(of) for _, of in parameters], strength)
    return _marked(parameters, cases, indirect, besides)


def in_turn(
    first: tuple[Any, Collection[Any]], *others: tuple[Any, Collection[Any]], besides: Collection[tuple] = ()
) -> pytest.MarkDecorator:
    """Parametrise a test by each value of the first parameter once, beside values of the others in turn.

    Any two values of the others meet where there are enough of the first. Where there are fewer, turns are taken far
    from each other, so that all values come up soon. The arguments are those of `every_pair`.
    """
    number, turns = len(first[1]), covering([len(of) for _, of in others])
    step = 1
    if number < len(turns):
        step = next(n for n in itertools.count(round(0.618 * len(turns))) if math.gcd(n, len(turns)) == 1)
    combinations = [(n, *turns[step * n % len(turns)]) for n in range(number)]
    return _marked((first, *others), combinations, (), besides)


def _marked(
    parameters: Sequence[tuple[Any, Collection[Any]]],
    combinations: Sequence[tuple[int, ...]],
    indirect: Sequence[str],
    besides: Collection[tuple],
) -> pytest.MarkDecorator:
    """The mark for combinations of indices."""
    names = [name if isinstance(name, tuple) else (name,) for name, _ in parameters]
    values = [[one if isinstance(name, tuple) else (one,) for one in given] for name, given in parameters]
    cases = [
        tuple(itertools.chain.from_iterable(of[index] for of, index in zip(values, combination)))
        for combination in combinations
    ]
    cases += besides
    ids = ["-".join(str(value).removeprefix("torch.") for value in case) for case in cases]
    names = list(itertools.chain.from_iterable(names))
    return pytest.mark.parametrize(names, cases, ids=ids, indirect=indirect)

"""Few combinations of parameters in which every value meets every other, where all combinations would be too many."""

from __future__ import annotations

import collections
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


def _evenly(combinations: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The combinations in an order in which each next has the values that came up least."""
    left, counts, ordered = [*combinations], collections.Counter(), []
    while left:
        ordered.append(min(left, key=lambda one: [sum(counts[place] for place in enumerate(one)), one]))
        left.remove(ordered[-1])
        counts.update(enumerate(ordered[-1]))
    return ordered


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
    names, values = _unpacked(parameters)
    chosen = covering([len(of) for of in values], strength)
    cases = _cases(values, chosen, besides)
    ids = ["-".join(str(value).removeprefix("torch.") for value in case) for case in cases]
    return pytest.mark.parametrize(names, cases, ids=ids, indirect=indirect)


def in_turn(*parameters: tuple[Any, Collection[Any]], besides: Collection[tuple] = ()) -> pytest.MarkDecorator:
    """Parametrise a test by each value of the first parameter once, beside values of the others in turn.

    Any two values of the others meet where there are enough of the first. For kernels of which one takes seconds to
    compile, too.

    Args:
        parameters: as for :func:`every_pair`; the first has so many values that each of the others comes up.
        besides: cases to run as well, each with a value for every name.
    """
    names, values = _unpacked(parameters)
    turns = itertools.cycle(_evenly(covering([len(of) for of in values[1:]])))
    chosen = [(index, *turn) for index, turn in zip(range(len(values[0])), turns)]
    assert all({*range(len(of))} == {*indices} for of, indices in zip(values, zip(*chosen))), "a value never comes up"
    return pytest.mark.parametrize(names, _cases(values, chosen, besides))


def _unpacked(parameters: Sequence[tuple[Any, Collection[Any]]]) -> tuple[list[str], list[list[tuple]]]:
    """All names, and for each parameter the tuples of values that it may take."""
    together = [isinstance(name, tuple) for name, _ in parameters]
    names = [name if packed else (name,) for packed, (name, _) in zip(together, parameters)]
    values = [[*given] if packed else [(one,) for one in given] for packed, (_, given) in zip(together, parameters)]
    return [*itertools.chain.from_iterable(names)], values


def _cases(values: list[list[tuple]], chosen: Collection[tuple[int, ...]], besides: Collection[tuple]) -> list[tuple]:
    """The values at the chosen indices, then ``besides``."""
    return [
        *(tuple(itertools.chain.from_iterable(of[one] for of, one in zip(values, indices))) for indices in chosen),
        *besides,
    ]

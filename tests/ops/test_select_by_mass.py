"""How many keys top-p takes: against sorted lists."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from foveate import ops

INF = float("inf")


def taken_by_mass(mass, rest):
    """Heaviest first, ties to the smaller index, until what is left is small enough."""
    order = sorted(range(len(mass)), key=lambda i: (-mass[i], i))
    for count in range(len(mass) + 1):
        if sum(mass[i] for i in order[count:]) <= rest:
            return order, count


eighths = st.lists(st.integers(0, 6).map(lambda n: n / 8), min_size=1, max_size=12)  # sums of them are exact


@given(eighths, st.integers(0, 8).map(lambda n: n / 8))
def test_the_heaviest_are_taken_until_little_is_left(mass, rest):
    order, counts = ops.select.by_mass(torch.tensor([[mass, mass[::-1]]]), rest)
    for h, row in enumerate((mass, mass[::-1])):
        assert (order[0, h].tolist(), counts[0, h].item()) == taken_by_mass(row, rest)


def test_what_must_be_taken_comes_first_and_what_has_no_mass_never():
    order, counts = ops.select.by_mass(torch.tensor([[[0.0, 0.1, INF, 0.0, 0.05, INF]]]), 1e-9)
    assert order.tolist() == [[[2, 5, 1, 4, 0, 3]]]
    assert counts.tolist() == [[4]]


def test_softmax_left_behind_is_at_most_the_rest():
    mass = (torch.randn(4, 3, 200, generator=torch.manual_seed(0)) * 3).softmax(-1)
    for rest in (0.5, 0.1, 0.01, 1e-4):
        order, counts = ops.select.by_mass(mass, rest)
        sizes = mass.gather(-1, order).double()
        left = torch.stack([sizes.flatten(0, 1)[i, n:].sum() for i, n in enumerate(counts.flatten())])
        more = torch.stack([sizes.flatten(0, 1)[i, n - 1 :].sum() for i, n in enumerate(counts.flatten())])
        assert (left <= rest + 1e-6).all()
        assert (more > rest - 1e-6).all()  # one fewer would not do

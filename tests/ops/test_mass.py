"""How many nodes to take: against sorted lists, and true attention against the bound of it."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foveate import ops
from foveate.ops import Logits
from tests.helpers import assert_close

INF = float("inf")


# The first of an order


@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 12), st.integers(0, 99))
def test_first_of_an_order(nodes, heads, capacity, seed):
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(2, heads, nodes, generator=generator).argsort(-1)
    counts = torch.randint(0, nodes + 1, (2, heads), generator=generator)
    first = ops.select.first_of(order, counts, capacity)
    assert first.dtype == torch.int64
    for b, h in itertools.product(range(2), range(heads)):
        wanted = sorted(order[b, h, : min(counts[b, h], capacity)].tolist())
        assert first[b, h].tolist() == wanted + [-1] * (min(capacity, nodes) - len(wanted))


# Top-p


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


# Bounds


def bounded_by_hand(upper, lower, known, limit):
    """Of one KV head, ``[G][N]`` and ``[G]``: order, how many, and the bound, in fp64 and by trying every number."""
    group, nodes = len(upper), len(upper[0])
    held = [max(math.exp(upper[g][n]) / total(known[g], lower[g]) for g in range(group)) for n in range(nodes)]
    order = sorted(range(nodes), key=lambda n: (-held[n], n))
    for count in range(nodes + 1):
        taken, rest = order[:count], order[count:]
        missed = max(bound_of(upper[g], lower[g], known[g], taken, rest) for g in range(group))
        if missed <= limit:
            return order, count, missed


def total(known, lower):
    return math.exp(known) + sum(map(math.exp, lower))


def bound_of(upper, lower, known, taken, rest):
    unread = sum(math.exp(upper[n]) for n in rest)
    return unread / (total(known, [lower[n] for n in taken]) + unread)


@given(st.integers(1, 9), st.integers(1, 4), st.sampled_from([0.9, 0.3, 0.05, 1e-3]), st.integers(0, 999))
@settings(max_examples=80)
def test_the_fewest_nodes_that_leave_little_enough(nodes, group, limit, seed):
    generator = torch.Generator().manual_seed(seed)
    lower = torch.randn(2, 2, group, nodes, generator=generator) * 2
    upper = lower + torch.rand(lower.shape, generator=generator) * 2
    nowhere = torch.rand(2, 2, 1, nodes, generator=generator) < 0.2
    upper, lower = (x.masked_fill(nowhere, -INF) for x in (upper, lower))
    known = torch.randn(2, 2, group, 1, generator=generator)
    order, counts, bounds = ops.select.by_bound(upper, lower, known, limit)
    for b, h in itertools.product(range(2), range(2)):
        wanted = bounded_by_hand(*(x[b, h].tolist() for x in (upper, lower)), known[b, h, :, 0].tolist(), limit)
        assert order[b, h].tolist() == wanted[0]
        assert counts[b, h].item() == wanted[1]
        assert bounds[b, h].item() == pytest.approx(wanted[2], abs=1e-6)
        assert not nowhere[b, h, 0, order[b, h, : counts[b, h]]].any()


def draw_pages(seed, temperature, clustered, batch=2, heads=2, group=3, pages=12, size=4, dim=8, raw=6):
    """Real queries and keys: the logits of all pages' keys, of the raw ones, and the bounds of each page."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, group, dim, generator=generator) / temperature
    centres = torch.randn(batch, heads, pages, 1, dim, generator=generator)
    k = centres * clustered + torch.randn(batch, heads, pages, size, dim, generator=generator) * (1 - clustered)
    raw = ops.key_logits(q, torch.randn(batch, heads, raw, dim, generator=generator), Logits(1.0))
    logits = ops.key_logits(q, k.flatten(2, 3), Logits(1.0))
    upper = ops.largest_logit(q, k.amin(3), k.amax(3), 1.0) + math.log(size)
    lower = ops.key_logits(q, k.mean(3), Logits(1.0)) + math.log(size)
    return logits.unflatten(-1, (pages, size)), raw, upper, lower


@pytest.mark.parametrize("temperature", [0.1, 0.3, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("clustered", [0.0, 0.7, 0.98])
@pytest.mark.parametrize("limit", [0.5, 0.1, 0.01])
def test_true_missed_mass_is_below_the_bound(temperature, clustered, limit):
    for seed in range(6):
        logits, raw, upper, lower = draw_pages(seed, temperature, clustered)
        order, counts, bounds = ops.select.by_bound(upper, lower, raw.logsumexp(-1, keepdim=True), limit)
        everything = torch.cat([raw, logits.flatten(-2)], -1).double()
        mass = everything.softmax(-1)[..., raw.shape[-1] :].unflatten(-1, logits.shape[-2:]).sum(-1)  # of each page
        assert (bounds <= limit).all()
        for b, h in itertools.product(*map(range, counts.shape)):
            rest = order[b, h, counts[b, h] :]
            assert (mass[b, h][:, rest].sum(-1) <= bounds[b, h] + 1e-6).all()


@given(st.integers(0, 99), st.sampled_from([0.3, 1.0, 3.0]), st.sampled_from([0.0, 0.9]))
@settings(max_examples=25)
def test_a_smaller_limit_takes_a_superset(seed, temperature, clustered):
    _, raw, upper, lower = draw_pages(seed, temperature, clustered)
    before, orders = None, []
    for limit in (0.99, 0.7, 0.3, 0.1, 0.03, 0.003):
        order, counts, bounds = ops.select.by_bound(upper, lower, raw.logsumexp(-1, keepdim=True), limit)
        assert before is None or (counts >= before).all()
        assert (bounds <= limit).all()
        before = counts
        orders.append(order)
    assert all(torch.equal(order, orders[0]) for order in orders)


def test_bounds_far_beyond_what_exp_can_hold():
    for shift in (0.0, 3e3, -3e3):
        upper = torch.tensor([[[[2.0, 1.0, -500.0, -INF]]]]) + shift
        known = torch.tensor([[[[0.5]]]]) + shift
        order, counts, bounds = ops.select.by_bound(upper, upper, known, 0.3)
        assert order[0, 0, :2].tolist() == [0, 1]
        rest = math.exp(1.0) / (math.exp(2.0) + math.exp(0.5) + math.exp(1.0))
        assert counts.item() == 1
        assert_close(bounds, torch.tensor([[rest]]))


def test_nodes_that_hold_nothing_are_never_taken():
    nowhere = torch.full((1, 2, 3, 5), -INF)
    _, counts, bounds = ops.select.by_bound(nowhere, nowhere, torch.zeros(1, 2, 3, 1), 0.01)
    assert counts.tolist() == [[0, 0]]
    assert bounds.tolist() == [[0.0, 0.0]]


def test_every_head_of_the_group_is_within_the_limit():
    """One head looks at the first page, another at the last; both are taken for both."""
    upper = torch.tensor([[[[5.0, -5.0, -5.0], [-5.0, -5.0, 5.0]]]])
    order, counts, bounds = ops.select.by_bound(upper, upper, torch.zeros(1, 1, 2, 1), 0.1)
    assert order.tolist() == [[[0, 2, 1]]]
    assert counts.tolist() == [[2]]
    assert bounds.item() < 0.1

"""How many pages to read: true attention against the bound of it."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.bound import by_bound
from foveate import ops
from foveate.ops import Logits
from tests.helpers import assert_close

INF = float("inf")


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
    order, counts, bounds = by_bound(upper, lower, known, limit)
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
        order, counts, bounds = by_bound(upper, lower, raw.logsumexp(-1, keepdim=True), limit)
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
        order, counts, bounds = by_bound(upper, lower, raw.logsumexp(-1, keepdim=True), limit)
        assert before is None or (counts >= before).all()
        assert (bounds <= limit).all()
        before = counts
        orders.append(order)
    assert all(torch.equal(order, orders[0]) for order in orders)


def test_bounds_far_beyond_what_exp_can_hold():
    for shift in (0.0, 3e3, -3e3):
        upper = torch.tensor([[[[2.0, 1.0, -500.0, -INF]]]]) + shift
        known = torch.tensor([[[[0.5]]]]) + shift
        order, counts, bounds = by_bound(upper, upper, known, 0.3)
        assert order[0, 0, :2].tolist() == [0, 1]
        rest = math.exp(1.0) / (math.exp(2.0) + math.exp(0.5) + math.exp(1.0))
        assert counts.item() == 1
        assert_close(bounds, torch.tensor([[rest]]))


def test_nodes_that_hold_nothing_are_never_taken():
    nowhere = torch.full((1, 2, 3, 5), -INF)
    _, counts, bounds = by_bound(nowhere, nowhere, torch.zeros(1, 2, 3, 1), 0.01)
    assert counts.tolist() == [[0, 0]]
    assert bounds.tolist() == [[0.0, 0.0]]


def test_every_head_of_the_group_is_within_the_limit():
    """One head looks at the first page, another at the last; both are taken for both."""
    upper = torch.tensor([[[[5.0, -5.0, -5.0], [-5.0, -5.0, 5.0]]]])
    order, counts, bounds = by_bound(upper, upper, torch.zeros(1, 1, 2, 1), 0.1)
    assert order.tolist() == [[[0, 2, 1]]]
    assert counts.tolist() == [[2]]
    assert bounds.item() < 0.1

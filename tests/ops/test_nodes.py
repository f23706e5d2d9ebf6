"""What a summary says about the keys beneath: estimates and bounds against the keys themselves, in fp64."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foveate import ops
from foveate.ops import Logits
from tests.helpers import LAYOUTS, assert_close, in_buffer

SCALING = 0.3

sizes = st.tuples(
    st.sampled_from([1, 2]),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 3, 7]),
    st.integers(1, 7),
    st.sampled_from([1, 5, 16, 80]),
)


def draw(*size, seed=0, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Logits and their deviation


@given(sizes, st.sampled_from(LAYOUTS), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@settings(max_examples=40)
def test_logits_of_keys(size, layout, dtype):
    batch, heads, group, number, dim = size
    rows, k = draw(batch, heads, group, dim, dtype=dtype), draw(batch, heads, number, dim, seed=1, dtype=dtype)
    logits = ops.key_logits(rows, in_buffer(k, layout), Logits(SCALING))
    assert logits.dtype == torch.float32
    assert_close(logits, torch.einsum("bhgd,bhnd->bhgn", rows.double(), k.double()) * SCALING)


@given(sizes, st.sampled_from(LAYOUTS), st.integers(0, 9))
@settings(max_examples=40)
def test_deviation_takes_dimensions_as_independent(size, layout, seed):
    batch, heads, group, number, dim = size
    rows, spread = draw(batch, heads, group, dim, seed=seed), draw(batch, heads, number, dim, seed=seed + 1).square()
    deviation = ops.score.logit_deviation(rows, in_buffer(spread, layout), SCALING)
    assert deviation.dtype == torch.float32
    for b, h, g, n in itertools.product(*map(range, (batch, heads, group, number))):
        variance = sum((float(rows[b, h, g, d]) * SCALING) ** 2 * float(spread[b, h, n, d]) for d in range(dim))
        assert deviation[b, h, g, n].item() == pytest.approx(math.sqrt(variance), rel=2e-5, abs=1e-6)


def test_deviation_is_that_of_the_logits_where_dimensions_are_independent():
    """A page of all corners of a box has no correlation between dimensions."""
    corners = torch.tensor(list(itertools.product([-1.0, 1.0], [0.0, 3.0], [2.0, 2.5])))[None, None, None]
    rows = draw(1, 1, 5, 3)
    page = ops.summarise(ops.Nodes(corners, corners), spread=True)
    logits = ops.key_logits(rows, corners[:, :, 0], Logits(SCALING))
    deviation = ops.score.logit_deviation(rows, page.spread, SCALING)
    assert_close(deviation[..., 0], logits.std(-1, correction=0))
    assert_close(ops.key_logits(rows, page.k, Logits(SCALING))[..., 0], logits.mean(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_deviation_in_half_precision(dtype):
    rows, spread = draw(2, 2, 3, 64, dtype=dtype), draw(2, 2, 5, 64, seed=1).square().to(dtype)
    wanted = ((rows.double() * SCALING).square() @ spread.double().transpose(-1, -2)).sqrt()
    assert_close(ops.score.logit_deviation(rows, spread, SCALING), wanted, dtype)


def test_no_spread_is_no_deviation():
    rows = draw(1, 2, 3, 8)
    assert (ops.score.logit_deviation(rows, torch.zeros(1, 2, 4, 8), SCALING) == 0).all()
    # rounding may leave a variance below zero
    assert (ops.score.logit_deviation(rows, torch.full((1, 2, 4, 8), -1e-9), SCALING) == 0).all()


# Free energy

counts = st.sampled_from([1, 2, 3, 16, 31, 128, 4096])
deviations = torch.tensor([0.0, 1e-4, 0.1, 0.5, 1.0, 2.0, 3.0, 4.0, 8.0, 100.0]).view(1, 1, 1, -1)


@given(counts)
def test_free_energy_is_the_formula(n):
    log_size = math.log(n)
    edge = math.sqrt(2 * log_size)
    found = ops.score.free_energy(deviations, log_size)
    for s, value in zip(deviations.flatten().tolist(), found.flatten().tolist()):
        assert value == pytest.approx(s * s / 2 if s < edge else edge * s - log_size, rel=1e-5, abs=1e-9)


@given(counts)
def test_free_energy_is_smooth_and_between_its_limits(n):
    log_size = math.log(n)
    edge = math.sqrt(2 * log_size)
    s = torch.linspace(0, 3 * edge + 1, 4001, dtype=torch.float64).view(1, 1, 1, -1)
    value = ops.score.free_energy(s, log_size)[0, 0, 0]
    s = s[0, 0, 0]
    slope = value.diff() / s.diff()
    step = s[1].item()
    assert value[0] == 0
    assert (slope >= 0).all()
    assert (slope <= edge + 1e-9).all()
    assert (slope.diff() >= -1e-9).all()  # convex
    assert (slope.diff() <= 1.01 * step).all()  # without a jump, of the value or of the slope
    assert slope[-1] == pytest.approx(edge, abs=1e-6)
    assert (value <= s.square() / 2 + 1e-9).all()  # Jensen, in the mean over pages
    assert (value <= edge * s + 1e-9).all()  # the largest of n Gaussians


def test_one_key_has_no_free_energy():
    assert (ops.score.free_energy(deviations, 0.0) == 0).all()


@pytest.mark.parametrize("n", [2, 4, 16, 64, 256])
def test_free_energy_against_pages_of_gaussian_logits(n):
    """Never below the mean of log mean exp; above it by its first correction, or as the largest is below its bound."""
    logits = torch.randn(8_000, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    edge = math.sqrt(2 * math.log(n))
    short = edge - logits.amax(-1).mean().item()  # of the largest of n Gaussians
    for s in (0.1, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0):
        found = (s * logits).logsumexp(-1) - math.log(n)
        error = 4 * found.std().item() / math.sqrt(8_000)
        above = ops.score.free_energy(torch.full((1, 1, 1, 1), s), math.log(n)).item() - found.mean().item()
        assert -error <= above
        assert above <= short * max(s, edge) + error
        if s <= 0.5:
            assert above <= math.expm1(s * s) / (2 * n) + error


# Bounds


@given(sizes, st.integers(1, 6), st.sampled_from(LAYOUTS), st.integers(0, 99))
@settings(max_examples=50)
def test_no_key_of_a_page_is_above_its_bound(size, width, layout, seed):
    batch, heads, group, number, dim = size
    rows, k = draw(batch, heads, group, dim, seed=seed), draw(batch, heads, number, width, dim, seed=seed + 1)
    low, high = in_buffer(k.amin(3), layout), in_buffer(k.amax(3), layout)
    bound = ops.largest_logit(rows, low, high, SCALING)
    assert bound.dtype == torch.float32
    logits = torch.einsum("bhgd,bhnsd->bhgns", rows.double(), k.double()) * SCALING
    assert (bound[..., None] >= logits - 1e-5).all()
    if width == 1:
        assert_close(bound, logits[..., 0])
    # and it is the smallest such bound: some corner of the box reaches it
    corner = torch.where(rows[:, :, :, None] > 0, high[:, :, None], low[:, :, None]).double()
    assert_close(bound, (rows[:, :, :, None].double() * corner).sum(-1) * SCALING)


def test_a_bound_holds_for_every_corner_and_is_met_by_one():
    corners = torch.tensor(list(itertools.product([-1.0, 2.0], [0.5, 3.0], [-4.0, -1.5])))
    low, high = (x[None, None, None] for x in (corners.amin(0), corners.amax(0)))
    for signs in itertools.product([-1.3, 0.0, 0.7], repeat=3):
        rows = torch.tensor(signs).view(1, 1, 1, 3)
        bound = ops.largest_logit(rows, low, high, SCALING).item()
        assert bound == pytest.approx((corners @ rows.flatten() * SCALING).max().item(), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bounds_in_half_precision_hold_for_the_keys_as_stored(dtype):
    rows, k = draw(2, 2, 3, 64, dtype=dtype), draw(2, 2, 5, 8, 64, seed=1, dtype=dtype)
    bound = ops.largest_logit(rows, k.amin(3), k.amax(3), SCALING)
    logits = torch.einsum("bhgd,bhnsd->bhgns", rows.double(), k.double()) * SCALING
    assert bound.dtype == torch.float32
    assert (bound[..., None] >= logits - 1e-5).all()

"""Attention over the first keys, or those up to a query's own, against textbook attention with masks."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foveate.ops import KV
from foveate.ops.attend import attend_prefix, attend_recent
from tests.helpers import LAYOUTS, LargestTensor, Shape, assert_close, naive, problem, shapes


def same(found, expected):
    assert_close(found.out, expected.out)
    assert torch.equal(found.lse.isneginf(), expected.lse.isneginf())
    assert_close(found.lse.nan_to_num(neginf=0), expected.lse.nan_to_num(neginf=0))


def counted(shape, seed, low, high, shared):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, (1 if shared else shape.batch, shape.queries), generator=generator)


@given(shapes(), st.integers(0, 1000), st.booleans(), st.sampled_from(LAYOUTS))
@settings(max_examples=40, deadline=None)
def test_the_first_keys(shape, seed, shared, layout):
    q, k, v = problem(shape, seed, layout=layout)
    counts = counted(shape, seed, -2, shape.keys + 3, shared)
    mask = torch.arange(shape.keys) < counts[:, None, :, None]
    same(attend_prefix(q, KV(k, v), counts, scaling=0.3), naive(q, k, v, 0.3, mask))


@given(shapes(), st.integers(0, 1000), st.integers(1, 30), st.booleans(), st.sampled_from(LAYOUTS))
@settings(max_examples=40, deadline=None)
def test_keys_up_to_ones_own(shape, seed, size, shared, layout):
    q, k, v = problem(shape, seed, layout=layout)
    counts = counted(shape, seed, -2, shape.keys + 3, shared)
    age = torch.arange(shape.offset, shape.keys)[:, None] - torch.arange(shape.keys)
    mask = (age >= 0) & (age < counts[:, None, :, None].clamp_max(size))
    same(attend_recent(q, KV(k, v), counts, size=size, scaling=0.3), naive(q, k, v, 0.3, mask))


def test_blocks_change_nothing_and_bound_memory(monkeypatch):
    q, k, v = problem(Shape(2, 1, 4, 300, 40, 8, 8))
    counts = torch.arange(41, 341)[None]

    def both():
        prefix = attend_prefix(q, KV(k, v), counts, scaling=0.3)
        return prefix, attend_recent(q, KV(k, v), counts, size=9, scaling=0.3)

    expected = both()
    monkeypatch.setattr("foveate.ops._math.SCRATCH_BYTES", 1 << 15)
    monkeypatch.setattr(sys.modules["foveate.ops.attend.ranges"], "_FEWEST", 8)
    with LargestTensor() as gauge:
        found = both()
    assert gauge.bytes <= q.nbytes < 4 * 300 * 340, gauge.what
    for one, other in zip(found, expected):
        same(one, other)


@pytest.mark.parametrize("counts", [torch.ones(2), torch.ones(3, 4, dtype=torch.int64), torch.ones(2, 5)])
def test_bad_counts_are_named(counts):
    q, k, v = problem(Shape(2, 1, 2, 4, 3, 8, 8))
    for attend in (attend_prefix, lambda *a, **more: attend_recent(*a, size=3, **more)):
        with pytest.raises(ValueError, match=r"counts \(.*\) do not fit 2 rows of 4 queries"):
            attend(q, KV(k, v), counts, scaling=1.0)


def test_windows_that_cannot_be():
    q, k, v = problem(Shape(1, 1, 2, 4, 0, 8, 8))
    for keys, size in ((3, 2), (4, 0)):
        with pytest.raises(ValueError, match=f"own keys and size be at least 1, not {keys}, {size}"):
            attend_recent(q, KV(k[:, :, :keys], v[:, :, :keys]), torch.ones(1, 4), size=size, scaling=1.0)

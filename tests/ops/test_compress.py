"""Page summaries against loops over pages."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foveate import ops
from tests.helpers import LAYOUTS, assert_close, in_buffer

sizes = st.tuples(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([1, 3, 4, 16]),
    st.sampled_from([5, 16, 80]),
    st.sampled_from([5, 16, 80]),
)


def draw_pages(size, layout="own", dtype=torch.float32):
    batch, heads, pages, page_size, dim, value_dim = size
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(batch, heads, pages * page_size, dim, generator=generator).to(dtype)
    v = torch.randn(batch, heads, pages * page_size, value_dim, generator=generator).to(dtype)
    mass = torch.rand(batch, heads, pages * page_size, generator=generator) * 9
    return in_buffer(k, layout), in_buffer(v, layout), mass


def weighted(x, weights, page_size):
    """Loop over pages in fp64; weights ``[B, H, P, page_size]``."""
    pages = x.double().split(page_size, 2)
    return torch.stack([(page * weights[:, :, p, :, None].double()).sum(2) for p, page in enumerate(pages)], 2)


@given(sizes, st.sampled_from(LAYOUTS))
@settings(max_examples=40)
def test_mean_summaries(size, layout):
    k, v, _ = draw_pages(size, layout)
    page_size = size[3]
    even = torch.full((*size[:4],), 1 / page_size)
    summary_k, summary_v = ops.summarise_pages(k, v, page_size)
    assert_close(summary_k, weighted(k, even, page_size))
    assert_close(summary_v, weighted(v, even, page_size))


@given(sizes, st.sampled_from(LAYOUTS), st.sampled_from([0.5, 1.0, 7.0]))
@settings(max_examples=40)
def test_importance_weighted_summaries(size, layout, temperature):
    k, v, mass = draw_pages(size, layout)
    page_size = size[3]
    weights = ops.page_importance(mass, page_size, temperature)
    exp = (mass.double() / temperature).exp().unflatten(2, (-1, page_size))
    assert weights.shape == size[:4]
    assert_close(weights, exp / exp.sum(-1, keepdim=True))
    summary_k, summary_v = ops.summarise_pages(k, v, page_size, weights)
    assert_close(summary_k, weighted(k, weights, page_size))
    assert_close(summary_v, weighted(v, weights, page_size))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_weight", [False, True])
def test_summaries_keep_the_dtype_and_accumulate_in_fp32(dtype, by_weight):
    k = torch.full((1, 1, 4096, 5), 1.0, dtype=dtype)
    k[:, :, ::2] = 1.0 + torch.finfo(dtype).eps  # summed in half precision, thousands of them would stall
    weights = torch.full((1, 1, 1, 4096), 1 / 4096) if by_weight else None
    for summary in ops.summarise_pages(k, k, 4096, weights):
        assert summary.dtype == dtype
        assert_close(summary, k.double().mean(2, keepdim=True), dtype)


def test_a_large_mass_takes_the_whole_page():
    mass = torch.zeros(1, 1, 8)
    mass[..., 5] = 1e5
    assert ops.page_importance(mass, 4, 1.0).tolist() == [[[[0.25] * 4, [0.0, 1.0, 0.0, 0.0]]]]

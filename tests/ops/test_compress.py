"""Summaries, of tokens and of summaries, against loops in fp64."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foveate import ops
from foveate.ops import KV
from foveate.ops.compress import reference
from tests.helpers import LAYOUTS, assert_close, in_buffer

sizes = st.tuples(
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3, 16]),
    st.sampled_from([1, 5, 16]),
    st.sampled_from([1, 5, 16]),
)


def groups_of(x, size, layout="own"):
    """A tensor ``[B, H, N * S, D]`` in an awkward layout, cut into N groups without a copy."""
    return in_buffer(x, layout).unflatten(2, (-1, size))


def draw_children(size, layout="own", dtype=torch.float32, levels=False, seed=0):
    """N groups of S children: tokens, or (``levels``) summaries with spreads and entropies of their own."""
    batch, heads, groups, width, dim, value_dim = size
    generator = torch.Generator().manual_seed(seed)

    def draw(dim):
        return torch.randn(batch, heads, groups * width, dim, generator=generator).to(dtype)

    k, v = groups_of(draw(dim), width, layout), groups_of(draw(value_dim), width, layout)
    if not levels:
        return ops.Nodes(k, v, None, torch.zeros(k.shape[:4]))
    spread = groups_of(draw(dim).abs(), width, layout)
    entropy = torch.rand(batch, heads, groups, width, generator=generator) * 3
    return ops.Nodes(k, v, spread, entropy)


def draw_weights(size, seed=0):
    weights = torch.rand(size[:4], generator=torch.Generator().manual_seed(seed)) ** 4
    return weights / weights.sum(-1, keepdim=True)


def summarised_by_hand(children, weights):
    """Fields ``[B, H, N, ...]`` in fp64, one group and one child at a time."""
    shape = children.k.shape[:3]
    fields = {"k": children.k, "v": children.v, "spread": children.k}
    found = {name: torch.zeros(*shape, x.shape[4], dtype=torch.float64) for name, x in fields.items()}
    found["entropy"] = torch.zeros(shape, dtype=torch.float64)
    for at in itertools.product(*map(range, shape)):
        there = range(children.k.shape[3])
        share = {s: 1 / len(there) if weights is None else float(weights[(*at, s)]) for s in there}
        for name in ("k", "v"):
            found[name][at] = sum(share[s] * getattr(children, name)[(*at, s)].double() for s in there)
        for s in there:
            apart = (children.k[(*at, s)].double() - found["k"][at]) ** 2
            own = 0.0 if children.spread is None else children.spread[(*at, s)].double()
            found["spread"][at] += share[s] * (apart + own)
            entropy = 0.0 if share[s] == 0 else -share[s] * math.log(share[s])
            found["entropy"][at] += entropy + share[s] * float(children.entropy[(*at, s)])
    return ops.Nodes(**found)


def assert_nodes_close(nodes, wanted, dtype=torch.float32):
    for name, value in nodes._asdict().items():
        assert_close(value, getattr(wanted, name), dtype)


@given(sizes, st.sampled_from(LAYOUTS), st.booleans(), st.booleans(), st.integers(0, 9))
@settings(max_examples=40)
def test_summaries_of_tokens_and_of_summaries(size, layout, levels, weighted, seed):
    children = draw_children(size, layout, levels=levels, seed=seed)
    weights = draw_weights(size, seed) if weighted else None
    assert_nodes_close(ops.summarise(children, weights, spread=True), summarised_by_hand(children, weights))


@pytest.mark.parametrize("weighted", [False, True])
def test_pages_are_summarised_in_blocks(monkeypatch, weighted):
    batch, heads, number, width, dim = 2, 3, 17, 4, 8
    random = torch.Generator().manual_seed(3)
    keys = torch.randn(batch, heads, number, width, dim, generator=random)
    children = ops.Nodes(keys, keys + 1, None, torch.zeros(keys.shape[:4]))
    weights = torch.rand(keys.shape[:4], generator=random).softmax(-1) if weighted else None
    whole = ops.summarise(children, weights, spread=True)
    blocks, summarise = [], reference._summarise
    monkeypatch.setattr("foveate.ops._math.SCRATCH_BYTES", 3 * 8 * batch * heads * width * dim)
    monkeypatch.setattr(reference, "_summarise", lambda part, *rest: blocks.append(part) or summarise(part, *rest))
    for one, other in zip(whole, ops.summarise(children, weights, spread=True)):
        assert_close(one, other)
    assert [part.k.shape[2] for part in blocks] == [3] * 5 + [2]


def test_what_is_not_asked_for_is_none():
    k = torch.randn(1, 2, 3, 4, 5)
    plain = ops.summarise(ops.Nodes(k, k))
    assert plain[2:] == (None, None)
    assert ops.summarise(ops.Nodes(k, k), spread=True).entropy is None


@given(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=3), st.integers(0, 9))
@settings(max_examples=20)
def test_means_over_levels_are_those_of_all_tokens_beneath(branches, seed):
    """Mean, total variance and entropy do not depend on how equal groups were put together."""
    size = (2, 2, 3, math.prod(branches), 5, 6)
    tokens = draw_children(size, seed=seed)
    nodes = ops.Nodes(*(None if x is None else x.flatten(2, 3) for x in tokens))
    for branch in branches:
        children = ops.Nodes(*(None if x is None else x.unflatten(2, (-1, branch)) for x in nodes))
        nodes = ops.summarise(children, spread=True)
    k, v = tokens.k.double(), tokens.v.double()
    wanted = ops.Nodes(k.mean(3), v.mean(3), k.var(3, correction=0), torch.full(size[:3], math.log(size[3])))
    assert_nodes_close(nodes, wanted)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 9))
@settings(max_examples=30)
def test_weights_over_levels_multiply(branch, width, seed):
    """Weighted mean, variance and entropy of two levels are those of the product of the weights (chain rule)."""
    below, above = (2, 2, 3 * branch, width, 5, 6), (2, 2, 3, branch, 5, 6)
    tokens = draw_children(below, seed=seed)
    first, second = draw_weights(below, seed=seed), draw_weights(above, seed=seed + 1)
    middle = ops.summarise(tokens, first, spread=True)
    top = ops.summarise(ops.Nodes(*(x.unflatten(2, (-1, branch)) for x in middle)), second, spread=True)
    product = (first.unflatten(2, (-1, branch)) * second[..., None]).flatten(3, 4)
    whole = ops.Nodes(*(None if x is None else x.unflatten(2, (-1, branch)).flatten(3, 4) for x in tokens))
    assert_nodes_close(top, summarised_by_hand(whole, product))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [False, True])
def test_summaries_keep_the_dtypes_and_accumulate_in_fp32(dtype, weighted):
    k = torch.full((1, 1, 1, 4096, 5), 1.0, dtype=dtype)
    k[:, :, :, ::2] = 1.0 + torch.finfo(dtype).eps  # summed in half precision, thousands of them would stall
    weights = torch.full((1, 1, 1, 4096), 1 / 4096) if weighted else None
    nodes = ops.summarise(ops.Nodes(k, k, k, torch.ones(k.shape[:4])), weights, spread=True)
    assert [x.dtype for x in nodes] == [dtype] * 3 + [torch.float32]
    for summary in (nodes.k, nodes.v, nodes.spread):
        assert_close(summary, k.double().mean(3), dtype)
    assert nodes.entropy.item() == pytest.approx(1 + math.log(4096))


def test_spread_of_keys_far_apart_stays_finite_in_half_precision():
    """Keys of a few hundred are within fp16, and their variance is not."""
    k = torch.tensor([-400.0, 400.0, -400.0, 400.0], dtype=torch.float16).view(1, 1, 1, 4, 1)
    nodes = ops.summarise(ops.Nodes(k, k), spread=True)
    assert nodes.spread.item() == torch.finfo(torch.float16).max
    rows = torch.tensor([0.0, 1.0, 3e4], dtype=torch.float16).view(1, 1, 3, 1)
    deviation = ops.score.logit_deviation(rows, nodes.spread, 1.0).flatten().tolist()
    assert deviation[0] == 0
    assert deviation[1] == pytest.approx(255.9, abs=0.2)
    assert math.isfinite(deviation[2])


# bound_newest


@given(
    st.lists(st.integers(1, 23), min_size=1, max_size=3),
    st.integers(1, 3),
    st.sampled_from([1, 2, 5, 8]),
    st.sampled_from([1, 5, 16]),
    st.sampled_from(LAYOUTS),
    st.integers(0, 99),
)
@settings(max_examples=60)
def test_the_box_of_the_newest_key_is_drawn_around_the_keys_of_its_page(lengths, heads, page_size, dim, layout, seed):
    """Quest, section 3.2: from the keys that a row has in it, and no other box is touched."""
    slots = -(-max(lengths) // page_size) * page_size
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(len(lengths), heads, slots, dim, generator=generator)
    for b, length in enumerate(lengths):
        keys[b, :, length:] = 1e4  # finite, and of no row
    shape = (len(lengths), heads, slots // page_size, dim)
    low, high = (in_buffer(torch.full(shape, fill), layout) for fill in (7.0, 8.0))
    before = keys.clone()
    ops.bound_newest(KV(in_buffer(keys, layout), lengths=torch.tensor(lengths)), low, high, page_size)
    assert torch.equal(keys, before)
    for b, length in enumerate(lengths):
        newest = (length - 1) // page_size
        for page in range(slots // page_size):
            own = keys[b, :, page * page_size : min(length, (page + 1) * page_size)]
            for box, fill, corner in ((low, 7.0, torch.amin), (high, 8.0, torch.amax)):
                wanted = corner(own, 1) if page == newest else torch.full((heads, dim), fill)
                assert torch.equal(box[b, :, page], wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_boxes_drawn_key_by_key_are_those_of_whole_pages(dtype):
    keys = torch.randn(2, 2, 24, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    low, high = torch.zeros(2, 2, 6, 5, dtype=dtype), torch.zeros(2, 2, 6, 5, dtype=dtype)
    for length in range(1, 25):
        ops.bound_newest(KV(keys, lengths=torch.full((2,), length)), low, high, 4)
    pages = keys.unflatten(2, (6, 4))
    assert torch.equal(low, pages.amin(3))
    assert torch.equal(high, pages.amax(3))

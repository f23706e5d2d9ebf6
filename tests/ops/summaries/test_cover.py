"""Refining a cover, and attention over it, against loops over heads in fp64 (LuKA, Algorithm 1)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foveate import ops
from foveate.ops import Logits
from tests.helpers import LAYOUTS, assert_close, in_buffer, naive

INF = float("inf")
SCALING = 0.3

sizes = st.tuples(
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 3, 4, 7]),
    st.integers(1, 6),
    st.sampled_from([1, 2, 5]),
)


def draw_refinement(batch, heads, group, nodes, width, seed, loudness=3.0):
    """Parents, of which some are nowhere; chosen places with gaps anywhere; children, of which some are nowhere."""
    generator = torch.Generator().manual_seed(seed)

    def some(*size: int) -> Tensor:
        return torch.rand(size, generator=generator) < 0.3

    parents = torch.randn(batch, heads, group, nodes, generator=generator) * loudness
    parents = parents.masked_fill(some(batch, heads, 1, nodes), -INF)
    places = int(torch.randint(1, nodes + 1, (1,), generator=generator))
    chosen = torch.rand(batch, heads, nodes, generator=generator).argsort(-1)[..., :places]
    chosen = chosen.masked_fill(some(*chosen.shape), -1)
    children = torch.randn(batch, heads, group, places, width, generator=generator) * loudness
    missing = some(batch, heads, 1, places, width)
    missing[..., 0] = False  # no parent is childless
    children = children.masked_fill(missing | (chosen < 0)[:, :, None, :, None], -INF)
    return parents, chosen, children


def refined_by_hand(parents, chosen, children, preserve):
    """What should remain of the parents, and their children's log-weights, one head at a time."""
    left, shared = parents.double().clone(), torch.full(children.shape, -INF, dtype=torch.float64)
    for b, h, g in torch.cartesian_prod(*(torch.arange(n) for n in parents.shape[:3])).view(-1, 3).tolist():
        for place, parent in enumerate(chosen[b, h].tolist()):
            if parent < 0:
                continue
            logits = children[b, h, g, place].double()
            mass = parents[b, h, g, parent].double()
            shared[b, h, g, place] = logits - logits.exp().sum().log() + mass if preserve else logits
            left[b, h, g, parent] = -INF
    return left, shared.flatten(-2)


@given(sizes, st.booleans(), st.integers(0, 99))
@settings(max_examples=80)
def test_refined_nodes_give_way_to_their_children(size, preserve, seed):
    parents, chosen, children = draw_refinement(*size, seed)
    before = [x.clone() for x in (parents, chosen, children)]
    left, below = ops.summaries.refine(parents, chosen, children, preserve=preserve)
    wanted_left, wanted_below = refined_by_hand(parents, chosen, children, preserve)
    assert_close(left, wanted_left)
    assert_close(below, wanted_below)
    assert all(torch.equal(x, y) for x, y in zip(before, (parents, chosen, children)))


@given(sizes, st.integers(0, 99), st.sampled_from([3.0, 3e3]))
@settings(max_examples=60)
def test_preserving_keeps_the_mass_of_the_cover_and_exactness_the_logits_of_the_children(size, seed, loudness):
    parents, chosen, children = draw_refinement(*size, seed, loudness)
    left, below = ops.summaries.refine(parents, chosen, children, preserve=True)
    assert_close(torch.cat([left, below], -1).logsumexp(-1), parents.logsumexp(-1))
    left, below = ops.summaries.refine(parents, chosen, children, preserve=False)
    used = (chosen >= 0)[:, :, None, :, None].expand(children.shape).flatten(-2)
    assert torch.equal(below[used], children.flatten(-2)[used])
    assert (below[~used] == -INF).all()
    assert not (left == INF).any()


@pytest.mark.parametrize("preserve", [False, True])
def test_an_unused_place_touches_no_parent(preserve):
    parents, nothing = torch.tensor([[[[1.0, 2.0]]]]), torch.full((1, 1, 1, 1, 3), -INF)
    left, below = ops.summaries.refine(parents, torch.tensor([[[-1]]]), nothing, preserve=preserve)
    assert left.tolist() == parents.tolist()
    assert below.tolist() == [[[[-INF] * 3]]]
    # an unused place beside the first parent's own one, in either order
    child = torch.zeros(1, 1, 1, 1, 3)
    for chosen, children in (([-1, 0], [nothing, child]), ([0, -1], [child, nothing])):
        left, below = ops.summaries.refine(parents, torch.tensor([[chosen]]), torch.cat(children, 3), preserve=preserve)
        assert left.tolist() == [[[[-INF, 2.0]]]]
        alone = below[below > -INF].tolist()
        assert alone == pytest.approx([1.0 - math.log(3)] * 3 if preserve else [0.0] * 3)


@given(sizes, st.booleans(), st.integers(0, 99))
@settings(max_examples=60)
def test_a_complete_choice_is_refined_the_same(size, preserve, seed):
    """Without unused places, which a complete choice is declared not to have: to the last bit, and by hand."""
    batch, heads, group, nodes, width = size
    parents, some, _ = draw_refinement(*size, seed)
    generator = torch.Generator().manual_seed(seed)
    places = some.shape[2]
    chosen = torch.rand(batch, heads, nodes, generator=generator).argsort(-1)[..., :places]
    children = torch.randn(batch, heads, group, places, width, generator=generator) * 3
    missing = torch.rand(children.shape, generator=generator) < 0.3
    missing[..., 0] = False  # no parent is childless
    children = children.masked_fill(missing, -INF)
    before = [x.clone() for x in (parents, chosen, children)]
    found = ops.summaries.refine(parents, chosen, children, preserve=preserve, complete=True)
    assert all(torch.equal(x, y) for x, y in zip(before, (parents, chosen, children)))
    for ours, plain, by_hand in zip(
        found,
        ops.summaries.refine(parents, chosen, children, preserve=preserve),
        refined_by_hand(parents, chosen, children, preserve),
    ):
        assert torch.equal(ours, plain)
        assert_close(ours, by_hand)


def test_children_of_a_parent_without_mass_have_none():
    _, below = ops.summaries.refine(
        torch.tensor([[[[-INF, 0.0]]]]), torch.tensor([[[0]]]), torch.zeros(1, 1, 1, 1, 2), preserve=True
    )
    assert below.tolist() == [[[[-INF, -INF]]]]


# Attention


def draw_parts(batch, heads, group, nodes, seed=0, value_dim=5, layout="own", dtype=torch.float32):
    """A part that is always there, and others of which some nodes, and now and then all, are nowhere."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for number in range(nodes):
        logits = torch.randn(batch, heads, group, number + 1, generator=generator) * 2
        if number:
            logits = logits.masked_fill(torch.rand(batch, heads, 1, number + 1, generator=generator) < 0.4, -INF)
        v = torch.randn(batch, heads, number + 1, value_dim, generator=generator).to(dtype)
        parts.append(ops.summaries.Part(logits, in_buffer(v, layout)))
    return parts


def attended_by_hand(parts):
    batch, heads, group = parts[0].logits.shape[:3]
    out = torch.zeros(batch, heads * group, 1, parts[0].v.shape[3], dtype=torch.float64)
    masses = [torch.zeros(part.logits.shape, dtype=torch.float64) for part in parts]
    for b in range(batch):
        for h in range(heads * group):
            kv, g = h // group, h % group
            weights = [[math.exp(logit) for logit in part.logits[b, kv, g].tolist()] for part in parts]
            total = sum(map(sum, weights))
            for part, own, mass in zip(parts, weights, masses):
                for n, weight in enumerate(own):
                    mass[b, kv, g, n] = weight / total
                    out[b, h, 0] += weight / total * part.v[b, kv, n].double()
    return out, masses


@given(sizes, st.integers(0, 99), st.sampled_from([1, 5, 16]), st.sampled_from(LAYOUTS))
@settings(max_examples=60)
def test_attention_over_all_parts_of_a_cover(size, seed, value_dim, layout):
    parts = draw_parts(*size[:4], seed, value_dim, layout)
    out, masses = ops.summaries.attend_cover(parts)
    wanted, wanted_masses = attended_by_hand(parts)
    assert_close(out, wanted)
    assert_close(masses, torch.cat(wanted_masses, -1))
    assert (masses[torch.cat([part.logits for part in parts], -1) == -INF] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cover_in_half_precision(dtype):
    parts = draw_parts(2, 2, 3, 4, dtype=dtype)
    out, masses = ops.summaries.attend_cover(parts)
    wanted, wanted_masses = attended_by_hand(parts)
    assert out.dtype == dtype
    assert masses.dtype == torch.float32
    assert_close(out, wanted, dtype)
    assert_close(masses, torch.cat(wanted_masses, -1))  # from fp32 logits, so as exact as ever


def test_logits_beyond_what_exp_can_hold():
    logits = torch.tensor([[[[1000.0, 999.0]]]])
    v = torch.tensor([[[[1.0], [3.0]]]])
    out, masses = ops.summaries.attend_cover([ops.summaries.Part(logits, v), ops.summaries.Part(logits - 5000.0, v)])
    first = 1 / (1 + math.exp(-1))
    assert masses[0, 0, 0].tolist() == pytest.approx([first, 1 - first, 0, 0])
    assert out.item() == pytest.approx(first + 3 * (1 - first))


@given(sizes, st.data())
@settings(max_examples=30)
def test_refining_every_page_exactly_is_dense_attention(size, data):
    batch, heads, group, pages, width = size
    paged = pages * width
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, heads * group, 1, 8, generator=generator)
    length = paged + data.draw(st.integers(1, 5))
    k, v = (torch.randn(batch, heads, length, dim, generator=generator) for dim in (8, 6))
    logits = ops.key_logits(ops.fold_group(q, heads), k, Logits(SCALING))
    raw, tail = logits[..., :paged].unflatten(-1, (pages, width)), logits[..., paged:]
    every = torch.arange(pages).expand(batch, heads, pages)
    summaries = torch.randn(batch, heads, group, pages, generator=generator)
    dense = naive(q, k, v, SCALING).out
    true_mass = raw.logsumexp(-1)
    for preserve, parents in ((False, summaries), (True, true_mass)):
        left, below = ops.summaries.refine(parents, every, raw, preserve=preserve)
        values = torch.randn(batch, heads, pages, 6, generator=generator)
        parts = [(tail, v[:, :, paged:]), (left, values), (below, v[:, :, :paged])]
        assert_close(ops.summaries.attend_cover([ops.summaries.Part(*part) for part in parts])[0], dense)

"""Attention over summaries, refined pages and a tail against loops over heads in fp64 (LuKA, Algorithm 1)."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foveate import ops
from tests.helpers import LAYOUTS, LargestTensor, assert_close, in_buffer, naive

SCALING = 0.3


class Cover(NamedTuple):
    """One query over P pages of S tokens and T tokens of tail."""

    q: Tensor
    k: Tensor
    v: Tensor
    summary_k: Tensor
    summary_v: Tensor
    tail_k: Tensor
    tail_v: Tensor
    page_size: int


def draw_cover(batch, kv_heads, group, pages, page_size, tail, dim, value_dim, layout="own", dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, length: int, width: int) -> Tensor:
        return torch.randn(batch, heads, length, width, generator=generator).to(dtype)

    def buffered(length: int) -> tuple[Tensor, Tensor]:
        return in_buffer(draw(kv_heads, length, dim), layout), in_buffer(draw(kv_heads, length, value_dim), layout)

    q = draw(kv_heads * group, 1, dim)
    return Cover(q, *buffered(pages * page_size), *buffered(pages), *buffered(tail), page_size)


sizes = st.tuples(
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 3, 7, 8]),
    st.integers(1, 6),
    st.sampled_from([1, 3, 4]),
    st.integers(1, 7),
    st.sampled_from([5, 16, 80]),
    st.sampled_from([5, 16, 80]),
)


def draw_refined(cover: Cover, places: int, page_used: Tensor, seed: int = 0) -> Tensor:
    """For every head its own existing pages, ascending, then -1."""
    batch, heads, pages = cover.summary_k.shape[:3]
    order = torch.rand(batch, heads, pages, generator=torch.Generator().manual_seed(seed)).argsort(-1)[..., :places]
    order = order.masked_fill(~page_used.expand(batch, heads, pages).gather(2, order), pages).sort(-1).values
    return order.masked_fill(order == pages, -1)


def written_out(cover: Cover, refined: Tensor, page_used: Tensor, tail_used: Tensor, bias: float, preserve: bool):
    """Output ``[B, Hq, Dv]`` and mass of the tail ``[B, Hkv, T]``, one head at a time."""
    q, k, v, summary_k, summary_v, tail_k, tail_v = (x.double() for x in cover[:-1])
    group = q.shape[1] // k.shape[1]
    outs, tail_mass = torch.zeros(*q.shape[:2], v.shape[3]), torch.zeros(tail_k.shape[:3])
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            kv, query = h // group, q[b, h, 0] * SCALING
            chosen = {page for page in refined[b, kv].tolist() if page >= 0}
            tail = [slot for slot in range(tail_k.shape[2]) if tail_used[b, 0, slot]]
            shown = [page for page in range(summary_k.shape[2]) if page_used[b, 0, page]]
            weight = {("page", page): (query @ summary_k[b, kv, page] + bias).exp() for page in shown}
            weight |= {("tail", slot): (query @ tail_k[b, kv, slot]).exp() for slot in tail}
            total = sum(weight.values())
            for page in chosen:
                whole = weight.pop(("page", page))
                slots = range(page * cover.page_size, (page + 1) * cover.page_size)
                own = torch.stack([query @ k[b, kv, slot] for slot in slots]).exp()
                own = own / own.sum() * whole if preserve else own
                weight |= {("raw", slot): one for slot, one in zip(slots, own)}
            total = total if preserve else sum(weight.values())
            values = {"page": summary_v, "raw": v, "tail": tail_v}
            outs[b, h] = sum(w / total * values[kind][b, kv, place] for (kind, place), w in weight.items())
            for slot in tail:
                tail_mass[b, kv, slot] += weight["tail", slot] / total
    return outs, tail_mass


def attend(cover: Cover, refined: Tensor, page_used=None, tail_used=None, bias=0.0, preserve=False, complete=False):
    scores = ops.score_cover(
        cover.q,
        cover.summary_k,
        cover.tail_k,
        scaling=SCALING,
        summary_used=page_used,
        tail_used=tail_used,
        bias=bias,
    )
    raw_k, raw_v = (ops.gather_pages(x, refined, cover.page_size) for x in (cover.k, cover.v))
    return ops.attend_cover(
        scores, cover.summary_v, cover.tail_v, raw_k, raw_v, refined, preserve=preserve, complete=complete
    )


def lengths_mask(counts: list[int], n: int) -> Tensor:
    return (torch.arange(n) < torch.tensor(counts)[:, None])[:, None]


@given(sizes, st.sampled_from(LAYOUTS), st.booleans(), st.sampled_from([0.0, 1.4]), st.data())
@settings(max_examples=50)
def test_cover_of_rows_with_their_own_pages_and_tails(size, layout, preserve, bias, data):
    cover = draw_cover(*size, layout=layout)
    batch, pages, tail = cover.q.shape[0], cover.summary_k.shape[2], cover.tail_k.shape[2]
    page_used = lengths_mask(data.draw(st.lists(st.integers(0, pages), min_size=batch, max_size=batch)), pages)
    tail_used = lengths_mask(data.draw(st.lists(st.integers(1, tail), min_size=batch, max_size=batch)), tail)
    refined = draw_refined(cover, data.draw(st.integers(1, pages)), page_used)
    attended = attend(cover, refined, page_used, tail_used, bias, preserve)
    out, tail_mass = written_out(cover, refined, page_used, tail_used, bias, preserve)
    assert_close(attended.out[:, :, 0], out)
    assert_close(attended.tail_mass, tail_mass)


@given(sizes, st.booleans(), st.data())
@settings(max_examples=30)
def test_cover_of_equal_rows_needs_no_masks(size, preserve, data):
    cover = draw_cover(*size)
    batch, pages, tail = cover.q.shape[0], cover.summary_k.shape[2], cover.tail_k.shape[2]
    everything = lengths_mask([pages] * batch, pages), lengths_mask([tail] * batch, tail)
    refined = draw_refined(cover, data.draw(st.integers(1, pages)), everything[0])
    attended = attend(cover, refined, preserve=preserve, complete=True)
    out, tail_mass = written_out(cover, refined, *everything, 0.0, preserve)
    assert_close(attended.out[:, :, 0], out)
    assert_close(attended.tail_mass, tail_mass)


def test_refining_every_page_exactly_is_dense_attention():
    cover = draw_cover(2, 2, 3, 5, 4, 6, 16, 24)
    every = torch.arange(5).expand(2, 2, 5)
    dense = naive(cover.q, torch.cat([cover.k, cover.tail_k], 2), torch.cat([cover.v, cover.tail_v], 2), SCALING)
    assert_close(attend(cover, every, complete=True).out, dense.out)


@pytest.mark.parametrize("preserve", [False, True])
def test_pages_that_are_not_refined_are_not_read(preserve):
    cover = draw_cover(2, 2, 3, 5, 4, 6, 16, 16)
    refined = torch.tensor([[[1, 3, -1], [0, -1, -1]], [[-1, -1, -1], [2, 3, 4]]])
    before = attend(cover, refined, preserve=preserve).out
    k, v = cover.k.clone(), cover.v.clone()
    for b in range(2):
        for h in range(2):
            for page in set(range(5)) - set(refined[b, h].tolist()):
                k[b, h, 4 * page : 4 * page + 4], v[b, h, 4 * page : 4 * page + 4] = float("nan"), float("nan")
    assert torch.equal(attend(cover._replace(k=k, v=v), refined, preserve=preserve).out, before)


def test_masses_of_the_pages():
    cover = draw_cover(2, 2, 3, 5, 4, 6, 16, 16)
    page_used, tail_used = lengths_mask([5, 3], 5), lengths_mask([2, 6], 6)
    scores = ops.score_cover(
        cover.q, cover.summary_k, cover.tail_k, scaling=SCALING, summary_used=page_used, tail_used=tail_used, bias=1.4
    )
    keys = torch.cat([cover.summary_k, cover.tail_k], 2).double().repeat_interleave(3, 1)
    plain = (cover.q.double() @ keys.transpose(-1, -2) * SCALING)[:, :, 0]
    plain[..., :5] += 1.4
    plain = plain.masked_fill(~torch.cat([page_used, tail_used], -1), float("-inf")).softmax(-1)
    assert_close(scores.page_mass, plain.unflatten(1, (2, 3)).mean(2)[..., :5])
    assert (scores.page_mass[1, :, 3:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("preserve", [False, True])
def test_cover_in_half_precision(dtype, preserve):
    cover = draw_cover(2, 2, 3, 5, 4, 6, 16, 16, dtype=dtype)
    refined = draw_refined(cover, 2, torch.ones(2, 1, 5, dtype=torch.bool))
    attended = attend(cover, refined, preserve=preserve, complete=True)
    everything = torch.ones(2, 1, 5, dtype=torch.bool), torch.ones(2, 1, 6, dtype=torch.bool)
    out, tail_mass = written_out(cover, refined, *everything, 0.0, preserve)
    assert attended.out.dtype == dtype
    assert attended.tail_mass.dtype == torch.float32
    assert_close(attended.out[:, :, 0], out, dtype)
    assert_close(attended.tail_mass, tail_mass, dtype)


def test_a_step_over_a_cover_copies_no_cache():
    cover = draw_cover(1, 2, 3, 256, 16, 128, 16, 16, layout="slots")
    with LargestTensor() as largest:
        attend(cover, torch.tensor([[[3, 70, 200], [0, 1, 255]]]), complete=True)
    assert largest.bytes < cover.k.nbytes / 8, largest.what

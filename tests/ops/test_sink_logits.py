"""Learned sinks, a logit of each head without a value: every reference against a softmax written out."""

import pytest
import torch

from foveate import ops
from foveate.ops import Logits, dispatch
from foveate.ops.attend import decode, dense, pooled, tiles, window
from foveate.ops.score import pooled as score
from foveate.ops.score.reference import query_mass
from tests.helpers import Shape, assert_close, problem
from tests.problems import listed

SHAPE = Shape(batch=2, kv_heads=2, group=3, queries=7, offset=20, dim=16, value_dim=12)
SCALING = 0.3


@pytest.fixture
def sinks():
    return 2 * torch.randn(6, generator=torch.Generator().manual_seed(3))


def written_out(q, k, sinks, mask):
    """Attention weights ``[B, Hq, Lq, Lk]`` in fp64, and their log-sum-exp; ``mask`` bool, broadcast to the weights."""
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = (q.double() @ keys.transpose(-1, -2) * SCALING).masked_fill(~mask, float("-inf"))
    column = sinks.double()[None, :, None, None].expand(*logits.shape[:3], 1)
    every = torch.cat([logits, column], -1)
    return every.softmax(-1)[..., :-1], every.logsumexp(-1)


def output(weights, v):
    return weights @ v.double().repeat_interleave(weights.shape[1] // v.shape[1], 1)


def by_kv_head(x):
    return x.unflatten(1, (2, 3))


def causal(shape):
    return torch.arange(shape.keys) <= torch.arange(shape.offset, shape.keys)[:, None]


def test_attention_and_its_mass(sinks):
    q, k, v = problem(SHAPE)
    mask = torch.rand(2, 1, 7, SHAPE.keys, generator=torch.manual_seed(0)) < 0.6
    mask[0, :, 3] = False  # this query sees nothing but the sinks
    found = decode.attend(q, k, v, logits=Logits(SCALING, sinks), mask=mask, need_lse=True, need_mass=True)
    weights, lse = written_out(q, k, sinks, mask)
    assert_close(found.out, output(weights, v))
    assert_close(found.lse, lse)
    assert_close(found.mass, by_kv_head(weights.sum(2)).sum(2))
    assert not found.out[0, :, 3].any()
    alone = decode.attend(q, k, v, logits=Logits(SCALING, sinks), mask=mask)
    assert torch.equal(alone.out, found.out)
    assert alone.lse is None


@pytest.mark.parametrize("offset", [0, 20])
@pytest.mark.parametrize("one", [ops, dense])
def test_causal_attention_with_gradients(sinks, offset, one):
    shape = SHAPE._replace(offset=offset)
    q, k, v = problem(shape, extra=3)
    q.requires_grad_()
    sinks.requires_grad_()
    found = one.attend_causal(q, k, v, logits=Logits(SCALING, sinks), offset=offset, need_lse=True)
    weights, lse = written_out(q, k[:, :, : shape.keys], sinks, causal(shape))
    expected = output(weights, v[:, :, : shape.keys])
    assert_close(found.out, expected)
    assert_close(found.lse, lse)
    given = torch.autograd.grad(found.out.square().sum(), (q, sinks))
    wanted = torch.autograd.grad(expected.square().sum(), (q, sinks))
    for one, other in zip(given, wanted):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_windows(sinks):
    q, k, v = problem(SHAPE)
    position = torch.arange(SHAPE.offset, SHAPE.keys)
    lower = position - 5
    found = window.attend_window(q, k, v, logits=Logits(SCALING, sinks), lower=lower, sinks=2, offset=20)
    keys = torch.arange(SHAPE.keys)
    mask = causal(SHAPE) & ((keys >= lower[:, None]) | (keys < 2))
    assert_close(found.out, output(written_out(q, k, sinks, mask)[0], v))


def test_chosen_keys_and_pages(sinks):
    shape = SHAPE._replace(queries=1)
    q, k, v = problem(shape)
    indices = torch.tensor([[[3, 0, -1, 9], [1, 2, -1, -1]], [[5, 6, 7, 8], [-1, -1, -1, -1]]])
    mask = torch.zeros(2, 2, shape.keys + 1, dtype=torch.bool).scatter_(2, indices % (shape.keys + 1), True)
    mask = mask[:, :, : shape.keys].repeat_interleave(3, 1)[:, :, None]
    found = decode.attend_indices(q, k, v, indices, logits=Logits(SCALING, sinks), need_lse=True, need_mass=True)
    weights, lse = written_out(q, k, sinks, mask)
    assert_close(found.out, output(weights, v))
    assert_close(found.lse, lse)
    mass = by_kv_head(weights[:, :, 0]).sum(2).gather(2, indices.clamp_min(0)).masked_fill(indices < 0, 0.0)
    assert_close(found.mass, mass)
    pages = torch.tensor([[[2, -1], [0, 1]], [[3, 0], [-1, -1]]])
    mask = torch.stack([torch.arange(shape.keys) // 4 == page for page in pages.flatten().tolist()])
    mask = mask.view(2, 2, 2, -1).any(2).repeat_interleave(3, 1)[:, :, None]
    found = decode.attend_pages(q, k, v, pages, 4, logits=Logits(SCALING, sinks))
    assert_close(found.out, output(written_out(q, k, sinks, mask)[0], v))


@pytest.mark.parametrize("pool", ["kv_head", "layer"])
@pytest.mark.parametrize("pooling", ["post_softmax", "sqrt", "max"])
def test_pooled_mass(sinks, pooling, pool):
    q, k, v = problem(SHAPE._replace(queries=1))
    how = {"logits": Logits(SCALING, sinks), "pooling": pooling, "pool": pool}
    weights, lse = written_out(q, k, sinks, torch.ones(k.shape[2], dtype=torch.bool))
    mass = weights[:, :, 0].sqrt() if pooling == "sqrt" else weights[:, :, 0]
    mass = by_kv_head(mass) if pool == "kv_head" else mass[:, None]
    expected = mass.amax(2) if pooling == "max" else mass.mean(2)
    assert_close(score.pooled_mass(q, k, **how), expected)
    found = pooled.attend_pooled(q, k, v, **how)
    assert_close(found.mass, expected)
    assert_close(found.out, output(weights, v))
    assert_close(found.lse, lse)


def test_tiles(sinks):
    """Over all keys before each tile: causal attention. Over some: what it is without sinks, times their share."""
    shape = SHAPE._replace(queries=12)
    q, k, v = problem(shape)
    how, beside = {"tile": 8, "offset": 20}, Logits(SCALING, sinks)
    before = torch.stack([torch.arange(24).masked_fill(torch.arange(24) >= start, -1) for start in (16, 24)])
    found = tiles.attend_tiles(q, k, v, **listed(before.expand(2, 2, 2, 24)), logits=beside, **how)
    weights, _ = written_out(q, k, sinks, causal(shape))
    assert_close(found.out, output(weights, v))
    some = listed(before.masked_fill(torch.arange(24) % 3 == 0, -1).expand(2, 2, 2, 24))
    with_sinks = tiles.attend_tiles(q, k, v, **some, logits=beside, **how).out
    low = tiles.attend_tiles(q, k, v, **some, logits=Logits(SCALING, torch.full_like(sinks, -1e4)), **how).out
    assert_close(low, tiles.attend_tiles(q, k, v, **some, logits=Logits(SCALING), **how).out)
    share = (with_sinks / low).mean(-1)  # one factor for all dims of a query
    torch.testing.assert_close(with_sinks, low * share[..., None], rtol=1e-3, atol=1e-4)
    assert bool(((share > 0) & (share < 1)).all())


def test_mass_of_a_few_queries(sinks):
    q, k, _ = problem(SHAPE)
    weights, _ = written_out(q, k, sinks, causal(SHAPE))
    assert_close(query_mass(q, k, logits=Logits(SCALING, sinks), offset=20), weights.sum(2))


def test_sinks_of_other_heads(sinks):
    q, k, v = problem(SHAPE)
    for call in (ops.attend, ops.attend_causal):
        with pytest.raises(ValueError, match="one logit for each of 6 heads, not \\(5,\\)"):
            call(q, k, v, logits=Logits(SCALING, sinks[:5]))


def test_whether_a_kernel_may_run_is_asked_of_the_sinks_too(monkeypatch):
    """Sinks on another device, or that learn, are for the reference."""
    asked, sinks = [], torch.zeros(4)
    monkeypatch.setattr(dispatch, "use_kernel", lambda *tensors: asked.extend(tensors))
    q, k = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 9, 8)
    ops.attend_pooled(q, k, k, logits=Logits(0.3, sinks))
    assert any(one is sinks for one in asked)

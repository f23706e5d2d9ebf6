"""Capped logits, ``softcap * tanh(logit / softcap)``: every reference against a softmax written out."""

import pytest
import torch

from foveate import ops
from foveate.ops import Logits
from foveate.ops.attend import attend_selected, decode, dense, pooled, tiles, window
from foveate.ops.score import pooled as score
from foveate.ops.score import reference as masses
from tests.helpers import LargestTensor, Shape, assert_close, problem
from tests.problems import listed

SHAPE = Shape(batch=2, kv_heads=2, group=3, queries=7, offset=20, dim=16, value_dim=12)
SCALING = 1.5
CAPS = [0.7, 5.0, 50.0]
each_cap = pytest.mark.parametrize("softcap", CAPS)


@pytest.fixture
def sinks():
    return 2 * torch.randn(6, generator=torch.Generator().manual_seed(3))


def capped_logits(q, k, softcap):
    """``[B, Hq, Lq, Lk]`` in fp64."""
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    return softcap * torch.tanh(q.double() @ keys.transpose(-1, -2) * SCALING / softcap)


def written_out(q, k, softcap, mask, sinks=None):
    """Attention weights ``[B, Hq, Lq, Lk]``, and their log-sum-exp; ``mask`` bool, broadcast to the weights."""
    every = capped_logits(q, k, softcap).masked_fill(~mask, float("-inf"))
    if sinks is not None:
        every = torch.cat([every, sinks.double()[None, :, None, None].expand(*every.shape[:3], 1)], -1)
    return every.softmax(-1)[..., : k.shape[2]], every.logsumexp(-1)


def output(weights, v):
    return weights @ v.double().repeat_interleave(weights.shape[1] // v.shape[1], 1)


def by_kv_head(x):
    return x.unflatten(1, (2, 3))


def causal(shape):
    return torch.arange(shape.keys) <= torch.arange(shape.offset, shape.keys)[:, None]


@each_cap
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_and_its_mass(softcap, with_sinks, sinks):
    """Sinks are not capped."""
    q, k, v = problem(SHAPE)
    mask = torch.rand(2, 1, 7, SHAPE.keys, generator=torch.manual_seed(0)) < 0.6
    sinks = sinks if with_sinks else None
    how = {"logits": Logits(SCALING, sinks, softcap), "mask": mask}
    found = decode.attend(q, k, v, need_lse=True, need_mass=True, **how)
    weights, lse = written_out(q, k, softcap, mask, sinks)
    assert_close(found.out, output(weights, v))
    assert_close(found.lse, lse)
    assert_close(found.mass, by_kv_head(weights.sum(2)).sum(2))
    assert torch.equal(decode.attend(q, k, v, **how).out, found.out)


@each_cap
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("offset", [0, 20])
@pytest.mark.parametrize("one", [ops, dense])
def test_causal_attention_with_gradients(softcap, with_sinks, offset, one, sinks):
    shape = SHAPE._replace(offset=offset)
    q, k, v = problem(shape, extra=3)
    q.requires_grad_()
    k = k.nan_to_num(0.0).requires_grad_()
    sinks = sinks if with_sinks else None
    how = {"logits": Logits(SCALING, sinks, softcap), "offset": offset}
    found = one.attend_causal(q, k, v, need_lse=True, **how)
    weights, lse = written_out(q, k[:, :, : shape.keys], softcap, causal(shape), sinks)
    expected = output(weights, v[:, :, : shape.keys])
    assert_close(found.out, expected)
    assert_close(found.lse, lse)
    given = torch.autograd.grad(found.out.square().sum(), (q, k))
    wanted = torch.autograd.grad(expected.square().sum(), (q, k))
    for one, other in zip(given, wanted):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_long_prompts_have_no_matrix(monkeypatch):
    monkeypatch.setattr("foveate.ops._math.SCRATCH_BYTES", 1 << 16)
    length = 1024
    q, k, v = (torch.randn(1, heads, length, 8) for heads in (4, 2, 2))
    with LargestTensor() as largest:
        dense.attend_causal(q, k, v, logits=Logits(SCALING, softcap=5.0))
    assert largest.bytes <= 4 << 16


def test_windows(sinks):
    q, k, v = problem(SHAPE)
    position, keys = torch.arange(SHAPE.offset, SHAPE.keys), torch.arange(SHAPE.keys)
    lower = position - 5
    how = {"lower": lower, "sinks": 2, "offset": 20}
    mask = causal(SHAPE) & ((keys >= lower[:, None]) | (keys < 2))
    for learned in (None, sinks):
        found = window.attend_window(q, k, v, logits=Logits(SCALING, learned, 5.0), **how)
        assert_close(found.out, output(written_out(q, k, 5.0, mask, learned)[0], v))


@each_cap
def test_chosen_keys_and_pages(softcap):
    shape = SHAPE._replace(queries=1)
    q, k, v = problem(shape)
    indices = torch.tensor([[[3, 0, -1, 9], [1, 2, -1, -1]], [[5, 6, 7, 8], [4, -1, -1, -1]]])
    mask = torch.zeros(2, 2, shape.keys + 1, dtype=torch.bool).scatter_(2, indices % (shape.keys + 1), True)
    mask = mask[:, :, : shape.keys].repeat_interleave(3, 1)[:, :, None]
    found = decode.attend_indices(
        q, k, v, indices, logits=Logits(SCALING, softcap=softcap), need_lse=True, need_mass=True
    )
    weights, lse = written_out(q, k, softcap, mask)
    assert_close(found.out, output(weights, v))
    assert_close(found.lse, lse)
    mass = by_kv_head(weights[:, :, 0]).sum(2).gather(2, indices.clamp_min(0)).masked_fill(indices < 0, 0.0)
    assert_close(found.mass, mass)
    pages = torch.tensor([[[2, -1], [0, 1]], [[3, 0], [4, -1]]])
    mask = torch.stack([torch.arange(shape.keys) // 4 == page for page in pages.flatten().tolist()])
    mask = mask.view(2, 2, 2, -1).any(2).repeat_interleave(3, 1)[:, :, None]
    found = decode.attend_pages(q, k, v, pages, 4, logits=Logits(SCALING, softcap=softcap))
    assert_close(found.out, output(written_out(q, k, softcap, mask)[0], v))


@pytest.mark.parametrize("pool", ["kv_head", "layer"])
@pytest.mark.parametrize("pooling", ["post_softmax", "sqrt", "max"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_pooled_mass(pooling, pool, with_sinks, sinks):
    q, k, v = problem(SHAPE._replace(queries=1))
    sinks = sinks if with_sinks else None
    how = {"logits": Logits(SCALING, sinks, 5.0), "pooling": pooling, "pool": pool}
    weights, lse = written_out(q, k, 5.0, torch.ones(k.shape[2], dtype=torch.bool), sinks)
    mass = weights[:, :, 0].sqrt() if pooling == "sqrt" else weights[:, :, 0]
    mass = by_kv_head(mass) if pool == "kv_head" else mass[:, None]
    expected = mass.amax(2) if pooling == "max" else mass.mean(2)
    assert_close(score.pooled_mass(q, k, **how), expected)
    found = pooled.attend_pooled(q, k, v, **how)
    assert_close(found.mass, expected)
    assert_close(found.out, output(weights, v))
    assert_close(found.lse, lse)


@each_cap
def test_tiles(softcap):
    """Over all keys before each tile, causal attention; over some, attention among these and the tile's own."""
    shape = SHAPE._replace(queries=12)
    q, k, v = problem(shape)
    how = {"tile": 8, "logits": Logits(SCALING, softcap=softcap), "offset": 20}
    before = torch.stack([torch.arange(24).masked_fill(torch.arange(24) >= start, -1) for start in (16, 24)])
    found = tiles.attend_tiles(q, k, v, **listed(before.expand(2, 2, 2, 24)), **how)
    assert_close(found.out, output(written_out(q, k, softcap, causal(shape))[0], v))
    some = before.masked_fill(torch.arange(24) % 3 == 0, -1)
    found = tiles.attend_tiles(q, k, v, **listed(some.expand(2, 2, 2, 24)), **how).out
    for t, (start, queries) in enumerate(((16, slice(0, 4)), (24, slice(4, 12)))):
        chosen = some[t][some[t] >= 0]
        own = torch.arange(start, min(start + 8, shape.keys))
        of = [x[:, :, torch.cat([chosen, own])] for x in (k, v)]
        logits = capped_logits(q[:, :, queries], of[0], softcap)
        seen = torch.cat([chosen, own]) <= torch.arange(20, shape.keys)[queries, None]
        weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
        assert_close(found[:, :, queries], output(weights, of[1]))


@each_cap
def test_masses_of_keys(softcap):
    q, k, _ = problem(SHAPE)
    weights, lse = written_out(q, k, softcap, causal(SHAPE))
    how = {"logits": Logits(SCALING, softcap=softcap), "offset": 20}
    assert_close(masses.column_mass(q, k, lse.float(), **how), by_kv_head(weights.sum(2)).sum(2))
    assert_close(masses.query_mass(q, k, **how), weights.sum(2))
    for first, mass in masses.tile_mass(q, k, lse.float(), tile=8, **how):
        assert first == 2  # queries 20 .. 26: the tiles from 16 and from 24 on
        for t, (start, queries) in enumerate(((16, slice(0, 4)), (24, slice(4, 7)))):
            expected = by_kv_head(weights[:, :, queries, :start].mean(2)).mean(2)
            assert_close(mass[:, :, t, :start], expected)


def test_half_the_mass_to_the_base():
    """Square roots of attention, of half the scaling under half the cap."""
    q, k, _ = problem(SHAPE)
    weights, lse = written_out(q, k, 5.0, causal(SHAPE))
    how = {"logits": Logits(SCALING / 2, softcap=2.5), "offset": 20}
    ((_, mass),) = masses.tile_mass(q, k, lse.float() / 2, tile=8, **how)
    assert_close(mass[:, :, 1, :24], by_kv_head(weights[:, :, 4:, :24].sqrt().mean(2)).mean(2))


@pytest.mark.parametrize("softcap", [0, 0.0, -5.0, float("inf"), float("nan"), True, "5"])
def test_caps_that_are_none(softcap):
    q, k, v = problem(SHAPE)
    for call in (ops.attend, ops.attend_causal):
        with pytest.raises(ValueError, match=f"softcap must be a finite number above 0, or None, not {softcap!r}"):
            call(q, k, v, logits=Logits(SCALING, softcap=softcap))
    lse, rows = torch.zeros(q.shape[:3]), ops.fold_group(q, k.shape[1])
    for call in (ops.column_mass, lambda *given, logits: next(ops.tile_mass(*given, tile=8, offset=20, logits=logits))):
        with pytest.raises(ValueError, match="softcap must be a finite number above 0"):
            call(q, k, lse, logits=Logits(SCALING, softcap=softcap))
    with pytest.raises(ValueError, match="softcap must be a finite number above 0"):
        ops.key_logits(rows, k, Logits(SCALING, softcap=softcap))


def test_what_cannot_cap_has_no_such_argument():
    q, k, v = problem(SHAPE)
    with pytest.raises(TypeError, match="logits"):
        attend_selected(q, k, v, torch.zeros(2, 7, 3, dtype=torch.int64), logits=Logits(SCALING, softcap=5.0))

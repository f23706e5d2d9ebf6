"""Capped logits, ``softcap * tanh(logit / softcap)``, and learned sinks, a logit of each head without a value: every
reference against a softmax written out."""

import dataclasses

import pytest
import torch
from torch._subclasses import FakeTensorMode

from foveate import ops
from foveate.ops import KV, Logits, dispatch
from foveate.ops.attend import attend_selected, decode, dense, pooled, tiles, window
from foveate.ops.score import pooled as score
from foveate.ops.score import reference as masses
from tests.helpers import LargestTensor, Shape, assert_close, problem
from tests.problems import listed

SHAPE = Shape(batch=2, kv_heads=2, group=3, queries=7, offset=20, dim=16, value_dim=12)
SCALING = 1.5
"""Large, so that caps are reached; beside sinks alone a fifth, so that they matter."""
CAPS = [0.7, 5.0, 50.0]
each_cap = pytest.mark.parametrize("softcap", CAPS)
KINDS = [(None, True), *((cap, with_sinks) for cap in CAPS for with_sinks in (False, True))]
each_kind = pytest.mark.parametrize(("softcap", "sinks"), KINDS, indirect=["sinks"])


@pytest.fixture
def sinks(request):
    """Of six heads, or None where the parameter is False."""
    if getattr(request, "param", True):
        return 2 * torch.randn(6, generator=torch.Generator().manual_seed(3))
    return None


def logits_of(sinks, softcap):
    return Logits(SCALING / 5 if softcap is None else SCALING, sinks, softcap)


def capped_logits(q, k, softcap):
    """``[B, Hq, Lq, Lk]`` in fp64."""
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = q.double() @ keys.transpose(-1, -2) * logits_of(None, softcap).scaling
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


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


@each_kind
def test_attention_and_its_mass(softcap, sinks):
    """Sinks are not capped."""
    q, k, v = problem(SHAPE)
    mask = torch.rand(2, 1, 7, SHAPE.keys, generator=torch.manual_seed(0)) < 0.6
    mask[0, :, 3] &= sinks is None  # else this query sees nothing but the sinks
    how = {"logits": logits_of(sinks, softcap), "mask": mask}
    found = decode.attend(q, KV(k, v), need_lse=True, need_mass=True, **how)
    weights, lse = written_out(q, k, softcap, mask, sinks)
    assert_close(found.out, output(weights, v))
    assert_close(found.lse, lse)
    assert_close(found.mass, by_kv_head(weights.sum(2)).sum(2))
    assert found.out[0, :, 3].any() == (sinks is None)
    alone = decode.attend(q, KV(k, v), **how)
    assert torch.equal(alone.out, found.out)
    assert alone.lse is None


@each_kind
@pytest.mark.parametrize("offset", [0, 20])
@pytest.mark.parametrize("one", [ops, dense])
def test_causal_attention_with_gradients(softcap, offset, one, sinks):
    shape = SHAPE._replace(offset=offset)
    q, k, v = problem(shape, extra=3)
    k = k if softcap is None else k.nan_to_num(0.0)
    learned = [x for x in (q, None if softcap is None else k, sinks) if x is not None]
    for x in learned:
        x.requires_grad_()
    found = one.attend_causal(q, KV(k, v), need_lse=True, logits=logits_of(sinks, softcap), offset=offset)
    weights, lse = written_out(q, k[:, :, : shape.keys], softcap, causal(shape), sinks)
    expected = output(weights, v[:, :, : shape.keys])
    assert_close(found.out, expected)
    assert_close(found.lse, lse)
    given = torch.autograd.grad(found.out.square().sum(), learned)
    wanted = torch.autograd.grad(expected.square().sum(), learned)
    for one, other in zip(given, wanted):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_long_prompts_have_no_matrix(monkeypatch):
    monkeypatch.setattr("foveate.ops._math.SCRATCH_BYTES", 1 << 16)
    length = 1024
    q, k, v = (torch.randn(1, heads, length, 8) for heads in (4, 2, 2))
    with LargestTensor() as largest:
        dense.attend_causal(q, KV(k, v), logits=Logits(SCALING, softcap=5.0))
    assert largest.bytes <= 4 << 16


@each_kind
def test_windows(softcap, sinks):
    q, k, v = problem(SHAPE)
    position, keys = torch.arange(SHAPE.offset, SHAPE.keys), torch.arange(SHAPE.keys)
    lower = position - 5
    mask = causal(SHAPE) & ((keys >= lower[:, None]) | (keys < 2))
    logits = logits_of(sinks, softcap)
    found = window.attend_window(q, KV(k, v), logits=logits, lower=lower, sinks=2, offset=20)
    assert_close(found.out, output(written_out(q, k, softcap, mask, sinks)[0], v))


@each_kind
def test_chosen_keys_and_pages(softcap, sinks):
    shape = SHAPE._replace(queries=1)
    q, k, v = problem(shape)
    one, logits = 4 if sinks is None else -1, logits_of(sinks, softcap)  # or nothing but the sinks
    indices = torch.tensor([[[3, 0, -1, 9], [1, 2, -1, -1]], [[5, 6, 7, 8], [one, -1, -1, -1]]])
    mask = torch.zeros(2, 2, shape.keys + 1, dtype=torch.bool).scatter_(2, indices % (shape.keys + 1), True)
    mask = mask[:, :, : shape.keys].repeat_interleave(3, 1)[:, :, None]
    found = decode.attend_indices(q, KV(k, v), indices, logits=logits, need_lse=True, need_mass=True)
    weights, lse = written_out(q, k, softcap, mask, sinks)
    assert_close(found.out, output(weights, v))
    assert_close(found.lse, lse)
    mass = by_kv_head(weights[:, :, 0]).sum(2).gather(2, indices.clamp_min(0)).masked_fill(indices < 0, 0.0)
    assert_close(found.mass, mass)
    pages = torch.tensor([[[2, -1], [0, 1]], [[3, 0], [one, -1]]])
    mask = torch.stack([torch.arange(shape.keys) // 4 == page for page in pages.flatten().tolist()])
    mask = mask.view(2, 2, 2, -1).any(2).repeat_interleave(3, 1)[:, :, None]
    found = decode.attend_pages(q, KV(k, v), pages, 4, logits=logits)
    assert_close(found.out, output(written_out(q, k, softcap, mask, sinks)[0], v))


@pytest.mark.parametrize("pool", ["kv_head", "layer"])
@pytest.mark.parametrize("pooling", ["post_softmax", "sqrt", "max"])
@pytest.mark.parametrize(("softcap", "sinks"), [(5.0, False), (5.0, True), (None, True)], indirect=["sinks"])
def test_pooled_mass(pooling, pool, softcap, sinks):
    q, k, v = problem(SHAPE._replace(queries=1))
    how = {"logits": logits_of(sinks, softcap), "pooling": pooling, "pool": pool}
    weights, lse = written_out(q, k, softcap, torch.ones(k.shape[2], dtype=torch.bool), sinks)
    mass = weights[:, :, 0].sqrt() if pooling == "sqrt" else weights[:, :, 0]
    mass = by_kv_head(mass) if pool == "kv_head" else mass[:, None]
    expected = mass.amax(2) if pooling == "max" else mass.mean(2)
    assert_close(score.pooled_mass(q, KV(k), **how), expected)
    found = pooled.attend_pooled(q, KV(k, v), **how)
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
    found = tiles.attend_tiles(q, KV(k, v), **listed(before.expand(2, 2, 2, 24)), **how)
    assert_close(found.out, output(written_out(q, k, softcap, causal(shape))[0], v))
    some = before.masked_fill(torch.arange(24) % 3 == 0, -1)
    found = tiles.attend_tiles(q, KV(k, v), **listed(some.expand(2, 2, 2, 24)), **how).out
    for t, (start, queries) in enumerate(((16, slice(0, 4)), (24, slice(4, 12)))):
        chosen = some[t][some[t] >= 0]
        own = torch.arange(start, min(start + 8, shape.keys))
        of = [x[:, :, torch.cat([chosen, own])] for x in (k, v)]
        logits = capped_logits(q[:, :, queries], of[0], softcap)
        seen = torch.cat([chosen, own]) <= torch.arange(20, shape.keys)[queries, None]
        weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
        assert_close(found[:, :, queries], output(weights, of[1]))


def test_tiles_beside_sinks(sinks):
    """Over all keys before each tile: causal attention. Over some: what it is without sinks, times their share."""
    shape = SHAPE._replace(queries=12)
    q, k, v = problem(shape)
    how, beside = {"tile": 8, "offset": 20}, logits_of(sinks, None)
    before = torch.stack([torch.arange(24).masked_fill(torch.arange(24) >= start, -1) for start in (16, 24)])
    found = tiles.attend_tiles(q, KV(k, v), **listed(before.expand(2, 2, 2, 24)), logits=beside, **how)
    weights, _ = written_out(q, k, None, causal(shape), sinks)
    assert_close(found.out, output(weights, v))
    some = listed(before.masked_fill(torch.arange(24) % 3 == 0, -1).expand(2, 2, 2, 24))
    with_sinks = tiles.attend_tiles(q, KV(k, v), **some, logits=beside, **how).out
    low = tiles.attend_tiles(q, KV(k, v), **some, logits=logits_of(torch.full_like(sinks, -1e4), None), **how).out
    assert_close(low, tiles.attend_tiles(q, KV(k, v), **some, logits=logits_of(None, None), **how).out)
    share = (with_sinks / low).mean(-1)  # one factor for all dims of a query
    torch.testing.assert_close(with_sinks, low * share[..., None], rtol=1e-3, atol=1e-4)
    assert bool(((share > 0) & (share < 1)).all())
    assert_close(masses.query_mass(q, KV(k[:, :, : shape.keys]), logits=beside, offset=20), weights.sum(2))


@each_cap
def test_masses_of_keys(softcap):
    q, k, _ = problem(SHAPE)
    weights, lse = written_out(q, k, softcap, causal(SHAPE))
    how = {"logits": Logits(SCALING, softcap=softcap), "offset": 20}
    assert_close(masses.column_mass(q, KV(k), lse.float(), **how), by_kv_head(weights.sum(2)).sum(2))
    assert_close(masses.query_mass(q, KV(k), **how), weights.sum(2))
    for first, mass in masses.tile_mass(q, KV(k), lse.float(), tile=8, **how):
        assert first == 2  # queries 20 .. 26: the tiles from 16 and from 24 on
        for t, (start, queries) in enumerate(((16, slice(0, 4)), (24, slice(4, 7)))):
            expected = by_kv_head(weights[:, :, queries, :start].mean(2)).mean(2)
            assert_close(mass[:, :, t, :start], expected)


def test_half_the_mass_to_the_base():
    """Square roots of attention, of half the scaling under half the cap."""
    q, k, _ = problem(SHAPE)
    weights, lse = written_out(q, k, 5.0, causal(SHAPE))
    how = {"logits": Logits(SCALING / 2, softcap=2.5), "offset": 20}
    ((_, mass),) = masses.tile_mass(q, KV(k), lse.float() / 2, tile=8, **how)
    assert_close(mass[:, :, 1, :24], by_kv_head(weights[:, :, 4:, :24].sqrt().mean(2)).mean(2))


@pytest.mark.parametrize("softcap", [0, 0.0, -5.0, float("inf"), float("nan"), True, "5"])
def test_caps_that_are_none(softcap):
    """No verb sees such a cap."""
    with pytest.raises(ValueError, match=f"softcap must be a finite number above 0, or None, not {softcap!r}"):
        Logits(SCALING, softcap=softcap)
    with pytest.raises(ValueError, match="softcap must be a finite number above 0"):
        dataclasses.replace(Logits(SCALING), softcap=softcap)


def test_what_cannot_cap_has_no_such_argument():
    q, k, v = problem(SHAPE)
    with pytest.raises(TypeError, match="logits"):
        attend_selected(q, KV(k, v), torch.zeros(2, 7, 3, dtype=torch.int64), logits=Logits(SCALING, softcap=5.0))


def test_sinks_of_other_heads(sinks):
    q, k, v = problem(SHAPE)
    for call in (ops.attend, ops.attend_causal):
        with pytest.raises(ValueError, match="one logit for each of 6 heads, not \\(5,\\)"):
            call(q, KV(k, v), logits=Logits(SCALING, sinks[:5]))


def test_whether_a_kernel_may_run_is_asked_of_the_operands_too(monkeypatch):
    """Keys, lengths and sinks on another device, or that learn, are for the reference."""
    monkeypatch.setattr(dispatch, "kernels_wanted", lambda: True)
    monkeypatch.setattr(dispatch, "_unusable", lambda device: "")
    with FakeTensorMode():
        q, k = torch.randn(1, 4, 1, 8, device="cuda:0"), torch.randn(1, 2, 9, 8, device="cuda:0")
        lengths, sinks = torch.zeros(1, dtype=torch.int64, device="cuda:0"), torch.zeros(4, device="cuda:0")
        assert dispatch.use_kernel(q, KV(k, k, lengths=lengths), Logits(0.3, sinks))
        assert not dispatch.use_kernel(q, KV(k, k, lengths=lengths), Logits(0.3, sinks.cpu()))
        assert not dispatch.use_kernel(q, KV(k, k, lengths=lengths.cpu()), Logits(0.3, sinks))
        assert not dispatch.use_kernel(q, KV(k, k.to("cuda:1")), Logits(0.3))
        assert not dispatch.use_kernel(q, KV(k, k), Logits(0.3, sinks.requires_grad_()))

"""A mean key in place of the keys that a tile has not chosen: the references against a softmax written out."""

import itertools
import math

import pytest
import torch

from foveate import ops
from foveate.ops import KV, Logits, _math
from tests.combinations import every_pair
from tests.ops.test_bits import bounds, tiles_of
from tests.problems import LargestTensor, Shape, assert_close, in_blocks, problem

SHAPE = Shape(batch=2, kv_heads=2, group=3, queries=37, offset=45, dim=16, value_dim=12)


def keys_of(chosen, row, head, t):
    """The keys of a tile, one bit after the other."""
    words = chosen.words[row, head % chosen.words.shape[1], chosen.begins[t] : chosen.begins[t + 1]].tolist()
    return [32 * j + i for j, word in enumerate(words) for i in range(32) if word >> i & 1]


def written_out(q, k, v, chosen, tile, offset, logits, heads=None, means=True):
    """Every query on its own in fp64: ``(out, lse)``."""
    out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    lse = q.new_zeros(q.shape[:3], dtype=torch.float64)
    for row, head, i in itertools.product(*map(range, q.shape[:3])):
        own, position = head // (q.shape[1] // k.shape[1]), offset + i
        t, begin = position // tile - offset // tile, position // tile * tile
        found = keys_of(chosen, row, own if heads is None else heads[own], t)
        others = sorted(set(range(begin)) - set(found))
        index = [*found, *range(begin, position + 1)]
        keys, values = k[row, own, index].double(), v[row, own, index].double()
        if means and others:
            keys, values = (
                torch.cat([x, of[row, own, others].double().mean(0, keepdim=True)])
                for x, of in ((keys, k), (values, v))
            )
        products = keys @ q[row, head, i].double() * logits.scaling
        if logits.softcap is not None:
            products = (products / logits.softcap).tanh() * logits.softcap
        if means and others:
            products[-1] += math.log(len(others))
        if logits.sinks is not None:
            products = torch.cat([products, logits.sinks[head : head + 1].double()])
        lse[row, head, i] = products.logsumexp(0)
        out[row, head, i] = products.softmax(0)[: len(values)] @ values
    return out, lse


@every_pair(
    ("tile", [1, 5, 8, 32]),
    ("share", [0.0, 0.3, 1.0]),
    ("group", [1, 3, 6]),
    ("heads", [None, [1, 1], "layer"]),
    ("sinks", [False, True]),
    ("softcap", [None, 2.0]),
    ("means", [False, True]),
    ("room", [1, 1 << 20]),
)
def test_attention_written_out(tile, share, group, heads, sinks, softcap, means, room, monkeypatch):
    shape = SHAPE._replace(group=group)
    q, k, v = problem(shape, extra=3)
    chosen, _ = tiles_of(shape, tile, share, 1 if heads == "layer" else 2)
    heads = None if heads == "layer" else heads
    logits = Logits(0.5, torch.randn(2 * group, generator=torch.manual_seed(3)) if sinks else None, softcap)
    monkeypatch.setattr(_math, "SCRATCH_BYTES", room)
    how = {
        "tile": tile,
        "offset": shape.offset,
        "logits": logits,
        "heads": None if heads is None else torch.tensor(heads),
    }
    found = ops.attend_tile_keys(q, KV(k, v), chosen, **how, with_means=means, need_lse=True)
    out, lse = written_out(q, k, v, chosen, tile, shape.offset, logits, heads, means)
    assert_close(found.out, out)
    assert_close(found.lse, lse)
    alone = ops.attend_tile_keys(q, KV(k, v), chosen, **how, with_means=means)
    assert torch.equal(alone.out, found.out)
    assert alone.lse is None


def test_all_keys_are_exact_attention_to_the_last_bit():
    q, k, v = problem(SHAPE)
    chosen, _ = tiles_of(SHAPE, 8, 1.0, 2)
    how = {"tile": 8, "logits": Logits(0.3), "offset": 45}
    found, plain = (ops.attend_tile_keys(q, KV(k, v), chosen, **how, with_means=means).out for means in (True, False))
    assert torch.equal(found, plain)


def test_keys_that_are_alike_lose_nothing():
    """Where all keys that are not chosen are one, their mean gives dense attention."""
    q, k, v = problem(SHAPE)
    k[:, :, :40], v[:, :, :40] = k[:, :, :1], v[:, :, :1]
    chosen, _ = tiles_of(SHAPE, 40, 0.0, 2)
    found = ops.attend_tile_keys(q, KV(k, v), chosen, tile=40, logits=Logits(0.3), offset=45, with_means=True).out
    first = slice(0, 80 - 45)  # of the tile that begins at 40
    assert_close(found[:, :, first], ops.attend_causal(q, KV(k, v), logits=Logits(0.3), offset=45).out[:, :, first])


def test_a_single_key_among_many_keeps_its_digits():
    """The mean of the one key that is not chosen is that key, however large the others are."""
    shape = SHAPE._replace(queries=8, offset=64, batch=1)
    _, k, v = problem(shape)
    k[:, :, :64] *= 1e6
    k[:, :, 13] /= 1e6
    begins = bounds([2])
    words = torch.full((1, 2, 2), -1, dtype=torch.int32)
    words[:, :, 0] ^= 1 << 13
    means = ops.unchosen_means(KV(k, v), words, begins, tile=8, offset=64)
    assert torch.equal(means.k[:, :, 0], k[:, :, 13])
    assert torch.equal(means.v[:, :, 0], v[:, :, 13])
    assert means.numbers.tolist() == [[[1], [1]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_means_of_blocks_and_in_double_precision(dtype):
    _, k, v = problem(SHAPE, dtype=dtype)
    chosen, _ = tiles_of(SHAPE, 8, 0.3, 2)
    found = ops.unchosen_means(KV(k, v), *chosen[:2], tile=8, offset=45)
    assert found.k.dtype == found.v.dtype == dtype
    paged = ops.unchosen_means(KV(*in_blocks(k, v, 16)), *chosen[:2], tile=8, offset=45)
    assert all(map(torch.equal, found, paged))
    for t, begin in enumerate(range(40, 82, 8)):
        others = sorted(set(range(begin)) - set(keys_of(chosen, 1, 0, t)))
        assert found.numbers[1, 0, t] == len(others)
        assert_close(found.k[1, 0, t], k[1, 0, others].mean(0))
        assert_close(found.v[1, 0, t], v[1, 0, others].mean(0))


def test_each_piece_has_the_means_of_its_tiles(monkeypatch):
    q, k, v = problem(SHAPE)
    chosen, _ = tiles_of(SHAPE, 8, 0.3, 2)
    found = []
    for room in (1, 1 << 20):
        monkeypatch.setattr(_math, "SCRATCH_BYTES", room)
        how = {"tile": 8, "logits": Logits(0.3), "offset": 45, "with_means": True, "need_lse": True}
        found.append(ops.attend_tile_keys(q, KV(k, v), chosen, **how))
    assert_close(found[0].out, found[1].out)
    assert_close(found[0].lse, found[1].lse)


def test_gradients_are_those_of_the_whole(monkeypatch):
    """In pieces of a tile: what autograd records is written over nowhere."""
    monkeypatch.setattr(_math, "SCRATCH_BYTES", 1)
    shape = SHAPE._replace(batch=1, queries=11)
    q, k, v = (x.double().requires_grad_() for x in problem(shape))
    chosen, _ = tiles_of(shape, 8, 0.3, 2)
    how = {"tile": 8, "logits": Logits(0.3), "offset": 45}
    out = ops.attend_tile_keys(q, KV(k, v), chosen, **how, with_means=True).out
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    for x, grad, place in ((q, grads[0], (0, 4, 7, 3)), (k, grads[1], (0, 1, 20, 5)), (v, grads[2], (0, 0, 3, 2))):
        moved, sums = x.detach().clone(), []
        for by in (1e-5, -1e-5):
            moved[place] = x[place].detach() + by
            given = [moved if one is x else one.detach() for one in (q, k, v)]
            sums.append(
                ops.attend_tile_keys(given[0], KV(*given[1:]), chosen, **how, with_means=True).out.square().sum()
            )
        assert float((sums[0] - sums[1]) / 2e-5) == pytest.approx(float(grad[place]), rel=1e-4, abs=1e-7)


def test_memory_of_means_is_bounded(monkeypatch):
    """No temporary grows with the prompt beyond the means themselves."""
    room = 1 << 16
    monkeypatch.setattr(_math, "SCRATCH_BYTES", room)
    for queries in (512, 1024):
        shape = SHAPE._replace(batch=1, group=1, queries=queries, offset=0, value_dim=16)
        _, k, v = problem(shape)
        chosen, _ = tiles_of(shape, 32, 0.5, 2)
        with LargestTensor() as gauge:
            ops.unchosen_means(KV(k, v), *chosen[:2], tile=32)
        assert gauge.bytes <= max(4 * room, 2 * chosen.words.nbytes), gauge.what


def test_what_does_not_fit_is_refused():
    q, k, v = problem(SHAPE)
    chosen, _ = tiles_of(SHAPE, 8, 0.3, 2)
    words, begins, how = chosen.words, chosen.begins, {"tile": 8, "offset": 45}
    for kv, given, said in (
        (KV(k), (words, begins), "without lengths"),
        (KV(k, v, lengths=torch.full((2,), 40)), (words, begins), "without lengths"),
        (KV(k, v), (words[:, :1], begins), r"words \(2, 1, 14\) .* do not fit 2 rows of 2 KV heads"),
        (KV(k, v), (words.long(), begins), "in torch.int64"),
        (KV(k[:, :, :70], v[:, :, :70]), (words, begins), "k has 70 keys, and 80 are before the last tile"),
    ):
        with pytest.raises(ValueError, match=said):
            ops.unchosen_means(kv, *given, **how)
    means = ops.unchosen_means(KV(k, v), words, begins, **how)
    out, lse = q.new_zeros(2, 6, 37, 12), torch.zeros(2, 6, 37)
    good = {"q": q, "attended_out": out, "lse": lse, "means": means}
    for name, wrong, said in (
        ("attended_out", out[..., :8], r"attended_out must be \(2, 6, 37, 12\), not \(2, 6, 37, 8\)"),
        ("lse", lse[:, :, 1:], "lse must be"),
        ("means", means._replace(k=means.k[:, :, 1:]), "means.k must be"),
        ("means", means._replace(numbers=means.numbers[:, :1]), "means.numbers must be"),
        ("q", q[:, :5], "q has 5 heads, which is not a multiple of the 2 KV heads"),
    ):
        some = good | {name: wrong}
        if name == "q":
            some |= {"attended_out": out[:, :5], "lse": lse[:, :5]}
        with pytest.raises(ValueError, match=said):
            ops.merge_means(*some.values(), tile=8, logits=Logits(0.3), offset=45)

"""Attention over selected keys, a window and sinks, against textbook attention with masks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foveate import csa
from foveate.ops import KV
from foveate.ops.attend import attend_selected
from tests.helpers import LargestTensor, Shape, assert_close, naive, problem, shapes


def selection(shape, number, heads, seed):
    """Indices ``[B, heads, Lq, K]``, -1 after and among them, and the mask ``[B, Hkv, Lq, Lk]`` that they mean."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.full((shape.batch, heads, shape.queries, number), -1)
    mask = torch.zeros(shape.batch, heads, shape.queries, shape.keys, dtype=torch.bool)
    for b in range(shape.batch):
        for h in range(heads):
            for i in range(shape.queries):
                some = torch.randperm(shape.keys, generator=generator)[: max(0, number - i % 3)]
                indices[b, h, i, : len(some)] = some
                indices[b, h, i, : i % 2] = -1
                mask[b, h, i, indices[b, h, i][indices[b, h, i] >= 0]] = True
    return indices, mask.expand(-1, shape.kv_heads, -1, -1)


@given(shapes(), st.integers(0, 1000), st.integers(0, 9), st.booleans())
@settings(max_examples=40, deadline=None)
def test_each_query_reads_what_is_selected_for_it(shape, seed, number, shared):
    q, k, v = problem(shape, seed)
    indices, mask = selection(shape, number, 1 if shared else shape.kv_heads, seed)
    found = attend_selected(q, KV(k, v), indices[:, 0] if shared else indices, scaling=0.3)
    expected = naive(q, k, v, 0.3, mask)
    assert_close(found.out, expected.out)
    assert torch.equal(found.lse.isneginf(), expected.lse.isneginf())
    assert_close(found.lse.nan_to_num(neginf=0), expected.lse.nan_to_num(neginf=0))
    unread = ~mask.any(2)[..., None]
    again = attend_selected(
        q, KV(k.masked_fill(unread, torch.nan), v.masked_fill(unread, torch.nan)), indices, scaling=0.3
    )
    assert torch.equal(again.out, found.out)


def test_blocks_change_nothing_and_bound_memory(monkeypatch):
    shape = Shape(1, 1, 4, 64, 200, 32, 32)
    q, k, v = problem(shape)
    indices, _ = selection(shape, 50, 1, 0)
    expected = attend_selected(q, KV(k, v), indices, scaling=0.3)
    monkeypatch.setattr("foveate.ops._math.SCRATCH_BYTES", 1 << 14)
    with LargestTensor() as gauge:
        found = attend_selected(q, KV(k, v), indices, scaling=0.3)
    assert_close(found.out, expected.out)
    assert gauge.bytes <= 1 << 16, gauge.what


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("size", [None, 1, 5, 100])
@pytest.mark.parametrize("offset", [0, 9])
def test_compressed_keys_a_window_and_sinks(sinks, size, offset):
    generator = torch.Generator().manual_seed(0)
    batch, heads, length, dim, compressed = 2, 6, 12, 16, 5
    q = torch.randn(batch, heads, length, dim, generator=generator)
    kv = torch.randn(batch, 1, compressed, dim, generator=generator)
    raw = torch.randn(batch, 1, offset + length, dim, generator=generator)
    logits = torch.randn(heads, generator=generator) if sinks else None
    indices = torch.stack([torch.arange(3).masked_fill(torch.arange(3) > i % 4 - 1, -1) for i in range(length)])
    window = None if size is None else csa.Window(raw, raw, size)
    found = csa.sparse_attention(
        q, kv, kv, indices.expand(batch, -1, -1), scaling=0.3, window=window, offset=offset, sinks=logits
    )
    for i in range(length):
        read = [kv[:, :, indices[i][indices[i] >= 0]]]
        if size is not None:
            read.append(raw[:, :, max(0, offset + i + 1 - size) : offset + i + 1])
        keys = torch.cat(read, 2).double().expand(-1, heads, -1, -1)
        scores = (q[:, :, i, None].double() @ keys.transpose(-1, -2))[:, :, 0] * 0.3
        if sinks:
            scores = torch.cat([scores, logits.double().expand(batch, -1)[..., None]], -1)
        weights = scores.softmax(-1)[..., : keys.shape[2]]
        if scores.shape[-1]:
            assert_close(found.out[:, :, i], (weights[:, :, None] @ keys)[:, :, 0])
            assert_close(found.lse[:, :, i], scores.logsumexp(-1))
        else:
            assert not found.out[:, :, i].any()


@pytest.mark.parametrize("ratio", [1, 3, 50])
@pytest.mark.parametrize("size", [None, 4])
def test_all_entries_up_to_the_bound_and_rows_that_begin_later(ratio, size):
    generator = torch.Generator().manual_seed(0)
    batch, heads, length, before, dim, compressed = 3, 4, 7, 3, 8, 4
    q = torch.randn(batch, heads, length, dim, generator=generator)
    kv = torch.randn(batch, 1, compressed, dim, generator=generator)
    raw = torch.randn(batch, 1, before + length, dim, generator=generator)
    positions = torch.arange(length) + torch.tensor([[20], [before], [-2]])
    window = None if size is None else csa.Window(raw, raw, size)
    sinks = torch.randn(heads, generator=generator)
    how = {"scaling": 0.3, "window": window, "offset": before, "positions": positions, "ratio": ratio, "sinks": sinks}
    found = csa.sparse_attention(q, kv, kv, None, **how)
    for b in range(batch):
        for i in range(length):
            t = int(positions[b, i])
            read = [kv[b, 0, : max(0, t + 1) // ratio]]
            if size is not None:
                read.append(raw[b, 0, before + i + 1 - min(size, max(0, t + 1)) : before + i + 1])
            keys = torch.cat(read).double()
            scores = torch.cat([q[b, :, i].double() @ keys.T * 0.3, sinks[:, None].double()], -1)
            assert_close(found.out[b, :, i], scores.softmax(-1)[:, :-1] @ keys)
            assert_close(found.lse[b, :, i], scores.logsumexp(-1))


@pytest.mark.parametrize("indices", [None, torch.full((2, 4, 5), -1), torch.zeros(2, 4, 0, dtype=torch.int32)], ids=str)
def test_without_any_keys_there_is_nothing(indices):
    q, none = torch.randn(2, 3, 4, 8), torch.zeros(2, 1, 0, 8)
    found = csa.sparse_attention(q, none, none, indices, scaling=0.3)
    assert not found.out.any()
    assert found.lse.isneginf().all()


Q, KEYS, RAW = torch.zeros(2, 2, 3, 4), torch.zeros(2, 1, 5, 4), torch.zeros(2, 1, 9, 4)
CHOSEN, POSITIONS = torch.zeros(2, 3, 2, dtype=torch.int32), torch.arange(3).expand(2, 3)


@pytest.mark.parametrize("indices", [None, CHOSEN], ids=["all entries", "selected"])
@pytest.mark.parametrize("positions", [None, POSITIONS], ids=["in place", "positions"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ratio": -2}, "ratio must be an integer of at least 1, not -2"),
        ({"ratio": 0}, "ratio must be an integer of at least 1, not 0"),
        ({"ratio": 1.5}, r"ratio must be an integer of at least 1, not 1\.5"),
        ({"offset": -1}, "offset must be an integer of at least 0, not -1"),
        ({"q": Q[0]}, r"q must be a floating-point \[B, H, L, D\], not torch.float32 \[2, 3, 4\]"),
        ({"k": KEYS[:1], "v": KEYS[:1]}, r"shapes do not fit: q \(2, 2, 3, 4\), k \(1, 1, 5, 4\)"),
        ({"k": KEYS[..., :3], "v": KEYS[..., :3]}, r"shapes do not fit: .* k \(2, 1, 5, 3\)"),
        ({"v": KEYS[:, :, :4]}, r"shapes do not fit: .* v \(2, 1, 4, 4\)"),
        ({"k": KEYS[:, :0], "v": KEYS[:, :0]}, r"shapes do not fit: .* k \(2, 0, 5, 4\)"),
        ({"window": csa.Window(RAW[:1], RAW[:1], 2)}, r"shapes do not fit: window \(1, 1, 9, 4\)"),
        ({"window": csa.Window(*[RAW.expand(-1, 2, -1, -1)] * 2, 2)}, r"shapes do not fit: window \(2, 2, 9, 4\)"),
        ({"window": csa.Window(RAW[:, :, :3], RAW[:, :, :3], 2), "offset": 1}, "hold 4 positions, not 2 of 3"),
        ({"window": csa.Window(RAW[:, :, :3], RAW, 2)}, r"shapes do not fit: k \(2, 1, 3, 4\), v \(2, 1, 9, 4\)"),
        ({"window": csa.Window(RAW, RAW, 0)}, "window must be of at least 1 token"),
        ({"sinks": torch.zeros(3)}, r"sinks must be one logit for each of 2 heads, not \(3,\)"),
    ],
)
def test_bad_input_is_named(indices, positions, change, message):
    arguments = {"q": Q, "k": KEYS, "v": KEYS, "indices": indices, "positions": positions, "scaling": 1.0}
    with pytest.raises(ValueError, match=message):
        csa.sparse_attention(**(arguments | change))


@pytest.mark.parametrize("indices", [None, CHOSEN], ids=["all entries", "selected"])
@pytest.mark.parametrize("window", [None, csa.Window(RAW, RAW, 2)], ids=["no window", "window"])
@pytest.mark.parametrize(
    "positions", [torch.zeros(5, 4).long(), torch.arange(3), POSITIONS[:1], POSITIONS.float()], ids=str
)
def test_positions_are_those_of_the_queries(indices, window, positions):
    with pytest.raises(ValueError, match=r"positions must be int \[B, S\] = \[2, 3\], not torch"):
        csa.sparse_attention(Q, KEYS, KEYS, indices, scaling=1.0, window=window, positions=positions)


@pytest.mark.parametrize("positions", [None, POSITIONS], ids=["in place", "positions"])
@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (CHOSEN[:, :2], r"indices \(2, 2, 2\) do not fit 2 rows of 3 queries"),
        (CHOSEN[0], r"indices \(3, 2\) do not fit 2 rows of 3 queries"),
        (CHOSEN.float(), "indices must be int8, int16, int32 or int64, not torch.float32"),
        (CHOSEN.bool(), "not torch.bool"),
        (CHOSEN + 7, "indices must be those of 5 keys, from 0 on, or -1 for none, not 7"),
        (CHOSEN + 5, "not 5"),
        (CHOSEN - 2, "not -2"),
    ],
)
def test_indices_are_those_of_keys(positions, indices, message):
    with pytest.raises(ValueError, match=message):
        csa.sparse_attention(Q, KEYS, KEYS, indices, scaling=1.0, positions=positions)

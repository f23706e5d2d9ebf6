"""The kernel of attention over selections against its reference, in numbers that Triton's interpreter gets right."""

import pytest
import torch

from foveate.ops import KV
from foveate.ops.attend import selected, selected_kernel
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.tiles import Tile
from tests.combinations import every_pair
from tests.problems import in_buffer

pytestmark = pytest.mark.usefixtures("poisoned")


def problem(batch=2, heads=6, kv_heads=2, length=3, number=60, dim=16, value_dim=None, dtype=torch.float32, seed=0):
    """``q, k, v``; without ``value_dim`` values are keys."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, length, dim, generator=generator).to(dtype)
    k = torch.randn(batch, kv_heads, number, dim, generator=generator).to(dtype)
    v = torch.randn(batch, kv_heads, number, value_dim, generator=generator).to(dtype) if value_dim else k
    return q, k, v


def selection(batch, heads, length, number, places, seed=0):
    """Keys in any order ``[B, heads, Lq, K]``, unused places among and after them; the second query has none."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(batch, heads, length, max(number, places), generator=generator).argsort(-1)[..., :places]
    unused = (drawn >= number) | (torch.rand(drawn.shape, generator=generator) < 0.2)
    unused[..., places - places // 4 :] = True
    unused[:, :, 1:2] = True
    return drawn.masked_fill(unused, -1).to(torch.int32)


def check(q, k, v, indices, **more):
    arguments = {"scaling": 0.3, **more}
    found = selected_kernel.attend_selected(q, KV(k, v), indices, **arguments)
    expected = selected.attend_selected(q, KV(k, v), indices, **arguments)
    tolerance = 1e-5 if q.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(found.out, expected.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-4, atol=1e-4)
    return found


@pytest.fixture(params=[1, 100], ids=["one program", "many programs"])
def splits(request, monkeypatch):
    """Few programs, and so many multiprocessors that keys are split."""
    monkeypatch.setattr(selected_kernel, "multiprocessors", lambda device: 40 * request.param)


SPLITS = ("splits", [1, 100])


@every_pair(
    ("dtype", [torch.float32, torch.float16]),
    ("value_dim", [None, 5]),
    ("places", [1, 33]),
    ("own", [False, True]),
    SPLITS,
    indirect=["splits"],
    strength=3,
)
def test_selections(dtype, value_dim, places, own, splits):
    q, k, v = problem(value_dim=value_dim, dtype=dtype)
    indices = selection(2, 2 if own else 1, 3, 60, places)
    found = check(q, k, v, indices if own else indices[:, 0])
    assert not found.out[:, :, 1].any()
    assert found.lse[:, :, 1].isneginf().all()
    check(q, k, v, indices.long())


@every_pair(
    (("sinks", "value_dim"), [(False, None), (True, 24), (True, None)]),
    (("size", "offset"), [(1, 0), (5, 31), (40, 2)]),
    SPLITS,
    indirect=["splits"],
)
def test_windows_and_sinks(sinks, value_dim, size, offset, splits):
    q, k, v = problem(value_dim=value_dim)
    _, recent_k, recent_v = problem(number=40, value_dim=value_dim, seed=1)
    recent_k[:, :, offset + 3 :], recent_v[:, :, offset + 3 :] = torch.nan, torch.nan
    recent_k[:, :, : max(0, offset + 1 - size)], recent_v[:, :, : max(0, offset + 1 - size)] = torch.nan, torch.nan
    logits = torch.tensor([0.0, 3.0, -2.0, -torch.inf, 40.0, 1.0]) if sinks else None
    arguments = {"recent": KV(recent_k, recent_v), "window": size, "offset": offset, "sinks": logits}
    check(q, k, v, selection(2, 1, 3, 60, 20), **arguments)
    nothing = torch.full((2, 3, 7), -1, dtype=torch.int32)
    check(q, k, v, nothing, **arguments)
    check(q, k, v, nothing[..., :0], **arguments)
    check(q, k, v, nothing, sinks=logits)


@pytest.mark.parametrize(
    ("dim", "value_dim"), [(5, 5), (24, None), (64, 80), (80, 64), (96, None), (192, 128), (256, None)]
)
def test_head_dims(dim, value_dim):
    check(*problem(1, 3, 1, 3, 40, dim, value_dim), selection(1, 1, 3, 40, 20))


def test_wide_heads_whose_values_are_the_first_dimensions_of_keys():
    q, k, _ = problem(1, 3, 1, 3, 40, 576, dtype=torch.float16)
    check(q * 0.1, k, k[..., :512], selection(1, 1, 3, 40, 20))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (7, 1), (6, 6), (40, 2), (130, 1)])
def test_groups(heads, kv_heads, splits):
    check(*problem(1, heads, kv_heads, 2), selection(1, kv_heads, 2, 60, 20))


@pytest.mark.parametrize("layout", ["slots", "tokens_first", "padded_rows"])
def test_strides_among_nan(layout, splits):
    q, k, v = (in_buffer(x, layout) for x in problem(value_dim=24))
    indices = torch.stack([selection(2, 2, 3, 60, 20), torch.full((2, 2, 3, 20), 5)], -1)[..., 0]
    recent = KV(in_buffer(k.clone(), "own"), in_buffer(v.clone(), layout))
    logits = torch.stack([torch.ones(6), torch.full((6,), torch.nan)], 1)[:, 0]
    check(q, k, v, indices, recent=recent, window=7, offset=9, sinks=logits)


@pytest.mark.parametrize("value_dim", [None, 24])
def test_keys_that_are_not_selected_may_be_nan(value_dim, splits):
    q, k, v = problem(value_dim=value_dim)
    indices = selection(2, 1, 3, 60, 8)[:, 0]
    expected = check(q, k, v, indices)
    for b in range(2):
        unread = ~torch.isin(torch.arange(60), indices[b])
        k[b, :, unread], v[b, :, unread] = torch.nan, torch.inf
    found = selected_kernel.attend_selected(q, KV(k, v), indices, scaling=0.3)
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int64])
def test_dtypes_of_indices_beside_a_window_far_away(dtype):
    """Positions of the window need not fit the dtype of the indices."""
    q, k, v = problem(number=210, length=3)
    chosen = selection(2, 2, 3, 100, 7).to(dtype)
    found = check(q, k, v, chosen, recent=KV(k, v), window=5, offset=200)
    assert torch.equal(found.out, check(q, k, v, chosen.int(), recent=KV(k, v), window=5, offset=200).out)


def test_blocks_larger_than_what_is_selected(monkeypatch):
    monkeypatch.setattr(selected_kernel, "tile_for", lambda *_: Tile(64, 64, num_warps=8, num_stages=2))
    check(*problem(), selection(2, 1, 3, 60, 3), window=3, recent=KV(*problem()[1:]))


def test_nothing_to_do():
    q, k, v = problem()
    found = selected_kernel.attend_selected(q[:, :, :0], KV(k, v), torch.zeros(2, 0, 3).int(), scaling=1.0)
    assert found.out.shape[2] == 0


def test_what_it_refuses():
    q, k, v = problem()
    indices = selection(2, 1, 3, 60, 8)
    with pytest.raises(UnsupportedError, match="float64"):
        selected_kernel.attend_selected(q.double(), KV(k.double(), v.double()), indices, scaling=1.0)
    wide = problem(dim=577, dtype=torch.float16)
    with pytest.raises(UnsupportedError, match="head dims above 576"):
        selected_kernel.attend_selected(wide[0], KV(*wide[1:]), indices, scaling=1.0)
    with pytest.raises(ValueError, match="do not fit 2 rows of 3 queries"):
        selected_kernel.attend_selected(q, KV(k, v), indices[:1], scaling=1.0)
    with pytest.raises(ValueError, match="shapes do not fit"):
        selected_kernel.attend_selected(q, KV(k[..., :8], v), indices, scaling=1.0)
    with pytest.raises(ValueError, match="indices must be those of 60 keys, from 0 on, or -1 for none, not 60"):
        selected_kernel.attend_selected(q, KV(k, v), torch.full_like(indices, 60), scaling=1.0)
    with pytest.raises(ValueError, match="window must be of at least 1 token"):
        selected_kernel.attend_selected(q, KV(k, v), indices, scaling=1.0, window=3)

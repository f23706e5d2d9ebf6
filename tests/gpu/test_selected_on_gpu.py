"""Attention over selections on a GPU against its reference in fp64: odd sizes, dtypes, strides, poison, repeats."""

import pytest
import torch

from foveate import csa
from foveate.ops import KV, dispatch
from foveate.ops.attend import attend_selected, selected, selected_hopper_kernel, selected_kernel
from tests.combinations import every_pair
from tests.helpers import in_buffer
from tests.kernels import poisoned_memory

pytestmark = pytest.mark.gpu

DTYPES = ("dtype", [torch.bfloat16, torch.float16, torch.float32])
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 2e-5}


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch):
    """A reference that is reached without being asked for fails the test."""
    pytest.importorskip("triton")
    assert "attend_selected" in dispatch.kernel_status().split(", ")
    monkeypatch.setattr(dispatch, "_say_once", lambda text: pytest.fail(text))


@pytest.fixture(params=[True, False], ids=["hopper", "portable"])
def hopper(request, monkeypatch):
    """With and without the kernel for Hopper alone; whether it ran is noted."""
    monkeypatch.setattr(selected_kernel, "_HOPPER", request.param)
    ran, real = [], selected_hopper_kernel.attend_selected
    monkeypatch.setattr(selected_hopper_kernel, "attend_selected", lambda *a, **k: ran.append(True) or real(*a, **k))
    return ran if request.param and torch.cuda.get_device_capability() == (9, 0) else None


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def problem(batch, heads, kv_heads, length, number, dim, value_dim, dtype, seed=0):
    """``q, k, v``; values are keys, or their first dimensions, if ``value_dim`` is None or smaller."""
    q = draw(batch, length, heads, dim, dtype=dtype, seed=seed).transpose(1, 2)
    k = draw(batch, kv_heads, number, dim, dtype=dtype, seed=seed + 1)
    if value_dim is None:
        return q, k, k
    return q, k, draw(batch, kv_heads, number, value_dim, dtype=dtype, seed=seed + 2)


def selection(batch, heads, length, number, places, seed=0):
    """Keys in any order ``[B, heads, Lq, K]``, unused places among and after them; the second query has none."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (batch, heads, length, max(number, places))
    drawn = torch.rand(shape, generator=generator, device="cuda").argsort(-1)[..., :places]
    unused = (drawn >= number) | (torch.rand(drawn.shape, generator=generator, device="cuda") < 0.1)
    unused[..., places - places // 5 :] = True
    unused[:, :, 1:2] = True
    return drawn.masked_fill(unused, -1).to(torch.int32)


def check(q, k, v, indices, **more):
    """In poisoned memory, twice; keys and values that no query of a KV head reads are NaN."""
    arguments = {"scaling": q.shape[-1] ** -0.5, **more}
    doubled = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    if recent := more.get("recent"):
        doubled["recent"] = KV(recent.k.double(), recent.v.double())
    exact = selected.attend_selected(q.double(), KV(k.double(), v.double()), indices, **doubled)
    chosen = indices if indices.dim() == 4 else indices[:, None]
    for b in range(len(k)):
        for h in range(k.shape[1]):
            read = torch.isin(torch.arange(k.shape[2], device="cuda"), chosen[b, h % chosen.shape[1]])
            k[b, h, ~read] = torch.nan
            v[b, h, ~read] = torch.nan
    with poisoned_memory("cuda"):
        found = attend_selected(q, KV(k, v), indices, **arguments)
        again = attend_selected(q, KV(k, v), indices, **arguments)
    assert found.out.dtype == q.dtype
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(found.out.double(), exact.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.lse.double(), exact.lse, rtol=tolerance / 10, atol=tolerance / 10)
    assert torch.equal(found.out, again.out), "repeats are equal bit for bit"
    assert torch.equal(found.lse, again.lse), "repeats are equal bit for bit"
    return found


def window_of(batch, kv_heads, length, offset, size, dim, value_dim, dtype, seed=7):
    """A window's arguments; what no query sees is NaN."""
    _, k, v = problem(batch, 1, kv_heads, 1, offset + length + 9, dim, value_dim, dtype, seed)
    for x in (k, v):
        x[:, :, offset + length :] = torch.nan
        x[:, :, : max(0, offset + 1 - size)] = torch.nan
    return {"recent": KV(k, v), "window": size, "offset": offset}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [64, 40, 128])
@pytest.mark.parametrize(
    ("length", "number", "places", "size", "offset"),
    [(200, 1000, 512, 128, 0), (333, 70, 1, 1, 5), (301, 5000, 1024, 128, 70_000), (200, 90, 77, 500, 100)],
)
def test_deepseek_v4(hopper, dtype, heads, length, number, places, size, offset):
    q, k, v = problem(1, heads, 1, length, number, 512, None, dtype)
    indices = selection(1, 1, length, number, places)
    found = check(q, k, v, indices, **window_of(1, 1, length, offset, size, 512, None, dtype), sinks=draw(heads) * 3)
    assert not found.lse.isneginf().any()
    found = check(*problem(1, heads, 1, length, number, 512, None, dtype), indices[:, 0].long())
    assert not found.out[:, :, 1].any()
    assert found.lse[:, :, 1].isneginf().all()
    assert hopper is None or len(hopper) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_batches_and_kv_heads_with_selections_of_their_own(hopper, dtype):
    q, k, v = problem(3, 128, 2, 150, 400, 512, None, dtype)
    more = window_of(3, 2, 150, 31, 70, 512, None, dtype)
    check(q, k, v, selection(3, 2, 150, 400, 130), **more)
    check(q, k, v.clone(), selection(3, 2, 150, 400, 130))  # values of their own: the portable kernel
    nothing = torch.full((3, 150, 64), -1, dtype=torch.int32, device="cuda")
    check(q, *problem(3, 128, 2, 150, 400, 512, None, dtype)[1:], nothing, **more)
    assert hopper is None or len(hopper) == 4


@pytest.mark.parametrize("layout", ["slots", "tokens_first", "padded_rows"])
def test_strides_among_nan(hopper, layout):
    q, k, _ = problem(2, 64, 1, 150, 300, 512, None, torch.bfloat16)
    k = in_buffer(k, layout)
    more = window_of(2, 1, 150, 31, 70, 512, None, torch.bfloat16)
    recent = in_buffer(more["recent"].k, layout)
    indices = torch.stack([selection(2, 1, 150, 300, 90), torch.full((2, 1, 150, 90), 5, device="cuda")], -1)[..., 0]
    q = in_buffer(q, "tokens_first")
    check(q, k, k, indices, **{**more, "recent": KV(recent, recent)})
    assert hopper is None or bool(hopper) == selected_hopper_kernel.fits(q, k, recent, 512, True, 160)


@every_pair(
    DTYPES,
    ("length", [1, 3, 150]),
    (("dim", "value_dim"), [(16, None), (24, 24), (64, None), (80, 80), (96, 64), (128, 128), (192, 128), (256, None)]),
)
def test_head_dims(dtype, length, dim, value_dim):
    q, k, v = problem(2, 12, 2, length, 333, dim, value_dim, dtype)
    more = window_of(2, 2, length, 100, 50, dim, value_dim, dtype)
    check(q, k, v, selection(2, 2, length, 333, 130), **more, sinks=draw(12))


@every_pair(DTYPES)
@pytest.mark.parametrize("length", [1, 3, 150])
@pytest.mark.parametrize("heads", [16, 128])
def test_latent_attention(dtype, length, heads):
    """As DeepSeek-V3.2 has it in its weights' own basis: values are the first 512 dimensions of keys of 576."""
    q, k, _ = problem(1, heads, 1, length, 3000, 576, None, dtype)
    check(q, k, k[..., :512], selection(1, 1, length, 3000, 300))
    q, k, _ = problem(1, heads, 1, length, 3000, 576, None, dtype)
    check(q, k, k[..., :512].clone(), selection(1, 1, length, 3000, 300))


@every_pair(DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (7, 1), (28, 2), (33, 1), (130, 1)])
def test_groups(dtype, heads, kv_heads):
    for own in (1, kv_heads):
        q, k, v = problem(2, heads, kv_heads, 41, 333, 64, 64, dtype)
        check(q, k, v, selection(2, own, 41, 333, 130))


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_decode_step_is_split_and_can_be_captured(batch, length, sinks):
    q, k, v = problem(batch, 64, 1, length, 5000, 512, None, torch.bfloat16)
    indices = selection(batch, 1, length, 5000, 1024)[:, 0]
    more = window_of(batch, 1, length, 3000, 128, 512, None, torch.bfloat16)
    more |= {"sinks": draw(64)} if sinks else {}
    expected = check(q, k, v, indices, **more)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = attend_selected(q, KV(k, v), indices, scaling=512**-0.5, **more)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)


@pytest.mark.usefixtures("much_memory")
def test_keys_beyond_the_reach_of_32_bits(hopper):
    """Five million keys, and as many in a window's tensor: 2.5 billion elements each."""
    number, length = 5_000_000, 150
    q = draw(1, length, 64, 512, dtype=torch.bfloat16).transpose(1, 2)
    far = torch.empty(1, 1, number, 512, dtype=torch.bfloat16, device="cuda")
    far[:, :, -5000:] = draw(1, 1, 5000, 512, dtype=torch.bfloat16, seed=1)
    near = far[:, :, -5000:].clone()
    indices = selection(1, 1, length, 4000, 512)
    moved = indices.where(indices < 0, indices + number - 5000)
    scaling, offset = 512**-0.5, number - length
    both = {"scaling": scaling, "window": 128}
    found = attend_selected(q, KV(far, far), moved, recent=KV(far, far), offset=offset, **both)
    expected = attend_selected(q, KV(near, near), indices, recent=KV(near, near), offset=5000 - length, **both)
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)
    assert hopper is None or len(hopper) == 2


@pytest.mark.usefixtures("much_memory")
def test_outputs_beyond_the_reach_of_32_bits(hopper):
    """70,000 queries: 2.3 billion elements of queries and outputs each."""
    length = 70_000
    q = draw(1, 300, 64, 512, dtype=torch.bfloat16).transpose(1, 2)
    long = torch.empty(1, length, 64, 512, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    long[:, :, -300:] = q
    long[:, :, :-300] = 0
    kv = draw(1, 1, 2000, 512, dtype=torch.bfloat16)
    indices = torch.full((1, length, 64), -1, dtype=torch.int32, device="cuda")
    indices[:, -300:] = selection(1, 1, 300, 2000, 64)[:, 0]
    found = attend_selected(long, KV(kv, kv), indices, scaling=512**-0.5)
    expected = attend_selected(q, KV(kv, kv), indices[:, -300:], scaling=512**-0.5)
    assert torch.equal(found.out[:, :, -300:], expected.out)
    assert torch.equal(found.lse[:, :, -300:], expected.lse)
    assert not found.out[:, :, :-300].any()
    assert hopper is None or len(hopper) == 2


@pytest.mark.parametrize("size", [None, 128])
def test_sparse_attention_is_one_call(hopper, size):
    q, kv, _ = problem(1, 64, 1, 700, 175, 512, None, torch.bfloat16)
    raw, sinks = draw(1, 1, 700, 512, dtype=torch.bfloat16, seed=5), draw(64)
    visible = (torch.arange(700, device="cuda") + 1) // 4
    indices = torch.arange(100, dtype=torch.int32, device="cuda").expand(700, -1)
    indices = indices.masked_fill(indices >= visible[:, None], -1)[None]
    window = None if size is None else csa.Window(raw, raw, size)
    found = csa.sparse_attention(q, kv, kv, indices, scaling=512**-0.5, window=window, sinks=sinks)
    with dispatch.reference_only():
        expected = csa.sparse_attention(q, kv, kv, indices, scaling=512**-0.5, window=window, sinks=sinks)
    torch.testing.assert_close(found.out, expected.out, rtol=1.6e-2, atol=1.6e-2)
    torch.testing.assert_close(found.lse, expected.lse, rtol=2e-3, atol=2e-3)
    assert hopper is None or len(hopper) == 1

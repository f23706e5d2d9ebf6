"""The kernel of column_mass on a GPU against its reference: odd sizes, every dtype, strides, poison, repeats."""

import pytest
import torch

from foveate import ops
from foveate.ops import KV, Logits, dispatch
from foveate.ops.score import reference
from tests.combinations import every_pair

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch):
    """A reference that is reached without being asked for fails the test."""
    pytest.importorskip("triton")
    assert "column_mass" in dispatch.kernel_status().split(", ")
    monkeypatch.setattr(dispatch, "_say_once", lambda text: pytest.fail(text))


def problem(batch, heads, kv_heads, length, offset, dim, dtype, extra=0, device="cuda"):
    """``q, k, lse``: keys with ``extra`` NaN after them, and the queries' true log-sum-exp."""
    generator = torch.Generator(device).manual_seed(0)
    q = torch.randn(batch, heads, length, dim, generator=generator, device=device).to(dtype)
    k = torch.randn(batch, kv_heads, offset + length + extra, dim, generator=generator, device=device).to(dtype)
    k[:, :, offset + length :] = float("nan")
    end = offset + length
    wide = k[:, :, :end].float().repeat_interleave(heads // kv_heads, 1)
    future = torch.ones(length, end, dtype=torch.bool, device=device).triu(offset + 1)
    logits = (q.float() @ wide.mT * dim**-0.5).masked_fill_(future, float("-inf"))
    return q, k, logits.logsumexp(-1)


def check(q, k, lse, offset):
    arguments = {"logits": Logits(q.shape[-1] ** -0.5), "offset": offset}
    mass = ops.column_mass(q, KV(k), lse, **arguments)
    expected = reference.column_mass(q, KV(k), lse, **arguments)
    torch.testing.assert_close(mass, expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(mass, ops.column_mass(q, KV(k), lse, **arguments)), "repeats are equal bit for bit"
    return mass


DTYPES = ("dtype", [torch.bfloat16, torch.float16, torch.float32])


@every_pair(
    DTYPES,
    ("dim", [16, 64, 80, 96, 128, 256]),
    (("length", "offset"), [(1, 0), (1, 777), (63, 65), (129, 1000), (333, 0), (1024, 0), (2049, 5)]),
)
def test_sizes(dtype, dim, length, offset):
    mass = check(*problem(2, 8, 2, length, offset, dim, dtype, extra=50), offset)
    total = torch.full_like(mass[..., 0], 4.0 * length)
    torch.testing.assert_close(mass.sum(-1), total, rtol=1e-3, atol=1e-3)


@every_pair(
    DTYPES, (("heads", "kv_heads"), [(1, 1), (8, 8), (9, 3), (14, 2), (12, 2), (32, 8), (16, 1)]), ("batch", [1, 3])
)
def test_heads(dtype, heads, kv_heads, batch):
    check(*problem(batch, heads, kv_heads, 517, 131, 64, dtype), 131)


@pytest.mark.parametrize("dim", [64, 128])
def test_several_waves_of_programs(dim):
    check(*problem(1, 14, 2, 9001, 700, dim, torch.bfloat16), 700)


@every_pair(DTYPES)
def test_strides_and_poisoned_buffers(dtype):
    q, k, lse = problem(2, 6, 2, 300, 77, 80, dtype)
    expected = check(q, k, lse, 77)
    tokens_first = torch.full((2, 400, 6, 80), float("nan"), dtype=dtype, device="cuda")
    slots = torch.full((2, 2, 500, 83), float("nan"), dtype=dtype, device="cuda")
    rows = torch.full((2, 6, 300, 2), float("nan"), device="cuda")
    q = tokens_first[:, 50:350].transpose(1, 2).copy_(q)
    k = slots[:, :, 30:407, :80].copy_(k)
    lse = rows[..., 1].copy_(lse)
    buffer = torch.full((2, 3, 500), float("nan"), device="cuda")
    out = buffer[:, 1:, 9:386].fill_(1.0)
    assert ops.column_mass(q, KV(k), lse, logits=Logits(80**-0.5), offset=77, out=out) is out
    torch.testing.assert_close(out, 1 + expected, rtol=1e-5, atol=1e-5)
    assert buffer.isnan().sum() == buffer.numel() - out.numel()


def test_queries_that_saw_nothing_and_later_keys_leave_no_trace():
    q, k, lse = problem(1, 4, 2, 300, 0, 64, torch.bfloat16)
    lse[:, 1, 40:200] = float("-inf")
    before = check(q, k, lse, 0)
    assert before.isfinite().all()
    k[:, :, -1] = float("inf")  # seen by the last query alone
    assert torch.equal(ops.column_mass(q, KV(k), lse, logits=Logits(0.125))[..., :-1], before[..., :-1])


def test_what_takes_the_reference():
    q, k, lse = problem(1, 4, 2, 70, 9, 64, torch.float32)
    expected = reference.column_mass(q, KV(k), lse, logits=Logits(0.125), offset=9)
    assert not dispatch.use_kernel(q.requires_grad_(), k)
    with torch.no_grad():
        assert dispatch.use_kernel(q, k)
        with dispatch.reference_only():
            assert torch.equal(ops.column_mass(q, KV(k), lse, logits=Logits(0.125), offset=9), expected)
    assert not dispatch.use_kernel(k, lse.cpu())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_than_the_current_one():
    check(*problem(1, 4, 2, 70, 9, 64, torch.float32, device="cuda:1"), 9)

"""The kernel of attend_window on a GPU against its reference: odd sizes, every dtype, strides, poison, repeats."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foveate import methods, ops
from foveate.ops import KV, Logits, dispatch
from foveate.ops.attend import window
from foveate.state.borrowed import cache_of
from tests.combinations import every_pair
from tests.helpers import in_buffer
from tests.kernels import poisoned_memory

pytestmark = pytest.mark.gpu

DTYPES = ("dtype", [torch.bfloat16, torch.float16, torch.float32])
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 2e-5}
LOWER = {  # of each position
    "dense": torch.zeros_like,
    "own_only": lambda position: position,
    "window": lambda position: position - 199,
    "share": lambda position: position + 1 - (0.3 * (position + 1).double()).long().clamp_min(1),
    "same_for_ninety": lambda position: position // 90 * 90 - 3,
}


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch):
    """A reference that is reached without being asked for fails the test."""
    pytest.importorskip("triton")
    assert "attend_window" in dispatch.kernel_status().split(", ")
    monkeypatch.setattr(dispatch, "_say_once", lambda text: pytest.fail(text))


@pytest.fixture
def launches(monkeypatch):
    """The sizes of the kernel's outputs, one for each time that it ran."""
    from foveate.ops.attend import window_kernel as kernel

    sizes, attend_window = [], kernel.attend_window

    def counted(*args, **more):
        attended = attend_window(*args, **more)
        sizes.append(tuple(attended.out.shape))
        return attended

    monkeypatch.setattr(kernel, "attend_window", counted)
    return sizes


class Operations(TorchDispatchMode):
    """The names of the operations that PyTorch is asked for."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def problem(batch, heads, kv_heads, length, offset, dim, dtype, value_dim=None, extra=0, device="cuda"):
    """``q, k, v``, the keys and values with ``extra`` NaN after them."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size):
        return torch.randn(size, generator=generator, device=device).to(dtype)

    q = draw(batch, heads, length, dim)
    k, v = (draw(batch, kv_heads, offset + length + extra, size) for size in (dim, value_dim or dim))
    k[:, :, offset + length :], v[:, :, offset + length :] = float("nan"), float("nan")
    return q, k, v


def lower_of(kind, length, offset, device="cuda"):
    return LOWER[kind](torch.arange(offset, offset + length, device=device))


def check(q, k, v, lower, sinks, offset):
    arguments = {"logits": Logits(q.shape[-1] ** -0.5), "lower": lower, "sinks": sinks, "offset": offset}
    with poisoned_memory(str(q.device)):
        out = ops.attend_window(q, KV(k, v), **arguments).out
        assert torch.equal(out, ops.attend_window(q, KV(k, v), **arguments).out), "repeats are equal bit for bit"
    assert out.dtype == q.dtype
    exact = window.attend_window(q.double(), KV(k.double(), v.double()), **arguments).out
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    return out


@every_pair(
    DTYPES,
    ("kind", LOWER),
    ("sinks", [0, 4, 300]),
    (("length", "offset"), [(1, 0), (1, 777), (63, 65), (129, 1000), (333, 0), (1024, 0), (2049, 5)]),
    strength=3,
)
def test_windows(dtype, kind, sinks, length, offset, launches):
    check(*problem(2, 4, 2, length, offset, 64, dtype, extra=50), lower_of(kind, length, offset), sinks, offset)
    assert launches == [(2, 4, length, 64)] * 2


@every_pair(
    DTYPES,
    ("kind", ["window", "share"]),
    (
        ("dim", "value_dim"),
        [(16, 16), (20, 20), (40, 40), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128), (24, 72)],
    ),
    (("length", "offset"), [(1, 0), (129, 1000), (700, 3)]),
)
def test_head_dims(dtype, kind, dim, value_dim, length, offset):
    check(*problem(1, 4, 2, length, offset, dim, dtype, value_dim), lower_of(kind, length, offset), 4, offset)


@every_pair(
    DTYPES, (("heads", "kv_heads"), [(1, 1), (8, 8), (9, 3), (14, 2), (12, 2), (32, 8), (16, 1)]), ("batch", [1, 3])
)
def test_heads(dtype, heads, kv_heads, batch):
    check(*problem(batch, heads, kv_heads, 517, 131, 64, dtype), lower_of("window", 517, 131), 4, 131)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", ["window", "share"])
def test_several_waves_of_programs(dim, kind):
    check(*problem(1, 14, 2, 9001, 700, dim, torch.bfloat16), lower_of(kind, 9001, 700), 4, 700)


@pytest.mark.usefixtures("much_memory")
def test_keys_beyond_the_reach_of_32_bits():
    """Tokens 128 KiB apart, as where many heads share a buffer: the window begins 2^31 numbers after the first key."""
    q, k, v = problem(1, 2, 2, 400, 35_500, 64, torch.bfloat16)
    buffer = torch.empty(1, 36_000, 1024, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2)[:, :, :35_900]
    k, v = buffer[:, 5:7].copy_(k), buffer[:, 1000:1002].copy_(v)
    check(q, k, v, lower_of("window", 400, 35_500), 4, 35_500)


@every_pair(DTYPES)
@pytest.mark.parametrize("layout", ["slots", "tokens_first", "padded_rows"])
def test_strides_among_nan(dtype, layout):
    lower = lower_of("share", 300, 77)
    every_other = torch.stack([lower, lower + 1000], 1)[:, 0]
    check(*(in_buffer(x, layout) for x in problem(2, 6, 2, 300, 77, 80, dtype)), every_other, 4, 77)


@every_pair(DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_keys_that_no_query_sees_leave_no_trace(dtype, poison):
    q, k, v = problem(1, 4, 2, 300, 500, 64, dtype, extra=200)
    lower = lower_of("window", 300, 500)
    clean = check(q, k, v, lower, 4, 500)
    for x in (k, v):
        x[:, :, 4 : lower[0]] = poison
        x[:, :, 800:] = poison
    out = ops.attend_window(q, KV(k, v), logits=Logits(0.125), lower=lower, sinks=4, offset=500).out
    assert torch.equal(out, clean)


@every_pair(DTYPES)
def test_queries_that_see_nothing_get_zero(dtype):
    q, k, v = problem(1, 4, 2, 300, 0, 64, dtype)
    lower = lower_of("window", 300, 0)
    lower[130:] = 5000
    with poisoned_memory("cuda"):
        out = ops.attend_window(q, KV(k, v), logits=Logits(0.125), lower=lower).out
    assert (out[:, :, 130:] == 0).all()
    check(q[:, :, :130], k, v, lower[:130], 0, 0)


def test_a_call_is_one_launch_and_waits_for_nothing(launches):
    q, k, v = problem(1, 14, 2, 600, 40, 64, torch.bfloat16)
    arguments = {"logits": Logits(0.125), "lower": lower_of("window", 600, 40), "sinks": 4, "offset": 40}
    ops.attend_window(q, KV(k, v), **arguments)  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        with Operations() as asked:
            ops.attend_window(q, KV(k, v), **arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert asked.names == ["new_empty", "transpose"]
    assert len(launches) == 2


@pytest.mark.parametrize("spec", ["streaming:window=100", "streaming:window=0.3"])
def test_a_prompt_of_the_method_takes_the_kernel(spec, launches):
    q, k, v = problem(1, 14, 2, 613, 0, 64, torch.bfloat16)
    method = methods.parse(spec)
    expected = method.prompt(cache_of(*(x.float().cpu() for x in (k, v)), 14), q.float().cpu(), 0.125).out
    ops.attend_window(q, KV(k, v), logits=Logits(0.125), lower=lower_of("window", 613, 0), sinks=4)  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = method.prompt(cache_of(k, v, 14), q, 0.125).out
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(launches) == 2
    torch.testing.assert_close(out.float().cpu(), expected, rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.parametrize("window", [0.1, 0.125, 0.3, 1 / 3, 0.7, 1.0])
def test_windows_on_the_gpu_begin_where_they_begin_on_the_cpu(window):
    method = methods.make("streaming", window=window)
    assert method.lower(torch.arange(70_000, device="cuda")).tolist() == [method.lower(i) for i in range(70_000)]


def test_what_takes_the_reference(launches):
    q, k, v = problem(1, 4, 2, 70, 9, 64, torch.float32)
    arguments = {"logits": Logits(0.125), "lower": lower_of("window", 70, 9), "sinks": 4, "offset": 9}
    expected = window.attend_window(q, KV(k, v), **arguments).out
    with dispatch.reference_only():
        assert torch.equal(ops.attend_window(q, KV(k, v), **arguments).out, expected)
    torch.autograd.grad(ops.attend_window(q.requires_grad_(), KV(k, v), **arguments).out.sum(), q)
    assert not launches


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_than_the_current_one():
    device = "cuda:1"
    check(*problem(1, 4, 2, 70, 9, 64, torch.float32, device=device), lower_of("window", 70, 9, device), 4, 9)

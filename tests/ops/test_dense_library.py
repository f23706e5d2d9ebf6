"""Dense prompts by libraries: which is used, what it is given, and what becomes of one that is wrong or lacks some.

The libraries here compute in fp64. They count their calls, so that no test passes where none is called.
"""

import contextlib
import importlib.machinery
import math
import sys
from types import ModuleType

import pytest
import torch

from foveate import ops
from foveate.ops import KV, Logits, dispatch
from foveate.ops.attend import dense, dense_obstacles, library, prompt_path
from foveate.ops.attend.attended import Attended
from foveate.ops.attend.library import PYTORCH, CuDNN, FlashAttention3, Library
from tests.problems import Shape, assert_close, causal_mask, naive, problem

SHAPE = Shape(batch=2, kv_heads=3, group=4, queries=17, offset=20, dim=64, value_dim=64)
HALF = [torch.float16, torch.bfloat16]


class StandIn(Library):
    """Dense attention in fp64, with whatever fault a test gives it."""

    name = "stand-in"

    def __init__(self, lacks="", takes_caps=True, fault=lambda attended, q, offset: attended):
        self.lacks, self.takes_caps, self.fault = lacks, takes_caps, fault
        self.calls = []

    def missing(self, device):
        return self.lacks

    def limit(self, q, k, v, offset, softcap):
        return "" if self.takes_caps or softcap is None else "it caps no logits"

    def attend(self, q, k, v, logits, offset, need_lse):
        self.calls.append((tuple(q.shape), offset, logits.softcap))
        return self.fault(in_fp64(q, k, v, logits.scaling, logits.softcap), q, offset)


def in_fp64(q, k, v, scaling, softcap=None):
    """The last query sees the last key."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    logits = q.double() @ k.transpose(-1, -2) * scaling
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
    logits = logits.masked_fill(future, -math.inf)
    return Attended((logits.softmax(-1) @ v).to(q.dtype), logits.logsumexp(-1).float())


@pytest.fixture
def used(monkeypatch):
    """Makes a library the first of all, and forgets what proofs and warnings there were."""

    def use(*libraries):
        monkeypatch.setattr(library, "LIBRARIES", (*libraries, PYTORCH))
        return libraries[0]

    monkeypatch.setattr(library, "_faults", {})
    library._say_once.cache_clear()
    return use


def attended(dtype=torch.float16, shape=SHAPE, softcap=None, **how):
    """Attention of a problem, and the same in fp64."""
    q, k, v = problem(shape, dtype=dtype, layout="slots", extra=3)
    found = ops.attend_causal(q, KV(k, v), logits=Logits(0.125, softcap=softcap), offset=shape.offset, **how)
    expected = in_fp64(q.double(), *(x[:, :, : shape.keys] for x in (k, v)), 0.125, softcap)
    return found, expected


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("offset", [0, 20])
@pytest.mark.parametrize("need_lse", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_right_library_attends(used, dtype, offset, need_lse, softcap):
    one, shape = used(StandIn()), SHAPE._replace(offset=offset)
    found, expected = attended(dtype, shape, need_lse=need_lse, softcap=softcap)
    assert one.calls[-1] == ((2, 12, 17, 64), offset, softcap)
    assert_close(found.out, expected.out, dtype)
    assert (found.lse is not None) == need_lse
    if need_lse:
        assert_close(found.lse, expected.lse)


def test_a_library_is_proved_once_for_each_kind(used):
    one = used(StandIn())
    attended()
    proofs = len(one.calls) - 1
    assert proofs == 2 * len(library._PROBLEMS)
    assert {(shape[2], offset) for shape, offset, _ in one.calls[:-1]} == set(library._PROBLEMS)
    assert {shape[1] for shape, _, _ in one.calls[:-1]} == {2 * 4}, "the group is that of the queries"
    attended()
    assert len(one.calls) == proofs + 2
    for change in ({"dtype": torch.bfloat16}, {"shape": SHAPE._replace(dim=16, value_dim=16)}, {"softcap": 2.0}):
        before = len(one.calls)
        attended(**change)
        assert len(one.calls) == before + proofs + 1, change
    before = len(one.calls)
    attended(shape=SHAPE._replace(group=2))
    assert len(one.calls) == before + proofs + 1


def of_other_keys(attended, q, offset):
    return attended._replace(out=attended.out.roll(1, 2))


def one_row_wrong(attended, q, offset):
    out = attended.out.clone()
    out[-1, -1, -1] *= 1.05
    return attended._replace(out=out)


def another_without_the_lse():
    calls = []

    def fault(attended, q, offset):
        calls.append(0)
        return attended if len(calls) % 2 else attended._replace(out=attended.out * 1.002)

    return fault


FAULTS = {
    "another output": (of_other_keys, "its output of 77 queries after 0 keys differs from fp32"),
    "one vector": (one_row_wrong, "its output of 77 queries after 0 keys differs from fp32 by 0.05"),
    "NaN": (lambda one, q, offset: one._replace(out=one.out * math.nan), "differs from fp32 by nan"),
    "wrong at an offset": (
        lambda one, q, offset: of_other_keys(one, q, offset) if offset else one,
        "its output of 130 queries after 213 keys differs from fp32",
    ),
    "wrong for one query": (
        lambda one, q, offset: one._replace(out=-one.out) if q.shape[2] == 1 else one,
        "its output of 1 queries after 301 keys differs from fp32",
    ),
    "log2": (lambda one, q, offset: one._replace(lse=one.lse / math.log(2)), "its log-sum-exp of 77 .* differs"),
    "a constant": (lambda one, q, offset: one._replace(lse=one.lse + 0.002), "its log-sum-exp of 77 .* by 0.002"),
    "no lse": (lambda one, q, offset: one._replace(lse=None), "its log-sum-exp of 77 queries after 0 keys is None"),
    "lse in half": (lambda one, q, offset: one._replace(lse=one.lse.half()), "its log-sum-exp .* is torch.float16"),
    "lse of another shape": (lambda one, q, offset: one._replace(lse=one.lse[..., None]), "its log-sum-exp .* is"),
    "another dtype": (lambda one, q, offset: one._replace(out=one.out.float()), "its output .* is torch.float32"),
    "two outputs": (another_without_the_lse(), "is another without the log-sum-exp"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_library_is_not_used_and_a_warning_says_why(used, fault):
    one = used(StandIn(fault=FAULTS[fault][0]))
    with pytest.warns(UserWarning, match=f"^stand-in's dense attention is not used, .*{FAULTS[fault][1]}") as warned:
        found, expected = attended(need_lse=True)
    assert len(warned) == 1
    assert one.calls
    assert_close(found.out, expected.out, torch.float16)
    assert_close(found.lse, expected.lse, torch.float16)
    before = len(one.calls)
    attended()
    assert len(one.calls) == before, "it is asked once"


def test_a_library_that_raises_in_its_proof(used):
    def fails(attended, q, offset):
        raise OSError("no such\nkernel")

    one = used(StandIn(fault=fails))
    with pytest.warns(UserWarning, match=r"OSError: no such kernel \(torch.float16, 4 query heads of dim 64 to a KV"):
        found, expected = attended()
    assert_close(found.out, expected.out, torch.float16)
    assert len(one.calls) == 1


def test_a_library_that_fails_later(used):
    def fails(attended, q, offset):
        if q.shape[2] == SHAPE.queries:
            raise RuntimeError("no plan")
        return attended

    one = used(StandIn(fault=fails))
    with pytest.warns(UserWarning, match=r"it fails for q \(2, 12, 17, 64\) and k \(2, 3, 37, 64\) .* no plan"):
        found, expected = attended()
    assert_close(found.out, expected.out, torch.float16)
    assert one.calls[-1][0][2] == SHAPE.queries


def test_out_of_memory_is_not_hidden(used):
    def fails(attended, q, offset):
        if q.shape[2] == SHAPE.queries:
            raise torch.OutOfMemoryError("too large")
        return attended

    used(StandIn(fault=fails))
    with pytest.raises(torch.OutOfMemoryError, match="too large"):
        attended()


def test_one_that_is_missing_or_lacks_something_is_passed_over_in_silence(used, recwarn):
    absent, uncapped, last = StandIn(lacks="not installed"), StandIn(takes_caps=False), StandIn()
    used(absent, uncapped, last)
    found, expected = attended(softcap=2.0)
    assert_close(found.out, expected.out, torch.float16)
    assert (len(absent.calls), len(uncapped.calls), last.calls[-1][2]) == (0, 0, 2.0)
    attended()
    assert len(absent.calls) == 0
    assert uncapped.calls[-1] == ((2, 12, 17, 64), 20, None)
    assert not recwarn.list


def test_short_prompts_go_to_the_next(used):
    one = used(StandIn())
    one.least_work = SHAPE.queries * SHAPE.keys + 1
    attended()
    assert not one.calls
    one.least_work -= 1
    attended()
    assert one.calls


def test_autograd_is_recorded_as_before(used):
    one, (q, k, v) = used(StandIn()), problem(SHAPE)
    q.requires_grad_()
    for offset in (0, SHAPE.offset):
        some, keys = q[:, :, : SHAPE.keys - offset], offset + min(SHAPE.queries, SHAPE.keys - offset)
        out = ops.attend_causal(some, KV(k[:, :, :keys], v[:, :, :keys]), logits=Logits(0.125), offset=offset).out
        assert out.grad_fn is not None
    assert not one.calls
    with torch.no_grad():
        ops.attend_causal(q, KV(k, v), logits=Logits(0.125), offset=SHAPE.offset)
    assert one.calls


def test_learned_sinks_take_their_share_of_a_library_s_result(used):
    one, (q, k, v) = used(StandIn()), problem(SHAPE)
    sinks = torch.randn(12)
    how = {"logits": Logits(0.125, sinks), "offset": SHAPE.offset, "need_lse": True}
    found, expected = ops.attend_causal(q, KV(k, v), **how), dense.attend_causal(q, KV(k, v), **how)
    assert one.calls
    assert_close(found.out, expected.out)
    assert_close(found.lse, expected.lse)


def test_the_reference_is_textbook_attention():
    q, k, v = problem(SHAPE, extra=3)
    expected = naive(q, *(x[:, :, : SHAPE.keys] for x in (k, v)), 0.125, causal_mask(SHAPE.queries, SHAPE.offset))
    found = dense.attend_causal(q, KV(k, v), logits=Logits(0.125), offset=SHAPE.offset, need_lse=True)
    assert_close(found.out, expected.out)
    assert_close(found.lse, expected.lse)


def test_what_is_in_use(used):
    heads = ops.PromptHeads(torch.device("cpu"), torch.bfloat16, 64, 64, 4)
    one = used(StandIn())
    assert prompt_path(heads) == "stand-in"
    one.least_work = 100
    assert prompt_path(heads) == "stand-in (short prompts: PyTorch)"
    assert dense_obstacles(heads) == {"stand-in": "", "PyTorch": ""}
    used(StandIn(lacks="it is not here"))
    assert prompt_path(heads) == "PyTorch"
    assert prompt_path(heads._replace(softcap=5.0)) == "blocks (torch)"
    assert prompt_path(heads._replace(value_dim=32)) == "blocks (torch)"
    assert dense_obstacles(heads) == {"stand-in": "it is not here", "PyTorch": ""}


# The libraries themselves, on tensors of a CPU that pass for those of a Hopper GPU


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(library, "_on_gpu", lambda device: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.delenv("FOVEATE_KERNELS", raising=False)


@pytest.fixture
def interface(monkeypatch):
    """FlashAttention-3's package, as far as it is called."""
    module, calls = ModuleType("flash_attn_interface"), []
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn_interface", None)

    def flash_attn_with_kvcache(q, k, v, softmax_scale, causal, softcap, return_softmax_lse):
        assert causal
        assert return_softmax_lse
        calls.append((tuple(q.shape), tuple(k.shape), softcap))
        found = in_fp64(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale, softcap or None)
        return found.out.transpose(1, 2).contiguous(), found.lse, torch.empty(0), torch.empty(0)

    module.flash_attn_with_kvcache, module.calls = flash_attn_with_kvcache, calls
    flags = ModuleType("flash_attn_config")
    flags.CONFIG = {"build_flags": {"FLASHATTENTION_DISABLE_SOFTCAP": False}}
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setitem(sys.modules, "flash_attn_config", flags)
    module.flags = flags.CONFIG["build_flags"]
    return module


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("offset", [0, 20])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_flash_attention_3(used, hopper, interface, dtype, offset, dim, softcap):
    used(FlashAttention3())
    shape = SHAPE._replace(offset=offset, dim=dim, value_dim=dim)
    found, expected = attended(dtype, shape, need_lse=True, softcap=softcap)
    assert interface.calls[-1] == ((2, 17, 12, dim), (2, 17 + offset, 3, dim), softcap or 0.0)
    assert_close(found.out, expected.out, dtype)
    assert_close(found.lse, expected.lse)


def test_a_build_of_flash_attention_3_without_caps(used, hopper, interface, recwarn):
    used(FlashAttention3())
    interface.flags["FLASHATTENTION_DISABLE_SOFTCAP"] = True
    found, expected = attended(softcap=2.0)
    assert_close(found.out, expected.out, torch.float16)
    assert not interface.calls
    attended()
    assert interface.calls
    assert not recwarn.list


def unaligned(x):
    """The same numbers, of which no vector begins at a multiple of 16 bytes."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda q, k, v: (q.float(), k.float(), v.float()), "it takes float16 or bfloat16, not float32"),
        (lambda q, k, v: (q, k.bfloat16(), v), "it takes float16 or bfloat16, not bfloat16 with float16"),
        (lambda q, k, v: (q, k, v[..., :32]), "not 64 and 32"),
        (lambda q, k, v: (q[..., :60], k[..., :60], v[..., :60]), "multiples of 8 and at most 256, not 60 and 60"),
        (lambda q, k, v: (torch.cat([x] * 5, -1) for x in (q, k, v)), "at most 256, not 320 and 320"),
        (lambda q, k, v: (q, unaligned(k), v), "vectors do not begin at multiples of 16 bytes"),
        (lambda q, k, v: (q, k, v.transpose(2, 3).contiguous().transpose(2, 3)), "vectors do not begin"),
    ],
)
def test_what_no_library_takes_on_a_gpu(hopper, interface, change, reason):
    q, k, v = change(*(x.contiguous() for x in problem(SHAPE._replace(offset=0), dtype=torch.float16)))
    for one in (FlashAttention3(), CuDNN()):
        assert reason in library.obstacle(one, q, k, v)


@pytest.mark.parametrize("why", ["Ampere", "ROCm", "switched off", "references", "not installed", "broken"])
def test_where_flash_attention_3_does_not_run(used, hopper, interface, monkeypatch, why):
    one, warning, block = used(FlashAttention3()), contextlib.nullcontext(), contextlib.nullcontext()
    reason = "it runs on Hopper GPUs"
    if why == "Ampere":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    elif why == "ROCm":
        monkeypatch.setattr(torch.version, "hip", "6.2")
    elif why == "switched off":
        monkeypatch.setenv("FOVEATE_KERNELS", "0")
        reason = "kernels are switched off"
    elif why == "references":
        block, reason = dispatch.reference_only(), "kernels are switched off"
    elif why == "not installed":
        monkeypatch.delitem(sys.modules, "flash_attn_interface")
        reason = "flash_attn_interface is not installed"
    else:
        reason = "flash_attn_interface does not load: ImportError: undefined symbol"
        monkeypatch.setattr(library.importlib, "import_module", broken)
        warning = pytest.warns(UserWarning, match=f"^FlashAttention-3's dense .* {reason}$")
    with block, warning:
        assert one.missing(torch.device("cpu")) == reason
        found, expected = attended()
    assert not interface.calls
    assert_close(found.out, expected.out, torch.float16)


def broken(name):
    raise ImportError("undefined symbol")


@pytest.fixture
def cudnn(monkeypatch):
    """PyTorch's operator with cuDNN's mask, which begins at the first key, and shape of the log-sum-exp."""
    calls, refused = [], []

    def run(q, k, v, bias, need_lse, dropout, causal, debug, *, scale):
        assert bias is None
        assert need_lse
        assert (dropout, debug) == (0.0, False)
        calls.append((tuple(q.shape), tuple(k.shape), causal))
        if causal:
            found = in_fp64(q, k[:, :, : q.shape[2]], v[:, :, : q.shape[2]], scale)
        else:
            exact = naive(q, k, v, scale)
            found = Attended(exact.out.to(q.dtype), exact.lse.float())
        return found.out, found.lse[..., None], *[None] * 7

    class Aten:
        _scaled_dot_product_cudnn_attention = staticmethod(run)

        def __getattr__(self, name):
            return getattr(aten, name)

    def can(params):
        assert params.enable_gqa
        return params.key.shape[2] not in refused

    aten = torch.ops.aten
    monkeypatch.setattr(torch.ops, "aten", Aten())
    monkeypatch.setattr(library, "can_use_cudnn_attention", can)
    monkeypatch.setattr(CuDNN, "least_work", 0)
    return calls, refused


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("offset", [0, 20])
@pytest.mark.parametrize("need_lse", [False, True])
def test_cudnn(used, hopper, cudnn, dtype, offset, need_lse):
    used(CuDNN())
    found, expected = attended(dtype, SHAPE._replace(offset=offset), need_lse=need_lse)
    own = ((2, 12, 17, 64), (2, 3, 17, 64), True)
    before = ((2, 12, 17, 64), (2, 3, 20, 64), False)
    assert cudnn[0][-2:] == [before, own] if offset else cudnn[0][-1] == own
    assert_close(found.out, expected.out, dtype)
    if need_lse:
        assert_close(found.lse, expected.lse)


def test_keys_that_pytorch_does_not_offer_cudnn_for(used, hopper, cudnn):
    """One key before the queries' own."""
    calls, refused = cudnn
    refused.append(1)
    used(CuDNN())
    attended(shape=SHAPE._replace(offset=1))
    assert all(keys[2] != 18 for _, keys, _ in calls)
    assert all(queries[2] != 17 for queries, _, _ in calls)
    attended(shape=SHAPE._replace(offset=2))
    assert calls[-1][0][2] == 17


def test_a_library_that_takes_none_of_the_problems(used, hopper, cudnn):
    cudnn[1].extend(queries for queries, _ in library._PROBLEMS)
    used(CuDNN())
    with pytest.warns(UserWarning, match="cuDNN's .* it takes none of the problems of its proof"):
        attended()
    assert not cudnn[0]

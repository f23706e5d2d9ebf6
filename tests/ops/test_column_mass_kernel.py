"""The kernel of column_mass: what it compiles to, when it is chosen."""

import importlib
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from foveate import ops
from foveate.ops import KV, Logits, dispatch
from foveate.ops.score import reference
from tests.combinations import in_turn
from tests.kernels import assert_compiled_well, compile_for

# What it compiles to


SHAPES = (
    ("dtype", "dim"),
    [
        ("bf16", 64),
        ("bf16", 80),
        ("bf16", 96),
        ("bf16", 128),
        ("bf16", 256),
        ("fp16", 128),
        ("fp32", 128),
        ("fp32", 256),
    ],
)


@in_turn(
    SHAPES,
    ("capability", [80, 90]),
    ("softcap", [0.0, 50.0]),
    besides=[("bf16", 128, 80, 50.0), ("fp32", 256, 80, 50.0)],
)
def test_compiles_for_ampere_and_hopper(capability, dtype, dim, softcap):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.score.column_mass_kernel")
    half = dtype != "fp32"
    tile = kernel.tile_for(torch.bfloat16 if half else torch.float32, dim)
    strides = {f"{x}_stride_{axis}": "i32:16" for x in ("q", "k", "lse") for axis in "bhl"}
    compiled = compile_for(
        capability,
        kernel._column_mass,
        {
            **strides,
            "q_ptr": f"*{dtype}:16",
            "k_ptr": f"*{dtype}:16",
            "lse_ptr": "*fp32:16",
            "mass_ptr": "*fp32:16",
            "q_stride_d": 1,
            "k_stride_d": 1,
            "lse_stride_l": 1,
            "num_heads": "i32",
            "group": "i32",
            "length": "i32",
            "offset": "i32",
            "scale": "fp32",
            "SOFTCAP": softcap,
            "DIM": dim,
            "BLOCK_D": 64 if dim == 64 else 128 if dim <= 128 else 256,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
        },
        **tile.options,
    )
    # a cap takes a few registers more than three programs by 168 leave
    assert_compiled_well(compiled, capability, half, spilled=32 if softcap else 16)


# When it is chosen


@pytest.fixture
def problem():
    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 8, 16)
    return {"q": q, "kv": KV(k), "lse": torch.full(q.shape[:3], 3.0), "logits": Logits(0.3), "offset": 3}


@pytest.fixture
def zeros(monkeypatch):
    """A verb whose kernel answers zeros, but for head dims below 16, and is chosen on every device."""

    def column_mass(q, kv, lse, *, logits, offset=0, out=None):
        if q.shape[-1] < 16:
            raise dispatch.UnsupportedError("head dims below 16")
        return torch.zeros(kv.k.shape[:3])

    monkeypatch.delenv("FOVEATE_KERNELS", raising=False)
    monkeypatch.setitem(sys.modules, "kernel_of_zeros", SimpleNamespace(column_mass=column_mass))
    monkeypatch.setattr(dispatch, "_verbs", dict(dispatch._verbs))
    monkeypatch.setattr(dispatch, "use_kernel", lambda *tensors: dispatch.kernels_wanted())
    return dispatch.dispatch(reference.column_mass, "kernel_of_zeros")


def test_a_cpu_takes_the_reference_without_a_word(problem):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(ops.column_mass(**problem), reference.column_mass(**problem))


def test_sinks_are_on_the_device_of_the_kernel_too(problem, zeros, monkeypatch):
    seen, logits = [], Logits(0.3, torch.zeros(4))
    monkeypatch.setattr(dispatch, "use_kernel", lambda *given: seen.extend(given))
    zeros(**problem | {"logits": logits})
    assert [x.shape for x in seen if isinstance(x, torch.Tensor)] == [x.shape for x in (problem["q"], problem["lse"])]
    assert problem["kv"] in seen
    assert logits in seen


def test_kernels_can_be_switched_off(problem, zeros, monkeypatch):
    expected = reference.column_mass(**problem)
    assert (zeros(**problem) == 0).all()
    with dispatch.reference_only():
        assert torch.equal(zeros(**problem), expected)
    assert (zeros(**problem) == 0).all()
    monkeypatch.setenv("FOVEATE_KERNELS", "0")
    assert torch.equal(zeros(**problem), expected)


def test_what_a_kernel_does_not_support_is_said_once(problem, zeros):
    problem |= {"q": problem["q"][..., :9], "kv": KV(problem["kv"].k[..., :9])}
    dispatch._say_once.cache_clear()
    with pytest.warns(UserWarning, match="column_mass: the kernel does not support head dims below 16"):
        mass = zeros(**problem)
    assert torch.equal(mass, reference.column_mass(**problem))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zeros(**problem)


def test_the_verb_keeps_its_documentation():
    assert "H2O" in ops.column_mass.__doc__
    assert ops.column_mass.__name__ == "column_mass"


def test_queries_that_saw_nothing_add_nothing(problem):
    problem["lse"][:, 1, 2] = float("-inf")
    mass = ops.column_mass(**problem)
    problem["lse"][:, 1, 2] = float("inf")
    assert mass.isfinite().all()
    assert torch.equal(mass, ops.column_mass(**problem))

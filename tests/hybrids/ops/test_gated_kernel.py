"""The kernels of attend_gated: what they compile to."""

import importlib

import pytest

from tests.kernels import compile_for


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("dtype", "dim", "wide"), [("bf16", 64, 1024), ("bf16", 128, 8192), ("fp32", 64, 1024)])
def test_compiles_for_ampere_and_hopper(capability, dtype, dim, wide):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.hybrids.ops.gated_kernel")
    half = dtype != "fp32"
    sizes = {
        "DIM": dim,
        "VALUE_DIM": dim,
        "BLOCK_D": dim,
        "BLOCK_DV": dim,
        "BLOCK_M": 16,
        "BLOCK_N": 64 if half else 16,
    }
    common = {
        **{f"{x}_ptr": f"*{dtype}:16" for x in ("q", "k", "v")},
        "length_ptr": "*i64:16",
        **{f"{x}_stride_{axis}": "i32:16" for x in "qkv" for axis in "bhl" if (x, axis) != ("q", "l")},
        **{f"{x}_stride_d": 1 for x in "qkv"},
        **dict.fromkeys(kernel._OF_STEP, "i32"),
        "block": "i32:16",
        "scale": "fp32",
        **sizes,
    }
    options = {"num_warps": 4, "num_stages": 3 if half else 1}
    choosing = {**{f"{x}_ptr": "*fp32:16" for x in ("logit", "weight", "out")}, "page_ptr": "*i32:16", "padded": "i32"}
    choosing = compile_for(capability, kernel._choose, common | choosing | {"WIDE": wide}, **options)
    assert choosing.spilled <= (0 if wide == 1024 else 700)
    more = dict.fromkeys(("batches", "window", "parts_chosen", "each"), "i32")
    more |= {"out_ptr": "*fp32:16", "lse_ptr": "*fp32:16", "page_ptr": "*i32:16"}
    reading = compile_for(capability, kernel._attend_parts, common | more, **options)
    assert reading.spilled == 0
    for compiled in (choosing, reading):
        assert ("mma.sync" in compiled.ptx) == half
        assert ("cp.async" in compiled.ptx) == half, "keys are loaded ahead"
        assert compiled.shared <= 99 << 10


@pytest.mark.parametrize("capability", [80, 90])
def test_merging_compiles_for_ampere_and_hopper(capability):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.hybrids.ops.gated_kernel")
    arguments = {
        **{f"{x}_ptr": "*fp32:16" for x in ("compressed", "part", "lse")},
        **{f"{x}_ptr": "*bf16:16" for x in ("gate", "out")},
        **{f"gate_stride_{axis}": "i32" for axis in "gbh"},
        **dict.fromkeys(("batches", "num_heads", "parts_chosen", "parts"), "i32"),
        "VALUE_DIM": 64,
        "BLOCK_DV": 64,
        "PARTS": 32,
    }
    assert compile_for(capability, kernel._merge_gated, arguments, num_warps=1).spilled == 0

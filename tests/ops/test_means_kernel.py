"""The kernels of mean keys: what they compile to."""

import importlib

import pytest
import torch

from tests.combinations import in_turn
from tests.kernels import compile_for

CAPABILITIES = ("capability", [90, 80])
SHAPES = (
    ("dtype", "dim"),
    [
        *(("bf16", dim) for dim in (32, 64, 80, 128, 256)),
        *(("fp16", dim) for dim in (64, 128)),
        *(("fp32", dim) for dim in (64, 128, 256)),
    ],
)


@pytest.fixture(autouse=True)
def triton_is_there():
    pytest.importorskip("triton")


@in_turn(SHAPES, CAPABILITIES, ("mapped", [True, False]), ("block_size", [0, 16]))
def test_means_compile_for_ampere_and_hopper(capability, dtype, dim, mapped, block_size):
    kernel = importlib.import_module("foveate.ops.compress.means_kernel")
    half = dtype != "fp32"
    tile = kernel.tile_for(torch.bfloat16 if half else torch.float32, dim)
    compiled = compile_for(
        capability,
        kernel._unchosen_means,
        {
            **{f"{x}_ptr": f"*{dtype}:16" for x in "kv"},
            **{f"{x}_strides": ("i32:16", "i32:16", "i32:16", 1) for x in "kv"},
            "word_ptr": "*i32:16",
            "word_strides": ("i32", "i32", 1),
            "begin_ptr": "*i64:16",
            "heads_ptr": "*i64:16" if mapped else None,
            "table_ptr": "*i32" if block_size else None,
            "table_stride": "i32" if block_size else None,
            **dict.fromkeys(("mean_k_ptr", "mean_v_ptr"), "*fp32:16"),
            "number_ptr": "*i32:16",
            **dict.fromkeys(("num_kv_heads", "tiles", "tile", "start"), "i32"),
            "BLOCK_SIZE": block_size,
            "WORDS": kernel._WORDS,
            **tile.sizes(dim, dim),
        },
        **tile.options,
    )
    print(compiled.shared, compiled.spilled, compiled.registers)
    assert ("wgmma.mma_async" in compiled.ptx) == (half and capability == 90)
    assert ("mma.sync" in compiled.ptx) == (half and capability == 80)
    assert ("cp.async" in compiled.ptx) == half, "keys are loaded ahead"
    assert compiled.shared <= 99 << 10
    assert compiled.spilled <= 60


@in_turn(SHAPES, CAPABILITIES, ("softcap", [0.0, 50.0]))
def test_merging_compiles_for_ampere_and_hopper(capability, dtype, dim, softcap):
    kernel = importlib.import_module("foveate.ops.attend.means_kernel")
    width = max(16, 1 << (dim - 1).bit_length())
    compiled = compile_for(
        capability,
        kernel._merge_means,
        {
            **{f"{x}_ptr": f"*{dtype}:16" for x in ("q", "given", "out")},
            **{f"{x}_strides": ("i32:16", "i32:16", "i32:16", 1) for x in ("q", "given", "out")},
            **{f"mean_{x}_ptr": "*fp32:16" for x in "kv"},
            **{f"mean_{x}_strides": ("i32:16", "i32:16", "i32:16", 1) for x in "kv"},
            "number_ptr": "*i32:16",
            "number_strides": ("i32", "i32", 1),
            **dict.fromkeys(("lse_ptr", "total_ptr"), "*fp32:16"),
            **dict.fromkeys(("num_kv_heads", "group", "tile", "parts", "length", "lead"), "i32"),
            "scale": "fp32",
            "SOFTCAP": softcap,
            **{"DIM": dim, "VALUE_DIM": dim, "BLOCK_D": width, "BLOCK_DV": width, "BLOCK_M": kernel._ROWS},
        },
        num_warps=4,
    )
    print(compiled.shared, compiled.spilled, compiled.registers)
    wide = "v4.b32" if dtype != "fp32" else ".v4."
    assert any("ld.global" in line and wide in line for line in compiled.ptx.splitlines()), "16 bytes at a time"
    assert "ex2.approx.ftz.f32" in compiled.ptx
    assert compiled.spilled == 0

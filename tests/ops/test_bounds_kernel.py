"""The bounds of boxes: what their kernel compiles to."""

import importlib

import pytest
import torch

from tests.combinations import in_turn
from tests.kernels import compile_for


@in_turn(
    (
        ("dtype", "dim", "heads"),
        [
            *(("fp16", 128, 4), ("bf16", 64, 1), ("bf16", 80, 7), ("bf16", 256, 16)),
            *(("bf16", 256, 32), ("fp16", 192, 64), ("fp32", 128, 8)),
        ],
    ),
    ("bounded", [True, False]),
    ("capability", [90, 80]),
)
def test_bounds_compile_for_ampere_and_hopper(capability, dtype, dim, heads, bounded):
    triton = pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.score.bounds_kernel")
    types = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    tile, half = kernel.tile_for(types[dtype], dim, heads, capability // 10), dtype != "fp32"
    compiled = compile_for(
        capability,
        kernel._largest_logit,
        {
            **{f"{x}_ptr": f"*{dtype}:16" for x in ("q", "low", "high")},
            "length_ptr": "*i64" if bounded else None,
            "bound_ptr": "*fp32:16",
            **{f"{x}_stride_{axis}": "i32:16" for x in ("low", "high") for axis in "bhl"},
            **{f"q_stride_{axis}": "i32:16" for axis in "bhg"},
            **{f"{x}_stride_d": 1 for x in ("q", "low", "high")},
            **{f"length_stride_{axis}": "i32" for axis in "bh"},
            **dict.fromkeys(("num_kv_heads", "group", "parts", "number", "room"), "i32"),
            "padded": "i32:16",
            "scale": "fp32",
            "BOUNDED": bounded,
            "DIM": dim,
            "BLOCK_D": triton.next_power_of_2(dim),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
        },
        **tile.options,
    )
    assert ("mma.sync" in compiled.ptx or "wgmma.mma_async" in compiled.ptx) == half, "matrix units"
    assert ("cp.async.cg.shared.global" in compiled.ptx) == half, "corners are fetched ahead, 16 bytes at a time"
    assert compiled.shared <= (113 if capability == 90 else 99) << 10, "two programs to a multiprocessor"
    assert compiled.spilled <= (0 if half else 96)
    assert "st.global.v" in compiled.ptx or not half, "bounds are written several at a time"

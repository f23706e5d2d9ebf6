"""The kernel of retention scores: what it compiles to."""

import importlib
import re

import pytest
import torch

from tests.combinations import in_turn
from tests.kernels import compile_for

POINTERS = ("x", "y", "weight", "bias", "real", "slot", "cos", "sin", "head", "head_bias", "out")


@in_turn(
    (("dtype", "dim"), [("bf16", 64), ("fp16", 128), ("bf16", 80), ("fp32", 64), ("fp32", 128)]),
    ("number", [0, 1, 2, "mlp"]),
    ("capability", [80, 90]),
)
def test_compiles_for_ampere_and_hopper(capability, dtype, dim, number):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.score.retention_kernel")
    half = dtype != "fp32"
    tile = kernel.tile_for(torch.bfloat16 if half else torch.float32, dim, capability // 10)
    first, last, taps = number in (0, "mlp"), number in (2, "mlp"), 1 if number == "mlp" else 3
    channels = 2 * dim if first else 2 * dim >> number
    arguments = {f"{name}_ptr": f"*{dtype}:16" for name in POINTERS}
    arguments |= {"real_ptr": "*u8:16", "slot_ptr": "*i64:16" if first else None}
    arguments |= dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32:16" if first else None)
    if last:
        arguments["out_ptr"] = "*fp32:16"
    else:
        arguments |= {"head_ptr": None, "head_bias_ptr": None}
    compiled = compile_for(
        capability,
        kernel._convolve,
        {
            **arguments,
            **{f"{x}_stride_{axis}": "i32:16" for x in "xy" for axis in "bhl"},
            **{f"{x}_stride_d": 1 for x in "xy"},
            "angle_stride_b": "i32:16",
            **dict.fromkeys(("heads", "length"), "i32"),
            "FIRST": first,
            "LAST": last,
            "TAPS": taps,
            "DILATION": 2,
            "VALUES": dim if first else 0,
            "CHANNELS": channels,
            "NEW": channels // 2,
            "BLOCK_T": tile.tokens,
            "BLOCK_D": kernel.padded(dim // 2 if first else channels),
            "BLOCK_V": kernel.padded(dim),
            "BLOCK_N": min(tile.columns, kernel.padded(channels // 2)),
        },
        num_warps=tile.warps,
    )
    assert ("wgmma.mma_async" in compiled.ptx or "mma.sync" in compiled.ptx) == half
    assert re.search(r"ld\.global\S*\.v4\.b32", compiled.ptx), "16 bytes are loaded at once"
    assert compiled.shared <= 48 << 10
    assert compiled.spilled <= 48

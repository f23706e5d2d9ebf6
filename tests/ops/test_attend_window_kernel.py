"""The kernel of attend_window: what it compiles to."""

import importlib

import pytest
import torch

from tests.combinations import in_turn
from tests.kernels import assert_compiled_well, compile_for

SHAPES = (
    ("dtype", "dim", "value_dim"),
    [
        ("bf16", 32, 32),
        ("bf16", 64, 64),
        ("bf16", 80, 80),
        ("bf16", 128, 128),
        ("bf16", 192, 128),
        ("bf16", 256, 256),
        ("fp16", 64, 64),
        ("fp16", 128, 128),
        ("fp32", 64, 64),
        ("fp32", 128, 128),
        ("fp32", 256, 256),
    ],
)


@in_turn(
    SHAPES,
    ("capability", [80, 90]),
    ("softcap", [0.0, 50.0]),
    besides=[("bf16", 128, 128, 80, 50.0), ("bf16", 256, 256, 80, 0.0)],
)
def test_compiles_for_ampere_and_hopper(capability, dtype, dim, value_dim, softcap):
    assert_compiled_well(*_compiled(capability, dtype, dim, value_dim, softcap), spilled=40)


@in_turn(
    (SHAPES[0], [("bf16", 64, 64), ("bf16", 192, 128), ("fp16", 128, 128), ("fp32", 128, 128)]),
    ("capability", [80, 90]),
    ("block_size", [16, 24]),
)
def test_prompts_in_blocks_compile_for_ampere_and_hopper(capability, dtype, dim, value_dim, block_size):
    assert_compiled_well(*_compiled(capability, dtype, dim, value_dim, 0.0, block_size), spilled=40)


def _compiled(capability, dtype, dim, value_dim, softcap, block_size=0):
    """The kernel, the capability, and whether it is of half precision."""
    triton = pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.attend.window_kernel")
    half = dtype != "fp32"
    tile = kernel.tile_for(torch.bfloat16 if half else torch.float32, max(dim, value_dim))
    compiled = compile_for(
        capability,
        kernel._attend_window,
        {
            **{f"{x}_ptr": f"*{dtype}:16" for x in ("q", "k", "v", "out")},
            **{f"{x}_strides": ("i32:16", "i32:16", "i32:16", 1) for x in ("q", "k", "v")},
            "out_strides": ("i32:16", "i32:16", "i32:16"),
            **dict.fromkeys(("num_heads", "group", "length", "offset", "sinks"), "i32"),
            "lower_ptr": "*i64:16",
            "lower_stride": 1,
            "sink_ptr": f"*{dtype}:16" if dim == 64 else None,
            "sink_stride": 1,
            "table_ptr": "*i32" if block_size else None,
            "table_stride": "i32" if block_size else None,
            "BLOCK_SIZE": block_size,
            "lse_ptr": "*fp32:16" if softcap else None,
            "scale": "fp32",
            "SOFTCAP": softcap,
            "DIM": dim,
            "VALUE_DIM": value_dim,
            "BLOCK_D": triton.next_power_of_2(dim),
            "BLOCK_DV": triton.next_power_of_2(value_dim),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
        },
        **tile.options,
    )
    return compiled, capability, half

"""The kernels of attend_until: what they compile to."""

import importlib

import pytest
import torch

from tests.combinations import in_turn
from tests.kernels import assert_compiled_well, compile_for


@in_turn(
    (("dtype", "dim"), [("bf16", 64), ("fp16", 64), ("bf16", 128), ("fp32", 64), ("fp32", 128)]),
    ("capability", [90, 80]),
)
def test_compiles_for_ampere_and_hopper(capability, dtype, dim):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.hybrids.ops.until_kernel")
    half = dtype != "fp32"
    tile = kernel.tile_for(torch.bfloat16 if half else torch.float32, dim)
    compiled = compile_for(
        capability,
        kernel._attend_until,
        {
            **{f"{x}_ptr": f"*{dtype}:16" for x in ("q", "k", "v", "out")},
            **{f"{x}_ptr": "*i32:16" for x in ("until", "slot", "end", "first_end", "count", "least")},
            **{f"{x}_strides": ("i32:16", "i32:16", "i32:16", 1) for x in ("q", "k", "v")},
            "out_strides": ("i32:16", "i32:16", "i32:16"),
            **dict.fromkeys(("num_kv_heads", "group", "length", "number", "window", "spans", "blocks"), "i32"),
            "room": "i32:16",
            "scale": "fp32",
            "SPAN": kernel._SPAN,
            "TAIL": 512,
            "WIDE": 16,
            "DIM": dim,
            "VALUE_DIM": dim,
            "BLOCK_D": dim,
            "BLOCK_DV": dim,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
        },
        **tile.options,
    )
    assert_compiled_well(compiled, capability, half, spilled=160)  # nearly all of it outside of the loops


@pytest.mark.parametrize("capability", [80, 90])
def test_listing_compiles_for_ampere_and_hopper(capability):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.hybrids.ops.until_kernel")
    compiled = compile_for(
        capability,
        kernel._list_retained,
        {
            **{f"{x}_ptr": "*i32:16" for x in ("until", "slot", "end", "first_end", "count", "least")},
            **dict.fromkeys(("length", "number", "window", "blocks", "blocks_each"), "i32"),
            "room": "i32:16",
            "SPAN": kernel._SPAN,
            "BLOCK_N": 64,
            "SCAN": kernel._SCAN,
        },
        num_warps=4,
    )
    assert compiled.spilled <= 8

"""The kernels of tiles: what they compile to."""

import importlib

import pytest
import torch

from tests.combinations import every_pair
from tests.kernels import assert_compiled_well, compile_for

SHAPES = (
    ("dtype", "dim"),
    [
        ("bf16", 32),
        ("bf16", 64),
        ("bf16", 80),
        ("bf16", 128),
        ("bf16", 256),
        ("fp16", 64),
        ("fp16", 128),
        ("fp32", 64),
        ("fp32", 128),
        ("fp32", 256),
    ],
)
CAPABILITIES = ("capability", [90, 80])


@every_pair(
    CAPABILITIES,
    SHAPES,
    ("rest", [False, True]),
    ("softcap", [0.0, 50.0]),
    # the fullest shared memory and registers
    besides=[
        (90, *shape, True, softcap)
        for shape in (("bf16", 128), ("bf16", 256), ("fp32", 256))
        for softcap in (0.0, 50.0)
    ],
)
def test_attention_compiles_for_ampere_and_hopper(capability, dtype, dim, rest, softcap):
    triton = pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.attend.tiles_kernel")
    half = dtype != "fp32"
    tile = kernel.tile_for(torch.bfloat16 if half else torch.float32, dim, 126)
    compiled = compile_for(
        capability,
        kernel._attend_tiles,
        {
            **{f"{x}_ptr": f"*{dtype}:16" for x in ("q", "k", "v", "out")},
            **{f"{x}_stride_{axis}": "i32:16" for x in ("q", "k", "v", "out") for axis in "bhl"},
            **{f"{x}_stride_d": 1 for x in ("q", "k", "v")},
            **{f"index_stride_{axis}": "i32" for axis in "bht"},
            **dict.fromkeys(("num_kv_heads", "group", "tile", "tiles", "parts", "length", "offset"), "i32"),
            **dict.fromkeys(("index_ptr", "used_ptr"), "*i32:16"),
            "heads_ptr": "*i64:16",
            **dict.fromkeys(("key_sum_ptr", "value_sum_ptr"), "*fp32:16" if rest else None),
            "sink_ptr": f"*{dtype}:16" if dim == 64 else None,
            "sink_stride": 1,
            "MAPPED": True,
            "REST": rest,
            "SOFTCAP": softcap,
            "index_stride_k": 1,
            "scale": "fp32",
            "DIM": dim,
            "VALUE_DIM": dim,
            "BLOCK_D": triton.next_power_of_2(dim),
            "BLOCK_DV": triton.next_power_of_2(dim),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
        },
        **tile.options,
    )
    # the sums of the values cost Ampere a few registers too many, and fp32, which no one is served in, a lot of them
    spilled = (220 if half else 6000) if softcap else 200 if half else 4000
    assert_compiled_well(compiled, capability, half, spilled=spilled if rest else 60)


@every_pair(CAPABILITIES, SHAPES, ("one", [True, False]), ("softcap", [0.0, 50.0]))
def test_mass_compiles_for_ampere_and_hopper(capability, dtype, dim, one, softcap):
    triton = pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.score.tiles_kernel")
    half = dtype != "fp32"
    tile = kernel.tile_for(torch.bfloat16 if half else torch.float32, dim, 126)
    compiled = compile_for(
        capability,
        kernel._tile_block_mass,
        {
            **{f"{x}_ptr": f"*{dtype}:16" for x in ("q", "k")},
            **{f"k_stride_{axis}": "i32:16" for axis in "bhl"},
            **dict.fromkeys(("heads", "tiles", "rows", "number"), "i32"),
            **dict.fromkeys(("lse_ptr", "mass_ptr"), "*fp32:16"),
            "begin_ptr": "*i64:16",
            "k_stride_d": 1,
            "scale": "fp32",
            "DIM": dim,
            "BLOCK_D": triton.next_power_of_2(dim),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "ONE": one,
            "SOFTCAP": softcap,
        },
        **tile.options,
    )
    assert_compiled_well(compiled, capability, half, spilled=60)

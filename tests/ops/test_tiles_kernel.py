"""The kernels of tiles: what they compile to."""

import importlib

import pytest
import torch

from tests.combinations import in_turn
from tests.kernels import assert_compiled_well, assert_products_overlap, compile_for

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


@in_turn(SHAPES, CAPABILITIES, ("softcap", [0.0, 50.0]), besides=[("bf16", 256, 80, 50.0)])
def test_attention_compiles_for_ampere_and_hopper(capability, dtype, dim, softcap):
    _compile_attention(capability, dtype, dim, softcap)


@in_turn(
    (SHAPES[0], [("bf16", 64), ("bf16", 256), ("fp16", 128), ("fp32", 128)]),
    CAPABILITIES,
    ("block_size", [16, 24]),
)
def test_attention_in_blocks_compiles_for_ampere_and_hopper(capability, dtype, dim, block_size):
    _compile_attention(capability, dtype, dim, 0.0, block_size)


def _compile_attention(capability, dtype, dim, softcap, block_size=0):
    triton = pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.attend.tiles_kernel")
    half = dtype != "fp32"
    tile = kernel.tile_for(torch.bfloat16 if half else torch.float32, dim, 126)
    compiled = compile_for(
        capability,
        kernel._attend_tiles,
        {
            **{f"{x}_ptr": f"*{dtype}:16" for x in ("q", "k", "v", "out")},
            **{f"{x}_strides": ("i32:16", "i32:16", "i32:16", 1) for x in ("q", "k", "v")},
            "out_strides": ("i32:16", "i32:16", "i32:16"),
            "index_strides": ("i32", "i32", 1),
            **dict.fromkeys(("num_kv_heads", "group", "tile", "tiles", "parts", "length", "offset"), "i32"),
            **dict.fromkeys(("index_ptr", "count_ptr"), "*i32:16"),
            "start_ptr": "*i64:16",
            "heads_ptr": "*i64:16",
            "sink_ptr": f"*{dtype}:16" if dim == 64 else None,
            "sink_stride": 1,
            "lse_ptr": "*fp32:16" if softcap else None,
            "table_ptr": "*i32" if block_size else None,
            "table_stride": "i32" if block_size else None,
            "BLOCK_SIZE": block_size,
            "SOFTCAP": softcap,
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
    assert_compiled_well(compiled, capability, half, spilled=60)


@in_turn(
    ("dim", [64, 80, 128, 256]),
    ("dtype", ["bf16", "fp16"]),
    ("sinks", [True, False]),
    ("mapped", [True, False]),
    ("lse", [True, False]),
)
def test_hoppers_own_attention_compiles(dtype, dim, sinks, mapped, lse):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.attend.tiles_hopper_kernel")
    block_d = next(width for width in kernel._RINGS if dim <= width)
    keys, stages = kernel._RINGS[block_d]
    compiled = compile_for(
        90,
        kernel._attend_tiles_on_hopper,
        {
            **{f"{x}_ptr": f"*{dtype}:16" for x in ("q", "k", "v", "out")},
            **{f"{x}_stride_{axis}": "i32:16" for x in ("q", "k", "v", "out") for axis in "bhl"},
            **dict.fromkeys(("index_ptr", "count_ptr"), "*i32:16"),
            **{f"index_stride_{axis}": "i32" for axis in "bh"},
            "index_stride_k": 1,
            "heads_ptr": "*i64:16" if mapped else None,
            "start_ptr": "*i64:16",
            "sink_ptr": f"*{dtype}:16" if sinks else None,
            "sink_stride": 1 if sinks else "i32",
            "lse_ptr": "*fp32:16" if lse else None,
            **dict.fromkeys(("items", "num_kv_heads", "group", "tile", "tiles", "parts", "length", "offset"), "i32"),
            "scale": "fp32",
            "MAPPED": mapped,
            "SINKS": sinks,
            "LSE": lse,
            "SIZES": (kernel.ROWS, dim, block_d, keys, stages, kernel._AT_ONCE),
            "REGISTERS": kernel._REGISTERS[block_d],
        },
        num_warps=4,
    )
    assert compiled.shared <= 227 << 10
    assert compiled.spilled <= (192 if dim > 128 else 176)  # outside the loop over keys that every row sees
    assert f"wgmma.mma_async.sync.aligned.m64n{keys}k16" in compiled.ptx
    assert f"wgmma.mma_async.sync.aligned.m64n{block_d}k16" in compiled.ptx
    assert_products_overlap(compiled)
    assert compiled.ptx.count("wgmma.wait_group.sync.aligned 1") == 4, "values are multiplied after exponentials"
    assert "cp.async.cg.shared.global" in compiled.ptx
    assert "cp.async.ca.shared.global" not in compiled.ptx, "16 bytes at a time"
    assert "cp.async.mbarrier.arrive.noinc" in compiled.ptx
    assert "setmaxnreg" in compiled.ptx


@in_turn(SHAPES, CAPABILITIES, ("one", [True, False]), ("softcap", [0.0, 50.0]))
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


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dim", [64, 128])
def test_hoppers_own_mass_compiles(dtype, dim):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.score.tiles_hopper_kernel")
    compiled = compile_for(
        90,
        kernel._tile_block_mass_on_hopper,
        {
            **{f"{x}_ptr": f"*{dtype}:16" for x in ("q", "k")},
            **{f"k_stride_{axis}": "i32:16" for axis in "bhl"},
            **dict.fromkeys(("heads", "tiles", "rows", "number", "groups", "span"), "i32"),
            **dict.fromkeys(("lse_ptr", "mass_ptr"), "*fp32:16"),
            "begin_ptr": "*i64:16",
            "scale": "fp32",
            "ROWS": kernel.ROWS,
            "DIM": dim,
            "KEYS": kernel._KEYS,
            "STAGES": kernel._STAGES[dim],
            "AT_ONCE": kernel._AT_ONCE,
            "REGISTERS": kernel._REGISTERS,
        },
        num_warps=4,
    )
    assert compiled.shared <= 227 << 10
    assert compiled.spilled <= 48  # before the loop
    assert compiled.ptx.count("wgmma.mma_async.sync.aligned.m64n128k16") == 2 * 2 * dim // 16
    assert_products_overlap(compiled)
    assert compiled.ptx.count("wgmma.wait_group.sync.aligned 1") == 2, "exponentials are taken after products"
    assert "cp.async.cg.shared.global" in compiled.ptx
    assert "ex2.approx.ftz.f32" in compiled.ptx
    assert "setmaxnreg" in compiled.ptx

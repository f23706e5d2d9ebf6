"""The kernels of attention over selections: what they compile to."""

import importlib

import pytest
import torch

from tests.combinations import in_turn
from tests.kernels import compile_for


@in_turn(
    (
        ("dtype", "dim", "value_dim", "heads", "shared"),
        [
            ("bf16", 512, 512, 64, True),
            ("fp16", 512, 512, 64, True),
            ("bf16", 512, 512, 64, False),
            ("bf16", 576, 512, 128, True),
            ("bf16", 576, 512, 16, False),
            ("bf16", 256, 256, 64, False),
            ("bf16", 192, 128, 1, False),
            ("bf16", 80, 80, 4, False),
            ("bf16", 64, 64, 8, True),
            ("fp32", 128, 128, 8, False),
            ("fp32", 512, 512, 64, True),
        ],
    ),
    ("capability", [80, 90]),
)
def test_it_compiles_for_ampere_and_hopper(capability, dtype, dim, value_dim, heads, shared):
    triton = pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.attend.selected_kernel")
    half = dtype != "fp32"
    torch_dtype = torch.bfloat16 if half else torch.float32
    tile = kernel.tile_for(torch_dtype, max(dim, value_dim), heads, capability // 10, shared)
    block_d = 1 << dim.bit_length() - 1
    tensors = ("q", "k", "v", "recent_k", "recent_v", "out")
    compiled = compile_for(
        capability,
        kernel._attend_selected,
        {
            **{f"{x}_ptr": f"*{dtype}:16" for x in tensors},
            **{f"{x}_strides": ("i32:16", "i32:16", "i32:16", 1) for x in (*tensors[:-1], "index")},
            "out_strides": ("i32:16", "i32:16", "i32:16"),
            "index_ptr": "*i32:16",
            **dict.fromkeys(("sink_ptr", "lse_ptr"), "*fp32:16"),
            "sink_stride": 1,
            **dict.fromkeys(("batches", "num_kv_heads", "group", "parts", "length"), "i32"),
            **dict.fromkeys(("selected", "window", "offset", "each"), "i32"),
            "scale": "fp32",
            "SHARED": shared,
            "DIM": dim,
            "VALUE_DIM": value_dim,
            "BLOCK_D": block_d,
            "BLOCK_REST": max(16, triton.next_power_of_2(dim - block_d)) if dim > block_d else 0,
            "BLOCK_DV": triton.next_power_of_2(value_dim),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
        },
        **tile.options,
    )
    assert ("wgmma.mma_async" in compiled.ptx) == (half and capability == 90 and tile.block_m == 64)
    assert ("mma.sync" in compiled.ptx) == (half and not (capability == 90 and tile.block_m == 64))
    assert ("cp.async.cg.shared.global" in compiled.ptx) == half, "keys are gathered ahead, 16 bytes at a time"
    assert "ex2.approx.ftz.f32" in compiled.ptx
    assert compiled.shared <= (227 if capability == 90 else 99) << 10
    assert compiled.spilled <= (272 if dim > 256 else 96)  # of 64 heads of 512, addresses


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("own", [True, False])
def test_the_merge_compiles_for_ampere_and_hopper(capability, block, own):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.attend.splits_kernel")
    compiled = compile_for(
        capability,
        kernel.merge_splits,
        {
            **dict.fromkeys(("found_ptr", "found_lse_ptr", "sink_ptr", "lse_ptr"), "*fp32:16"),
            "out_ptr": "*bf16:16",
            **{f"{x}_stride_{axis}": "i32:16" for x in ("found", "out") for axis in "bhl"},
            "used_ptr": "*i32:16" if own else None,
            "sink_stride": 1,
            **dict.fromkeys(("batches", "num_heads", "length", "splits", "group"), "i32"),
            "SINKS": True,
            "VALUE_DIM": 512,
            "BLOCK_DV": 512,
            "BLOCK": block,
        },
        num_warps=4,
    )
    assert compiled.spilled == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("sinks", [True, False])
def test_hoppers_own_compiles(dtype, sinks):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.attend.selected_hopper_kernel")
    tensors = ("q", "k", "recent", "out")
    compiled = compile_for(
        90,
        kernel._attend_selected,
        {
            **{f"{x}_ptr": f"*{dtype}:16" for x in tensors},
            **{f"{x}_stride_{axis}": "i32:16" for x in tensors for axis in "bhl"},
            "index_ptr": "*i32:16",
            **{f"index_stride_{axis}": "i32:16" for axis in "bhl"},
            "sink_ptr": "*fp32:16" if sinks else None,
            "lse_ptr": "*fp32:16",
            "index_stride_k": 1,
            "sink_stride": 1 if sinks else "i32",
            **dict.fromkeys(("items", "num_kv_heads", "group", "parts", "length"), "i32"),
            **dict.fromkeys(("places", "window", "offset"), "i32"),
            "scale": "fp32",
            "SINKS": sinks,
            "HEADS": kernel.HEADS,
            "DIM": kernel.DIM,
            "KEYS": kernel._KEYS,
            "ROWS": kernel._ROWS,
            "REGISTERS": kernel._REGISTERS,
        },
        num_warps=4,
    )
    assert compiled.shared <= 227 << 10
    assert compiled.spilled == 0
    assert "wgmma.mma_async.sync.aligned.m64n256" in compiled.ptx
    assert "cp.async.cg.shared.global" in compiled.ptx
    assert "cp.async.mbarrier.arrive.noinc" in compiled.ptx
    assert "setmaxnreg" in compiled.ptx

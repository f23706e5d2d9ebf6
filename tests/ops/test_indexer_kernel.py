"""The kernels of the lightning indexer: what they compile to."""

import importlib

import pytest
import torch

from tests.combinations import every_pair, in_turn
from tests.kernels import compile_for


@in_turn(
    (("dtype", "dim"), [("bf16", 64), ("bf16", 128), ("fp16", 128), ("fp32", 128), ("fp32", 256)]),
    ("capability", [90, 80]),
    ("heads", [16, 64, 128]),
    besides=[("fp8e4nv", 128, 90, heads) for heads in (16, 64, 128)],  # Ampere has none
)
def test_scores_compile_for_ampere_and_hopper(capability, dtype, dim, heads):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.score.indexer_kernel")
    each = kernel.queries_of(heads, dim * {"fp32": 4, "fp8e4nv": 1}.get(dtype, 2))
    if not each:
        assert (dtype, dim, heads) == ("fp32", 256, 128)
        return  # the reference runs
    compiled = compile_for(
        capability,
        kernel._indexer_scores,
        {
            **{f"{x}_ptr": f"*{dtype}:16" for x in "qk"},
            **dict.fromkeys(("w_ptr", "score_ptr", "max_ptr"), "*fp32:16"),
            "lost_ptr": "*i32:16",
            "start_ptr": "*i64:16",
            "scale_ptr": "*fp32:16",
            "PADDED": True,
            "SCALED": True,
            "scale_stride_b": "i32",
            "scale_stride_t": 1,
            **{f"{x}_stride_{axis}": "i32:16" for x in "qw" for axis in "bs"},
            "q_stride_h": "i32:16",
            **{f"k_stride_{axis}": "i32:16" for axis in "bt"},
            **dict.fromkeys(("q_stride_d", "k_stride_d", "w_stride_h"), 1),
            **dict.fromkeys(("groups", "queries", "number", "apart", "max_apart", "ratio", "offset", "span"), "i32"),
            "HEADS": heads,
            "EACH": each,
            "DIM": dim,
            "BLOCK_D": dim,
            "BLOCK_T": kernel._KEYS,
            "BLOCK": 16,
        },
        **kernel.options({"fp32": torch.float32}.get(dtype, torch.bfloat16), dim, capability // 10),
    )
    half, hopper = dtype != "fp32", capability == 90
    assert ("wgmma.mma_async" in compiled.ptx) == (half and hopper)
    assert ("mma.sync" in compiled.ptx) == (half and not hopper)
    assert ("cp.async" in compiled.ptx) == half, "keys are loaded ahead"
    assert compiled.shared <= (227 if hopper else 163) << 10
    if half:
        assert compiled.spilled <= (0 if hopper else 300)
        assert compiled.shared <= (113 if hopper else 99) << 10, "two programs fit on one of Hopper's multiprocessors"


@pytest.mark.parametrize(
    ("dtype", "dim", "heads"),
    [("bf16", 128, 64), ("bf16", 64, 128), ("fp16", 128, 32), ("fp8e4nv", 128, 64), ("fp8e4nv", 256, 32)],
)
@pytest.mark.parametrize("more", [True, False])
def test_scores_compile_for_hopper_alone(dtype, dim, heads, more):
    """Two warpgroups that multiply by turns, and a warp that fetches for them."""
    gl = pytest.importorskip("triton.experimental.gluon.language")
    kernel = importlib.import_module("foveate.ops.score.indexer_hopper_kernel")
    layout = gl.NVMMASharedLayout(128, 8 if dtype == "fp8e4nv" else 16, rank=2)
    compiled = compile_for(
        90,
        kernel._indexer_scores,
        {
            "q_desc": f"tensordesc<{dtype}[{kernel._ROWS}, {dim}],{layout!r}>",
            "k_desc": f"tensordesc<{dtype}[{kernel._KEYS}, {dim}],{layout!r}>",
            **dict.fromkeys(("w_ptr", "score_ptr", "max_ptr"), "*fp32:16"),
            "lost_ptr": "*i32:16",
            "start_ptr": "*i64" if more else None,
            "scale_ptr": "*fp32:16" if more else None,
            **dict.fromkeys(("groups", "queries", "number", "apart", "max_apart", "ratio", "offset", "span"), "i32"),
            "HEADS": heads,
            "EACH": kernel._ROWS // heads,
            "KEYS": kernel._KEYS,
            "BLOCK": 16,
            "STAGES": kernel._STAGES,
            "PADDED": more,
            "SCALED": more,
        },
        num_warps=4,
    )
    assert compiled.spilled == 0
    assert compiled.shared <= 227 << 10
    assert "wgmma.mma_async.sync.aligned.m64n256" in compiled.ptx
    assert "cp.async.bulk.tensor.2d" in compiled.ptx
    assert "setmaxnreg" in compiled.ptx


@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize(("groups", "room"), [(2048, 2048), (8192, 8192)])
def test_choice_compiles_for_ampere_and_hopper(capability, groups, room):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.select.blocks_kernel")
    compiled = compile_for(
        capability,
        kernel._topk_of_blocks,
        {
            **dict.fromkeys(("score_ptr", "max_ptr", "kept_ptr"), "*fp32:16"),
            **dict.fromkeys(("list_ptr", "index_ptr", "found_ptr"), "*i32:16"),
            **dict.fromkeys(("visible_ptr", "start_ptr"), "*i64:16"),
            "PADDED": True,
            **dict.fromkeys(("rows", "number", "blocks", "k"), "i32"),
            "BLOCK": 16,
            "CHUNK": kernel._CHUNK,
            "GROUPS": groups,
            "ROOM": room,
        },
        num_warps=8,
    )
    assert compiled.spilled == 0


@every_pair(("capability", [90, 80]), ("held", [256, 8192, 16384]), ("named", [False, True]))
def test_choice_from_what_is_held_compiles_for_ampere_and_hopper(capability, held, named):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.select.blocks_kernel")
    compiled = compile_for(
        capability,
        kernel._topk_of_named if named else kernel._topk_of_short_rows,
        {
            "score_ptr": "*fp32:16",
            **({"list_ptr": "*i32:16", "BLOCK": 16} if named else {"UNIT": 1}),
            "found_ptr": "*i32:16",
            **dict.fromkeys(("visible_ptr", "start_ptr"), "*i64:16"),
            "PADDED": True,
            **dict.fromkeys(("apart", "rows", "number", "k"), "i32"),
            "VECTOR": 4,
            "HELD": held,
        },
        num_warps=kernel.warps(held),
    )
    assert compiled.spilled == 0
    if held > 256:
        assert "ld.global.v4.b32" in compiled.ptx, "scores are read 16 bytes at a time"

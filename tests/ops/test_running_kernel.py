"""The kernels of a buffer of the best tokens: what they compile to."""

import importlib

import pytest

from tests.kernels import compile_for


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("slots", [32, 512, 1024])
def test_the_walk_compiles_for_ampere_and_hopper(capability, slots):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.retain.running_kernel")
    compiled = compile_for(
        capability,
        kernel._running_best,
        {
            **dict.fromkeys(("kept_ptr", "margin_ptr"), "*fp32"),
            **dict.fromkeys(("place_ptr", "position_ptr", "leave_ptr"), "*i64:16"),
            **dict.fromkeys((*kernel._STRIDES, "position_stride_b", "heads", "size", "count"), "i32"),
            **dict.fromkeys(("kept_stride_s", "place_stride_s", "margin_stride_l", "position_stride_l"), 1),
            "SLOTS": slots,
            "BLOCK": kernel._BLOCK,
        },
        num_warps=1,
    )
    assert compiled.spilled == 0
    assert "bar.sync" not in compiled.ptx, "one warp waits for no other"
    assert "redux.sync" in compiled.ptx, "a step finds the weakest in few instructions"


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("slots", [128, 512, 1024])
def test_replacing_compiles_for_ampere_and_hopper(capability, slots):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.retain.running_kernel")
    compiled = compile_for(
        capability,
        kernel._replace_weakest,
        {
            **dict.fromkeys(("key_ptr", "value_ptr"), "*bf16:16"),
            "margin_ptr": "*fp32:16",
            **dict.fromkeys(("position_ptr", "kept_ptr", "slot_ptr", "token_ptr"), "*i64:16"),
            **dict.fromkeys((*kernel._IN_PLACE, "key_stride_s", "value_stride_s"), "i32"),
            **dict.fromkeys(("slot_stride", "token_stride", "heads", "ring", "size"), "i32"),
            **dict.fromkeys(("key_stride_d", "value_stride_d", "margin_stride_s", "position_stride_s"), 1),
            "DIM": 64,
            "VALUE_DIM": 64,
            "BLOCK_D": 64,
            "SLOTS": slots,
        },
        num_warps=1 if slots <= 256 else 4,
    )
    assert compiled.spilled == 0

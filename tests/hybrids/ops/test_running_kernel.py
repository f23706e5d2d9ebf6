"""The kernels of a buffer of the best tokens: what they compile to."""

import importlib

import pytest

from tests.kernels import compile_for


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ["_offer", "_list_best", "_leave"])
@pytest.mark.parametrize("slots", [1, 512, 1024])
def test_finding_turns_compiles_for_ampere_and_hopper(capability, name, slots):
    pytest.importorskip("triton")
    module = importlib.import_module("foveate.hybrids.ops.running_kernel")
    kernel, warps = getattr(module, name), 16 if name == "_list_best" else 4
    types = {
        **dict.fromkeys(("kept_ptr", "margin_ptr"), "*fp32"),
        **dict.fromkeys(("place_ptr", "position_ptr", "leave_ptr"), "*i64:16"),
        **dict.fromkeys(("offer_ptr", "value_ptr", "turn_ptr", "found_ptr"), "*i32:16"),
        **dict.fromkeys((*module._BUFFER_STRIDES, *module._OFFER_STRIDES), "i32"),
        **dict.fromkeys(("heads", "size", "count", "rows", "levels"), "i32"),
        **dict.fromkeys(("kept_stride_s", "place_stride_s", "margin_stride_l", "position_stride_l"), 1),
        "FIRST": module._FIRST,
        "SCAN": module._SCAN,
        "SLOTS": slots,
        "OWN": module._OWN,
        "OTHERS": module._OTHERS,
    }
    compiled = compile_for(capability, kernel, {x: types[x] for x in kernel.arg_names}, num_warps=warps)
    assert compiled.spilled == 0
    assert compiled.shared <= 48 << 10


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("slots", [128, 512, 1024])
def test_replacing_compiles_for_ampere_and_hopper(capability, slots):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.hybrids.ops.running_kernel")
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

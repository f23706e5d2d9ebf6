"""The kernels of a step's slots: what they compile to."""

import importlib

import pytest

from tests.kernels import compile_for


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("at", [False, True])
def test_giving_up_compiles_for_ampere_and_hopper(capability, at):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.retain.slots_kernel")
    compiled = compile_for(
        capability,
        kernel._give_up,
        {
            "position_ptr": "*i32:16",
            "score_ptr": None if at else "*fp32:16",
            "limit_ptr": "*i64:16",
            "row_ptr": "*i1",
            "slot_ptr": "*i64:16",
            **{f"{x}_stride_{axis}": "i32" for x in ("position", "score") for axis in "bh"},
            **{f"{x}_stride_s": 1 for x in ("position", "score")},
            **dict.fromkeys(("limit_stride", "row_stride", "heads", "number"), "i32"),
            "AT": at,
            "BLOCK": kernel._BLOCK,
        },
        num_warps=4,
    )
    assert compiled.spilled == 0


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("evicts", "block_size"), [(False, 0), (True, 0), (False, 16)])
def test_putting_compiles_for_ampere_and_hopper(capability, evicts, block_size):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.retain.slots_kernel")
    compiled = compile_for(
        capability,
        kernel._put_token,
        {
            **dict.fromkeys(("key_ptr", "value_ptr", "k_ptr", "v_ptr"), "*bf16:16"),
            **dict.fromkeys(("slot_ptr", "found_ptr"), "*i64:16"),
            "freed_ptr": "*i64:16" if evicts else None,
            **dict.fromkeys(("position_ptr", "newest_ptr"), "*i32:16" if evicts else None),
            "emptied_ptr": "*fp32:16" if evicts else None,
            "table_ptr": "*i32" if block_size else None,
            "table_stride": "i32" if block_size else None,
            **dict.fromkeys((*kernel._STRIDES, "heads", "key_stride_s", "value_stride_s"), "i32"),
            **{f"{x}_stride_d": 1 for x in ("key", "value")},
            **dict.fromkeys(("k_strides", "v_strides"), ("i32:16", "i32:16", "i32:16", 1)),
            **dict.fromkeys(("position_stride_s", "emptied_stride_s"), 1),
            "TAKE": evicts,
            "BLOCK_SIZE": block_size,
            "DIM": 128,
            "VALUE_DIM": 128,
            "BLOCK": 128,
        },
        num_warps=1,
    )
    assert compiled.spilled == 0

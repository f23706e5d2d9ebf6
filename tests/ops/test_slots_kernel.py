"""The kernel of what is given up: what it computes (under the interpreter) and what it compiles to."""

import importlib

import pytest

from tests.kernels import compile_for, run_interpreted


def test_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted("ops/interpreted_slots.py")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("at", [False, True])
def test_compiles_for_ampere_and_hopper(capability, at):
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

"""The kernels of running sums of attention: what they compute (under the interpreter) and what they compile to."""

import importlib

import pytest

from tests.kernels import compile_for, run_interpreted


def test_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted("ops/interpreted_masses.py")


@pytest.mark.parametrize("listed", [False, True])
def test_taking_in_compiles_for_hopper(listed):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.attend.masses_kernel")
    compiled = compile_for(
        90,
        kernel._take_in,
        {
            "slots_ptr": "*i64:16",
            **dict.fromkeys(("raw_ptr", "recent_ptr", "into_ptr", "mass_ptr"), "*fp32:16"),
            "total_ptr": None,
            "index_ptr": "*i64:16" if listed else None,
            **dict.fromkeys((*kernel._STRIDES, "batches", "heads", "nodes", "width", "node_blocks", "sinks"), "i32"),
            **dict.fromkeys(("into_stride_n", "index_stride_n"), 1),
            **dict.fromkeys(("share", "of_group"), "fp32"),
            "RAW": not listed,
            "BLOCK": kernel._BLOCK,
        },
        num_warps=4,
    )
    assert compiled.spilled == 0


def test_adding_children_compiles_for_hopper():
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.attend.masses_kernel")
    compiled = compile_for(
        90,
        kernel._add_children,
        {
            **dict.fromkeys(("beneath_ptr", "mass_ptr"), "*fp32:16"),
            "chosen_ptr": "*i64:16",
            **dict.fromkeys((*kernel._CHILD_STRIDES, "heads", "places", "width"), "i32"),
            "EACH": 64,
            "BLOCK": 16,
        },
        num_warps=4,
    )
    assert compiled.spilled == 0

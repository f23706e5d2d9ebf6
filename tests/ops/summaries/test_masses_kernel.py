"""The kernel of running sums of attention: what it compiles to."""

import importlib

import pytest

from tests.kernels import compile_for


@pytest.mark.parametrize("last", [False, True])
def test_compiles_for_hopper(last):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.summaries.masses_kernel").note_masses
    number, given = "*fp32:16", {}
    for name in kernel.arg_names:
        given[name] = number if name.endswith("_ptr") else "i32"
    given |= dict.fromkeys(("slots_ptr", "count_ptr", "chosen_ptr", "page_ptr", "list_ptr"), "*i64:16")
    given |= {"recent_strides": ("i32", "i32", 1), "raw_recent_strides": ("i32", "i32")}
    given |= {"picked_ptr": "*i32:16", "gone_ptr": "*i32:16", "share": "fp32"}
    given |= dict.fromkeys(("below_ptr", "list_ptr", "mass_ptr") if last else ("raw_recent_ptr",))
    given |= {"BRANCH": 4 * (not last), "GROUP": 7, "EACH": 32, "BLOCK_W": 16, "BLOCK": 512, "HEADS": 4}
    assert compile_for(90, kernel, given, num_warps=4).spilled == 0

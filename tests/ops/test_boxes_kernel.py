"""The kernels of a step's pages: what they compile to."""

import importlib

import pytest

from tests.kernels import compile_for


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("block_size", [0, 16])
def test_bounding_compiles_for_ampere_and_hopper(capability, block_size):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.compress.boxes_kernel")
    compiled = compile_for(
        capability,
        kernel._bound_newest,
        {
            **dict.fromkeys(("key_ptr", "low_ptr", "high_ptr"), "*bf16:16"),
            "length_ptr": "*i64:16",
            "table_ptr": "*i32" if block_size else None,
            "table_stride": "i32" if block_size else None,
            "BLOCK_SIZE": block_size,
            **dict.fromkeys((*kernel._VARYING, "length_stride", "heads", "page_size"), "i32"),
            **{f"{x}_stride_{axis}": "i32:16" for x, axis in (("key", "s"), ("low", "p"), ("high", "p"))},
            **{f"{x}_stride_d": 1 for x in ("key", "low", "high")},
            "DIM": 128,
            "BLOCK_D": 128,
            "BLOCK": 16,
        },
        num_warps=4,
    )
    assert compiled.spilled == 0


@pytest.mark.parametrize("capability", [80, 90])
def test_counting_compiles_for_ampere_and_hopper(capability):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.select.pages_kernel")
    compiled = compile_for(
        capability,
        kernel._keys_of_pages,
        {
            "page_ptr": "*i32:16",
            "length_ptr": "*i64:16",
            "found_ptr": "*i64:16",
            **dict.fromkeys(("page_stride_b", "page_stride_h", "length_stride"), "i32"),
            **dict.fromkeys(("heads", "group", "number", "page_size"), "i32"),
            "page_stride_p": 1,
            "STEPS": 10,
        },
        num_warps=4,
    )
    assert compiled.spilled == 0


@pytest.mark.parametrize("capability", [80, 90])
def test_mass_of_pages_compiles_for_ampere_and_hopper(capability):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.select.pages_kernel")
    compiled = compile_for(
        capability,
        kernel._mass_of_pages,
        {
            "mass_ptr": "*fp32:16",
            "page_ptr": "*i32:16",
            "found_ptr": "*fp32:16",
            **{f"{x}_stride_{axis}": "i32" for x in ("mass", "page") for axis in "bh"},
            **dict.fromkeys(("mass_stride_n", "page_stride_p"), 1),
            **dict.fromkeys(("heads", "number"), "i32"),
        },
        num_warps=4,
    )
    assert compiled.spilled == 0


@pytest.mark.parametrize("capability", [80, 90])
def test_pages_that_are_always_read_compile_for_ampere_and_hopper(capability):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.select.pages_kernel")
    compiled = compile_for(
        capability,
        kernel._with_always_read,
        {
            **dict.fromkeys(("score_ptr", "found_ptr"), "*fp32:16"),
            **dict.fromkeys(("newest_ptr", "end_ptr"), "*i64:16"),
            **{f"score_stride_{axis}": "i32" for axis in "bh"},
            "score_stride_p": 1,
            **dict.fromkeys(("newest_stride", "end_stride", "heads", "number", "first"), "i32"),
            "BLOCK": kernel._PLACES,
        },
        num_warps=4,
    )
    assert compiled.spilled == 0

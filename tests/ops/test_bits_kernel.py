"""The kernels of keys as bits: what they compile to."""

import importlib

import pytest

from tests.kernels import compile_for

WORDS = {"word_ptr": "*i32:16", **{f"word_stride_{axis}": "i32" for axis in "bh"}, "word_stride_p": 1}


@pytest.mark.parametrize("capability", [80, 90])
def test_entering_compiles(capability):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.select.bits_kernel")
    compiled = compile_for(
        capability,
        kernel._set_bits,
        {
            **WORDS,
            "index_ptr": "*i32:16",
            "begin_ptr": "*i64:16",
            **{f"index_stride_{axis}": "i32" for axis in "bht"},
            "index_stride_k": 1,
            **dict.fromkeys(("heads", "tiles", "number"), "i32"),
            "BLOCK": kernel._PLACES,
        },
        num_warps=4,
    )
    assert compiled.spilled == 0
    assert ".or.b32" in compiled.ptx


@pytest.mark.parametrize("capability", [80, 90])
def test_reading_compiles(capability):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.select.bits_kernel")
    compiled = compile_for(
        capability,
        kernel._keys_of_bits,
        {
            **WORDS,
            **dict.fromkeys(("begin_ptr", "start_ptr"), "*i64:16"),
            **dict.fromkeys(("found_ptr", "count_ptr"), "*i32:16"),
            **dict.fromkeys(("heads", "number"), "i32"),
            "WORDS": kernel._WORDS,
        },
        num_warps=1,
    )
    assert compiled.spilled == 0

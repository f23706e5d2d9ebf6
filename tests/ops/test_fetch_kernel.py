"""The kernels of `foveate.ops.fetch`, compiled for GPUs that are not there."""

import pytest

from tests.kernels import compile_for

pytest.importorskip("triton")

from foveate.ops.fetch import kernel

KEYS, NUMBERS = "*bf16:16", "*i32:16"


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("page", [4, 8, 16])
def test_pages_are_read_in_whole_words(capability, page):
    """Over the bus a piece of 2 bytes costs as much as one of 16."""
    pointers = {"pages_ptr": NUMBERS, "blocks_ptr": NUMBERS, "address_ptr": "*i64:16", "k_ptr": KEYS, "v_ptr": KEYS}
    sizes = dict.fromkeys(("number", "segments", "segment_slots"), "i32")
    constants = {"PAGE": page, "DIM": 128, "VALUE_DIM": 128, "ALIGNED": True, "BLOCK": page * 128}
    compiled = compile_for(capability, kernel._fetch, pointers | sizes | constants, num_warps=4)
    words = "ld.global.v4.b32" if page > 4 else "ld.global.v2.b32"
    assert compiled.ptx.count(words) >= 2
    assert "ld.global.b16" not in compiled.ptx
    assert not compiled.spilled


@pytest.mark.parametrize("capability", [80, 90])
def test_the_others_compile(capability):
    tables = ("pages", "table", "holds", "chosen", "clock", "given", "blocks", "counts")
    place = {f"{name}_ptr": NUMBERS for name in tables} | dict.fromkeys(("rows", "number", "entries", "size"), "i32")
    compiled = compile_for(capability, kernel._place, place | {"OLDEST": 255, "BLOCK": kernel._BLOCK}, num_warps=8)
    assert not compiled.spilled
    put = dict.fromkeys(("k_ptr", "v_ptr", "hot_k_ptr", "hot_v_ptr", "open_k_ptr", "open_v_ptr"), KEYS)
    put |= {"slots_ptr": "*i64:16", "address_ptr": "*i64:16", "table_ptr": NUMBERS}
    put |= {f"{x}_stride_{axis}": "i32" for x in "kv" for axis in "bhd"}
    put |= dict.fromkeys(("heads", "entries", "segments", "segment_slots"), "i32")
    put |= {"PAGE": 8, "DIM": 128, "VALUE_DIM": 128, "BLOCK": 128}
    assert not compile_for(capability, kernel._put, put, num_warps=1).spilled

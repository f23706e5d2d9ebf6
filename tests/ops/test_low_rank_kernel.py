"""Low-rank summaries of pages: what their kernels compile to."""

import importlib

import pytest
import torch

from foveate.ops.compress import low_rank
from foveate.ops.compress.low_rank import PageRecord
from tests.combinations import in_turn
from tests.kernels import compile_for


def of_form(form):
    """The constants that both kernels take."""
    return {
        "DIM": form.head_dim,
        "SIZE": form.page_size,
        "RANK": form.rank,
        "MEAN": form.mean,
        "DIRECTIONS": form.directions,
        "COEFFICIENTS": form.coefficients,
        "BITS": form.coefficient_bits,
    }


@in_turn(
    (
        ("newest", "written", "block_size"),
        [*((True, 0, size) for size in (0, 1, 16, 24)), (False, 0, 0), (False, 64, 0)],
    ),
    ("capability", [90, 80]),
    (("dtype", "sizes"), [("bf16", (128, 16)), ("bf16", (64, 16, 4)), ("fp16", (80, 7)), ("fp32", (256, 64, 4))]),
    ("weighted", [True, False]),
    besides=[(True, 0, 16, 90, "bf16", (128, 16, 8, 8), True)],  # LOCKS's record takes many times as long to compile
)
def test_compressing_compiles_for_ampere_and_hopper(capability, dtype, sizes, newest, written, block_size, weighted):
    triton = pytest.importorskip("triton")
    kernel, form = importlib.import_module("foveate.ops.compress.low_rank_kernel"), PageRecord(*sizes)
    block_d, block_s = (triton.next_power_of_2(x) for x in (form.head_dim, form.page_size))
    compiled = compile_for(
        capability,
        kernel._compress,
        {
            "key_ptr": f"*{dtype}:16",
            "record_ptr": "*u8:16",
            "weight_ptr": "*fp32:16" if weighted else None,
            "length_ptr": "*i64" if newest or written else None,
            "table_ptr": "*i32" if block_size else None,
            "table_stride": "i32" if block_size else None,
            **{f"key_stride_{axis}": "i32:16" for axis in "bhs"},
            "key_stride_d": 1,
            **{f"record_stride_{axis}": "i32:16" for axis in "bhp"},
            **dict.fromkeys(("length_stride", "heads"), "i32"),
            "WEIGHTED": weighted,
            "NEWEST": newest,
            "WRITTEN": written,
            "BLOCK_SIZE": block_size,
            **of_form(form),
            "ITERATIONS": low_rank.ITERATIONS,
            "MEAN_LIMIT": low_rank.MEAN_LIMIT,
            "LIMIT": low_rank.LIMIT,
            "TINY": low_rank.TINY,
            "BLOCK_D": block_d,
            "BLOCK_S": block_s,
        },
        num_warps=kernel.warps(form),
    )
    assert compiled.spilled == 0
    assert compiled.shared <= 8 << 10


@in_turn(
    (
        ("dtype", "sizes", "heads"),
        [
            *(("bf16", (128, 16), 4), ("bf16", (64, 16), 7), ("fp16", (80, 7, 1), 1), ("bf16", (128, 32), 4)),
            *(("bf16", (256, 32, 3), 4), ("fp16", (192, 64, 4), 32), ("fp32", (128, 16), 8)),
        ],
    ),
    ("capability", [90, 80]),
    ("weighted", [True, False]),
    ("bounded", [True, False]),
    (("branch", "totals", "largest"), [(0, True, False), (0, True, True), (0, False, False), (8, False, False)]),
    ("block_size", [0, 2]),
    ("softcap", [0.0, 30.0]),
    besides=[("bf16", (128, 16, 8, 8), 4, 90, True, True, 0, False, False, 2, 30.0)],
)
def test_masses_compile_for_ampere_and_hopper(
    capability, dtype, sizes, heads, weighted, bounded, branch, totals, largest, block_size, softcap
):
    pytest.importorskip("triton")
    kernel, form = importlib.import_module("foveate.ops.score.low_rank_kernel"), PageRecord(*sizes)
    types = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    tile, half = kernel.tile_for(types[dtype], form, heads), dtype != "fp32"
    compiled = compile_for(
        capability,
        kernel._page_lse,
        {
            "q_ptr": f"*{dtype}:16",
            "record_ptr": "*u8:16",
            "weight_ptr": "*fp32:16" if weighted else None,
            "length_ptr": "*i64" if bounded else None,
            "page_ptr": "*i32:16" if branch else None,
            "lse_ptr": "*fp32:16",
            "total_ptr": "*fp32:16",
            "table_ptr": "*i32" if block_size else None,
            "table_stride": "i32" if block_size else None,
            "q_strides": ("i32:16", "i32:16", "i32:16", 1),
            "record_strides": ("i32:16", "i32:16", "i32:16"),
            **{f"length_stride_{axis}": "i32" for axis in "bh"},
            **{f"page_stride_{axis}": "i32" for axis in "bhp"},
            **dict.fromkeys(("num_kv_heads", "group", "parts", "number", "room"), "i32"),
            "padded": "i32:16",
            "scale": "fp32",
            "WEIGHTED": weighted,
            "BRANCH": branch,
            "BLOCK_SIZE": block_size,
            "TOTALS": totals,
            "LARGEST": largest,
            "SOFTCAP": softcap,
            **kernel.constants(form),
            "PACKED": kernel.packed_for(form, heads, tile),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
        },
        **tile.options,
    )
    assert ("mma.sync" in compiled.ptx or "wgmma.mma_async" in compiled.ptx) == half, "matrix units"
    ahead = half and form.page_size * tile.block_m <= 256
    assert ("cp.async.cg.shared.global" in compiled.ptx) == ahead, "records are fetched ahead, 16 bytes at a time"
    assert "ex2.approx.ftz.f32" in compiled.ptx
    assert compiled.shared <= 75 << 10, "three programs to a multiprocessor"
    assert compiled.spilled <= (0 if half else 96)

"""The kernels of attention over summaries: what they compile to."""

import importlib

import pytest
import torch

from tests.combinations import every_pair, in_turn
from tests.kernels import compile_for

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SHAPES = (("dtype", "dim", "group"), [("fp16", 128, 4), ("bf16", 64, 1), ("bf16", 256, 8), ("fp32", 128, 7)])
AXES = {
    **dict.fromkeys(("k", "v"), "bhld"),
    **dict.fromkeys(("node", "value", "spread"), "bhnd"),
    "recent": "bhn",
    "q": "bhd",
}
"""Of tensors whose strides are passed as one tuple."""


def _compiled(kernel, vectors, options, **given):
    """``vectors``: which tensors hold vectors, which begin at multiples of 16 bytes; given: pointers and constants."""
    arguments = {}
    for name in kernel.arg_names:
        field, _, axis = name.partition("_stride")
        if name in given:
            arguments[name] = given[name]
        elif axis == "s":
            before = "i32:16" if field in vectors else "i32"
            arguments[name] = (*[before] * (len(AXES[field]) - 1), 1)
        else:
            numbers = ("scaling", "log_size", "reads", "prior")
            arguments[name] = "fp32" if name in numbers else "i32"
    return compile_for(90, kernel, arguments, **options)


def _sizes(tile, dim):
    return {"DIM": dim, "VALUE_DIM": dim, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}


def assert_compiled_well(compiled, half, spilled, programs=2):
    assert ("mma.sync" in compiled.ptx or "wgmma.mma_async" in compiled.ptx) == half
    assert ("cp.async.cg.shared.global" in compiled.ptx) == half, "vectors are fetched ahead, 16 bytes at a time"
    assert "tf32" not in compiled.ptx, "nothing is multiplied in less than its own precision"
    assert "ex2.approx.ftz.f32" in compiled.ptx
    assert compiled.shared <= (227 << 10) // programs - 1024, f"{programs} programs to a multiprocessor"
    assert compiled.spilled <= spilled


@every_pair(SHAPES, ("how", ["plain", "spread", "children", "estimate"]), ("softcap", [0.0, 50.0]))
def test_scores_compile_for_hopper(dtype, dim, group, how, softcap):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.summaries.score_kernel").score_nodes
    host = importlib.import_module("foveate.ops.summaries.launch")
    tile = host.tile_for(TYPES[dtype], dim, group, 9)
    spread, children = how in ("spread", "children"), how == "children"
    options = host.scoring_options(tile, TYPES[dtype], dim * (1 + spread), 9)
    vector, number = f"*{dtype}:16", "*fp32:16"
    compiled = _compiled(
        kernel,
        ("q", "k", "v", "node", "spread"),
        options,
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "node_ptr"), vector),
        spread_ptr=vector if spread else None,
        estimate_ptr=number if how == "estimate" else None,
        **dict.fromkeys(("slots_ptr", "count_ptr"), "*i64:16"),
        list_ptr="*i64:16" if children else None,
        **dict.fromkeys(("weight_ptr", "rank_ptr", "rank_lse_ptr", "raw_ptr"), number),
        **dict.fromkeys(("part_out_ptr", "part_lse_ptr", "read_ptr"), number),
        arrived_ptr="*i32:16",
        BRANCH=4 if children else 0,
        GROUP=group,
        SOFTCAP=softcap,
        **_sizes(tile, dim),
    )
    assert_compiled_well(compiled, dtype != "fp32", 8 if dtype != "fp32" else 192)


@in_turn(SHAPES, ("keeps", [False, True]), ("width", [16, 40]), ("softcap", [0.0, 50.0]))
def test_attention_compiles_for_hopper(dtype, dim, group, keeps, width, softcap):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.summaries.attend_kernel").attend_nodes
    host = importlib.import_module("foveate.ops.summaries.launch")
    tile = host.tile_for(TYPES[dtype], dim, group, 9)
    compiled = _compiled(
        kernel,
        ("q", "k", "v", "value"),
        tile.options,
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "value_ptr", "out_ptr"), f"*{dtype}:16"),
        **dict.fromkeys(("count_ptr", "page_ptr"), "*i64:16"),
        list_ptr=None,
        **dict.fromkeys(("weight_ptr", "part_out_ptr", "part_lse_ptr", "lse_ptr"), "*fp32:16"),
        token_ptr="*fp32:16" if keeps else None,
        **dict.fromkeys(("read_ptr", "refined_ptr"), "*fp32:16"),
        **dict.fromkeys(("picked_ptr", "arrived_ptr", "gone_ptr"), "*i32:16"),
        WIDTH=width,
        BRANCH=0,
        LAST=True,
        GROUP=group,
        SOFTCAP=softcap,
        AT_ONCE=host.merge_last(tile, 1 << (dim - 1).bit_length(), 64),
        **_sizes(tile, dim),
    )
    assert_compiled_well(compiled, dtype != "fp32", 96)


@pytest.mark.parametrize(
    ("held", "warps", "group"),
    [(1024, 4, 1), (4096, 8, 16), (8192, 16, 1), (8192, 16, 71)],
)
def test_selection_compiles_for_hopper(held, warps, group):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.summaries.select_kernel").select_nodes
    compiled = _compiled(
        kernel,
        (),
        {"num_warps": warps},
        **dict.fromkeys(("rank_ptr", "rank_lse_ptr", "part_lse_ptr", "recent_ptr"), "*fp32:16"),
        **dict.fromkeys(("count_ptr", "allowed_ptr", "chosen_ptr", "node_ptr", "list_ptr"), "*i64:16"),
        **dict.fromkeys(("picked_ptr", "gone_ptr"), "*i32:16"),
        BRANCH=4,
        SPLITS=16,
        OTHERS=4,
        HELD=held,
        GROUP=group,
        AT_ONCE=warps * 32 * importlib.import_module("foveate.ops.summaries.launch")._RANKED,
    )
    assert compiled.spilled <= 256

"""The kernels of attention over summaries: what they compile to."""

import importlib
import re

import pytest
import torch

from tests.combinations import every_pair
from tests.kernels import compile_for

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SHAPES = (("dtype", "dim", "group"), [("fp16", 128, 4), ("bf16", 64, 1), ("bf16", 256, 8), ("fp32", 128, 7)])
AXES = {
    **dict.fromkeys(("k", "v"), "bhld"),
    **dict.fromkeys(("node", "value", "spread"), "bhnd"),
    **dict.fromkeys(("size", "entropy", "recent", "end"), "bhn"),
    "q": "bhd",
    "count": "bh",
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
            last = "i32" if field == "count" else 1
            before = "i32:16" if field in vectors else "i32"
            arguments[name] = (*[before] * (len(AXES[field]) - 1), last)
        elif axis:
            arguments[name] = "i32"
        else:
            numbers = ("scaling", "log_size", "reads", "prior", "limit")
            arguments[name] = "fp32" if name in numbers else "i32"
    return compile_for(90, kernel, arguments, **options)


def _sizes(tile, dim):
    padded = 1 << (dim - 1).bit_length()
    return {
        "DIM": dim,
        "VALUE_DIM": dim,
        "BLOCK_D": padded,
        "BLOCK_DV": padded,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }


def assert_compiled_well(compiled, half, spilled, wide=None, programs=2):
    """``wide``: how many reads of 16 bytes there must be; None: vectors are fetched ahead."""
    assert ("mma.sync" in compiled.ptx or "wgmma.mma_async" in compiled.ptx) == half
    if wide is None:
        assert ("cp.async.cg.shared.global" in compiled.ptx) == half, "vectors are fetched ahead, 16 bytes at a time"
    else:
        found = re.findall(r"ld\.global(?!\.cg)[.\w:]*\.v4\.b32", compiled.ptx)
        assert len(found) >= wide, "keys are read 16 bytes at a time"
    assert "tf32" not in compiled.ptx, "nothing is multiplied in less than its own precision"
    assert "ex2.approx.ftz.f32" in compiled.ptx
    assert compiled.shared <= (227 << 10) // programs - 1024, f"{programs} programs to a multiprocessor"
    assert compiled.spilled <= spilled


@every_pair(
    SHAPES, ("how", ["plain", "spread", "children", "estimate"]), ("attends", [False, True]), ("softcap", [0.0, 50.0])
)
def test_scores_compile_for_hopper(dtype, dim, group, how, attends, softcap):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.summaries.score_kernel").score_nodes
    host = importlib.import_module("foveate.ops.summaries.launch")
    tile = host.tile_for(TYPES[dtype], dim, group, 9)
    spread, children = how in ("spread", "children"), how == "children"
    options = host.scoring_options(tile, TYPES[dtype], dim * (1 + spread + attends), 9)
    vector, number = f"*{dtype}:16", "*fp32:16"
    compiled = _compiled(
        kernel,
        ("q", "k", "v", "node", "value", "spread"),
        options,
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "node_ptr", "value_ptr"), vector),
        spread_ptr=vector if spread else None,
        estimate_ptr=number if how == "estimate" else None,
        **dict.fromkeys(("size_ptr", "entropy_ptr"), None),
        **dict.fromkeys(("slots_ptr", "count_ptr"), "*i64:16"),
        **dict.fromkeys(("list_ptr", "chosen_ptr"), "*i64:16" if children else None),
        parent_ptr=number if children else None,
        **dict.fromkeys(("weight_ptr", "rank_ptr", "raw_ptr"), number),
        rank_lse_ptr=number if how != "plain" or not attends else None,
        bound_ptr=number if attends else None,
        recent_ptr=number if how != "plain" else None,
        **dict.fromkeys(("part_out_ptr", "part_lse_ptr", "read_ptr"), number),
        arrived_ptr="*i32:16",
        BRANCH=4 if children else 0,
        ATTENDS=attends,
        PRESERVE=children,
        BIAS=1,
        SCORE={"plain": 0, "estimate": 2}.get(how, 1),
        LARGEST=torch.finfo(TYPES[dtype]).max,
        SOFTCAP=softcap,
        **_sizes(tile, dim),
    )
    assert_compiled_well(compiled, dtype != "fp32", 0 if dtype != "fp32" else 192)


def _attending(dtype, group, width, softcap, keeps=2):
    """What launches that attend have in common, and what some of them have."""
    return {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "value_ptr", "out_ptr"), f"*{dtype}:16"),
        **dict.fromkeys(("count_ptr", "allowed_ptr", "chosen_ptr", "page_ptr"), "*i64:16"),
        "list_ptr": None,
        "end_ptr": None if width else "*fp32:16",
        **dict.fromkeys(("recent_ptr", "rank_ptr", "rank_lse_ptr", "weight_ptr", "token_ptr"), "*fp32:16"),
        **dict.fromkeys(("part_out_ptr", "part_lse_ptr", "lse_ptr", "read_ptr", "refined_ptr"), "*fp32:16"),
        **dict.fromkeys(("picked_ptr", "arrived_ptr"), "*i32:16"),
        "gone_ptr": "*i32:16",
        "WIDTH": width,
        "BRANCH": 0,
        "PRESERVE": bool(width),
        "KEEPS": keeps,
        "SOFTCAP": softcap,
    }


@every_pair(SHAPES, ("keeps", [1, 2]), ("width", [16, 0]), ("softcap", [0.0, 50.0]), strength=3)
def test_attention_compiles_for_hopper(dtype, dim, group, keeps, width, softcap):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.summaries.attend_kernel").attend_nodes
    host = importlib.import_module("foveate.ops.summaries.launch")
    tile = host.tile_for(TYPES[dtype], dim, group, 9)
    common = _attending(dtype, group, width, softcap, keeps)
    given = {name: one for name, one in common.items() if name in kernel.arg_names}
    given["AT_ONCE"] = host.merge_last(tile, 1 << (dim - 1).bit_length(), 64)
    compiled = _compiled(
        kernel,
        ("q", "k", "v", "value"),
        tile.options,
        **given,
        LAST=True,
        BLOCK_W=min(16 if width else 32, tile.block_n),
        CHUNKS=1 if width or tile.block_n >= 32 else 2,
        **_sizes(tile, dim),
    )
    assert_compiled_well(compiled, dtype != "fp32", 96)


@every_pair(
    SHAPES,
    (
        ("few", "blocks", "width", "programs", "ranked", "branch"),
        [
            (3, 8, 16, 8, False, 0),
            (3, 8, 16, 8, True, 4),
            (3, 128, 16, 256, True, 0),
            (8, 1024, 0, 8, False, 0),
            (0, 1, 16, 64, False, 4),
        ],
    ),
    ("softcap", [0.0, 50.0]),
)
def test_replacing_compiles_for_hopper(dtype, dim, group, few, blocks, width, programs, ranked, branch, softcap):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.summaries.replace_kernel").replace_refined
    host = importlib.import_module("foveate.ops.summaries.launch")
    tile = host.tile_for(TYPES[dtype], dim, group, 9)
    plan = importlib.import_module("foveate.ops.summaries.plan")
    members = 1 << (group - 1).bit_length()
    block_s = plan.slice_dims(dim, programs, tile.block_m, 264)
    options = plan.replacing_options(tile, members * blocks)
    sizes = _sizes(tile, dim)
    del sizes["BLOCK_DV"]
    compiled = _compiled(
        kernel,
        ("q", "k", "v", "value"),
        options,
        **_attending(dtype, group, width, softcap)
        | {"AT_ONCE": host.merge_at_once(tile, block_s), "BRANCH": branch, "list_ptr": "*i64:16" if branch else None}
        | ({} if ranked or not few else {"rank_lse_ptr": None}),
        bound_ptr="*fp32:16",
        PRIOR=True,
        FEW=few,
        GROUP=group if few else 1,
        ROOM=8 if few == 8 else 4,
        BLOCKS=blocks,
        BLOCKS_AT_ONCE=blocks if members * blocks * tile.block_n <= plan._NO_BOUNDS else min(16, 64 // members),
        SPLITS=16,
        OTHERS=4,
        BLOCK_S=block_s,
        BLOCK_R=min(host._REREAD, tile.block_n),
        BLOCK_W=min(16 if width else 32, tile.block_n),
        CHUNKS=1 if width or tile.block_n >= 32 else 2,
        **sizes,
    )
    keys = tile.block_n * dim * TYPES[dtype].itemsize // (16 * 32 * options["num_warps"])
    assert_compiled_well(compiled, dtype != "fp32", 96, wide=keys)


@pytest.mark.parametrize(("held", "warps"), [(1024, 4), (4096, 8), (8192, 16)])
@pytest.mark.parametrize(("rule", "group"), [(0, 0), (1, 0), (2, 0), (0, 4), (0, 16), (1, 4), (2, 4)])
def test_selection_compiles_for_hopper(held, warps, rule, group):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.summaries.select_kernel").select_nodes
    compiled = _compiled(
        kernel,
        (),
        {"num_warps": warps},
        **dict.fromkeys(("rank_ptr", "rank_lse_ptr", "part_lse_ptr", "recent_ptr"), "*fp32:16"),
        **dict.fromkeys(("count_ptr", "allowed_ptr", "chosen_ptr", "node_ptr", "list_ptr"), "*i64:16"),
        **dict.fromkeys(("picked_ptr", "capped_ptr"), "*i32:16"),
        gone_ptr="*i32:16",
        RULE=rule,
        BRANCH=4,
        PRIOR=True,
        LAYER=rule == 1 and not group,
        SPLITS=16,
        OTHERS=4,
        HELD=held,
        GROUP=group,
        AT_ONCE=warps * 32 * importlib.import_module("foveate.ops.summaries.launch")._RANKED,
    )
    assert compiled.spilled <= 256

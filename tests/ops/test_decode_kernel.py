"""The kernels of decoding: what they compile to."""

import functools
import importlib

import pytest
import torch

from foveate.ops import KV, Logits
from tests.combinations import every_pair, in_turn
from tests.kernels import compile_for

SHAPES = (
    ("dtype", "dim", "heads"),
    [("fp16", 128, 4), ("bf16", 64, 1), ("bf16", 80, 7), ("bf16", 256, 16), ("fp16", 192, 64), ("fp32", 128, 8)],
)
CAPABILITIES = ("capability", [90, 80])


def _tile(tile_for, dtype, dim, heads, capability, **more):
    types = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    return tile_for(types[dtype], dim, heads, capability // 10, **more)


def assert_compiled_well(compiled, capability, half, spilled=0):
    """Matrix units, keys fetched ahead 16 bytes at a time, two programs to a multiprocessor."""
    assert ("mma.sync" in compiled.ptx or "wgmma.mma_async" in compiled.ptx) == half
    assert ("cp.async.cg.shared.global" in compiled.ptx) == half
    assert "ex2.approx.ftz.f32" in compiled.ptx
    assert compiled.shared <= (113 if capability == 90 else 99) << 10
    assert "cp.async.ca" not in compiled.ptx, "what says which keys to read is read by hand"
    assert compiled.spilled <= max(spilled, 0 if half else 96)


def assert_compiled_well_in_blocks(compiled, capability, half, whole=False):
    """Entries of the table that are read ahead take registers: a few more spill where these are full.

    So does what tells whole rows from others, in groups of 64 heads of dim 192 alone."""
    assert_compiled_well(compiled, capability, half, spilled=(112 if whole else 64) if half else 112)


def _compile_attention(
    capability,
    dtype,
    dim,
    heads,
    *,
    indexed=None,
    masked=False,
    bounded=False,
    kept=False,
    page_size=0,
    shared=1,
    softcap=0.0,
    block_size=0,
    whole=False,
    stored=None,
    queries=1,
):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.attend.decode_kernel")
    narrow = stored is not None and bool(kept or indexed)
    tile_for = functools.partial(kernel.decode_tile, narrow=narrow) if queries == 1 else kernel.newest_tile
    tile, resident = _tile(tile_for, dtype, dim, heads, capability, in_blocks=block_size > 0)
    half = dtype != "fp32"
    compiled = compile_for(
        capability,
        kernel._attend_decode,
        {
            "q_ptr": f"*{dtype}:16",
            "k_ptr": f"*{stored or dtype}:16",
            "v_ptr": f"*{'i16' if stored else dtype}:16",  # values in eight bits are read in pairs
            "q_strides": ("i32:16", "i32:16", 1),
            "kv_strides": ("i32:16", "i32:16", "i32:16", 1) * 2,
            "chosen_ptr": f"*{indexed}:16" if indexed else "*i8" if masked else None,
            "head_ptr": "*i64:16" if indexed and bounded else None,
            "table_ptr": "*i32" if block_size else None,
            "table_stride": "i32" if block_size else None,
            **{f"chosen_stride_{axis}": "i32" for axis in "bh"},
            "chosen_stride_l": 1,
            "length_ptr": "*i64" if bounded else None,
            "whole_ptr": "*i64" if whole else None,
            **{f"length_stride_{axis}": "i32" for axis in "bh"},
            "count_ptr": "*i64" if bounded and page_size else None,
            "count_stride": "i32",
            **dict.fromkeys(("out_ptr", "lse_ptr"), "*fp32:16"),
            "used_ptr": "*i32:16" if bounded or whole else None,
            "kept": ("*i16:16" if half else "*fp32:16", "*fp32:16", "*fp32:16") if kept else None,
            **dict.fromkeys(("batches", "num_kv_heads", "parts", "number", "blocks", "room"), "i32"),
            "group": 1 if shared > 1 else "i32",
            "keys": "i32" if page_size else None,
            "padded": "i32:16",
            **dict.fromkeys(("scale", "steps"), "fp32"),
            "INDEXED": indexed is not None,
            "PAGE_SIZE": page_size,
            "BLOCK_SIZE": block_size,
            "HEADS": (shared, queries),
            "CODED": kept and half,
            "SOFTCAP": softcap,
            "TILE": tile.shape(dim, dim),
        },
        **tile.options,
    )
    if capability == 90 and half and dim <= 128 and tile.block_m <= 16:  # as many at a time as the splits reckon with
        assert compiled.registers * 32 * tile.num_warps * resident <= 65536
        assert compiled.shared * resident <= 227 << 10
    if stored:
        return compiled
    if block_size:
        assert_compiled_well_in_blocks(compiled, capability, half, whole)
    else:
        assert_compiled_well(compiled, capability, half, spilled=8 if page_size else 0)


@in_turn(
    SHAPES,
    CAPABILITIES,
    (
        ("indexed", "masked", "kept"),
        [(None, False, False), (None, True, False), ("i32", False, False), ("i64", False, False), (None, False, True)],
    ),
    ("bounded", [False, True]),
    ("softcap", [0.0, 50.0]),
    # the fullest registers of Ampere, and the fullest shared memory of Hopper
    besides=[
        ("fp32", 128, 8, 80, None, True, False, False, 50.0),
        ("fp16", 192, 64, 90, None, False, True, True, 0.0),
        ("fp16", 192, 64, 90, None, False, True, True, 50.0),
    ],
)
def test_attention_compiles_for_ampere_and_hopper(
    capability, dtype, dim, heads, indexed, masked, kept, bounded, softcap
):
    how = {"indexed": indexed, "masked": masked, "bounded": bounded, "kept": kept, "softcap": softcap}
    _compile_attention(capability, dtype, dim, heads, **how)


@in_turn(SHAPES, CAPABILITIES, ("queries", [2, 5]), ("bounded", [False, True]), ("softcap", [0.0, 50.0]))
def test_attention_of_the_newest_tokens_compiles_for_ampere_and_hopper(
    capability, dtype, dim, heads, queries, bounded, softcap
):
    how = {"queries": queries, "bounded": bounded, "softcap": softcap}
    _compile_attention(capability, dtype, dim, heads * queries, **how)


BLOCK_SIZES = ("block_size", [1, 16, 24, 256])


@in_turn(
    (("indexed", "page_size", "kept"), [(None, 0, False), (None, 0, True), ("i32", 0, False), ("i32", 16, False)]),
    (SHAPES[0], [("bf16", 128, 4), ("fp16", 64, 8), ("bf16", 256, 4)]),
)
def test_attention_to_eight_bits_compiles_for_hopper(indexed, page_size, kept, dtype, dim, heads):
    how = {"indexed": indexed, "bounded": True, "kept": kept, "page_size": page_size, "block_size": 16}
    compiled = _compile_attention(90, dtype, dim, heads, stored="fp8e4nv", whole=indexed is not None, **how)
    assert_eight_bits_are_converted_at_once(compiled)
    assert "cp.async.cg.shared.global" in compiled.ptx, "keys are loaded ahead"
    assert compiled.shared <= 113 << 10
    assert compiled.spilled <= (112 if dim > 128 else 0)


def assert_eight_bits_are_converted_at_once(compiled):
    """Two of them by one instruction, none through a third type; and none is read from shared memory by itself."""
    assert "cvt.rn.f16x2.e4m3x2" in compiled.ptx
    assert "cvt.bf16.f16" not in compiled.ptx
    assert compiled.ptx.count("ld.shared.b8") <= 16, "those of masks"
    assert "mma" in compiled.ptx


@in_turn(
    SHAPES,
    CAPABILITIES,
    BLOCK_SIZES,
    (
        ("indexed", "masked", "bounded", "kept", "page_size"),
        [
            (None, False, True, False, 0),
            (None, True, False, False, 0),
            (None, False, True, True, 0),
            ("i32", False, False, False, 0),
            ("i64", False, True, False, 0),
            ("i32", False, True, False, 16),
        ],
    ),
)
def test_attention_in_blocks_compiles_for_ampere_and_hopper(
    capability, dtype, dim, heads, block_size, indexed, masked, bounded, kept, page_size
):
    how = {"indexed": indexed, "masked": masked, "bounded": bounded, "kept": kept, "page_size": page_size}
    _compile_attention(capability, dtype, dim, heads, block_size=block_size, **how)


@in_turn(SHAPES, CAPABILITIES, (("indexed", "page_size"), [("i32", 0), ("i64", 0), ("i32", 16)]))
def test_attention_with_whole_rows_compiles_for_ampere_and_hopper(capability, dtype, dim, heads, indexed, page_size):
    how = {"indexed": indexed, "bounded": True, "page_size": page_size, "block_size": 16, "whole": True}
    _compile_attention(capability, dtype, dim, heads, **how)


@in_turn(
    SHAPES,
    CAPABILITIES,
    ("own", [False, True]),
    (("page_size", "indexed", "bounded"), [(16, "i32", True), (3, "i64", True), (1, "i32", False)]),
)
def test_attention_of_pages_compiles_for_ampere_and_hopper(
    capability, dtype, dim, heads, own, page_size, indexed, bounded
):
    heads, shared = (1, max(heads, 2)) if own else (heads, 1)
    how = {"indexed": indexed, "bounded": bounded, "page_size": page_size, "shared": shared}
    _compile_attention(capability, dtype, dim, heads, **how)


@in_turn(
    SHAPES,
    CAPABILITIES,
    ("bounded", [False, True]),
    ("softcap", [0.0, 50.0]),
    besides=[("fp32", 128, 8, *one) for one in ((90, False, 0.0), (90, False, 50.0), (80, True, 50.0))],
)
def test_scoring_compiles_for_ampere_and_hopper(capability, dtype, dim, heads, bounded, softcap):
    compiled = _scoring(capability, dtype, dim, heads, bounded, softcap)
    assert_compiled_well(compiled, capability, dtype != "fp32")


@in_turn(SHAPES, CAPABILITIES, ("bounded", [False, True]), BLOCK_SIZES)
def test_scoring_in_blocks_compiles_for_ampere_and_hopper(capability, dtype, dim, heads, bounded, block_size):
    compiled = _scoring(capability, dtype, dim, heads, bounded, 0.0, block_size=block_size)
    assert_compiled_well_in_blocks(compiled, capability, dtype != "fp32")


@in_turn(
    SHAPES,
    CAPABILITIES,
    ("bounded", [False, True]),
    ("page_size", [3, 16, 64]),
    ("block_size", [0, *BLOCK_SIZES[1]]),
    ("softcap", [0.0, 50.0]),
)
def test_scoring_of_pages_compiles_for_ampere_and_hopper(
    capability, dtype, dim, heads, bounded, page_size, block_size, softcap
):
    how = {"page_size": page_size, "block_size": block_size}
    compiled = _scoring(capability, dtype, dim, heads, bounded, softcap, **how)
    half = dtype != "fp32"
    spilled = 168 if not half else 16 if block_size else 8  # where a key of a page is takes registers
    assert_compiled_well(compiled, capability, half, spilled=spilled)


@pytest.mark.parametrize(("dtype", "dim", "heads"), [("bf16", 128, 4), ("fp16", 64, 8)])
def test_scoring_of_eight_bits_compiles_for_hopper(dtype, dim, heads):
    compiled = _scoring(90, dtype, dim, heads, True, 0.0, block_size=16, stored="fp8e4nv")
    assert_eight_bits_are_converted_at_once(compiled)
    assert compiled.spilled == 0


def _scoring(capability, dtype, dim, heads, bounded, softcap, block_size=0, page_size=0, stored=None):
    """The compiled kernel that keeps logits; ``page_size``: of the keys of pages."""
    triton = pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.score.pooled_kernel")
    tile, half = _tile(kernel.tile_for, dtype, dim, heads, capability), dtype != "fp32"
    return compile_for(
        capability,
        kernel._keep_logits,
        {
            "q_ptr": f"*{dtype}:16",
            "k_ptr": f"*{stored or dtype}:16",
            "q_strides": ("i32:16", "i32:16", 1),
            "k_strides": ("i32:16", "i32:16", "i32:16", 1),
            "chosen_ptr": "*i32:16" if page_size else None,
            "table_ptr": "*i32" if block_size else None,
            "table_stride": "i32" if block_size else None,
            "logit_ptr": "*i16:16" if half else "*fp32:16",
            **dict.fromkeys(("top_ptr", "lse_ptr"), "*fp32:16"),
            **{f"chosen_stride_{axis}": "i32" for axis in "bh"},
            "chosen_stride_l": 1,
            "length_ptr": "*i64" if bounded else None,
            **{f"length_stride_{axis}": "i32" for axis in "bh"},
            "count_ptr": "*i64" if bounded and page_size else None,
            "count_stride": "i32",
            **dict.fromkeys(("num_kv_heads", "group", "parts", "number", "blocks", "room"), "i32"),
            "keys": "i32" if page_size else None,
            "padded": "i32:16",
            **dict.fromkeys(("scale", "steps"), "fp32"),
            "CODED": half,
            "SOFTCAP": softcap,
            "PAGE_SIZE": page_size,
            "BLOCK_SIZE": block_size,
            "DIM": dim,
            "BLOCK_D": triton.next_power_of_2(dim),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
        },
        **tile.options,
    )


@in_turn(("how", ["SUM", "MAX", "LOGIT", "LARGEST"]), CAPABILITIES, ("coded", [True, False]), ("page_size", [0, 3, 16]))
def test_pooling_compiles_for_ampere_and_hopper(capability, coded, how, page_size):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.score.kept_logits_kernel")
    compiled = compile_for(
        capability,
        kernel._pool_logits,
        {
            "chosen_ptr": "*i32:16" if page_size else "*i8",
            "logit_ptr": "*i16:16" if coded else "*fp32:16",
            **dict.fromkeys(("top_ptr", "lse_ptr", "score_ptr"), "*fp32:16"),
            **{f"chosen_stride_{axis}": "i32" for axis in "bh"},
            "chosen_stride_l": 1,
            "length_ptr": "*i64",
            **{f"length_stride_{axis}": "i32" for axis in "bh"},
            "count_ptr": "*i64" if page_size else None,
            "count_stride": "i32",
            **dict.fromkeys(("sets", "members", "group", "number", "blocks", "splits"), "i32"),
            "keys": "i32" if page_size else None,
            "padded": "i32:16",
            **dict.fromkeys(("power", "step"), "fp32"),
            "CODED": coded,
            "MASKED": not page_size,
            "BOUNDED": True,
            "PAGE_SIZE": page_size,
            **{one: one == how for one in ("SUM", "MAX", "LOGIT", "LARGEST")},
            "KEYS": kernel._POOLED,
            "MEMBERS": kernel._MEMBERS,
            "BLOCK_N": 128,
            "SPLITS": 128,
            "KV_HEADS": 8,
        },
        num_warps=4,
    )
    assert ("ex2.approx.ftz.f32" in compiled.ptx) == (how != "LOGIT")
    assert "ld.global.v4.b32" in compiled.ptx, "logits are read 16 bytes at a time"
    assert compiled.spilled <= 16


@every_pair(
    CAPABILITIES,
    ("name", ["_bracket", "_keep_between", "_settle", "_write_chosen"]),
    (("number", "k"), [(32_768, 3277), (131_072, 13_107), (1 << 20, 104_857), (1 << 21, 1 << 20)]),
    ("bounded", [False, True]),
)
def test_selection_compiles_for_ampere_and_hopper(capability, name, number, k, bounded):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.select.rows_kernel")
    sample, room = kernel.sizes(number, k)
    pointers = {
        "_bracket": ("bound", "kept_count", "found"),
        "_keep_between": ("bound", "kept_count", "tally", "kept", "index"),
        "_settle": ("bound", "tally", "kept", "settled"),
        "_write_chosen": ("tally", "kept", "index", "settled", "found"),
    }[name]
    held = kernel._HELD if bounded else -1
    constants = {"VECTOR": 4, "HELD": held, "TILE": kernel._TILE, "ROOM": room, "CHUNKS": 64}
    if name == "_bracket":
        constants = {"VECTOR": 4, "HELD": held, "SAMPLE": sample}
    elif name == "_keep_between":
        del constants["CHUNKS"]
    numbers = ("heads", "rows", "number", "k", "chunks")
    compiled = compile_for(
        capability,
        getattr(kernel, name),
        {
            "score_ptr": "*fp32:16",
            **{f"stride_{axis}": "i32" for axis in "bh"},
            "count_ptr": "*i64:16",
            "count_stride": 1,
            "length_ptr": "*i64:16" if bounded else None,
            "length_stride": "i32",
            **{f"{pointer}_ptr": f"*{'fp32' if pointer == 'kept' else 'i32'}:16" for pointer in pointers},
            **dict.fromkeys(numbers[:4] if name == "_bracket" else numbers, "i32"),
            **constants,
        },
        num_warps={"_bracket": kernel.warps(max(sample, held)), "_settle": kernel.warps(room)}.get(name, 4),
    )
    assert compiled.spilled == 0
    if name in ("_keep_between", "_write_chosen"):
        assert "ld.global.v4.b32" in compiled.ptx, "scores are read 16 bytes at a time"


@in_turn((("held", "bounded"), [(256, True), (16384, True), (16384, False)]), CAPABILITIES)
def test_selection_of_short_rows_compiles_for_ampere_and_hopper(capability, held, bounded):
    pytest.importorskip("triton")
    kernel = importlib.import_module("foveate.ops.select.rows_kernel")
    compiled = compile_for(
        capability,
        kernel.topk_of_short_rows,
        {
            "score_ptr": "*fp32:16",
            **{f"stride_{axis}": "i32" for axis in "bh"},
            "count_ptr": "*i64:16",
            "count_stride": 1,
            "length_ptr": "*i64:16" if bounded else None,
            "length_stride": "i32",
            "found_ptr": "*i32:16",
            **dict.fromkeys(("heads", "number", "k"), "i32"),
            "VECTOR": 4,
            "HELD": held,
        },
        num_warps=kernel.warps(held),
    )
    assert compiled.spilled == 0


class _LaunchError(Exception):
    """Carries the grid that a kernel was to be launched with."""


class _Grid:
    def __getitem__(self, grid):
        def launch(*args, **options):
            raise _LaunchError(grid)

        return launch


@pytest.mark.parametrize("verb", ["attend_indices", "attend_pages"])
def test_rows_that_are_read_whole_have_programs_for_their_keys(verb, monkeypatch):
    """However few keys the other rows select: outputs would be right, and one program would read them all."""
    kernels = importlib.import_module("foveate.ops.attend.decode_kernel")
    monkeypatch.setattr(kernels, "_attend_decode", _Grid())
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 132)
    q, k = torch.zeros(1, 4, 1, 64), torch.zeros(1, 2, 65536, 64)
    chosen, more = torch.zeros(1, 2, 8, dtype=torch.int32), {"attend_pages": (8,)}.get(verb, ())
    splits = []
    for whole in (None, torch.tensor([65536])):
        with pytest.raises(_LaunchError) as launched:
            getattr(kernels, verb)(q, KV(k, k), chosen, *more, logits=Logits(0.1), whole=whole)
        splits.append(launched.value.args[0][1])
    assert splits[0] <= 4 < 64 < splits[1]

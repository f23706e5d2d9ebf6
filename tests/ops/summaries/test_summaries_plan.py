"""How attention over summaries is cut into programs, without running any."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from foveate import ops
from foveate.ops._dispatch import UnsupportedError

plan = pytest.importorskip("foveate.ops.summaries.plan", exc_type=ImportError)

MULTIPROCESSORS = 132
KV_HEADS = 8


def work(batch, dtype=torch.float16):
    tile = plan.tile_for(dtype, 128, 4, 9)
    return plan.Work(tile, batch * KV_HEADS, 4, 128, dtype.itemsize, MULTIPROCESSORS)


def tree(pages, most, sizes=(16,), tail=144):
    """A stand-in with room for so many ``pages``, of which ``most`` of each level are refined, lowest level first."""
    top = pages * sizes[0] // sizes[-1]
    rows = SimpleNamespace(width=tail, places=top, most=most)
    return SimpleNamespace(
        rows=rows, levels=sizes, width=sizes[0], branch=lambda level: sizes[level] // sizes[level - 1]
    )


@pytest.mark.parametrize("batch", [1, 2, 8, 32, 64])
@pytest.mark.parametrize("tokens", [4096, 32768, 131072, 524288])
def test_programs_fill_the_gpu(batch, tokens):
    """Of page 16, top_k 3, where there is work for so many."""
    mine = work(batch)
    (stage,) = mine.stages(tree(tokens // 16, [3]), ops.Refinement())
    blocks = -(-tokens // 16 // mine.tile.block_n)
    assert (stage.width, stage.k, stage.replaces, stage.few) == (tokens // 16, 3, True, True)
    assert stage.parts == -(-blocks // stage.per)
    assert stage.scoring <= stage.parts
    assert mine.programs * stage.scoring >= min(0.9 * MULTIPROCESSORS, mine.programs * blocks)
    assert mine.programs * stage.attending >= min(0.9 * MULTIPROCESSORS, 8 * mine.programs)


def test_levels_follow_each_other():
    first, last = work(1).stages(tree(16384, [1802, 1229], (8, 32)), ops.Refinement())
    assert (first.level, first.width, first.k, first.replaces) == (1, 4096, 1229, False)
    assert (last.level, last.width, last.k, last.replaces) == (0, 4 * 1229, 1802, False)
    assert (first.begin, first.padded, last.begin, last.padded) == (0, 4096, 4096, 4928)
    assert (first.before, last.before) == (3, 3 + first.parts)  # sinks and tail are 144 keys


def test_nothing_is_refined():
    """Then no level is looked at below, and what is weighed is attended to."""
    (stage,) = work(1).stages(tree(64, [3, 0], (8, 32)), ops.Refinement())
    assert (stage.level, stage.k, stage.replaces) == (1, 0, True)


def test_what_kernels_do_not_do():
    with pytest.raises(UnsupportedError, match="more than 32768 nodes"):
        work(1).stages(tree(32769, [100]), ops.Refinement())
    with pytest.raises(UnsupportedError, match="3 children"):
        work(1).stages(tree(96, [10, 10], (8, 24)), ops.Refinement(mass="preserve"))


@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("tokens", [8192, 131072])
def test_the_program_that_is_ready_last_does_not_merge_for_long(batch, tokens):
    mine = work(batch)
    last = mine.stages(tree(tokens // 8, [tokens // 72, tokens // 106], (8, 32)), ops.Refinement())[-1]
    parts = last.before + last.parts
    at_once = plan.merge_last(mine.tile, mine.value_dim, parts)
    assert parts <= 2 * at_once
    assert at_once < 2 * parts  # places of no part are merged, too
    assert at_once * mine.tile.block_m * mine.value_dim <= 128 * 32 * mine.tile.num_warps


@pytest.mark.parametrize(
    ("path", "course"),
    [
        ("none", (True, True, 16)),
        ("bounds", (True, True, 128)),
        ("selects in each program", (True, False, 16)),
        ("replaces", (False, False, 16)),
    ],
)
def test_paths_that_a_benchmark_switches_off_are_not_taken(path, course):
    benchmark = runpy.run_path(str(Path(__file__).resolve().parents[3] / "benchmarks" / "luka_paths.py"))
    with mock.patch.dict(vars(plan), benchmark["OFF"][path]):
        (stage,) = work(1).stages(tree(8192, [3]), ops.Refinement())
    assert (stage.replaces, stage.few, stage.at_once) == course

"""How attention over summaries is cut into programs, without running any."""

from types import SimpleNamespace

import pytest
import torch

from foveate.ops.dispatch import UnsupportedError

plan = pytest.importorskip("foveate.ops.summaries.plan", exc_type=ImportError)

MULTIPROCESSORS = 132
KV_HEADS = 8


TILE = plan.tile_for(torch.float16, 128, 4, 9)


def stages(batch, *of_tree):
    return plan.stages(tree(*of_tree), TILE, batch * KV_HEADS, MULTIPROCESSORS)


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
    """Of pages of 16, where there is work for so many."""
    (stage,) = stages(batch, tokens // 16, [3])
    blocks = -(-tokens // 16 // TILE.block_n)
    assert (stage.width, stage.k) == (tokens // 16, 3)
    for splits in (stage.scoring, stage.attending):
        assert batch * KV_HEADS * splits >= min(0.9 * MULTIPROCESSORS, batch * KV_HEADS * blocks)


def test_levels_follow_each_other():
    first, last = stages(1, 16384, [1802, 1229], (8, 32))
    assert (first.level, first.width, first.k) == (1, 4096, 1229)
    assert (last.level, last.width, last.k) == (0, 4 * 1229, 1802)
    assert (first.begin, first.padded, last.begin, last.padded) == (0, 4096, 4096, 4928)
    assert (first.before, last.before) == (3, 3 + first.attending)  # sinks and tail are 144 keys


def test_nothing_is_refined():
    """Then no level is looked at below."""
    (stage,) = stages(1, 64, [3, 0], (8, 32))
    assert (stage.level, stage.k) == (1, 0)


def test_what_kernels_do_not_do():
    with pytest.raises(UnsupportedError, match="more than 32768 nodes"):
        stages(1, 32769, [100])


@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("tokens", [8192, 131072])
def test_the_program_that_is_ready_last_does_not_merge_for_long(batch, tokens):
    last = stages(batch, tokens // 8, [tokens // 72, tokens // 106], (8, 32))[-1]
    parts = last.before + last.attending
    at_once = plan.merge_last(TILE, 128, parts)
    assert parts <= 2 * at_once
    assert at_once < 2 * parts  # places of no part are merged, too
    assert at_once * TILE.block_m * 128 <= 128 * 32 * TILE.num_warps

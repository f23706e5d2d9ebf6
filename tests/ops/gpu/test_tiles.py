"""Tiles, and the split of work among programs."""

import pytest
import torch

tiles = pytest.importorskip("foveate.ops.gpu.tiles", exc_type=ImportError)


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 4, 7, 16, 64, 100])
@pytest.mark.parametrize(("capability", "room"), [(8, 8 << 10), (9, 16 << 10)])
def test_blocks_of_keys_fit_their_room(dim, group, capability, room):
    tile = tiles.group_tile(torch.bfloat16, dim, group, capability)
    padded = 1 << (dim - 1).bit_length()
    assert tile.block_n * padded * 2 <= room
    assert tile.block_n * max(padded, 64) * 2 == room
    assert tile.block_m == min(64, max(16, 1 << (group - 1).bit_length()))
    assert tile.num_stages == (2 if tile.block_m == 64 else 3)


@pytest.mark.parametrize("least", [1, 16])
def test_single_precision_has_small_blocks(least):
    tile = tiles.group_tile(torch.float32, 256, 2, 9, least_heads=least)
    assert (tile.block_m, tile.block_n, tile.num_warps, tile.num_stages) == (max(2, least), 16, 8, 1)


def test_the_tile_of_a_width_is_the_smallest_that_holds_it():
    table = {width: tiles.Tile(width, 16, num_warps=4, num_stages=2) for width in (64, 128)}
    assert [tiles.tile_of_width(table, dim).block_m for dim in (1, 64, 65, 128)] == [64, 64, 128, 128]


@pytest.mark.parametrize("rows", [1, 8, 300])
@pytest.mark.parametrize("blocks", [0, 1, 5, 64, 1000])
def test_a_split_covers_all_blocks_and_has_no_empty_program(rows, blocks):
    splits, each = tiles.split(rows, blocks, 264)
    assert splits * each >= blocks
    assert blocks == 0 or (splits - 1) * each < blocks

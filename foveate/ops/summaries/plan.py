"""The division of :func:`attend_summaries`' launches into programs, and their compile options.

The grid's first axis counts rows times KV heads times tiles of query heads. Its second axis splits the nodes of each of
these among programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.tiles import Tile, group_tile, split
from foveate.ops.summaries.tree import Tree

_SCORING, _ATTENDING = 3, 2
"""Number of resident programs per multiprocessor, for ``score_nodes`` and for ``attend_nodes``."""
_MERGING = 1 / 4
"""Cost of merging a part of the output, in units of reading a block of nodes."""
_HELD = 32768
"""The largest number of nodes that one selection of ``select_nodes`` can take."""
_SHARED = 96 << 10
"""Bytes of shared memory for a program's loads in flight. A multiprocessor has room for two programs that use all of
it, or for three that use three quarters."""


def tile_for(dtype: torch.dtype, dim: int, group: int, capability: int) -> Tile:
    """The query heads and nodes of a program, see :func:`group_tile`; ``dim`` is the larger of the head dims."""
    return group_tile(dtype, dim, group, capability, least_heads=1, wide_warps=8)


def scoring_options(tile: Tile, dtype: torch.dtype, of_node: int, capability: int) -> dict[str, int | None]:
    """Compile options of ``score_nodes``, with the pipeline stages that fit if it loads ``of_node`` numbers per
    node."""
    if dtype == torch.float32:
        return tile.options | {"num_warps": 8}
    blocks = _SHARED // (1 if capability >= 9 else 2) // (tile.block_n * of_node * dtype.itemsize)
    return tile.options | {"num_stages": max(2, min(tile.num_stages, blocks))}


def merge_last(tile: Tile, dims: int, parts: int) -> int:
    """The number of parts, of ``parts``, that the last program of ``attend_nodes`` merges at once, with registers
    free."""
    numbers = tile.num_warps * 32 * (32 if tile.block_m >= 16 else 128)
    return max(1, min(32, triton.next_power_of_2(parts), numbers // (tile.block_m * dims)))


def chunks_of(width: int, tile: Tile) -> int:
    """The number of chunks of a page of ``width`` tokens. A program reads a chunk at once; its size is a power of
    two."""
    return triton.cdiv(width, min(tile.block_n, triton.next_power_of_2(width)))


@dataclass(frozen=True)
class Stage:
    """Sizes of the launches at one level of the tree: capacities, and the numbers of programs."""

    level: int
    width: int
    """Capacity for visited nodes."""
    k: int
    """Capacity for refined nodes."""
    begin: int
    """Offset of the level's places in the last dimension of :attr:`Workspace.weights`."""
    padded: int
    """``width``, rounded up to a multiple of 16."""
    scoring: int
    """Number of programs of ``score_nodes`` that share the nodes of a row and KV head."""
    attending: int
    """Number of programs of ``attend_nodes`` that share these nodes; each writes a part of the output."""
    before: int
    """Number of parts of the output that earlier launches have written; at the top level these hold sinks and tail."""


def stages(tree: Tree, tile: Tile, programs: int, multiprocessors: int) -> list[Stage]:
    """The stages of a call, from the top level down.

    Args:
        tree: the tree that is visited.
        tile: the query heads and nodes of a program, see :func:`tile_for`.
        programs: number of programs without any splitting: rows times KV heads times tiles of query heads.
        multiprocessors: multiprocessors of the GPU.

    Raises:
        UnsupportedError: for more than 32,768 nodes in a selection.
    """
    found, width, begin, room = [], tree.rows.places, 0, _SCORING * multiprocessors
    before = max(1, min(triton.cdiv(tree.rows.width, tile.block_n), room // (2 * programs)))
    left = max(room - programs * before, room // 2)  # at the top level, beside the programs for sinks and tail
    for level in reversed(range(len(tree.levels))):
        if width > _HELD:
            raise UnsupportedError(f"more than {_HELD} nodes of a level")
        k = min(tree.rows.most[level], width)
        last = not k or not level
        blocks, padded = triton.cdiv(width, tile.block_n), triton.cdiv(width, 16) * 16
        pages_at_once = max(1, tile.block_n // triton.next_power_of_2(tree.width))
        tiles = triton.cdiv(k * chunks_of(tree.width, tile), pages_at_once) if last else 0
        scoring, _ = split(programs, blocks, room if found else left)
        attending, _ = split(programs, blocks + tiles, _ATTENDING * multiprocessors, _MERGING)
        found.append(Stage(level, width, k, begin, padded, scoring, attending, before))
        if last:
            break
        begin, before, width = begin + padded, before + attending, k * tree.branch(level)
    return found

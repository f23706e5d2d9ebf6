"""How the launches of :func:`attend_summaries` are cut into programs, and their compile options.

The grid's first axis is rows times KV heads times tiles of query heads; its second splits the nodes of each among
programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from foveate.ops._dispatch import UnsupportedError
from foveate.ops.gpu.tiles import Tile, group_tile, split
from foveate.ops.summaries.tree import Tree
from foveate.ops.summaries.types import Refinement

_SCORING, _ATTENDING = 3, 2
"""Resident programs per multiprocessor of ``score_nodes`` and of ``attend_nodes``."""
_MERGING = 1 / 4
"""Cost of merging a part of the output, in units of reading a block of nodes."""
_HELD = 32768
"""The most nodes from which ``select_nodes`` selects."""
FEW_HEADS = 16
"""In groups of at most this many query heads, a program computes the masses of all heads together."""
_SHARED = 96 << 10
"""Bytes of shared memory for a program's loads in flight: two programs fit on a multiprocessor, or three that use three
quarters of it."""


def tile_for(dtype: torch.dtype, dim: int, group: int, capability: int) -> Tile:
    """Query heads and nodes of a program, see :func:`group_tile`; ``dim`` is the larger of the head dims."""
    return group_tile(dtype, dim, group, capability, least_heads=1, wide_warps=8)


def scoring_options(tile: Tile, dtype: torch.dtype, of_node: int, capability: int) -> dict[str, int | None]:
    """Compile options of ``score_nodes``, with the pipeline stages that fit if it loads ``of_node`` numbers per
    node."""
    if dtype == torch.float32:
        return tile.options | {"num_warps": 8}
    blocks = _SHARED // (1 if capability >= 9 else 2) // (tile.block_n * of_node * dtype.itemsize)
    return tile.options | {"num_stages": max(2, min(tile.num_stages, blocks))}


def merge_last(tile: Tile, dims: int, parts: int) -> int:
    """How many of ``parts`` parts the last program of ``attend_nodes`` merges at a time, with all registers free."""
    numbers = tile.num_warps * 32 * (32 if tile.block_m >= 16 else 128)
    return max(1, min(32, triton.next_power_of_2(parts), numbers // (tile.block_m * dims)))


@dataclass(frozen=True)
class Stage:
    """Sizes of the launches at one level of the tree: capacities, and how the work is split."""

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
    """Programs of ``score_nodes`` that share the nodes of a row and KV head."""
    attending: int
    """Programs of ``attend_nodes`` that share them; each adds a part of the output."""
    before: int
    """Parts of the output that earlier launches have written."""


@dataclass(frozen=True)
class Work:
    """The sizes of a call, from which its :class:`Stage` objects follow."""

    tile: Tile
    programs: int
    """Programs if nothing were split: rows times KV heads times tiles of query heads."""
    multiprocessors: int

    def raw_splits(self, tree: Tree) -> int:
        """Programs that share sinks and tail of a row and KV head, in the launch that scores the top level."""
        blocks = triton.cdiv(tree.rows.width, self.tile.block_n)
        return max(1, min(blocks, _SCORING * self.multiprocessors // (2 * self.programs)))

    def stages(self, tree: Tree, how: Refinement) -> list[Stage]:
        """The stages of a call, from the top level down.

        Raises:
            UnsupportedError: for more than 32,768 nodes in a selection, or children of ``mass="preserve"`` whose number
                is not a power of two that fits into a block.
        """
        stages: list[Stage] = []
        width, begin, before = tree.rows.places, 0, self.raw_splits(tree)
        for level in reversed(range(len(tree.levels))):
            k = min(tree.rows.most[level], width)
            last = not k or not level
            stage = self._stage(tree, level, width, k, begin, before, last)
            stages.append(stage)
            begin, before = begin + stage.padded, before + stage.attending
            if last:
                break
            branch = tree.branch(level)
            if how.mass == "preserve" and (branch & (branch - 1) or branch > self.tile.block_n):
                raise UnsupportedError(f"{branch} children of a node under mass=preserve")
            width = k * branch
        return stages

    def _stage(self, tree: Tree, level: int, width: int, k: int, begin: int, before: int, last: bool) -> Stage:
        block, room = self.tile.block_n, _SCORING * self.multiprocessors
        blocks, padded = triton.cdiv(width, block), triton.cdiv(width, 16) * 16
        if width > _HELD:
            raise UnsupportedError(f"more than {_HELD} nodes of a level")
        raw_programs = 0 if begin else self.programs * before  # those that attend to sinks and tail
        scoring, _ = split(self.programs, blocks, max(room - raw_programs, room // 2))
        block_w = page_block(tree.width, self.tile)
        tiles = triton.cdiv(k * triton.cdiv(tree.width, block_w) * block_w, block) if last else 0
        attending, _ = split(self.programs, blocks + tiles, _ATTENDING * self.multiprocessors, _MERGING)
        return Stage(level, width, k, begin, padded, scoring, attending, before)


def page_block(width: int, tile: Tile) -> int:
    """Tokens of a page that a program reads at once, a power of two: the page, or a chunk of it."""
    return min(triton.next_power_of_2(width), tile.block_n)

"""How the programs of a Triton kernel work."""

import functools
from typing import NamedTuple

import torch

_START = 2
"""What a program's start costs, in blocks."""
_MOST = 256
"""The most programs that share a row."""


class Tile(NamedTuple):
    """Queries and keys that a program works on at a time, and what it is compiled with."""

    block_m: int
    """Queries."""
    block_n: int
    """Keys."""
    num_warps: int
    num_stages: int
    maxnreg: int | None = None

    @property
    def options(self) -> dict[str, int | None]:
        """Options of the launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.maxnreg}


@functools.lru_cache(maxsize=1024)
def split(rows: int, blocks: int, room: int, merging: float = 1 / 64) -> tuple[int, int]:
    """How to cut the ``blocks`` of each of ``rows`` among programs, of which the GPU runs ``room`` at a time.

    Full rounds of programs are what is looked for, and short programs, so that the last ones do not run for long; but
    each costs time to start, and ``merging``, in blocks, to merge.

    Returns:
        ``(splits, each)``: programs of a row, and blocks of a program.
    """

    def time(each: int) -> float:
        splits = -(-blocks // each)
        return (-(-rows * splits // room) + 0.5) * (each + _START) + splits * merging

    sizes = {-(-blocks // splits) for splits in range(1, min(blocks, _MOST) + 1)}
    each = min(sorted(sizes), key=time, default=1)
    return max(1, -(-blocks // each)), each


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

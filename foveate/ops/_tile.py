"""How the programs of a Triton kernel work."""

from typing import NamedTuple


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

"""The ranks of an engine's tensor parallelism. Each rank holds some of the heads of every layer."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Ranks(Protocol):
    """Exchanges numbers between ranks, so that heads that choose together choose the same keys on every rank.

    Query heads and KV heads are dealt in their order, the same number to each rank. Both operations may be captured in
    a CUDA graph; every rank calls them in the same order.
    """

    size: int
    """Number of ranks."""
    rank: int
    """This rank's number, 0 to ``size - 1``."""

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the ranks of ``x``, fp32 and of the same shape on each; ``x`` may be overwritten.

        Every rank gets the same bits; otherwise ranks would break near ties differently.
        """

    def gather(self, x: Tensor) -> Tensor:
        """``x [B, H, N]`` of the heads of this rank, as ``[B, size * H, N]`` of the heads of all ranks.

        ``x`` is fp32, int32 or int64, and its bits stay as they are.
        """

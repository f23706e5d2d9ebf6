"""The ranks of vLLM's tensor parallelism: what their heads choose together, and that all have the same settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class TensorParallel:
    """:class:`~foveate.state.Ranks` by vLLM's own group, whose operations its CUDA graphs capture."""

    def __init__(self, group: Any):
        self.group, self.size, self.rank = group, group.world_size, group.rank_in_group

    def mean(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(x.contiguous()).div_(self.size)

    def gather(self, x: Tensor) -> Tensor:
        bits = x.contiguous().view(torch.float32)  # vLLM's ranks on a CPU exchange no integers
        return self.group.all_gather(bits, 1).view(x.dtype)

    def check_alike(self, facts: Mapping[str, str]) -> None:
        """Compare facts with the other ranks', at the start of an engine.

        Raises:
            ValueError: on every rank, for the first fact that differs.
        """
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, dict(facts), group=self.group.cpu_group)
        for name in facts:
            for rank, other in enumerate(found):
                if other[name] != found[0][name]:
                    raise ValueError(
                        f"foveate: the ranks of the tensor parallelism differ in their {name}: rank 0 has "
                        f"{found[0][name]}, and rank {rank} {other[name]}; give all the same"
                    )


def tensor_parallel(vllm_config: Any) -> TensorParallel | None:
    """The ranks that share this model's heads; None where all of them are here."""
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return None
    from vllm.distributed.parallel_state import get_tp_group

    return TensorParallel(get_tp_group())

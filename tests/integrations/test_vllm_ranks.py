"""The ranks of a tensor parallelism within vLLM, over a group that stands for its own; without vLLM."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from foveate.integrations.vllm.ranks import TensorParallel, tensor_parallel
from tests.ranks import run_ranks


class Group:
    """What is used of vLLM's GroupCoordinator."""

    cpu_group = None

    def __init__(self):
        distributed.init_process_group("gloo")
        self.world_size, self.rank_in_group = distributed.get_world_size(), distributed.get_rank()

    def all_reduce(self, x):
        distributed.all_reduce(x)
        return x

    def all_gather(self, x, dim):
        assert x.dtype == torch.float32, "vLLM's ranks on a CPU exchange nothing else"
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        distributed.all_gather(parts, x)
        return torch.cat(parts, dim)


def of_rank():
    ranks, rank = TensorParallel(Group()), int(os.environ["RANK"])
    assert (ranks.size, ranks.rank) == (2, rank)
    scores = torch.tensor([[[1.0, 2.0, 5.0]], [[3.0, 0.0, 1.0]]]) * (1 + 2 * rank)
    torch.testing.assert_close(ranks.mean(scores.clone()), 2 * scores / (1 + 2 * rank))
    for dtype in (torch.int32, torch.int64, torch.float32):
        own = torch.tensor([[[7, -1, 2**30]], [[0, 5, 9]]]).to(dtype) - rank
        expected = torch.cat([own + rank, own + rank - 1], 1)
        assert torch.equal(ranks.gather(own.mT.contiguous().mT), expected), dtype
    ranks.check_alike({"settings": "kascade", "model": "{}"})
    with pytest.raises(ValueError, match="differ in their calibration: rank 0 has 0, and rank 1 1; give all the same"):
        ranks.check_alike({"settings": "kascade", "calibration": str(rank)})


def test_ranks_exchange_scores_and_choices_and_compare_what_they_run(tmp_path):
    run_ranks(2, of_rank, folder=tmp_path)


def test_one_rank_has_all_heads():
    assert tensor_parallel(SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1))) is None

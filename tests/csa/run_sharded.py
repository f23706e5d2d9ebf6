"""Run on each rank: the sharded indexer selects what one rank selects."""

import itertools

import pytest
import torch
import torch.distributed as dist

from foveate import csa
from foveate.csa import sharded


def problem(queries, number, dtype, ties):
    generator = torch.Generator().manual_seed(queries)
    shapes = (2, queries, 4, 8), (2, number, 8), (2, queries, 4)
    q, k, weights = (torch.randn(shape, generator=generator) for shape in shapes)
    if ties:
        q, k, weights = q.round(), k.round(), weights.round()
    if dtype == torch.float32:
        return q, k, weights, None
    (q, of_q), (k, of_k) = csa.to_fp8(q), csa.to_fp8(k)
    return q, k, weights * of_q, of_k


def cut(number, world):
    """Shares of different sizes, one of them empty where there are ranks enough."""
    ends = [0, *(number * (i + 1) // (world + 1) for i in range(world - 1)), number]
    return ends if world < 3 else [*ends[:2], ends[1], *ends[3:]]


def refusals(rank, world):
    """What one rank alone has wrong is an error on all, and ends no process."""
    mine = csa.pieces(40, rank, world)
    length = sum(stop - start for start, stop in mine)
    good = {"q": torch.zeros(1, length, 2, 4), "k": torch.zeros(1, 6, 4), "weights": torch.zeros(1, length, 2)}
    good |= {"top_k": 3, "pieces": mine, "ratio": 4}
    of_last = [
        ({"top_k": 0}, "top_k must be an integer of at least 1, not 0"),
        ({"weights": None}, "weights must be a tensor"),
        ({"pieces": None}, "not iterable"),
        ({"q": good["q"].half(), "k": good["k"].half()}, "all ranks must have the same dtype, not torch.float"),
        ({"q": good["q"][..., :3], "k": good["k"][..., :3]}, "all ranks must have the same dim, not"),
        ({"key_scales": torch.ones(1, 6)}, "all ranks must have the same key_scales, not"),
        ({"top_k": 4}, "all ranks must have the same top_k, not"),
        ({"ratio": 5}, "all ranks must have the same ratio, not"),
        ({"k": good["k"][:, :5]}, "all ranks must have the same keys in all, not"),
    ]
    for change, message in of_last if world > 1 else ():
        wrong = good | (change if rank == world - 1 else {})
        if rank < world - 1 and not message.startswith("all"):
            message = f"arguments of rank {world - 1} are not valid"
        with pytest.raises((ValueError, TypeError), match=message):
            csa.sharded_lightning_indexer(**wrong)
    if world > 1:
        with pytest.raises(ValueError, match=r"all ranks must have the same keys, not (ring|gather) here"):
            csa.sharded_lightning_indexer(**good, keys="ring" if rank else "gather")


def main(meeting=None):
    """Args: a file that is not there, by which the first two ranks meet once more, without the others."""
    dist.init_process_group("gloo")
    check()
    if meeting and (rank := dist.get_rank()) < 2:
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
        check()
    dist.destroy_process_group()


def check():
    """Everything, over all ranks of the process group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sharded._TOGETHER = 7
    settings = itertools.product(csa.sharded.KEYS, ((50, 1, 5), (97, 4, 6), (30, 3, 100)), (False, True))
    for keys, (queries, ratio, top_k), ties in settings:
        for dtype in (torch.float32, torch.float8_e4m3fn):
            q, k, weights, scales = problem(queries, queries // ratio, dtype, ties)
            expected = csa.lightning_indexer(q, k, weights, top_k, ratio=ratio, key_scales=scales)
            mine = csa.pieces(queries, rank, world)
            of_mine = torch.cat([torch.arange(*piece) for piece in mine])
            if keys != "replicated":
                ends = cut(k.shape[1], world)
                some = slice(ends[rank], ends[rank + 1])
                k, scales = k[:, some], None if scales is None else scales[:, some]
            how = {"pieces": mine, "ratio": ratio, "key_scales": scales, "keys": keys}
            found = csa.sharded_lightning_indexer(q[:, of_mine], k, weights[:, of_mine], top_k, **how)
            assert torch.equal(found, expected[:, of_mine]), (keys, queries, ratio, top_k, ties, dtype)
    q, k, weights, _ = problem(40, 40, torch.float32, False)
    mine = csa.pieces(40, rank, world)
    of_mine = torch.cat([torch.arange(*piece) for piece in mine])
    weights[:, 0] = float("nan")  # seen by the first rank alone
    ends = cut(40, world)
    for keys in csa.sharded.KEYS:
        share = k if keys == "replicated" else k[:, ends[rank] : ends[rank + 1]]
        name = "^weights must" if rank == 0 else "^q, k, weights and key_scales of all ranks must"
        with pytest.raises(ValueError, match=f"{name} be finite"):
            csa.sharded_lightning_indexer(q[:, of_mine], share, weights[:, of_mine], 5, pieces=mine, keys=keys)
    refusals(rank, world)
    print(f"rank {rank} of {world}: all equal\n", end="", flush=True)

"""The indexer over several ranks, on the CPU."""

import pytest
import run_sharded
import torch

from foveate import csa
from foveate.csa.sharded import _merge
from tests.ranks import run_ranks


def test_one_rank_selects_what_it_would_alone(monkeypatch, capfd):
    """In this process, which needs no other."""
    monkeypatch.setattr(csa.sharded, "_TOGETHER", 7)
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", 0)):
        monkeypatch.setenv(name, str(value))
    run_sharded.main()
    assert "rank 0 of 1: all equal" in capfd.readouterr().out


def test_two_and_three_ranks_select_what_one_would(tmp_path):
    said = "".join(run_ranks(3, run_sharded.main, tmp_path / "meeting", folder=tmp_path))
    for ranks in (2, 3):
        assert all(f"rank {rank} of {ranks}: all equal" in said for rank in range(ranks))


@pytest.mark.parametrize("length", [0, 1, 7, 64, 1001])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_pieces_are_all_queries_once_and_as_much_work(length, world):
    every = [csa.pieces(length, rank, world) for rank in range(world)]
    positions = [t for pieces in every for start, stop in pieces for t in range(start, stop)]
    assert sorted(positions) == list(range(length))
    work = [sum(t + 1 for start, stop in pieces for t in range(start, stop)) for pieces in every]
    assert max(work) - min(work) <= 2 * length + 1


def test_a_merge_is_the_first_of_both():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 5, 60, generator=generator).mul(3).round()
    scores[0, 0, 10:] = float("-inf")
    low, high = scores[..., :20], scores[..., 20:]

    def selection(some, first):
        keep = csa.sharded.ops.topk(some, 12)
        values = some.gather(-1, keep.clamp_min(0)).masked_fill(keep < 0, float("-inf"))
        return torch.where(keep < 0, -1, keep + first).to(torch.int32), values

    for one, other in ((selection(low, 0), selection(high, 20)), (selection(high, 20), selection(low, 0))):
        best, of_best = (x.clone() for x in one)
        _merge(best, of_best, *other)
        expected = selection(scores, 0)
        assert torch.equal(best, expected[0])
        assert torch.equal(of_best, expected[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": "some"}, "keys must be one of replicated, gather, ring, not 'some'"),
        ({"pieces": [(0, 3)]}, r"pieces must be \(start, stop\) of 5 queries in all, not \[\(0, 3\)\]"),
        ({"pieces": [(7, 2), (0, 10)]}, "pieces must be"),
        ({"top_k": 0}, "top_k must be an integer of at least 1, not 0"),
        ({"ratio": 0}, "ratio must be an integer of at least 1, not 0"),
        ({}, "torch.distributed must be initialised"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {"top_k": 3, "pieces": [(0, 5)], "ratio": 1} | change
    with pytest.raises(ValueError, match=message):
        csa.sharded_lightning_indexer(
            torch.zeros(1, 5, 2, 4), torch.zeros(1, 5, 4), torch.zeros(1, 5, 2), arguments.pop("top_k"), **arguments
        )

"""Peers of the indexer, with packages that stand for theirs: what they are given, and what is made of their sets."""

import importlib
import sys
from types import ModuleType

import pytest
import torch

from benchmarks import indexer, peers
from foveate import ops
from foveate.errors import UserError

NAME = "deepgemm+flashinfer"
SMALL = {"heads": 32, "dim": 32, "top_k": 20, "ratio": 4, "dtype": "float8_e4m3fn", "repeats": 1, "device": "cpu"}


def mqa_logits(q, kv, weights, starts, ends, clean_logits, max_seqlen_k):
    """As DeepGEMM has it: bounds that it can take, and rubbish beyond them."""
    keys, scales = kv
    for one in (q, keys, scales, starts, ends):
        assert one.is_contiguous()
    assert starts.dtype == ends.dtype == torch.int32
    assert not starts.any()
    assert int(ends.min()) >= 1
    assert int(ends.max()) <= max_seqlen_k <= len(keys)
    assert not clean_logits
    scores = ops.score.indexer.weighted_relu(q[None], keys[None], weights[None], scales[None])[0, :, :max_seqlen_k]
    return scores.masked_fill(torch.arange(max_seqlen_k) >= ends[:, None], float("nan"))


def top_k_ragged_transform(scores, offsets, lengths, k):
    """As FlashInfer has it; of equal scores the last ones."""
    assert scores.is_contiguous()
    assert offsets.shape == lengths.shape == scores.shape[:1]
    found = torch.full((len(scores), k), -1, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        order = scores[row, :length].flip(0).sort(descending=True, stable=True).indices[:k]
        found[row, : len(order)] = (length - 1 - order + offsets[row]).int()
    return found


@pytest.fixture
def packages(monkeypatch):
    made = {name: ModuleType(name) for name in peers.PACKAGES}
    made["deep_gemm"].fp8_mqa_logits = mqa_logits
    made["flashinfer"].top_k_ragged_transform = top_k_ragged_transform
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def without(monkeypatch, missing, error):
    real = importlib.import_module

    def load(name):
        if name == missing:
            raise error
        return real(name)

    monkeypatch.setattr(importlib, "import_module", load)


@pytest.mark.parametrize(
    ("held", "lengths"), [(1, (200,)), (4 * 50 * 7, (200, 1100)), (1 << 30, (200,))], ids=["one", "few", "all"]
)
def test_a_peer_is_measured_in_the_same_run(packages, monkeypatch, held, lengths):
    """Where bytes are held for a query at a time, for a few, for all."""
    monkeypatch.setattr(peers, "SCORES_BYTES", held)
    rows = indexer.run(indexer.Plan(tokens=lengths, **SMALL), lambda _: None)
    assert [row["impl"] for row in rows] == [*indexer.IMPLEMENTATIONS, NAME] * len(lengths)
    assert [row["recall_min"] for row in rows] == [1.0] * 4 * len(lengths)
    assert all(row["other_ties"] == 0 for row in rows if row["impl"] != NAME)
    assert rows[3].keys() == rows[0].keys()
    assert rows[3]["case"] == {**rows[0]["case"], "impl": NAME}
    assert rows[3]["recall_counts"].endswith("ties to any")


def test_sets_are_those_of_the_fused_path(packages):
    plan = indexer.Plan(tokens=(300,), **SMALL)
    q, k, weights, scales, _ = indexer._draw(plan, 300, indexer.ALONE)
    found = peers.select(q[0], k[0], weights[0], scales[0], 20, 4)
    expected = indexer.csa.lightning_indexer(q, k, weights, 20, ratio=4, key_scales=scales)[0]
    assert found.dtype == torch.int32
    assert found[:3].eq(-1).all()
    shares = [len({*a} & {*b}) / len({*a} | {*b}) for a, b in zip(found.tolist(), expected.tolist())]
    assert min(shares) > 0.9  # apart from ties


def test_ties_are_counted_fairly_and_told(packages):
    def tied(q, kv, weights, starts, ends, clean_logits, max_seqlen_k):
        return mqa_logits(q, kv, weights, starts, ends, clean_logits, max_seqlen_k).mul_(0)

    packages["deep_gemm"].fp8_mqa_logits = tied
    (row,) = indexer.run(indexer.Plan(tokens=(200,), implementations=(NAME,), **SMALL), lambda _: None)
    assert row["recall_min"] == 1
    assert row["other_ties"] == 64 - sum((t + 1) // 4 <= 20 for t in (200 * n // 64 - 1 for n in range(1, 65)))
    assert row["baseline"] == NAME


@pytest.mark.parametrize("wrong", ["other", "less", "twice", "future"])
def test_a_wrong_set_of_a_peer_is_seen(packages, wrong):
    def bad(scores, offsets, lengths, k):
        found = top_k_ragged_transform(scores, offsets, lengths, k)
        if wrong == "other":
            return top_k_ragged_transform(-scores, offsets, lengths, k)
        found[:, 0] = {"less": -1, "twice": found[:, 1].clone(), "future": 49}[wrong]
        return found

    packages["flashinfer"].top_k_ragged_transform = bad
    (row,) = indexer.run(indexer.Plan(tokens=(201,), implementations=(NAME,), **SMALL), lambda _: None)
    assert row["recall_min"] < 1


def test_a_missing_package_is_left_out_and_said(packages, monkeypatch):
    without(monkeypatch, "flashinfer", ModuleNotFoundError("No module named 'it'"))
    said = []
    rows = indexer.run(indexer.Plan(tokens=(64,), **SMALL), said.append)
    assert [row["impl"] for row in rows] == list(indexer.IMPLEMENTATIONS)
    assert said[0].startswith(f"{NAME} is left out: flashinfer is not installed (No module named 'it'): pip install")


@pytest.mark.parametrize(
    ("missing", "error", "message"),
    [
        ("deep_gemm", ModuleNotFoundError("gone"), r"deep_gemm is not installed \(gone\): pip install sgl-deep-gemm=="),
        (
            "flashinfer",
            AssertionError("no\nnvcc"),
            r"flashinfer does not load \(no nvcc\): pip install flashinfer-pyth",
        ),
    ],
)
def test_a_package_that_was_asked_for_is_an_error(packages, monkeypatch, missing, error, message):
    without(monkeypatch, missing, error)
    with pytest.raises(UserError, match=message):
        indexer.run(indexer.Plan(tokens=(64,), implementations=("foveate", NAME), **SMALL), lambda _: None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "bfloat16"}, "takes dtype float8_e4m3fn, not bfloat16"),
        ({"heads": 16}, "takes heads 32 or 64, not 16"),
        ({"dim": 48}, "takes dim 32 or 64 or 128, not 48"),
    ],
)
def test_what_a_peer_does_not_take(packages, change, message):
    settings = {**SMALL, **change}
    with pytest.raises(UserError, match=message):
        indexer.run(indexer.Plan(tokens=(64,), implementations=(NAME,), **settings), lambda _: None)
    said = []
    rows = indexer.run(indexer.Plan(tokens=(64,), **settings), said.append)
    assert all(row["impl"] != NAME for row in rows)
    assert said[0] == f"{NAME} is left out: {message}"

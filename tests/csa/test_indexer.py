"""The lightning indexer: every path against a sort of all scores, whatever the chunks; what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foveate import csa, ops
from foveate.csa import indexer
from tests.helpers import LargestTensor

PATHS = ("materialised", "chunked", "fused")


def problem(batch=2, queries=11, keys=40, heads=4, dim=6, seed=0, whole=True, dtype=torch.float32):
    """Small whole numbers, whose scores are exact and often equal, or normal ones."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, queries, heads, dim), (batch, keys, dim), (batch, queries, heads)
    if whole:
        return [torch.randint(-2, 3, shape, generator=generator).to(dtype) for shape in shapes]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def in_order(q, k, weights, top_k, ratio, offset, starts=None):
    """The keys of each query by score and then by index, as lists; scores in float64."""
    scores = torch.einsum("bshd,btd->bsht", q.double(), k.double()).relu()
    scores = (scores * weights.double()[..., None]).sum(2)
    found = torch.full((*q.shape[:2], top_k), -1, dtype=torch.int32)
    for b in range(q.shape[0]):
        for s in range(q.shape[1]):
            visible = min((offset + s + 1) // ratio, k.shape[1])
            first = 0 if starts is None else int(starts[b])
            best = sorted(range(first, visible), key=lambda t, row=scores[b, s]: (-row[t].item(), t))[:top_k]
            found[b, s, : len(best)] = torch.tensor(sorted(best), dtype=torch.int32)
    return found


@given(
    st.integers(0, 10_000),
    st.integers(1, 13),
    st.integers(1, 70),
    st.integers(1, 4),
    st.integers(0, 90),
    st.sampled_from([1, 3, 8, 100]),
    st.sampled_from([None, (0, 5), (17, 2), (1, 90)]),
)
@settings(max_examples=100, deadline=None)
def test_every_path_finds_the_same_keys(seed, queries, keys, ratio, offset, top_k, starts):
    q, k, weights = problem(queries=queries, keys=keys, seed=seed)
    starts = None if starts is None else torch.tensor(starts)
    expected = in_order(q, k, weights, top_k, ratio, offset, starts)
    for path in PATHS:
        found = csa.lightning_indexer(q, k, weights, top_k, ratio=ratio, offset=offset, starts=starts, path=path)
        assert found.dtype == torch.int32
        assert torch.equal(found, expected), path


@pytest.mark.parametrize("top_k", [4, 40, 300])
@pytest.mark.parametrize(("query_chunk", "key_chunk", "scores"), [(1, 1, 1), (7, 16, 900), (64, 23, 4 * 2 * 150)])
def test_chunks_change_nothing(monkeypatch, top_k, query_chunk, key_chunk, scores):
    q, k, weights = problem(queries=50, keys=150, seed=3)
    expected = csa.lightning_indexer(q, k, weights, top_k, offset=90, path="materialised")
    monkeypatch.setattr(indexer, "QUERY_CHUNK", query_chunk)
    monkeypatch.setattr(indexer, "KEY_CHUNK", key_chunk)
    monkeypatch.setattr(indexer, "SCORES_BYTES", scores)
    for path in PATHS:
        assert torch.equal(csa.lightning_indexer(q, k, weights, top_k, offset=90, path=path), expected), path


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("of_keys", "of_weights"), [(1, 1), (1, -1), (-1, 1), (1, 0)])
def test_ties_go_to_the_smaller_index(path, of_keys, of_weights):
    q, k, weights = (torch.ones_like(x) for x in problem())
    found = csa.lightning_indexer(q, of_keys * k, of_weights * weights, 3, offset=20, path=path)
    assert found.tolist() == [[[0, 1, 2]] * 11] * 2


@pytest.mark.parametrize("path", PATHS)
def test_where_no_key_is_whole_yet_none_is_read(path):
    q, k, weights = problem(queries=9, keys=2)
    found = csa.lightning_indexer(q, k, weights, 3, ratio=4, path=path)
    assert found[0].tolist() == [[-1, -1, -1]] * 3 + [[0, -1, -1]] * 4 + [[0, 1, -1]] * 2
    none = csa.lightning_indexer(q, k[:, :0], weights, 3, ratio=4, path=path)
    assert none.tolist() == [[[-1] * 3] * 9] * 2


@pytest.mark.parametrize("path", ["chunked", "fused"])
def test_memory_is_bounded(monkeypatch, path):
    q, k, weights = problem(batch=1, queries=512, keys=512, heads=8, dim=4, whole=False)
    monkeypatch.setattr(indexer, "QUERY_CHUNK", 32)
    monkeypatch.setattr(indexer, "KEY_CHUNK", 64)
    monkeypatch.setattr(indexer, "SCORES_BYTES", 1 << 15)
    monkeypatch.setattr("foveate.ops._math.SCRATCH_BYTES", 1 << 16)
    with LargestTensor() as gauge:
        csa.lightning_indexer(q, k, weights, 8, path=path)
    assert gauge.bytes <= 1 << 17, gauge.what


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_nan_are_an_error(path, where, value):
    tensors = problem(whole=False)
    tensors[where].view(-1)[-1 if where != 1 else 5] = value
    tensors[1][:, 7] = 0.0  # times infinity is not a number
    if where == 1 and value == float("inf"):
        tensors[0][:, :, 0] = 0.0
    with pytest.raises(ValueError, match=r"scores (are|hold) NaN"):
        csa.lightning_indexer(*tensors, 3, offset=60, path=path)


@pytest.mark.parametrize("path", PATHS)
def test_what_no_query_may_read_does_not_matter(path):
    q, k, weights = problem(queries=5, keys=40)
    expected = csa.lightning_indexer(q, k, weights, 4, offset=10, path=path)
    k[:, 15:] = float("nan")
    assert torch.equal(csa.lightning_indexer(q, k, weights, 4, offset=10, path=path), expected)
    starts = torch.tensor([2, 3])
    expected = csa.lightning_indexer(q, k, weights, 4, offset=10, starts=starts, path=path)
    k[:, :2], k[1, 2] = float("nan"), float("inf")
    assert torch.equal(csa.lightning_indexer(q, k, weights, 4, offset=10, starts=starts, path=path), expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("starts", [None, (0, 11)])
def test_fp8_is_what_its_values_are(path, starts):
    q, k, weights = problem(queries=30, keys=90, heads=8, dim=32, whole=False)
    starts = None if starts is None else torch.tensor(starts)
    (q8, of_q), (k8, of_k) = csa.to_fp8(q), csa.to_fp8(k)
    q, k = q8.double() * of_q[..., None], k8.double() * of_k[..., None]
    how = {"ratio": 2, "offset": 90, "starts": starts, "path": path}
    found = csa.lightning_indexer(q8, k8, weights * of_q, 9, key_scales=of_k, **how)
    assert torch.equal(found, in_order(q, k, weights.double(), 9, 2, 90, starts))


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 3e4])
def test_scales_of_fp8_are_the_least_powers_of_two(size):
    x = size * torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    found, scales = csa.to_fp8(x)
    assert torch.equal(torch.exp2(torch.log2(scales).round()), scales)
    assert bool((x.abs().amax(-1) <= 448 * scales).all())
    assert bool((x.abs().amax(-1) > 224 * scales).all())
    torch.testing.assert_close(found.float() * scales[:, None], x, rtol=2**-4, atol=float(2**-10 * scales.max()))


def test_fp8_of_nothing_is_nothing():
    found, scales = csa.to_fp8(torch.zeros(2, 3, 16, dtype=torch.bfloat16))
    assert not bool(found.float().any())
    assert bool(torch.isfinite(scales).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_fp32(dtype):
    q, k, weights = problem(queries=30, keys=90, heads=8, dim=32, whole=False, dtype=dtype)
    scores = ops.indexer_scores(q, k, weights.float(), offset=90).scores
    exact = torch.einsum("bshd,btd->bsht", q.double(), k.double()).relu() * weights.double()[..., None]
    torch.testing.assert_close(scores.double(), exact.sum(2), rtol=1e-4, atol=1e-4)
    assert torch.equal(csa.lightning_indexer(q, k, weights, 9, offset=60), in_order(q, k, weights.float(), 9, 1, 60))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 11, 6)}, r"q must be \[B, S, H, D\] and k \[B, T, D\], not \[2, 11, 6\]"),
        ({"k": torch.zeros(2, 40, 5)}, r"not \[2, 11, 4, 6\] and \[2, 40, 5\]"),
        ({"k": torch.zeros(1, 40, 6)}, r"and \[1, 40, 6\]"),
        ({"weights": torch.zeros(2, 11, 3)}, r"weights must be \[B, S, H\] = \[2, 11, 4\], not \[2, 11, 3\]"),
        ({"k": torch.zeros(2, 40, 6, dtype=torch.float16)}, "float8_e4m3fn, not torch.float32 and torch.float16"),
        ({"q": torch.zeros(2, 11, 4, 6).long(), "k": torch.zeros(2, 40, 6).long()}, "not torch.int64"),
        ({"top_k": 0}, "top_k must be an integer of at least 1, not 0"),
        ({"top_k": 2.5}, "top_k must be an integer of at least 1, not 2.5"),
        ({"ratio": 0}, "ratio must be an integer of at least 1, not 0"),
        ({"offset": -1}, "offset must be an integer of at least 0, not -1"),
        ({"starts": torch.zeros(3).long()}, r"starts must be int64 \[2\], not torch.int64 \[3\]"),
        ({"starts": torch.zeros(2)}, r"starts must be int64 \[2\], not torch.float32 \[2\]"),
        ({"key_scales": torch.ones(2, 39)}, r"key_scales must be \[B, T\] = \[2, 40\], not \[2, 39\]"),
        ({"path": "fast"}, "path must be one of auto, materialised, chunked, fused, not 'fast'"),
    ],
)
def test_bad_input_is_named(change, message):
    q, k, weights = problem()
    with pytest.raises(ValueError, match=message):
        csa.lightning_indexer(**({"q": q, "k": k, "weights": weights, "top_k": 3} | change))


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("offset", [0, 1, 2040, 2047, 8180, 8187, 8190, 16380, 40_000])
@pytest.mark.parametrize("queries", [1, 15, 17, 4096, 20_000])
def test_rows_are_cut_by_their_keys_and_never_into_a_few(ratio, offset, queries):
    """Pieces whose queries have at most twice the keys of the first, or few; each with enough for the same kernel."""
    first, pieces = 0, []
    while first < queries:
        pieces.append((offset + first, indexer._rows(queries - first, 1, 1 << 20, ratio, offset + first)))
        first += pieces[-1][1]
    assert first == queries
    assert min(rows for _, rows in pieces) >= min(indexer._FEWEST, queries)
    for at, rows in pieces:
        most, few = (at + rows) // ratio, (at + 2 * indexer._FEWEST) // ratio
        assert most <= max(indexer._SHORT, 2 * few)

"""The lightning indexer: every path against a sort of all scores, whatever the chunks; what is refused."""

import itertools

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


@pytest.mark.parametrize("top_k", [4, 20, 300])
@pytest.mark.parametrize(("query_chunk", "key_chunk", "scores"), [(1, 1, 1), (7, 16, 400), (64, 23, 4 * 2 * 60)])
def test_chunks_change_nothing(monkeypatch, top_k, query_chunk, key_chunk, scores):
    q, k, weights = problem(queries=20, keys=60, seed=3)
    expected = csa.lightning_indexer(q, k, weights, top_k, offset=36, path="materialised")
    monkeypatch.setattr(indexer, "QUERY_CHUNK", query_chunk)
    monkeypatch.setattr(indexer, "KEY_CHUNK", key_chunk)
    monkeypatch.setattr(indexer, "SCORES_BYTES", scores)
    for path in PATHS:
        assert torch.equal(csa.lightning_indexer(q, k, weights, top_k, offset=36, path=path), expected), path


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


@pytest.mark.parametrize("path", ["auto", *PATHS])
@pytest.mark.parametrize("where", [0, 1, 2, 3])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_nan_are_an_error_that_names_what_is_not_finite(path, where, value):
    tensors = [*problem(whole=False), torch.ones(2, 40)]
    tensors[where].view(-1)[-1 if where in (0, 2) else 5] = value
    tensors[1][:, 7] = 0.0  # times infinity is not a number
    if where in (1, 3) and value == float("inf"):
        tensors[0][:, :, 0] = tensors[0][:, :, 1] = 0.0
        tensors[2][:] = 0.0
    name = ("q", "k", "weights", "key_scales")[where]
    *tensors, scales = tensors
    with pytest.raises(ValueError, match=f"^{name} must be finite, without NaN and infinities; no set of keys"):
        csa.lightning_indexer(*tensors, 3, offset=60, key_scales=scales, path=path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("every", [False, True])
def test_weights_must_be_finite_where_a_key_is_seen(path, value, every):
    q, k, weights = (x.abs() + 1 for x in problem())  # products are positive, so that infinite scores are not NaN
    weights[1, 5] = value
    if every:
        weights[:] = value
    with pytest.raises(ValueError, match=r"^weights must be finite"):
        csa.lightning_indexer(q, k, weights, 3, path=path)
    if not every:
        q, k, weights = (x[:, :6] for x in (q, k, weights))
        starts = torch.tensor([0, 6])  # the query is padding
        found = csa.lightning_indexer(q, k, weights, 3, starts=starts, path=path)
        assert bool((found[1] == -1).all())
        csa.lightning_indexer(q, k, weights, 3, ratio=7, path=path)  # it sees no key


@pytest.mark.parametrize("path", PATHS)
def test_sums_beyond_fp32_are_not_blamed_on_what_is_finite(path):
    q, k, weights = (torch.full_like(x, 1e19) for x in problem())
    weights[..., 0] = -1e19
    with pytest.raises(ValueError, match="scores are NaN: sums over heads are beyond fp32"):
        csa.lightning_indexer(q, k, weights, 3, path=path)


def test_a_call_that_does_not_wait_selects_nothing_and_counts(monkeypatch):
    monkeypatch.setattr(indexer, "_waits", lambda found: False)
    q, k, weights = problem(queries=1)
    lost = torch.zeros(1, dtype=torch.int64)
    expected = csa.lightning_indexer(q, k, weights, 3, offset=30, lost=lost)
    assert lost.item() == 0
    assert bool((expected >= 0).all())
    k[0, 3] = float("nan")
    for count in (1, 2):
        assert bool((csa.lightning_indexer(q, k, weights, 3, offset=30, lost=lost) == -1).all())
        assert lost.item() == count


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_kept_for_gradients(path):
    tensors, kept = [x.requires_grad_() for x in problem(whole=False)], []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        csa.lightning_indexer(*tensors, 3, path=path)
    assert not kept


def test_the_path_is_chosen_by_size(monkeypatch):
    ran = []
    for path in PATHS:
        monkeypatch.setattr(indexer, f"_{path}", lambda *_, path=path: ran.append(path) or torch.zeros(1).bool())
    q, k, weights = problem(batch=1, queries=64, keys=1024, heads=16, dim=2)
    csa.lightning_indexer(q, k, weights, 3, offset=2000)
    csa.lightning_indexer(q, k, weights, 3)  # which reads 64 of the keys
    csa.lightning_indexer(*(torch.cat([x, x]) for x in (q, k, weights)), 3, offset=2000)
    assert ran == ["materialised", "materialised", "chunked"]


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


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, 4).long(), "x must be bf16, fp16 or fp32, not torch.int64"),
        (torch.zeros(3, 4).double(), "not torch.float64"),
        (torch.zeros(3, 0), r"x must be \[..., D\] with D of at least 1, not \[3, 0\]"),
        (torch.zeros(()), r"with D of at least 1, not \[\]"),
    ],
)
def test_what_has_no_fp8(x, message):
    with pytest.raises(ValueError, match=message):
        csa.to_fp8(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_fp32(dtype):
    q, k, weights = problem(queries=30, keys=90, heads=8, dim=32, whole=False, dtype=dtype)
    scores = ops.score.indexer_scores(q, k, weights.float(), offset=90).scores
    exact = torch.einsum("bshd,btd->bsht", q.double(), k.double()).relu() * weights.double()[..., None]
    torch.testing.assert_close(scores.double(), exact.sum(2), rtol=1e-4, atol=1e-4)
    assert torch.equal(csa.lightning_indexer(q, k, weights, 9, offset=60), in_order(q, k, weights.float(), 9, 1, 60))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 11, 6)}, r"q must be \[B, S, H, D\] and k \[B, T, D\], not \[2, 11, 6\]"),
        ({"k": torch.zeros(2, 40, 5)}, r"not \[2, 11, 4, 6\] and \[2, 40, 5\]"),
        ({"k": torch.zeros(1, 40, 6)}, r"and \[1, 40, 6\]"),
        ({"q": None}, "q must be a tensor, not NoneType"),
        ({"weights": None}, "weights must be a tensor, not NoneType"),
        (
            {"weights": torch.zeros(2, 11, 3)},
            r"weights must be floating \[B, S, H\] = \[2, 11, 4\], not .* \[2, 11, 3\]",
        ),
        (
            {"weights": torch.zeros(2, 11, 4, dtype=torch.complex64)},
            r"weights must be floating .*, not torch.complex64",
        ),
        ({"weights": torch.zeros(2, 11, 4).long()}, r"weights must be floating .*, not torch.int64"),
        ({"weights": torch.zeros(2, 11, 4, device="meta")}, "weights must be on the device of q, cpu, not on meta"),
        ({"k": torch.zeros(2, 40, 6, device="meta")}, "k must be on the device of q, cpu, not on meta"),
        ({"starts": torch.zeros(2, device="meta").long()}, "starts must be on the device of q, cpu, not on meta"),
        ({"key_scales": torch.ones(2, 40, device="meta")}, "key_scales must be on the device of q, cpu, not on meta"),
        (
            {"q": torch.zeros(2, 11, 0, 6), "weights": torch.zeros(2, 11, 0)},
            r"q must be \[B, S, H, D\] with H and D of at least 1, not \[2, 11, 0, 6\]",
        ),
        ({"q": torch.zeros(2, 11, 4, 0), "k": torch.zeros(2, 40, 0)}, r"at least 1, not \[2, 11, 4, 0\]"),
        ({"k": torch.zeros(2, 40, 6, dtype=torch.float16)}, "float8_e4m3fn, not torch.float32 and torch.float16"),
        ({"q": torch.zeros(2, 11, 4, 6).long(), "k": torch.zeros(2, 40, 6).long()}, "not torch.int64"),
        ({"top_k": 0}, "top_k must be an integer of at least 1, not 0"),
        ({"top_k": 2.5}, "top_k must be an integer of at least 1, not 2.5"),
        ({"ratio": 0}, "ratio must be an integer of at least 1, not 0"),
        ({"offset": -1}, "offset must be an integer of at least 0, not -1"),
        ({"starts": torch.zeros(3).long()}, r"starts must be int64 \[2\], not torch.int64 \[3\]"),
        ({"starts": torch.zeros(2)}, r"starts must be int64 \[2\], not torch.float32 \[2\]"),
        ({"key_scales": torch.ones(2, 39)}, r"key_scales must be floating \[B, T\] = \[2, 40\], not .* \[2, 39\]"),
        ({"key_scales": torch.ones(2, 40) + 0j}, r"key_scales must be floating .*, not torch.complex64"),
        ({"lost": torch.zeros(1)}, r"lost must be int64 \[1\] on cpu, not torch.float32 \[1\] on cpu"),
        ({"path": "fast"}, "path must be one of auto, materialised, chunked, fused, not 'fast'"),
    ],
)
def test_bad_input_is_named(change, message):
    q, k, weights = problem()
    with pytest.raises(ValueError, match=message):
        csa.lightning_indexer(**({"q": q, "k": k, "weights": weights, "top_k": 3} | change))


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("batch", [1, 4, 8, 16, 64])
def test_rows_are_cut_by_their_keys_and_never_into_a_few(ratio, batch):
    """Pieces whose queries have at most twice the keys of the first, or few; each with enough for the same kernel, and
    no more than there is room for beyond that."""
    keys, few = 1 << 20, indexer._FEWEST
    offsets = (0, 1, 2040, 2047, 8180, 8187, 8190, 16380, 40_000, 1 << 23)
    numbers = (1, 15, 16, 17, 31, 40, 4096, 20_000)
    for offset, queries in itertools.product(offsets, numbers):
        pieces = list(indexer.cuts(queries, batch, keys, ratio, offset))
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
        assert pieces[-1].stop == queries
        assert min(piece.stop - piece.start for piece in pieces) >= min(few, queries)
        for piece in pieces:
            at, rows = offset + piece.start, piece.stop - piece.start
            most = (at + rows) // ratio
            assert most <= max(indexer._SHORT, 2 * ((at + 2 * few) // ratio))
            assert rows < 2 * few or 4 * batch * rows * min(most, keys) <= indexer.SCORES_BYTES

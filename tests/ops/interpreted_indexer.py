"""The kernels of the lightning indexer against their references, in numbers that Triton's interpreter gets right."""

import pytest
import torch
import triton.language as tl

from foveate.ops.dispatch import UnsupportedError
from foveate.ops.score import indexer, indexer_kernel
from foveate.ops.select import blocks, blocks_kernel
from tests.combinations import every_pair

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def small_blocks(monkeypatch):
    """Several programs walk over the keys of a query, and a row is too long to be kept."""
    monkeypatch.setattr(indexer_kernel, "_SPAN", 2)
    monkeypatch.setattr(blocks_kernel, "_CHUNK", 64)
    monkeypatch.setattr(blocks_kernel, "_HELD", 64)
    monkeypatch.setattr(blocks_kernel, "_KEPT", 64)


# indexer_scores


def problem(batch=2, queries=9, keys=150, heads=64, dim=16, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, queries, heads, dim), (batch, keys, dim), (batch, queries, heads)
    q, k, weights = (torch.randn(shape, generator=generator) for shape in shapes)
    return q.to(dtype), k.to(dtype), weights


def check(q, k, weights, ratio, offset, starts=None, key_scales=None):
    how = {"ratio": ratio, "offset": offset, "starts": starts, "key_scales": key_scales}
    found, expected = (run(q, k, weights, **how) for run in (indexer_kernel.indexer_scores, indexer.indexer_scores))
    visible = indexer.visible_keys(q.shape[1], k.shape[1], ratio, offset, q.device)[:, None]
    for place, (one, other) in enumerate(zip(found[:2], expected[:2], strict=True)):
        step = indexer.BLOCK if place else 1
        seen = (torch.arange(one.shape[-1]) * step < visible).expand_as(one)
        if starts is not None and not place:
            seen = seen & (torch.arange(one.shape[-1]) >= starts[:, None, None])
        torch.testing.assert_close(one[seen], other[seen], rtol=1e-4, atol=1e-4)
    assert found.lost.tolist() == expected.lost.tolist() == [0]
    return found


@pytest.mark.parametrize("keys", [1, 15, 64, 150])
@pytest.mark.parametrize(("ratio", "offset"), [(1, 0), (1, 140), (4, 500), (3, 2)])
def test_scores(keys, ratio, offset, small_blocks):
    check(*problem(keys=keys), ratio, offset)


def test_keys_that_are_padding(small_blocks):
    q, k, weights = problem()
    k[0, :70], k[1, :5] = float("nan"), float("inf")
    check(q, k, weights, 1, 140, torch.tensor([70, 5]))


def test_scales_of_keys(small_blocks):
    scales = torch.rand(300, 2).T[:, 7:157]
    check(*problem(), 1, 140, key_scales=scales)
    found = check(*problem(), 1, 140, torch.tensor([70, 5]), key_scales=-scales)
    assert not bool((found.scores[0, -1, 70:] > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(16, 24), (32, 128), (128, 16), (64, 256), (64, 5)])
def test_heads(heads, dim, dtype):
    check(*problem(1, 7, 70, heads, dim, dtype), 1, 60)


def test_strided_inputs():
    q, k, weights = problem()
    expected = check(q, k, weights, 1, 100)
    wide = torch.full((2, 9, 64, 20), float("nan"))
    wide[..., 2:18] = q
    keys, swapped = k.transpose(1, 2).contiguous().transpose(1, 2), weights.transpose(1, 2).contiguous().transpose(1, 2)
    found = check(wide[..., 2:18], keys, swapped, 1, 100)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("seen", [True, False])
def test_nan_is_told_where_a_query_may_see_it(seen):
    q, k, weights = problem(1, 5, 90)
    k[:, 40 if seen else 80] = float("nan")
    assert indexer_kernel.indexer_scores(q, k, weights, offset=60).lost.tolist() == [int(seen)]
    assert indexer.indexer_scores(q, k, weights, offset=60).lost.tolist() == [int(seen)]


@every_pair(("query", [0, 1, 8]), ("value", [float("nan"), float("inf"), -float("inf")]))
def test_weights_that_are_not_finite_are_told_where_their_query_sees_a_key(value, query, small_blocks):
    q, k, weights = problem(keys=150)
    q, k = q.abs(), k.abs()  # so that no score is NaN
    weights[1, query, -1] = value
    for starts, offset, seen in ((None, 0, query), (None, 140, True), (torch.tensor([0, 141]), 140, query)):
        how = {"ratio": 1 if offset else 2, "offset": offset, "starts": starts}
        assert indexer_kernel.indexer_scores(q, k, weights, **how).lost.tolist() == [int(bool(seen))]
        assert indexer.indexer_scores(q, k, weights, **how).lost.tolist() == [int(bool(seen))]


def test_what_scores_refuse():
    q, k, weights = problem()
    with pytest.raises(UnsupportedError, match="float64"):
        indexer_kernel.indexer_scores(q.double(), k.double(), weights)
    for heads in (8, 48, 256):
        with pytest.raises(UnsupportedError, match=f"{heads} index heads of 16"):
            indexer_kernel.indexer_scores(*problem(heads=heads))


# topk_of_blocks


def rows(name, number, seed=0):
    """Scores ``[2, 3, number]`` of a kind that has been the end of other people's top-k."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, number, generator=generator)
    few = torch.rand(x.shape, generator=generator) < 0.3
    return {
        "normal": x,
        "tied": torch.ones_like(x),
        "three values": (x * 1.5).round().clamp(-1, 1),
        "zeros of both signs": torch.where(few, 0.0, -0.0),
        "mostly -inf": x.masked_fill(~few, float("-inf")),
        "some inf": x.masked_fill(few, float("inf")),
        "only -inf": torch.full_like(x, float("-inf")),
        "one bin of fp16": 1 + x * 1e-5,
        "rising": torch.arange(number).float().expand_as(x).contiguous(),
        "falling": -torch.arange(number).float().expand_as(x).contiguous(),
        "tiny": x * 1e-42,
    }[name]


def check_choice(scores, visible, k, block=16, starts=None, made=None):
    unseen = torch.arange(scores.shape[-1]) >= visible[:, None]
    if starts is not None:
        unseen = unseen | (torch.arange(scores.shape[-1]) < starts[:, None, None])
    padded = torch.nn.functional.pad(
        scores.masked_fill(unseen, float("-inf")), (0, -scores.shape[-1] % block), value=float("-inf")
    )
    maxima = padded.unflatten(-1, (-1, block)).amax(-1)
    poisoned = maxima.masked_fill(torch.arange(maxima.shape[-1]) * block >= visible[:, None], float("nan"))
    scores = scores.masked_fill(unseen, float("nan"))
    expected = blocks.topk_of_blocks(scores.masked_fill(unseen, 9.0), maxima, visible, k, block, starts)
    made = made or at_16_bytes
    found = blocks_kernel.topk_of_blocks(made(scores), made(poisoned), visible, k, block, starts)
    assert found.dtype == torch.int32
    assert torch.equal(found, expected)


def at_16_bytes(x):
    """The same in rows that begin at 16 bytes, with NaN between them, as what scores them leaves them."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 4 + 4), value=float("nan"))[..., : x.shape[-1]]


@pytest.fixture
def by_names(monkeypatch):
    """Rows whose blocks are chosen first, and written in several turns."""
    monkeypatch.setattr(blocks_kernel, "_SHORT", 0)
    monkeypatch.setattr(blocks_kernel, "_TILE", tl.constexpr(64))
    made = []
    real = blocks_kernel._topk_of_named
    monkeypatch.setattr(blocks_kernel, "_topk_of_named", noted_launch(real, made))
    return made


def noted_launch(kernel, launched):
    """The kernel, with its launches noted."""

    class Noted:
        def __getitem__(self, grid):
            launched.append(grid)
            return kernel[grid]

    return Noted()


KINDS = (
    "normal",
    "tied",
    "three values",
    "zeros of both signs",
    "mostly -inf",
    "some inf",
    "only -inf",
    "one bin of fp16",
    "rising",
    "falling",
    "tiny",
)

N = 205
"""Scores of a row: three chunks of 64, or twelve blocks of 16, and 13 more."""


@every_pair(("name", KINDS), ("k", [7, 40, 400]), ("block", [1, 16]))
def test_choice(name, k, block, small_blocks):
    """Groups of one block and of several, scores that are kept (k = 7) and that are not."""
    check_choice(rows(name, N), torch.tensor([0, 130, N]), k, block)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("k", [1, 40, 400])
def test_choice_from_short_rows(name, k):
    check_choice(rows(name, 333), torch.tensor([0, 200, 333]), k)


@every_pair(("name", KINDS), ("k", [1, 7, 12]), ("block", [1, 16]))
def test_choice_from_blocks_that_are_chosen_first(name, k, block, by_names):
    check_choice(rows(name, N), torch.tensor([0, 130, N]), k, block)
    check_choice(rows(name, N), torch.tensor([50, 100, N]), k, block, starts=torch.tensor([90, 7]))
    assert len(by_names) == 2


def test_choice_from_blocks_of_thousands():
    check_choice(rows("normal", 20_000), torch.tensor([0, 9000, 20_000]), 2, 8192)


@pytest.mark.parametrize("k", [1, 40, 400])
@pytest.mark.parametrize("held", [64, 16384])
def test_choice_behind_padding(k, held, small_blocks, monkeypatch):
    monkeypatch.setattr(blocks_kernel, "_HELD", held)
    visible = torch.tensor([0, 130, N])
    check_choice(rows("normal", N), visible, k, starts=torch.tensor([100, 7]))
    check_choice(rows("tied", N), visible, k, starts=torch.tensor([0, N]))


@pytest.mark.parametrize("held", [64, 16384])
@pytest.mark.parametrize("name", ["normal", "tied"])
@pytest.mark.parametrize("where", [slice(3, 4), slice(16, 32), slice(0, None, 5)])
def test_nan_writes_nothing_beyond_its_row(name, held, where, small_blocks, monkeypatch):
    """No set is right; the row after it, which is made before, must stay as it is."""
    monkeypatch.setattr(blocks_kernel, "_HELD", held)
    scores = rows(name, N)
    scores[0, 2, where] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # as GPUs spell it
    maxima = torch.nn.functional.pad(scores, (0, 3), value=float("-inf")).unflatten(-1, (-1, 16)).nan_to_num(-3.0)
    visible = torch.full((3,), N)
    found = blocks_kernel.topk_of_blocks(scores, maxima.amax(-1), visible, 7, 16)
    clean = rows(name, N)
    padded = torch.nn.functional.pad(clean, (0, 3), value=float("-inf")).unflatten(-1, (-1, 16))
    expected = blocks_kernel.topk_of_blocks(clean, padded.amax(-1), visible, 7, 16)
    assert torch.equal(found.flatten(0, 1)[[0, 1, 3, 4, 5]], expected.flatten(0, 1)[[0, 1, 3, 4, 5]])
    assert bool(((found >= -1) & (found < N)).all())


@pytest.mark.parametrize("k", [7, 40])
@pytest.mark.parametrize("held", [64, 16384])
@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000, -1], ids=["positive", "negative", "all bits"])
def test_nan_of_either_sign_counts_as_infinite(k, held, bits, small_blocks, monkeypatch):
    monkeypatch.setattr(blocks_kernel, "_HELD", held)
    scores = rows("normal", N)
    scores.view(torch.int32)[:, :, 3::20] = bits
    infinite = scores.nan_to_num(float("inf"))
    maxima = torch.nn.functional.pad(infinite, (0, 3), value=float("-inf")).unflatten(-1, (-1, 16)).amax(-1)
    visible = torch.tensor([0, 130, N])
    of_nan = torch.where(
        maxima.isinf() & (maxima > 0), torch.tensor(bits, dtype=torch.int32).view(torch.float32), maxima
    )
    found = blocks_kernel.topk_of_blocks(scores, of_nan, visible, k, 16)
    assert torch.equal(found, blocks_kernel.topk_of_blocks(infinite, maxima, visible, k, 16))
    assert 3 in found[0, 2]


@every_pair(("number", [1, 16, 17, 2048, 2049, 5000]), ("block", [1, 16, 64]), ("held", [256, 16384]))
def test_any_number_of_scores(number, block, held, monkeypatch):
    monkeypatch.setattr(blocks_kernel, "_HELD", held)
    check_choice(rows("three values", number), torch.full((3,), number), 13, block, made=torch.Tensor.contiguous)


def test_what_choice_refuses():
    scores, maxima, visible = torch.zeros(1, 2, 40), torch.zeros(1, 2, 3), torch.tensor([40, 40])
    with pytest.raises(UnsupportedError, match="float16"):
        blocks_kernel.topk_of_blocks(scores.half(), maxima, visible, 3, 16)
    for wrong in (
        (scores, maxima, visible, 3, 8),
        (scores, maxima, visible, 3, 12),
        (scores, maxima, visible[:1], 3, 16),
    ):
        with pytest.raises(ValueError, match="do not fit blocks of"):
            blocks_kernel.topk_of_blocks(*wrong)

"""The kernels of top-k in every row against their reference, in numbers that Triton's interpreter gets right."""

import pytest
import torch
import triton.language as tl

from foveate.ops.dispatch import UnsupportedError
from foveate.ops.select import reference as select
from foveate.ops.select import rows_kernel
from tests.combinations import every_pair
from tests.kernels import noted

pytestmark = pytest.mark.usefixtures("poisoned")

INF = float("inf")
N = 4500
SCORES = {
    "random": torch.rand(N, generator=torch.manual_seed(0)),
    "signed": torch.randn(N, generator=torch.manual_seed(1)) * 1e3,
    "tied": torch.zeros(N),
    "signed zeros": torch.where(torch.arange(N) % 2 == 0, 0.0, -0.0),
    "few values": torch.randint(0, 4, (N,), generator=torch.manual_seed(2)).float(),
    "rising": torch.arange(N).float(),
    "falling": -torch.arange(N).float(),
    "one ulp apart": 1 + torch.arange(N).remainder(2) * 2.0**-23,
    "none": torch.full((N,), -INF),
    "few": torch.where(torch.arange(N) % 1500 == 7, 1.0, -INF),
    "infinite": torch.where(torch.arange(N) % 2 == 1, INF, -1e38),
    "subnormal": torch.arange(N) * 1e-42,
}
COUNTS = [([1, 450, 2048], torch.int32), ([0, N - 1, N], torch.int64)]


HOWS = ["held", "found in a sample of all", "found in a small sample", "found out of registers", "read anew"]
HOW = pytest.mark.parametrize("how", HOWS)


@pytest.fixture
def sizes(how, monkeypatch):
    """Rows kept whole; of longer ones the last score bracketed well, loosely, with more between than registers hold,
    or with too little room between."""
    monkeypatch.setattr(rows_kernel, "_HELD", 16384 if how == "held" else -1)
    monkeypatch.setattr(rows_kernel, "multiprocessors", lambda device: 1 if how == "found in a small sample" else 100)
    samples = {"found in a small sample": (256, 4096), "found out of registers": (256, 4096), "read anew": (64, 64)}
    if how == "found out of registers":
        monkeypatch.setattr(rows_kernel, "_HOLDS", tl.constexpr(64))
        monkeypatch.setattr(rows_kernel, "_AT_ONCE", tl.constexpr(256))
    if how in samples:
        monkeypatch.setattr(rows_kernel, "sizes", lambda number, k: samples[how])


@every_pair(("scores", SCORES), ("how", HOWS), (("counts", "dtype"), COUNTS))
def test_topk_of_rows(scores, counts, dtype, sizes):
    scores = SCORES[scores]
    scores = torch.stack([scores, scores.flip(0), scores.roll(5)]).view(3, 1, N)
    counts = torch.tensor(counts)
    arguments = (scores, counts, int(counts.max()))
    found = rows_kernel.topk_rows(*arguments, dtype=dtype)
    assert found.dtype == dtype
    assert torch.equal(found, select.topk_rows(*arguments, dtype=dtype))


@pytest.mark.parametrize(
    ("scores", "how", "by"),
    [
        (torch.randn(3, 1, 40_000, generator=torch.manual_seed(4)), "found in a sample", [2, 2, 2]),
        (torch.randn(3, 1, 40_000, generator=torch.manual_seed(4)).clamp_min(0.5), "all tie", [2, 1, 1]),
        (torch.arange(40_000.0).remainder(10).expand(3, 1, -1), "few values", [0, 1, 1]),
    ],
)
def test_what_tells_where_chosen_scores_lie(scores, how, by, monkeypatch):
    """The sample suffices for scores in no order, and for a tie that is longer than what is kept."""
    settled = noted(monkeypatch, rows_kernel)
    monkeypatch.setattr(rows_kernel, "multiprocessors", lambda device: 1)
    counts = torch.tensor([4000, 20_000, 39_000]) if how != "few values" else torch.tensor([4000, 18_000, 30_500])
    chosen = rows_kernel.topk_rows(scores.contiguous(), counts, 39_000)
    assert torch.equal(chosen, select.topk_rows(scores.contiguous(), counts, 39_000))
    assert settled[0][2].tolist() == by


@pytest.mark.parametrize(
    ("number", "share", "room"),
    [(524_288, 0.3, 32_768), (1 << 20, 0.5, 32_768), ((1 << 21) - 5, 0.05, 32_768), ((1 << 21) - 5, 0.5, 65_536)],
)
def test_long_rows_are_read_twice(number, share, room, monkeypatch):
    """What is kept of them fits its room, also where that is more than registers hold."""
    settled = noted(monkeypatch, rows_kernel)
    monkeypatch.setattr(rows_kernel, "_TILE", 16_384)  # the interpreter takes its time for each
    scores, k = torch.randn(1, 1, number, generator=torch.manual_seed(7)), int(share * number)
    chosen = rows_kernel.topk_rows(scores, torch.tensor([k]), k)
    assert torch.equal(chosen, select.topk_rows(scores, torch.tensor([k]), k))
    assert settled[0][2].tolist() == [rows_kernel._KEPT.value]
    assert rows_kernel.sizes(number, k)[1] == room


@pytest.mark.parametrize("number", [20_000, 131_072, 524_288, 1 << 20, 1 << 21, 1 << 22])
def test_there_is_room_for_what_lies_between(number):
    """In samples that are drawn at random, of shares of which the sizes of rooms are close to what they need."""
    generator, draws = torch.Generator().manual_seed(8), 60
    for k in (number * torch.logspace(-4, -0.3, 12)).long().tolist():
        sample, room = rows_kernel.sizes(number, k)
        share = k / number
        away = rows_kernel._DEVIATIONS.value * (sample * share * (1 - share)) ** 0.5 + rows_kernel._SLACK.value
        ends = max(0, int(sample * share - away)), min(sample, int(sample * share + away) + 1) - 1
        drawn = torch.rand(draws, sample, generator=generator)
        first, last = (drawn.kthvalue(end + 1).values * number for end in ends)
        assert float((last - first).max()) < room


@pytest.mark.parametrize("number", [1, 3, 2048, 2049])
@HOW
def test_topk_of_rows_of_any_length_and_strides(number, sizes):
    scores = torch.rand(2, number, 3, generator=torch.manual_seed(3)).transpose(1, 2)
    counts = torch.stack([torch.tensor([2, 1700]), torch.full((2,), 5)], 1)[:, 0]
    found = rows_kernel.topk_rows(scores, counts, 1700)
    assert torch.equal(found, select.topk_rows(scores, counts, 1700))


@HOW
def test_topk_of_rows_of_different_lengths(sizes):
    """What is beyond a row's length, however high, is no score of the row; a row may be empty."""
    scores = torch.randn(5, 2, N, generator=torch.manual_seed(9))
    lengths, counts = torch.tensor([N, N // 7, 3, 0, 2500]), torch.tensor([300, 40, 3, 0, 300])
    for row, length in zip(scores, lengths):
        row[:, length:] = INF
    found = rows_kernel.topk_rows(scores, counts, 300, lengths=lengths)
    assert torch.equal(found, select.topk_rows(scores, counts, 300, lengths=lengths))
    alone = [
        select.topk_rows(row[None, :, :n], counts[i : i + 1], 300) for i, (row, n) in enumerate(zip(scores, lengths))
    ]
    for row, expected in zip(found, alone):
        assert torch.equal(row[:, : expected.shape[2]], expected[0])
        assert bool((row[:, expected.shape[2] :] == -1).all())


def test_rows_that_are_short_by_their_lengths_among_long_ones(monkeypatch):
    """Kept whole by the kernels of long rows, in two sizes; one may have no scores."""
    monkeypatch.setattr(rows_kernel, "_HELD", 1024)
    scores = torch.randn(6, 2, N, generator=torch.manual_seed(9))
    lengths, counts = torch.tensor([N, 1024, 513, 512, 3, 0]), torch.tensor([300, 40, 300, 300, 300, 0])
    found = rows_kernel.topk_rows(scores, counts, 300, lengths=lengths)
    assert torch.equal(found, select.topk_rows(scores, counts, 300, lengths=lengths))


@HOW
def test_rows_of_which_fewer_than_none_are_chosen(sizes):
    """Nothing is written before a row, neither into the row before it nor into what is before the first."""
    scores = torch.randn(4, 2, N, generator=torch.manual_seed(6))
    counts = torch.tensor([-1, 300, -(2**40), -299])
    chosen = rows_kernel.topk_rows(scores, counts, 300)
    assert torch.equal(chosen, select.topk_rows(scores, counts, 300))
    assert bool((chosen[[0, 2, 3]] == -1).all())


@HOW
def test_nan_of_either_sign_counts_as_infinite_among_rows(sizes):
    scores = torch.randn(2, 2, N, generator=torch.manual_seed(5))
    bits = scores.view(torch.int32)
    bits[:, :, 5::1000], bits[:, :, 17::1100] = 0x7FC00000, -0x400000  # 0xFFC00000, what x86 and 0 * inf make
    bits[:, 1, ::3], bits[:, 1, 1::3] = -1, 0x7FFFFFFF  # as GPUs spell it
    scores[0, 0, 100::1000] = INF
    for counts in ([6, 1500], [N, 12]):
        arguments = (scores, torch.tensor(counts), max(counts))
        found = rows_kernel.topk_rows(*arguments)
        assert torch.equal(found, select.topk_rows(*arguments))
    assert {17, 1005} <= set(found[1, 0].tolist())


def test_topk_of_one_score_for_all_rows():
    scores = torch.rand(1, 1, 100, generator=torch.manual_seed(3)).expand(2, 3, -1)
    assert torch.equal(
        rows_kernel.topk_rows(scores, torch.tensor([4, 9]), 9), select.topk_rows(scores, torch.tensor([4, 9]), 9)
    )


def test_what_topk_of_rows_refuses():
    scores = torch.rand(2, 3, 50)
    assert rows_kernel.topk_rows(scores, torch.zeros(2, dtype=torch.int64), 0).shape == (2, 3, 0)
    with pytest.raises(UnsupportedError, match="float64"):
        rows_kernel.topk_rows(scores.double(), torch.tensor([1, 2]), 2)
    with pytest.raises(ValueError, match="counts"):
        rows_kernel.topk_rows(scores, torch.tensor([1]), 2)

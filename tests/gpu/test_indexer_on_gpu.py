"""The lightning indexer on a GPU: scores against fp64, sets against the kernel's own scores, adversarial rows."""

import pytest
import torch

from foveate import csa, ops
from foveate.csa import indexer
from foveate.ops import dispatch
from foveate.ops.score import indexer_hopper_kernel, indexer_kernel
from tests.combinations import every_pair
from tests.kernels import poisoned_memory

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.bfloat16: 1e-4, torch.float16: 1e-4, torch.float32: 1e-4, FP8: 2e-3}
"""Relative; the matrix units of Hopper add fp8 products with fewer bits than fp32 has."""


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch):
    """A reference that is reached without being asked for fails the test."""
    pytest.importorskip("triton")
    assert {"indexer_scores", "topk_of_blocks"} <= set(dispatch.kernel_status().split(", "))
    monkeypatch.setattr(dispatch, "_say_once", lambda text: pytest.fail(text))


def problem(batch, queries, keys, heads=64, dim=128, dtype=torch.bfloat16, seed=0):
    """As StreamIndex draws them (section 6)."""
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, weights = (
        torch.randn(shape, generator=generator, device="cuda")
        for shape in ((batch, queries, heads, dim), (batch, keys, dim), (batch, queries, heads))
    )
    size = 8.0 if dtype == FP8 else dim**-0.5  # within what fp8 holds, and not too small for it
    return (q * size).to(dtype), (k * size).to(dtype), weights * (dim * heads) ** -0.5 / (size * size * dim)


def in_total_order(scores, visible, k):
    """The k best of each row by score and then by index, ascending; scores with -inf where nothing may be chosen."""
    unseen = torch.arange(scores.shape[-1], device="cuda") >= visible[:, None]
    ordered, order = scores.masked_fill(unseen, float("-inf")).sort(dim=-1, descending=True, stable=True)
    last = scores.shape[-1]
    order = order[..., :k].masked_fill(ordered[..., :k].isneginf(), last).sort(-1).values
    order = order.masked_fill(order == last, -1).to(torch.int32)
    return torch.nn.functional.pad(order, (0, k - order.shape[-1]), value=-1)


@pytest.fixture(params=[True, False], ids=["hopper", "portable"])
def hopper(request, monkeypatch):
    """With and without the kernel for Hopper alone; whether it ran is noted."""
    monkeypatch.setattr(indexer_kernel, "_HOPPER", request.param)
    ran, real = [], indexer_hopper_kernel.indexer_scores
    monkeypatch.setattr(indexer_hopper_kernel, "indexer_scores", lambda *a, **k: ran.append(True) or real(*a, **k))
    return ran if request.param and torch.cuda.get_device_capability() == (9, 0) else None


@every_pair(
    ("dtype", TOLERANCE),
    (("heads", "dim"), [(64, 128), (64, 64), (16, 128), (32, 40), (128, 128), (32, 256)]),
    ("more", [False, True]),
    (("queries", "keys", "ratio", "offset"), [(1, 1, 1, 0), (37, 333, 4, 1300), (300, 4097, 1, 3800)]),
)
def test_scores(hopper, dtype, heads, dim, more, queries, keys, ratio, offset):
    q, k, weights = problem(2, queries, keys, heads, dim, dtype)
    starts = torch.tensor([0, 70], device="cuda") if more else None
    scales = torch.rand(2, keys, device="cuda") if more else None
    how = {"ratio": ratio, "offset": offset, "starts": starts, "key_scales": scales}
    with poisoned_memory("cuda"):
        scores, maxima, lost = ops.score.indexer_scores(q, k, weights, **how)
        again = ops.score.indexer_scores(q, k, weights, **how)
    assert hopper is None or bool(hopper) == indexer_hopper_kernel.fits(q, k)
    exact = (torch.einsum("bshd,btd->bsht", q.double(), k.double()).relu() * weights.double()[..., None]).sum(2)
    if more:
        exact *= scales.double()[:, None]
    visible = ops.score.visible_keys(queries, keys, ratio, offset, q.device)
    seen = (torch.arange(keys, device="cuda") < visible[:, None]).expand_as(scores)
    if more:
        seen = seen & (torch.arange(keys, device="cuda") >= starts[:, None, None])
    torch.testing.assert_close(scores[seen].double(), exact[seen], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 10)
    assert torch.equal(scores[seen], again.scores[seen]), "repeats are equal bit for bit"
    blocks = ops.score.INDEXER_BLOCK * torch.arange(maxima.shape[-1], device="cuda") < visible[:, None]
    padded = torch.nn.functional.pad(
        scores.masked_fill(~seen, float("-inf")), (0, -keys % ops.score.INDEXER_BLOCK), value=float("-inf")
    )
    expected = padded.unflatten(-1, (-1, ops.score.INDEXER_BLOCK)).amax(-1)
    assert torch.equal(maxima[blocks.expand_as(maxima)], expected[blocks.expand_as(maxima)])
    assert lost.item() == 0


KINDS = {
    "normal": lambda x, few: x,
    "tied": lambda x, few: torch.ones_like(x),
    "zeros of both signs": lambda x, few: torch.where(few, 0.0, -0.0),
    "three values": lambda x, few: (x * 1.5).round().clamp(-1, 1),
    "mostly -inf": lambda x, few: x.masked_fill(~few, float("-inf")),
    "some inf": lambda x, few: x.masked_fill(few, float("inf")),
    "one bin of fp16": lambda x, few: 1 + x * 1e-5,
    "rising": lambda x, few: torch.arange(x.shape[-1], device=x.device).float().expand_as(x).contiguous(),
    "falling": lambda x, few: -torch.arange(x.shape[-1], device=x.device).float().expand_as(x).contiguous(),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("k", [1, 512, 2048, 13107])
@pytest.mark.parametrize("number", [100, 4099, 131072])
def test_choice(name, k, number):
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(1, 16, number, generator=generator, device="cuda")
    scores = KINDS[name](x, torch.rand(x.shape, generator=generator, device="cuda") < 0.1)
    visible = torch.linspace(number // 2, number, 16, device="cuda").long()
    block = ops.score.INDEXER_BLOCK
    unseen = torch.arange(number, device="cuda") >= visible[:, None]
    padded = torch.nn.functional.pad(scores.masked_fill(unseen, float("-inf")), (0, -number % block), value=-torch.inf)
    maxima = padded.unflatten(-1, (-1, block)).amax(-1)
    with poisoned_memory("cuda"):
        found = ops.select.topk_of_blocks(scores, maxima, visible, k, block)
        again = ops.select.topk_of_blocks(scores, maxima, visible, k, block)
    assert torch.equal(found, in_total_order(scores, visible, k))
    assert torch.equal(found, again), "repeats are equal bit for bit"


@pytest.mark.parametrize(("queries", "ratio", "top_k"), [(2048, 4, 512), (5000, 1, 2048), (9001, 4, 1024)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_sets_are_those_of_the_kernels_own_scores(monkeypatch, hopper, dtype, queries, ratio, top_k):
    q, k, weights = problem(1, queries, queries // ratio, dtype=dtype)
    monkeypatch.setattr(indexer, "SCORES_BYTES", 8 << 20)
    found = csa.lightning_indexer(q, k, weights, top_k, ratio=ratio)
    scores = ops.score.indexer_scores(q, k, weights, ratio=ratio).scores
    visible = ops.score.visible_keys(queries, k.shape[1], ratio, 0, q.device)
    assert torch.equal(found, in_total_order(scores, visible, top_k))
    exact = torch.einsum("bshd,btd->bsht", q[:, -50:].double(), k.double()).relu()
    exact = (exact * weights[:, -50:].double()[..., None]).sum(2)
    last = k.shape[1]  # a place for those that are missing
    chosen = torch.zeros(1, 50, last + 1, dtype=torch.bool, device="cuda")
    chosen = chosen.scatter_(2, found[:, -50:].long().where(found[:, -50:] >= 0, last), True)[..., :last]
    worst = exact.masked_fill(~chosen, torch.inf).amin(-1)
    seen = torch.arange(k.shape[1], device="cuda") < visible[-50:, None]
    best_dropped = exact.masked_fill(chosen | ~seen, -torch.inf).amax(-1)
    size = exact.abs().where(seen, 0.0).amax(-1)
    error = TOLERANCE[dtype] * (size + 0.1)  # as scores are held against fp64 above
    assert bool((best_dropped <= worst + 2 * error).all())


def test_planted_keys_among_a_million_are_always_found(hopper):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, weights = problem(1, 8, 1 << 20)
    planted = torch.randperm(1 << 20, generator=generator, device="cuda")[:40].sort().values
    k[0, planted] = q[0].float().sum((0, 1)).mul(8).to(k.dtype)
    found = csa.lightning_indexer(q, k, weights.abs(), 512, offset=1 << 20)
    assert torch.isin(planted.to(torch.int32), found[0]).all()
    assert all(torch.isin(planted.to(torch.int32), row).all() for row in found[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (3, 63), (7, 5)])
def test_weights_must_be_finite(hopper, value, place):
    q, k, weights = (x.abs() for x in problem(1, 8, 5000))  # products are positive: no score need be NaN
    weights[0, place[0], place[1]] = value
    with pytest.raises(ValueError, match="weights must be finite"):
        csa.lightning_indexer(q, k, weights, 512, offset=4999)
    assert hopper is None or hopper
    lost = ops.score.indexer_scores(q, k, weights, ratio=6000, offset=0).lost
    assert lost.item() == 0, "no query sees a key"


def test_nan_is_an_error_and_a_graph_can_be_captured(hopper):
    q, k, weights = problem(1, 8, 5000)
    k[:, 4000] = float("nan")
    with pytest.raises(ValueError, match="k must be finite"):
        csa.lightning_indexer(q, k, weights, 512, offset=4999)
    assert hopper is None or hopper
    lost = torch.zeros(1, dtype=torch.int64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        step = csa.lightning_indexer(q[:, :1], k, weights[:, :1], 512, offset=4999, lost=lost)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool((step == -1).all())
    assert lost.item() == 1
    q, k, weights = problem(1, 1, 70_000)
    expected = csa.lightning_indexer(q, k, weights, 512, offset=69_999)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = csa.lightning_indexer(q, k, weights, 512, offset=69_999)
    graph.replay()
    assert torch.equal(found, expected)

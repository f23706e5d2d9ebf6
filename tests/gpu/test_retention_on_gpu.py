"""Retention scores on a GPU: the kernel against fp64, among poison, and of layers in pieces."""

import pytest
import torch

from foveate import ops
from foveate.calibration.retention_scores import RetentionScores
from foveate.hybrids.layers import LearnedEviction
from foveate.hybrids.state import RetainedMemory
from foveate.ops import dispatch
from foveate.ops.score import retention
from tests.combinations import every_pair
from tests.kernels import poisoned_memory
from tests.retention import in_slots, weights

pytestmark = pytest.mark.gpu

DTYPES = ("dtype", [torch.bfloat16, torch.float16, torch.float32])
TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float32: 2e-5}
WIDTH = 256


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch):
    """A reference that is reached without being asked for fails the test."""
    pytest.importorskip("triton")
    assert "retention_logits" in dispatch.kernel_status().split(", ")
    monkeypatch.setattr(dispatch, "_say_once", lambda text: pytest.fail(text))


@every_pair(
    DTYPES,
    ("dims", [(64, 64), (128, 128), (80, 80), (40, 72), (96, 128)]),
    ("kind", ["conv", "mlp"]),
    (("batch", "heads", "length"), [(2, 8, 769), (1, 1, 1), (3, 3, 5), (33, 2, 130), (1, 16, 5000)]),
)
def test_tokens_in_slots(dtype, dims, kind, batch, heads, length):
    k, v, options, tokens = in_slots(batch, heads, length, dims, dtype, "cuda")
    given = weights(heads, sum(dims), kind, dtype, "cuda")
    with poisoned_memory("cuda"):
        found = ops.score.retention_logits(k, v, *given, **options)
        assert torch.equal(found, ops.score.retention_logits(k, v, *given, **options)), "repeats are equal bit for bit"
    *convolutions, head = (ops.score.Convolution(*(x.double() for x in one)) for one in (*given[0], given[1]))
    exact = retention.retention_logits(k.double(), v.double(), convolutions, head, **options)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found, exact, atol=tolerance, rtol=tolerance)
    plain = ops.score.retention_logits(*tokens, *given, real=options["real"])
    torch.testing.assert_close(plain, found, atol=2 * tolerance, rtol=2 * tolerance)  # the roundings of both


@every_pair(DTYPES, ("kind", ["conv", "mlp"]), ("dim", [64, 128]))
def test_the_module_s_scores(dtype, kind, dim):
    torch.manual_seed(0)
    scores = RetentionScores(8, 2 * dim, kind=kind).to("cuda", dtype).eval()
    k, v, options, tokens = in_slots(3, 8, 1000, (dim, dim), dtype, "cuda")
    found = scores.of_cached(k, v, **options)
    expected = scores.double()(*(x.double() for x in tokens), options["real"])
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found, expected.detach(), atol=tolerance, rtol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pieces_score_as_one(dtype, monkeypatch):
    """To the last bit: a token's sums do not depend on the piece that it is in."""
    torch.manual_seed(0)
    layer = LearnedEviction(WIDTH, 8, 2, 64, window=100, buffer=64).to("cuda", dtype).eval()
    k, v, options, _ = in_slots(2, 2, 500, (64, 64), dtype, "cuda")
    given = torch.arange(500, device="cuda").expand(2, -1), options["real"], torch.tensor([0, 1000], device="cuda")
    whole = layer._margins(k, v, *given, options["slots"])
    monkeypatch.setattr("foveate.hybrids.layers.lte.SCORED", 2 * 77)
    monkeypatch.setattr("foveate.hybrids.layers.lte.PIECE", 77)
    assert torch.equal(layer._margins(k, v, *given, options["slots"]), whole)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decode_scores_as_the_prompt(dtype):
    """What a layer remembers of a sequence, token by token and in one piece."""
    torch.manual_seed(0)
    layer = LearnedEviction(WIDTH, 8, 2, 64, window=100, buffer=64).to("cuda", dtype).eval()
    torch.nn.init.constant_(layer.scores.head.bias, -0.2)
    x = torch.randn(2, 400, WIDTH, generator=torch.Generator("cuda").manual_seed(3), device="cuda").to(dtype)
    at = torch.arange(400, device="cuda")[None]
    k, v = (layer._heads(proj(x)) for proj in (layer.k_proj, layer.v_proj))
    memory = RetainedMemory(layer.window, layer.buffer)
    for token in range(400):
        layer(x[:, token : token + 1], at[:, token : token + 1], memory)
    layer._score_late(memory)
    ring = memory.ring
    late = torch.arange(400 - ring, 400 - layer.reach, device="cuda")
    expected = layer.scores.double()(k.double(), v.double())[:, :, late] - 0.5
    found = memory.tensors["margins"][:, :, late % ring]
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected.double(), atol=tolerance, rtol=tolerance)

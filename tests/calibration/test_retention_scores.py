"""Scores of what tokens are worth to later queries, against convolutions written out."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from foveate.calibration.retention_scores import RetentionScores


def test_scores_see_thirteen_tokens():
    scores = RetentionScores(2, 32).eval()
    k, v = torch.randn(1, 2, 40, 16, requires_grad=True), torch.randn(1, 2, 40, 16)
    scores(k, v)[0, 1, 20].backward()
    touched = k.grad[0].abs().sum(-1)
    assert touched[0].sum() == 0  # the other head
    assert touched[1].nonzero()[:, 0].tolist() == list(range(14, 27, 2))
    assert scores.reach == 6


def test_the_ablation_s_scores_see_one_token():
    scores = RetentionScores(2, 32, kind="mlp").eval()
    k = torch.randn(1, 2, 40, 16, requires_grad=True)
    scores(k, torch.randn(1, 2, 40, 16))[0, 1, 20].backward()
    assert k.grad[0, 1].abs().sum(-1).nonzero()[:, 0].tolist() == [20]
    assert scores.reach == 0


def convolved(scores: RetentionScores, k: torch.Tensor, v: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """Logits by grouped convolutions; dropout, on ``[Hkv, B, L, channels]``, is whatever ``F.dropout`` is."""

    def dropped(x: torch.Tensor, where: str) -> torch.Tensor:
        if where != scores.dropout_at:
            return x
        by_head = x.unflatten(1, (scores.num_kv_heads, -1)).permute(1, 0, 3, 2)
        return F.dropout(by_head, scores.dropout, scores.training).permute(1, 0, 3, 2).flatten(1, 2)

    x = torch.cat([k, v], -1).transpose(2, 3).flatten(1, 2)
    mask = torch.ones_like(x[:, :1]) if real is None else real[:, None]
    x = x * mask
    for conv in scores.convs:
        x = dropped(F.silu(conv(dropped(x, "input")) * mask), "output")
    return scores.head(x)


def drop_by_place(x: torch.Tensor, share: float, training: bool) -> torch.Tensor:
    """Dropout whose draws depend on nothing but the tensor's shape."""
    if not training:
        return x
    kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(x.shape[-1])) >= share
    return x * kept / (1 - share)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("at", ["input", "output"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 25])
@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_scores_and_gradients_are_those_of_convolutions(kind, length, padded, at, training, monkeypatch):
    torch.manual_seed(0)
    scores = RetentionScores(3, 32, kind=kind, dropout=0.4, dropout_at=at).double().train(training)
    for conv in (*scores.convs, scores.head):
        torch.nn.init.normal_(conv.bias)
    k = torch.randn(2, length, 3, 16, dtype=torch.float64).transpose(1, 2)
    v = torch.randn(2, 3, length, 16, dtype=torch.float64)
    inputs = [k.requires_grad_(), v.requires_grad_(), *scores.parameters()]
    real = torch.arange(length) >= torch.tensor([[0], [length // 3]]) if padded else None
    monkeypatch.setattr(F, "dropout", drop_by_place)
    expected, found = convolved(scores, k, v, real), scores.logits(k, v, real)
    assert found.dtype == torch.float32
    assert found.shape == (2, 3, length)
    torch.testing.assert_close(found, expected.float(), atol=1e-6, rtol=1e-6)
    along = torch.randn_like(found)
    wanted = torch.autograd.grad(expected, inputs, along.double())
    for a, b in zip(torch.autograd.grad(found, inputs, along), wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(scores.logits(k, v, real), found, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("at", ["input", "output"])
def test_dropout_where_the_paper_and_where_the_code_has_it(at, monkeypatch):
    scores = RetentionScores(2, 32, dropout=0.5, dropout_at=at).train()
    widths, real = [], F.dropout

    def noted(x: torch.Tensor, share: float, training: bool) -> torch.Tensor:
        out = real(x, share, training)
        widths.append(x.shape[-1])
        assert float((out == 0).float().mean()) == pytest.approx(0.5, abs=0.15)
        return out

    monkeypatch.setattr(F, "dropout", noted)
    scores(torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16))
    assert widths == ([32, 16, 8] if at == "input" else [16, 8, 4])


@pytest.mark.parametrize("at", ["input", "output"])
@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_scores_compile_into_one_graph(kind, at):
    """Their gradients, too, and once for all steps."""
    torch.manual_seed(0)
    scores = RetentionScores(2, 32, kind=kind, dropout=0.0, dropout_at=at).train()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(scores.logits, backend=counter, fullgraph=True, dynamic=False)
    real = torch.arange(20) >= torch.tensor([[0], [7]])
    for _ in range(3):
        k, v = torch.randn(2, 2, 20, 16), torch.randn(2, 2, 20, 16)
        found = torch.autograd.grad(compiled(k, v, real).sum(), [*scores.parameters()])
        wanted = torch.autograd.grad(scores.logits(k, v, real).sum(), [*scores.parameters()])
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert counter.frame_count == 1


def test_scores_under_autocast():
    """Products are of half precision, scores are not."""
    torch.manual_seed(0)
    scores = RetentionScores(2, 32, dropout=0.0).train()
    k, v = torch.randn(2, 2, 20, 16), torch.randn(2, 2, 20, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found = scores.logits(k.bfloat16(), v.bfloat16())
    assert found.dtype == torch.float32
    assert not torch.equal(found, scores.logits(k, v))
    torch.testing.assert_close(found, scores.logits(k, v), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_padding_before_a_row_changes_no_score(kind):
    torch.manual_seed(0)
    scores = RetentionScores(3, 32, kind=kind).eval()
    for conv in (*scores.convs, scores.head):
        torch.nn.init.normal_(conv.bias)
    k, v = torch.randn(2, 3, 20, 16), torch.randn(2, 3, 20, 16)
    found = scores(k, v, torch.arange(20) >= torch.tensor([[0], [7]]))
    torch.testing.assert_close(found[1:, :, 7:], scores(k[1:, :, 7:], v[1:, :, 7:]), atol=1e-6, rtol=1e-5)

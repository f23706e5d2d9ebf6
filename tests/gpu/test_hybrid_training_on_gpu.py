"""Training of hybrids on a GPU: attention in tiles and scores, compiled, with gradients, against fp64."""

import functools

import pytest
import torch

from foveate.calibration.retention_scores import RetentionScores
from foveate.hybrids.layers import masked, nsa
from foveate.hybrids.ops import choose_blocks

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh_graphs():
    pytest.importorskip("triton")
    torch.compiler.reset()


def close(found, exact, dtype, name):
    """As near as the dtype lets a sum be whose terms are larger than it."""
    error, size = (found.double() - exact).abs().amax(), exact.abs().amax()
    assert error <= size * {torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype], (name, float(error), float(size))


def attended(attend, q, k, v, retained, window, reach):
    group, at = q.shape[1] // k.shape[1], torch.arange(k.shape[2], dtype=torch.int32, device=k.device)
    last = torch.where(retained, k.shape[2], at + window)

    def sees(b, h, i, j):
        return i <= last[b, h // group, j]

    return attend(q, k, v, sees, q.shape[-1] ** -0.5, reach)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4)])
@pytest.mark.parametrize(
    ("length", "window", "reach"), [(1000, 256, None), (512, 1, 2), (777, 383, 384), (90, 8, None)]
)
def test_tiles(dtype, compiled, heads, kv_heads, length, window, reach):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, length, number, 64, generator=generator, device="cuda").to(dtype).transpose(1, 2)
        for number in (heads, kv_heads, kv_heads)
    )
    retained = torch.rand(2, kv_heads, length, generator=generator, device="cuda") < (0.0 if reach else 0.2)
    call = torch.compile(attended, fullgraph=True, dynamic=False) if compiled else attended
    given, exact = ([x.to(kind).requires_grad_() for x in (q, k, v)] for kind in (dtype, torch.float64))
    found = call(masked._attend_tiles, *given, retained, window, reach)
    expected = attended(masked._attend_pairs, *exact, retained, window, reach)
    close(found, expected, dtype, "output")
    along = torch.randn(found.shape, generator=generator, device="cuda").to(dtype)
    gradients = torch.autograd.grad(expected, exact, along.double())
    for name, a, b in zip("qkv", torch.autograd.grad(found, given, along), gradients, strict=True):
        close(a, b, dtype, name)


@pytest.mark.parametrize("scale", [1.0, 4.0, 12.0])
@pytest.mark.parametrize(("length", "block"), [(2048, 32), (4096, 32), (777, 64)])
def test_compressed_blocks(scale, length, block):
    """Sharp logits, as a trained model has them: cuDNN's gradient of queries was not finite over 64 masked keys."""
    generator = torch.Generator("cuda").manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, device="cuda")
    q, common = draw(2, 6, length, 64) * scale, 2 * scale * draw(1, 2, 1, 64)
    keys, values = draw(2, 2, length // block, 64) * scale + common, draw(2, 2, length // block, 64)
    at = torch.arange(length, device="cuda").expand(2, -1)
    complete, _ = choose_blocks(q, keys, at, scaling=0.125, block=block, blocks=8)
    given = [x.bfloat16().requires_grad_() for x in (q, keys, values)]
    exact = [x.detach().double().requires_grad_() for x in given]
    along = draw(q.shape).bfloat16()
    found, expected = (nsa._attend(*some, complete, 0.125) for some in (given, exact))
    close(found, expected, torch.bfloat16, "output")
    gradients = (
        torch.autograd.grad(out, some, along.to(out.dtype)) for out, some in ((found, given), (expected, exact))
    )
    for name, a, b in zip("qkv", *gradients, strict=True):
        close(a, b, torch.bfloat16, name)


@pytest.mark.parametrize("kind", ["conv", "mlp"])
@pytest.mark.parametrize("padded", [False, True])
def test_scores_under_autocast(kind, padded):
    """Logits and gradients of the compiled scores of a training step."""
    torch.manual_seed(0)
    scores = RetentionScores(2, 128, kind=kind, dropout=0.0).cuda().train()
    k, v = (torch.randn(4, 1000, 2, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    real = (
        torch.arange(1000, device="cuda") < torch.tensor([[1000], [7], [400], [1]], device="cuda") if padded else None
    )
    given = [k.requires_grad_(), v.requires_grad_(), *scores.parameters()]
    with torch.autocast("cuda", torch.bfloat16):
        found = torch.compile(scores.logits, fullgraph=True, dynamic=False)(k, v, real)
    along = torch.randn_like(found)
    gradients = torch.autograd.grad(found, given, along)
    exact_k, exact_v = (x.detach().double().requires_grad_() for x in (k, v))
    scores.double()
    exact = scores.logits(exact_k, exact_v, real)
    close(found, exact.double(), torch.bfloat16, "logits")
    names = ["k", "v", *(name for name, _ in scores.named_parameters())]
    wanted = torch.autograd.grad(exact, [exact_k, exact_v, *scores.parameters()], along)
    for name, a, b in zip(names, gradients, wanted, strict=True):
        close(a, b, torch.bfloat16, name)


def test_a_compiled_step_waits_for_nothing():
    """Forward, feedback and backward of laLTE."""
    from foveate.hybrids.models import HybridForCausalLM, make_config
    from foveate.hybrids.training.sparsity import SparsityFeedback, SparsitySettings

    config = make_config("lalte", "27M", num_hidden_layers=2, vocab_size=512)
    model = HybridForCausalLM(config).cuda().train()
    model.compile()
    feedback = SparsityFeedback(SparsitySettings(budget=128, interval=1))
    ids = torch.randint(512, (2, 1024), device="cuda")

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            out = model(ids, labels=ids, use_cache=False, output_retention=True)
        (out.loss + feedback.penalty(out.retention)).backward()
        feedback.observe(out.retention)
        feedback.step()

    step()
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")

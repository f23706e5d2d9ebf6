"""The kernel of retention scores against its reference, under Triton's interpreter."""

import pytest
import torch

from foveate.ops import score
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.score import retention, retention_kernel
from tests.combinations import every_pair
from tests.retention import in_slots, weights

pytestmark = pytest.mark.usefixtures("poisoned")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


def check(k, v, given, **options):
    found = retention_kernel.retention_logits(k, v, *given, **options)
    expected = retention.retention_logits(k, v, *given, **options)
    assert found.dtype == torch.float32
    tolerance = TOLERANCE[given[1].weight.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@every_pair(
    ("dims", [(16, 16), (64, 64), (40, 24)]),
    ("length", [1, 2, 5, 67, 130]),
    ("kind", ["conv", "mlp"]),
    ("dtype", [torch.float32, torch.float16]),
)
def test_tokens_in_slots(dims, length, kind, dtype):
    k, v, options, _ = in_slots(2, 3, length, dims, dtype)
    check(k, v, weights(3, sum(dims), kind, dtype), **options)


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_any_options(slots, rotated, padded):
    generator, length = torch.Generator().manual_seed(0), 70
    k, v = (torch.randn(2, length, 2, 16, generator=generator).transpose(1, 2) for _ in range(2))
    options = {}
    if slots:
        options["slots"] = torch.randint(length, (2, length), generator=generator)
    if rotated:
        options["angles"] = tuple(torch.randn(1, length, 8, generator=generator).repeat(1, 1, 2) for _ in range(2))
    if padded:
        options["real"] = torch.rand(2, length, generator=generator) > 0.3
    check(k, v, weights(2, 32, "conv", torch.float32), **options)


@pytest.mark.parametrize("dims", [(128, 128), (96, 128)])
@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_more_channels_than_are_summed_at_once(dims, kind):
    k, v, options, _ = in_slots(1, 1, 40, dims, torch.float32)
    check(k, v, weights(1, sum(dims), kind, torch.float32), **options)


def test_weights_in_another_dtype_than_the_cache():
    k, v, options, _ = in_slots(2, 1, 40, (16, 16), torch.float16)
    check(k, v, weights(1, 32, "conv", torch.float32), **options)
    k, v, options, _ = in_slots(2, 1, 40, (16, 16), torch.float32)
    check(k, v, weights(1, 32, "conv", torch.float16), **options)


@pytest.mark.parametrize("taps", [1, 3, 5])
@pytest.mark.parametrize("dilation", [1, 3])
def test_other_taps_and_dilations(taps, dilation):
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 2, 30, 16, generator=generator) for _ in range(2))
    weight = torch.randn(2, taps, 32, 12, generator=generator) / 8
    convolutions = [retention.Convolution(weight, torch.randn(2, 12, generator=generator))]
    head = retention.Convolution(torch.randn(2, 1, 12, 1, generator=generator), torch.zeros(2, 1))
    check(k, v, (convolutions, head), dilation=dilation)


def test_what_the_kernel_does_not_do():
    run, k = retention_kernel.retention_logits, torch.randn(1, 2, 9, 16)
    with pytest.raises(UnsupportedError, match="float64"):
        run(k, k, *weights(2, 32, "conv", torch.float64))
    wide = torch.randn(1, 1, 9, 144)
    with pytest.raises(UnsupportedError, match="head dims 144 and 144"):
        run(wide, wide, *weights(1, 288, "conv", torch.float32))
    convolutions, head = weights(2, 32, "conv", torch.float32)
    convolutions[1].weight.requires_grad_()
    with pytest.raises(UnsupportedError, match="gradients"):
        run(k, k, convolutions, head)
    with torch.no_grad():
        check(k, k, (convolutions, head))
    with pytest.raises(ValueError, match="shapes do not fit"):
        score.retention_logits(k, k[:, :, 1:], convolutions, head)
    assert run(k[:0], k[:0], *weights(2, 32, "conv", torch.float32)).shape == (0, 2, 9)

"""The bounds of boxes against their reference, in numbers that Triton's interpreter gets right."""

import pytest
import torch

from foveate.ops.dispatch import UnsupportedError
from foveate.ops.score import bounds_kernel, nodes
from tests.combinations import every_pair
from tests.problems import in_buffer, of_rows

pytestmark = pytest.mark.usefixtures("poisoned")


def problem(batch=2, kv_heads=2, group=3, number=150, dim=16, dtype=torch.float32, seed=0):
    """``rows, low, high``."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(batch, kv_heads, group, dim, generator=generator).to(dtype)
    corners = torch.randn(2, batch, kv_heads, number, dim, generator=generator).to(dtype)
    return rows, corners.amin(0), corners.amax(0)


def check(rows, low, high, **more):
    """Against the reference."""
    tolerance = 1e-5 if rows.dtype == torch.float32 else 1e-4
    found = of_rows(bounds_kernel.largest_logit(rows, low, high, 0.3, **more), more.get("lengths"))
    expected = nodes.largest_logit(rows, low, high, 0.3, **more)
    assert found.dtype == torch.float32
    assert torch.equal(found.isneginf(), expected.isneginf())
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=[1, 100], ids=["one program", "many programs"])
def splits(request, monkeypatch):
    """Few programs, and so many multiprocessors that boxes are split."""
    monkeypatch.setattr(bounds_kernel, "multiprocessors", lambda device: request.param)


HALF = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
LENGTHS = {
    "rows": torch.tensor([150, 33]),
    "rows, the second without any": torch.tensor([70, 0], dtype=torch.int32),
    "heads": torch.tensor([[1, 150], [64, 500]], dtype=torch.int32),
}


@every_pair(
    ("dtype", [torch.float32, torch.float16]),
    ("group", [1, 4, 7]),
    ("number", [1, 32, 150]),
    ("splits", [1, 100]),
    indirect=["splits"],
)
def test_all_boxes(dtype, group, number, splits):
    check(*problem(group=group, number=number, dtype=dtype))


@HALF
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_first_boxes_alone(dtype, lengths, splits):
    rows, low, high = problem(dtype=dtype)
    beyond = torch.arange(150) >= lengths.view(2, -1, 1).expand(-1, 2, -1)
    low[beyond], high[beyond] = torch.nan, torch.inf
    check(rows, low, high, lengths=lengths)


@HALF
@pytest.mark.parametrize("dim", [5, 64, 80, 128, 256])
def test_head_dims(dtype, dim):
    check(*problem(1, 1, 4, 40, dim, dtype), lengths=torch.tensor([33]))


def test_more_heads_than_a_program_has(splits):
    check(*problem(1, 1, 70, 60, dtype=torch.float16))


@pytest.mark.parametrize("layout", ["slots", "tokens_first", "padded_rows"])
def test_strides_among_nan(layout, splits):
    rows, low, high = (in_buffer(x, layout) for x in problem(dim=24))
    check(rows, low, high, lengths=torch.tensor([[3, 150], [0, 80]]))


def test_what_bounds_refuse():
    rows, low, high = problem()
    assert bounds_kernel.largest_logit(rows, low[:, :, :0], high[:, :, :0], 0.3).shape == (2, 2, 3, 0)
    with pytest.raises(UnsupportedError, match="float64"):
        bounds_kernel.largest_logit(rows.double(), low, high, 0.3)
    with pytest.raises(UnsupportedError, match="head dims above 256"):
        bounds_kernel.largest_logit(*problem(dim=257), 0.3)
    with pytest.raises(ValueError, match="shapes do not fit"):
        bounds_kernel.largest_logit(rows, low[:1], high, 0.3)

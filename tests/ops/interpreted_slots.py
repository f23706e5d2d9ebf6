"""The kernel of what is given up against its reference, under Triton's interpreter."""

import pytest
import torch

from foveate.ops._dispatch import UnsupportedError
from foveate.ops.retain import reference, slots_kernel

pytestmark = pytest.mark.usefixtures("poisoned")


def problem(batch, heads, number, seed=0):
    """Positions in any order with holes among them, and scores of which many tie and some are NaN."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(batch, heads, number, generator=generator).argsort(-1)
    positions = (3 * order + 1).masked_fill(torch.rand(order.shape, generator=generator) < 0.2, -1).to(torch.int32)
    positions[..., 0] = 0  # one that may leave, whatever is asked
    scores = torch.randn(order.shape, generator=generator).round()
    scores[0, :, number // 2] = float("nan")
    scores[:, -1] = scores[:, -1].masked_fill(scores[:, -1] == 0, -0.0)
    return positions, scores


def check(positions, **by):
    mine, its = positions.clone(), positions.clone()
    found = slots_kernel.give_up(mine, **by)
    assert torch.equal(found, reference.give_up(its, **by))
    assert torch.equal(mine, its)


@pytest.mark.parametrize("number", [1, 130, 5000])
@pytest.mark.parametrize("rows", [None, [True, False, True]])
@pytest.mark.parametrize("before", [None, [1, 40, 10_000]])
def test_the_weakest(number, rows, before):
    positions, scores = problem(3, 2, number)
    rows, before = (None if x is None else torch.tensor(x) for x in (rows, before))
    check(positions, scores=scores, rows=rows, before=before)
    check(positions, scores=scores[:, :1].expand(-1, 2, -1), rows=rows, before=before)


@pytest.mark.parametrize("rows", [None, [True, False, True]])
def test_a_certain_token(rows):
    positions, _ = problem(3, 2, 3000)
    at = positions[:, 0].amax(-1).long()
    positions[:, 1] = positions[:, 0].flip(-1)
    check(positions, at=at, rows=None if rows is None else torch.tensor(rows))


def test_memory_of_a_cache():
    """Slots of a larger buffer, of which the others stay as they are."""
    buffer = torch.full((2, 2, 400), -9, dtype=torch.int32)
    positions, scores = problem(2, 2, 300)
    buffer[:, :, :300] = positions
    found = slots_kernel.give_up(buffer[:, :, :300], scores=scores)
    assert torch.equal(found, reference.give_up(positions, scores=scores))
    assert torch.equal(buffer[:, :, :300], positions)
    assert bool((buffer[:, :, 300:] == -9).all())


def test_what_it_refuses():
    positions, scores = problem(1, 2, 30)
    with pytest.raises(UnsupportedError, match="float64"):
        slots_kernel.give_up(positions, scores=scores.double())
    with pytest.raises(ValueError, match="do not fit"):
        slots_kernel.give_up(positions, scores=scores[..., :20])
    assert slots_kernel.give_up(positions[:0], scores=scores[:0]).shape == (0, 2)

"""The kernels of a step's slots against their references, under Triton's interpreter."""

import pytest
import torch

from foveate import ops
from foveate.ops import KV
from foveate.ops.block_table import in_one_piece
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.retain import reference, slots_kernel
from tests.problems import in_blocks

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
    found, given = (torch.full(positions.shape[:2], 7) for _ in range(2))
    assert slots_kernel.give_up(mine, out=found, **by) is found
    assert reference.give_up(its, out=given, **by) is given
    assert torch.equal(found, given)
    assert torch.equal(found, slots_kernel.give_up(positions.clone(), **by))
    assert torch.equal(found, reference.give_up(positions.clone(), **by))
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


@pytest.mark.parametrize(("dim", "value_dim"), [(5, 5), (64, 64), (80, 128)])
@pytest.mark.parametrize("freed", [None, [[3, -1], [-1, 0], [9, 9]]])
@pytest.mark.parametrize("take", [False, True])
@pytest.mark.parametrize("evicts", [False, True])
def test_a_token_is_put(dim, value_dim, freed, take, evicts):
    generator = torch.Generator().manual_seed(0)
    given = []
    for _ in range(2):
        generator.manual_seed(0)
        keys = torch.randn(3, 2, 40, dim, generator=generator).half()
        values = torch.randn(3, 40, 2, value_dim, generator=generator).half().transpose(1, 2)
        k, v = (torch.randn(3, 1, 2, x.shape[3], generator=generator).half().transpose(1, 2) for x in (keys, values))
        own = None if freed is None else torch.tensor(freed)
        positions = torch.arange(3 * 2 * 50, dtype=torch.int32).view(3, 2, 50)[..., :40]
        numbers = torch.rand(3, 2, 50, generator=generator)[..., :40]
        given.append((keys, values, k, v, torch.tensor([[11, 0], [20, 0], [39, 0]])[:, 0], own, positions, numbers))
    newest, found = torch.tensor([100, 200, 300], dtype=torch.int32), []
    for run, (keys, values, *token, own, positions, numbers) in zip(
        (slots_kernel.put_token, reference.put_token), given
    ):
        more = {"positions": positions, "newest": newest, "emptied": numbers} if evicts else {}
        found.append(run(KV(keys, values), *token, freed=own, take=take, **more))
    assert torch.equal(*found)
    for mine, its in zip(*given):
        assert mine is its is None or torch.equal(mine, its)
    assert int((given[0][-1] == 0).sum()) == 6 * evicts


@pytest.mark.parametrize("blocks", [False, True])
def test_several_tokens_are_put(blocks):
    memory, slots = torch.zeros(2, 3, 2, 48, 8), torch.tensor([11, 44, 0])
    k, v = torch.randn(2, 3, 4, 2, 8, generator=torch.Generator().manual_seed(0)).transpose(2, 3)
    for run in (slots_kernel.put_token, reference.put_token):
        memory.zero_()
        assert run(KV(*memory), k, v, slots).tolist() == [[11] * 2, [44] * 2, [0] * 2]
        for b, first in enumerate(slots.tolist()):
            assert torch.equal(memory[:, b, :, first : first + 4], torch.stack([k[b], v[b]]))
        assert int((memory != 0).sum()) == k.numel() + v.numel()
        if blocks:
            *parts, table = in_blocks(*torch.zeros_like(memory), 16)
            run(KV(*parts, table), k, v, slots)
            assert all(map(torch.equal, in_one_piece(k, table, *parts), memory))


def test_what_putting_refuses():
    keys, k, slots = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 1, 8), torch.tensor([1])
    with pytest.raises(ValueError, match="does not fit memory"):
        slots_kernel.put_token(KV(keys, keys), k[..., :4], k, slots)
    with pytest.raises(ValueError, match="for memory in"):
        slots_kernel.put_token(KV(keys, keys), k.half(), k, slots)


def test_what_giving_up_refuses():
    positions, scores = problem(1, 2, 30)
    with pytest.raises(UnsupportedError, match="float64"):
        slots_kernel.give_up(positions, scores=scores.double())
    assert slots_kernel.give_up(positions[:0], scores=scores[:0]).shape == (0, 2)
    for out in (torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 2), torch.zeros(1, 4, dtype=torch.int64)[:, ::2]):
        with pytest.raises(ValueError, match=r"out must be contiguous int64 \(1, 2\), not"):
            ops.retain.give_up(positions, scores=scores, out=out)


@pytest.mark.parametrize("number", [2, 40, 3000])
def test_zeros_of_either_sign_tie(number):
    """So the token of the smaller position leaves, wherever the signs are; NaN leaves before all."""
    generator = torch.Generator().manual_seed(number)
    positions, _ = problem(3, 2, number)
    scores = torch.where(torch.rand(positions.shape, generator=generator) < 0.5, -0.0, 0.0)
    check(positions, scores=scores)
    check(positions, scores=-scores)
    scores[1, 0, number // 2] = float("nan")
    check(positions, scores=scores)

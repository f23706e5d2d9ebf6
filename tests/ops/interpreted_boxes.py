"""The kernels of a step's pages, their boxes and their keys, against their references, under Triton's interpreter."""

import pytest
import torch

from foveate.ops import KV
from foveate.ops.compress import boxes, boxes_kernel
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.select import pages, pages_kernel

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("page_size", [1, 3, 16, 100])
@pytest.mark.parametrize("dim", [5, 64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_newest_box(page_size, dim, dtype):
    """Around the keys that are there, in memory of any strides; every other box stays as it is."""
    generator, lengths = torch.Generator().manual_seed(0), torch.tensor([[1, 0], [250, 0], [200, 0]])[:, 0]
    keys = torch.randn(3, 300, 2, dim, generator=generator).to(dtype).transpose(1, 2)
    for row, length in enumerate(lengths.tolist()):
        keys[row, :, length:] = float("nan")
    corners = torch.randn(2, 3, 2, -(-300 // page_size), dim + 3, generator=generator).to(dtype)
    mine, its = corners.clone(), corners.clone()
    boxes_kernel.bound_newest(KV(keys, lengths=lengths), *mine[..., :dim], page_size)
    boxes.bound_newest(KV(keys, lengths=lengths), *its[..., :dim], page_size)
    assert torch.equal(mine, its)
    assert not torch.equal(mine, corners)


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize(("page_size", "number", "most"), [(1, 5, 7), (16, 40, 90), (7, 900, 1500)])
def test_keys_of_pages(group, page_size, number, most):
    """Lists of different lengths, the newest page among some of them; one that has none."""
    generator, lists = torch.Generator().manual_seed(group), torch.full((3, 2 * group, number + 5), -1)
    lengths = torch.tensor([1, most * page_size, (most - 1) * page_size + 1])
    for row, length in enumerate(lengths.tolist()):
        there = -(-length // page_size)
        for head in range(2 * group):
            many = int(torch.randint(0, min(number, there) + 1, (1,), generator=generator))
            chosen = torch.randperm(there, generator=generator)[:many].sort().values
            lists[row, head, :many] = chosen
    lists = lists.int()[..., :number]
    found = pages_kernel.keys_of_pages(lists, 2, page_size, lengths)
    assert torch.equal(found, pages.keys_of_pages(lists, 2, page_size, lengths))
    for row, length in enumerate(lengths.tolist()):
        for head in range(2):
            read = {int(page) for page in lists[row, head * group : (head + 1) * group].flatten() if page >= 0}
            keys = {key for page in read for key in range(page * page_size, min((page + 1) * page_size, length))}
            assert int(found[row, head]) == len(keys)


def test_what_is_refused():
    keys, low, lengths = torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 2, 4), torch.tensor([8])
    with pytest.raises(UnsupportedError, match="float64"):
        boxes_kernel.bound_newest(KV(keys.double(), lengths=lengths), low.double(), low.double(), 4)
    with pytest.raises(ValueError, match="do not fit keys"):
        boxes_kernel.bound_newest(KV(keys, lengths=lengths), low.half(), low.half(), 4)
    with pytest.raises(ValueError, match="do not fit 2 KV heads"):
        pages_kernel.keys_of_pages(torch.zeros(1, 3, 4, dtype=torch.int32), 2, 4, lengths)

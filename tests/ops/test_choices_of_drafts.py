"""What a draft reads again: keys that all heads share stay one row, and keys of each head stay each head's."""

import pytest
import torch

from foveate.ops import Choice


@pytest.mark.parametrize("shared", [True, False])
def test_keys_of_heads_are_kept_as_they_are_held(shared):
    number, slots, newest = torch.tensor([2, 1]), torch.tensor([20, 9]), 3
    keys = torch.arange(12, dtype=torch.int32).view(2, 1, 6).expand(-1, 4, -1)
    keys = keys if shared else keys + 100 * torch.arange(4, dtype=torch.int32)[:, None]
    read = torch.tensor([[4], [6]])
    kept = Choice(keys=keys, read=read, packed=True).for_draft(slots)
    again = kept.with_newest(kept.newest(slots, number, newest), number)
    for choice, width in ((kept, 6), (again, 6 + newest)):
        assert choice.keys.shape == (2, 4, width)
        assert (choice.keys.stride(1) == 0) == shared, "one row in memory, where the heads share it"
        assert torch.equal(choice.keys[1, :, :6], keys[1])
        assert torch.equal(choice.keys[0, :, :4], keys[0, :, :4])
        assert bool((choice.keys[0, :, 4:6] == -1).all()), "places that are not read"
    assert again.keys[:, 0, 6:].tolist() == [[19, 18, -1], [8, -1, -1]]
    assert torch.equal(again.read, read + number[:, None])

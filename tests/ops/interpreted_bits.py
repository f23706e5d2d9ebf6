"""Keys of tiles to bits and back: the kernels against their references."""

import sys

import pytest
import torch

from foveate.ops import select
from foveate.ops.select import bits, bits_kernel
from tests.combinations import every_pair

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(params=[(1024, 64), (16, 2)], ids=["whole", "many parts"], autouse=True)
def sizes(request, monkeypatch):
    """What a program enters, and reads at once."""
    for name, size in zip(("_PLACES", "_WORDS"), request.param, strict=True):
        monkeypatch.setattr(bits_kernel, name, size)


def drawn(before, count, batch=2, heads=3, seed=0):
    """Some of the keys before each tile, -1 at some places, int32 ``[B, H, T, K]``, and where tiles' words begin."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.full((batch, heads, len(before), count), -1, dtype=torch.int32)
    for each in found.flatten(0, 1):
        for t, number in enumerate(before):
            some = torch.randperm(number, generator=generator)[: max(0, count - t % 2)].to(torch.int32)
            each[t, torch.randperm(count, generator=generator)[: len(some)]] = some
    words = torch.tensor([-(-number // bits.WORD_KEYS) for number in before])
    return found, torch.nn.functional.pad(words.cumsum(0), (1, 0))


def assert_same(found, expected):
    assert torch.equal(found.keys, expected.keys)
    assert torch.equal(found.counts, expected.counts)


@every_pair(
    ("before", [[0], [0, 1], [31, 32, 33, 64, 0], [100, 250, 700]]),
    ("count", [0, 1, 17, 90]),
    ("strided", [False, True]),
)
def test_keys_become_bits_and_bits_keys(before, count, strided):
    indices, begins = drawn(before, count)
    if strided:
        indices = indices.long().transpose(1, 2).contiguous().transpose(1, 2)
    expected, found = (torch.zeros(2, 3, int(begins[-1]) + 5, dtype=torch.int32) for _ in range(2))
    bits.set_bits(expected[..., 5:], indices, begins)
    bits_kernel.set_bits(found[..., 5:], indices, begins)
    assert torch.equal(found, expected)
    starts = torch.arange(len(before) + 1) * count
    for first in range(len(before)):
        some = begins[first:], starts[first:], count * (len(before) - first)
        assert_same(bits_kernel.keys_of_bits(found[..., 5:], *some), bits.keys_of_bits(expected[..., 5:], *some))


def test_every_bit_of_a_word():
    indices = torch.arange(96, dtype=torch.int32).view(1, 1, 1, 96)
    words, begins = torch.zeros(1, 1, 3, dtype=torch.int32), torch.tensor([0, 3])
    bits_kernel.set_bits(words, indices, begins)
    assert words.tolist() == [[[-1] * 3]]
    assert torch.equal(bits_kernel.keys_of_bits(words, begins, torch.tensor([0, 96]), 96).keys, indices[:, :, 0])


def test_no_more_keys_than_places():
    indices, begins = drawn([100, 200], 90)
    words = torch.zeros(2, 3, int(begins[-1]), dtype=torch.int32)
    bits.set_bits(words, indices, begins)
    for starts in ([0, 7, 40], [3, 3, 20]):
        some = begins, torch.tensor(starts), starts[-1] - starts[0]
        assert_same(bits_kernel.keys_of_bits(words, *some), bits.keys_of_bits(words, *some))


def test_what_does_not_fit_is_refused():
    indices, begins = drawn([100, 200], 9)
    with pytest.raises(ValueError, match=r"shapes do not fit: words \(2, 3, 11\)"):
        select.set_bits(torch.zeros(2, 3, 11, dtype=torch.int32), indices, begins[1:])


def test_a_process_under_the_interpreter_loads_no_library_of_models_or_of_property_tests():
    """It would take most of the time in which the process begins."""
    assert not {"transformers", "hypothesis"} & sys.modules.keys()

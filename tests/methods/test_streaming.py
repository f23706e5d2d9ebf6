"""The window of StreamingLLM: where it begins, for one position and for all of a prompt."""

import pytest
import torch

from foveate import methods
from foveate.state.borrowed import cache_of

POSITIONS = 70_000


def lower_of(spec: str) -> list[int]:
    method = methods.parse(spec)
    return [method.lower(position) for position in range(POSITIONS)]


@pytest.mark.parametrize("window", [1, 1024, 0.001, 0.1, 0.125, 0.3, 1 / 3, 0.7, 0.999, 1.0])
def test_positions_in_a_tensor_have_the_windows_of_each_alone(window):
    method = methods.make("streaming", window=window)
    lower = method.lower(torch.arange(POSITIONS))
    assert lower.dtype == torch.int64
    assert lower.tolist() == [method.lower(position) for position in range(POSITIONS)]


def test_where_windows_begin():
    assert lower_of("streaming:window=1") == list(range(POSITIONS))
    assert lower_of("streaming:window=100")[:102] == [*range(-99, 0), 0, 1, 2]
    assert lower_of("streaming:window=1.0") == [0] * POSITIONS
    assert lower_of("streaming:window=0.5")[:8] == [0, 1, 2, 2, 3, 3, 4, 4]  # at least the query's own token
    assert lower_of("streaming:window=0.1")[9:21] == [9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 18, 19]


def test_a_number_and_a_share_of_equal_value_are_not_taken_for_each_other():
    q, k, v = torch.randn(3, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    outs = [
        methods.make("streaming", sinks=0, window=window).prompt(cache_of(k, v, 2), q, 0.25).out
        for window in (1, 1.0, 1)
    ]
    torch.testing.assert_close(outs[0], v)
    assert not torch.allclose(outs[1], v)
    assert torch.equal(outs[0], outs[2])

"""A buffer that keeps the best tokens so far."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foveate.hybrids.ops import replace_weakest, running_best


class Buffer:
    """The policy in a few lines of Python: margins by position, best first."""

    def __init__(self, size: int):
        self.size, self.held = size, {}

    def offer(self, position: int, margin: float) -> int | None:
        """The token that is not there afterwards, if any."""
        if not margin > 0:
            return position
        self.held[position] = margin
        if len(self.held) <= self.size:
            return None
        gone = min(self.held, key=lambda at: (self.held[at], -at))
        del self.held[gone]
        return gone


margins = st.lists(st.sampled_from([-1.0, 0.0, 0.25, 0.5, 0.75, float("inf"), float("nan")]), min_size=1, max_size=40)


@given(st.lists(margins, min_size=2, max_size=2), st.integers(1, 6), st.integers(0, 20))
def test_tokens_leave_when_the_policy_says(drawn, size, first):
    """Two heads, a first part that fills the buffer, and a second part that is asked about."""
    length = max(map(len, drawn))
    drawn = [one + [-1.0] * (length - len(one)) for one in drawn]
    first = min(first, length - 1)
    held = torch.full((1, 2, size), -1), torch.zeros(1, 2, size)
    expected = []
    for head, one in enumerate(drawn):
        buffer = Buffer(size)
        for position in range(first):
            buffer.offer(position, one[position])
        for slot, (position, margin) in enumerate(sorted(buffer.held.items())):
            held[0][0, head, slot], held[1][0, head, slot] = position, margin
        leaves = dict.fromkeys(range(length), length - first)
        for turn, position in enumerate(range(first, length)):
            gone = buffer.offer(position, one[position])
            if gone is not None:
                leaves[gone] = turn
        expected.append(leaves)
    new = torch.arange(first, length)[None]
    found = running_best(held[1], held[0], torch.tensor(drawn)[None, :, first:], new)
    for head, leaves in enumerate(expected):
        assert found.new[0, head].tolist() == [leaves[position] for position in range(first, length)]
        for slot, position in enumerate(held[0][0, head].tolist()):
            if position >= 0:
                assert found.kept[0, head, slot] == leaves[position]


@given(margins, st.integers(1, 6))
def test_one_token_at_a_time(drawn, size):
    """The decode step's replacement holds what the policy holds, keys and values included."""
    ring, buffer = 3, Buffer(size)
    memory = {
        "keys": torch.full((1, 1, ring + size, 2), -5.0),
        "values": torch.full((1, 1, ring + size, 1), -5.0),
        "margins": torch.zeros(1, 1, ring + size),
        "positions": torch.full((1, 1, size), -1),
        "kept": torch.zeros(1, 1, dtype=torch.int64),
    }
    for position, margin in enumerate(drawn):
        slot = position % ring
        memory["keys"][0, 0, slot], memory["values"][0, 0, slot] = position, 2 * position
        memory["margins"][0, 0, slot] = margin
        replace_weakest(**memory, slots=torch.tensor([slot]), tokens=torch.tensor([position]), ring=ring)
        buffer.offer(position, margin)
        kept = int(memory["kept"])
        found = memory["positions"][0, 0, :kept].tolist()
        assert sorted(found) == sorted(buffer.held)
        assert memory["positions"][0, 0, kept:].tolist() == [-1] * (size - kept)
        for slot, position in enumerate(found, ring):
            assert memory["keys"][0, 0, slot].tolist() == [position, position]
            assert memory["values"][0, 0, slot].tolist() == [2 * position]
            assert memory["margins"][0, 0, slot] == buffer.held[position]


def test_rows_without_a_token_change_nothing():
    memory = {
        "keys": torch.randn(2, 1, 5, 2),
        "values": torch.randn(2, 1, 5, 2),
        "margins": torch.ones(2, 1, 5),
        "positions": torch.full((2, 1, 2), -1),
        "kept": torch.zeros(2, 1, dtype=torch.int64),
    }
    replace_weakest(**memory, slots=torch.tensor([0, 0]), tokens=torch.tensor([-1, 7]), ring=3)
    assert memory["kept"].tolist() == [[0], [1]]
    assert memory["positions"].tolist() == [[[-1, -1]], [[7, -1]]]


@pytest.mark.parametrize("count", [0, 3])
def test_what_is_not_full_keeps_everything(count):
    found = running_best(
        torch.ones(1, 1, 8), torch.arange(8)[None, None] - 8 + count, torch.ones(1, 1, 4), torch.arange(20, 24)[None]
    )
    assert found.new.tolist() == [[[4] * 4]]

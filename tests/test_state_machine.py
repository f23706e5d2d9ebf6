"""A few of the sequences that `python -m tests.state_machine` draws, always the same; and those that once disagreed."""

import pytest

from tests import state_machine


@pytest.mark.parametrize("name", state_machine.NAMES)
def test_caches_equal_their_history_or_are_refused(name):
    state_machine.run(name, examples=6)

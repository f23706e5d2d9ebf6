import os
import time

import pytest

from tests import differences

SECONDS = float(os.environ.get("FOVEATE_TEST_SECONDS", "6"))
"""How long random cases are drawn; more finds more."""


def test_random_cases_that_no_one_thought_of():
    seed = time.time_ns() % 10**9
    print(f"python -m tests.differences --seconds {SECONDS:g} --seed {seed}")
    _, wrong = differences.search(SECONDS, seed, least=4)  # however busy the machine is
    assert wrong == []


def test_a_difference_is_found_and_named(monkeypatch):
    """Logits that are off by one are reported with their seed and method."""
    whole = differences.Case.whole
    monkeypatch.setattr(differences.Case, "whole", lambda case, ids, n: (whole(case, ids, n)[0] + 1, None))
    with pytest.raises(differences.DiffersError, match="seed 3: a full budget of "):
        differences.run(3)

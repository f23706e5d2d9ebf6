"""Set-up of every test run: one thread, and property tests that draw the same examples every time."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.kernels import poisoned_memory

torch.set_num_threads(1)

settings.register_profile("foveate", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("foveate")

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreter import speed_up

    speed_up()


@pytest.fixture
def poisoned():
    """Fresh memory holds NaN, so that what a kernel fails to write is seen."""
    with poisoned_memory():
        yield

"""What processes that share one GPU do for each other."""

import fcntl
import tempfile
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def memory_goes_back():
    """Memory that a test has needed much of is there for the tests of other processes."""
    yield
    if torch.cuda.memory_reserved() > 2 << 30:
        torch.cuda.empty_cache()


@pytest.fixture
def much_memory():
    """One test at a time, in whichever process, that takes gigabytes."""
    with (Path(tempfile.gettempdir()) / "foveate-much-gpu-memory.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()

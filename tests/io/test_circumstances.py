import subprocess
import sys

import pytest

from foveate.io import circumstances

PEAK = """
import torch

from foveate.io import circumstances

memory = circumstances.PeakMemory("cpu")
torch.ones(60_000_000).sum()
memory.start()
before = memory.peak()
torch.ones(25_000_000).sum()  # 100 MB, gone at once
during = memory.peak()
assert "RSS" in memory.kind
assert during - before > 80_000_000 or "since the process began" in memory.kind, (before, during)
memory.start()
assert memory.peak() < during or "since the process began" in memory.kind
"""


@pytest.mark.full
def test_peak_memory_sees_what_was_freed_again():
    # A process of its own: one that ran other tests has freed memory that it keeps resident and hands out again.
    subprocess.run([sys.executable, "-c", PEAK], check=True)


def test_versions_device_and_commit(monkeypatch):
    assert {"python", "foveate", "torch", "transformers"} <= circumstances.versions().keys()
    assert circumstances.device_name("cpu").startswith("cpu: ")

    def fail(*args, **kwargs):
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(subprocess, "run", fail)
    assert circumstances.commit() == "unknown"

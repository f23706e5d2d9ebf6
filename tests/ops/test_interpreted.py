"""The files `interpreted_*.py` of all folders: they run under Triton's interpreter, and pytest leaves them alone
otherwise.

They need processes of their own, because Triton looks at ``TRITON_INTERPRET`` when it is imported. A process takes
seconds to begin, so that the files of a family of kernels share one; the processes take about as long as each other.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = {path.stem.removeprefix("interpreted_"): path for path in sorted(TESTS.rglob("interpreted_*.py"))}
PROCESSES = {
    "decode": ("decode", "eight_bits", "fetch"),
    "pages": ("block_table", "pages", "low_rank"),
    "engine steps and slots": ("bound", "bounds", "boxes", "select", "slots"),
    "indexer": ("indexer", "selected", "retention"),
    "summaries": ("summaries", "masses", "column_mass"),
    "prompts": ("tiles", "means", "attend_window", "bits", "softmax"),
    "hybrids": ("until", "gated", "running"),
}


@pytest.mark.divided
@pytest.mark.parametrize("names", PROCESSES.values(), ids=PROCESSES)
def test_under_the_interpreter(names):
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", *(str(FILES[name]) for name in names)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_is_run_once():
    assert sorted(FILES) == sorted(name for names in PROCESSES.values() for name in names)

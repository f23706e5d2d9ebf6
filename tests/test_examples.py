"""The examples run."""

import subprocess
import sys
from pathlib import Path

from evaluation import tiny

ROOT = Path(__file__).parents[1]


def test_questions_about_a_document_that_is_read_once(tmp_path):
    model, kept = tiny.build(tmp_path / "tiny-llama"), tmp_path / "read.safetensors"
    command = [sys.executable, ROOT / "examples" / "questions.py", "--model", model, "--kept", kept, "--tokens", 200]
    command += ["--file", tiny.SAMPLE / "books" / "moby_dick.txt", "--question", "His name is", "--question", "He went"]
    said = []
    for _ in range(2):
        done = subprocess.run([str(one) for one in command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert kept.exists()
        said.append([line for line in done.stdout.splitlines() if line.startswith(("His name is", "He went"))])
    assert len(said[0]) == 2
    assert said[0] == said[1], "the cache on disk answers as the one in memory does"

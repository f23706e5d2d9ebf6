"""The scripts in `benchmarks/` ask for methods that exist, with settings that are allowed."""

import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest

from foveate import methods
from foveate.cli import imports

STAND_IN = """#!/bin/sh
printf '%s\\n' "$@" >> "$ASKED"
while [ $# -gt 1 ]; do [ "$1" = --out ] && touch "$2"; shift; done
"""
"""Notes what it is asked for, and makes the file that it is to write."""
CALIBRATION = re.compile(r',?calibration=\\?"?[^",]*"?')
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = [
    path
    for path in sorted(BENCHMARKS.glob("*.sh"))
    if re.search("foveate (compare|calibrate|bench decode)", path.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_methods_of_scripts_are_accepted(script, tmp_path, methods_of_package):
    model, data, asked = tmp_path / "qwen2.5-coder-0.5b-instruct", tmp_path / "data", tmp_path / "asked"
    for folder in (model, data, tmp_path / "bin"):
        folder.mkdir()
    stand_in = tmp_path / "bin" / "foveate"
    stand_in.write_text(STAND_IN, encoding="utf-8")
    stand_in.chmod(0o755)
    (stand_in.parent / "python").symlink_to(stand_in)
    found = {"PATH": f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}", "ASKED": str(asked)}
    out = tmp_path / ("rows.jsonl" if script.name == "decode.sh" else "runs")
    of_data = script.name not in ("decode.sh", "recommended-times.sh")
    given = [str(model), str(data), str(out)] if of_data else [str(model), str(out)]
    subprocess.run(["bash", str(script), *given], cwd=tmp_path, env=found, capture_output=True, check=True)
    words = asked.read_text(encoding="utf-8").splitlines()
    for file in {file for word, file in itertools.pairwise(words) if word == "--import"}:
        imports.run(Path(file))
    specs = {method for word, method in itertools.pairwise(words) if word == "--method"}
    assert specs
    for spec in specs:
        if "lte.safetensors" not in spec:
            methods.parse(CALIBRATION.sub("", spec))  # no file of that name is there
        else:
            assert methods.spelled(spec).startswith("lte:")

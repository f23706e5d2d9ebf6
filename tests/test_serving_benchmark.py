"""`benchmarks/serving.py`: rows beside vLLM's own engine of the same run; the engines' processes are left out."""

import json
import runpy
from pathlib import Path

import pytest

from foveate import methods
from foveate.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


def test_rows_are_beside_vllms_own_and_of_cases_that_both_have(tmp_path, monkeypatch, capsys):
    benchmark, asked = runpy.run_path(str(ROOT / "benchmarks" / "serving.py")), []

    def run(job):
        config = json.loads((Path(job["model"]) / "config.json").read_text(encoding="utf-8"))
        asked.append((job["method"], config["max_position_embeddings"], job["kv_cache_dtype"]))
        cases = [f"{tokens}x{batch}" for tokens, batch in job["cases"]]
        taken = {"ms": 8.0 if job["method"] else 20.0, "ms_all": 9.0, "first_token_ms": 5.0, "keys_read_share": 0.3}
        taken |= {"peak_bytes": 0, "device": "cpu", "runner": "v2"}
        return dict.fromkeys(cases if job["method"] is None else cases[:1], taken)

    monkeypatch.setitem(benchmark["main"].__globals__, "run", run)
    out = tmp_path / "rows.jsonl"
    arguments = ["--tiny", "--case", "300x4", "--case", "70x1", "--out", str(out)]
    arguments += ["--kv-cache-dtype", "auto", "--kv-cache-dtype", "fp8"]
    for _ in range(2):
        benchmark["main"](arguments)
    row, eight_bits = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    (spec,) = {method for method, _, _ in asked} - {None}
    methods.parse(spec)
    most = 300 + benchmark["ROOM"]
    assert asked[:4] == [(method, most, dtype) for dtype in ("auto", "fp8") for method in (None, spec)]
    case = {"model": "tiny-shape", "method": spec, "tokens": 300, "batch": 4, "kv_cache_dtype": "auto", "runner": "v2"}
    assert row["case"] == case
    assert eight_bits["case"] == case | {"kv_cache_dtype": "fp8"}
    assert (row["speedup"], row["tokens_per_s"], row["baseline_first_token_ms"]) == (2.5, 500.0, 5.0)
    assert "2.50 times as fast as vllm" in capsys.readouterr().out
    out.write_text('{"bench": "decode", "case": {}}\n', encoding="utf-8")
    with pytest.raises(UserError, match="holds rows of decode, not of serving"):
        benchmark["main"](arguments)


@pytest.mark.parametrize("method", runpy.run_path(str(ROOT / "benchmarks" / "serving.py"))["METHODS"])
def test_methods_can_be_served(method):
    assert methods.parse(method).decode_only

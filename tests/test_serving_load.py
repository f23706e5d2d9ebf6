"""`benchmarks/serving_load.py`: times from arrivals, failures, and rows beside vLLM's own; engines are left out."""

import json
import sys
from types import SimpleNamespace

import pytest

from benchmarks import serving, serving_load, table_kinds
from foveate import methods
from foveate.runtime.steps import obstacle
from foveate.state import Geometry


class Engine:
    """Answers a token a step to each of two requests at a time; the third one that arrives is lost."""

    def __init__(self, clock):
        self.clock, self.waiting, self.running, self.given = clock, [], {}, 0

    def add_request(self, name, prompt, sampling):
        self.given += 1
        if self.given != 3:
            self.waiting.append((name, len(prompt["prompt_token_ids"]), sampling.max_tokens))

    def has_unfinished_requests(self):
        return bool(self.waiting or self.running)

    def step(self):
        while self.waiting and len(self.running) < 2:
            name, _, new = self.waiting.pop(0)
            self.running[name] = [new, 0]
        self.clock.now += 1.0
        outs = []
        for name, state in list(self.running.items()):
            state[1] += 1
            outs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[7] * state[1])]))
            if state[0] == state[1]:
                del self.running[name]
        return outs


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(serving_load, "time", clock)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    return clock


def test_times_count_from_arrivals(clock):
    job = {"requests": 5, "least": 4, "most": 400, "new": 3}
    found = serving_load._pass(Engine(clock), job, float("inf"), seed=0)
    assert found["failed"] == 1
    assert found["token_ms"] == [1000.0] * 3
    assert found["first_token_ms"] == [1000.0, 4000.0, 4000.0]  # two at once, two wait for three steps
    assert found["request_ms"] == [3000.0, 6000.0, 6000.0]
    slow = serving_load._pass(Engine(clock), job, 0.01, seed=0)
    assert slow["first_token_ms"] == pytest.approx([1000.0] * 3)
    assert slow["seconds"] > 100


def test_an_engine_that_answers_nothing_is_an_error(clock):
    job = {"requests": 1, "least": 4, "most": 400, "new": 3}
    engine = Engine(clock)
    engine.given = 2
    with pytest.raises(RuntimeError, match=r"none of 1 requests at 1\.0 a second"):
        serving_load._pass(engine, job, 1.0, seed=0)


def test_one_token_has_no_time_between(tmp_path, capsys):
    """Said before an engine starts."""
    with pytest.raises(SystemExit):
        serving_load.main(["--out", str(tmp_path / "rows.jsonl"), "--tiny", "--new", "1"])
    assert "--new must be at least 2" in capsys.readouterr().err


def test_rows_are_beside_vllms_own(tmp_path, monkeypatch, capsys):
    def run(job, program):
        assert program == serving_load.PROGRAM
        times = {
            key: [8.0 if job["method"] else 20.0, 30.0, 40.0] for key in ("first_token_ms", "token_ms", "request_ms")
        }
        taken = {"failed": 0, "seconds": 2.0, "grown_bytes": 1 << 20, "peak_bytes": 0, "device": "cpu", "runner": "v1"}
        passes = [(rate, seed) for rate in job["rates"] for seed in job["seeds"]]
        return {serving_load._name(*one): dict(times | taken) for one in passes}

    monkeypatch.setattr(serving, "run", run)
    out = tmp_path / "rows.jsonl"
    for _ in range(2):
        asked = ["--tiny", "--rate", "3", "--seed", "5", "--seed", "6", "--requests", "7", "--kv-cache-dtype", "fp8"]
        serving_load.main([*asked, "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    methods_and_seeds = [(method, seed) for method in serving_load.METHODS for seed in (5, 6)]
    assert [(row["case"]["method"], row["case"]["seed"]) for row in rows] == methods_and_seeds
    assert {(row["case"]["runner"], row["case"]["kv_cache_dtype"]) for row in rows} == {("v1", "fp8")}
    assert {(row["case"]["rate"], row["case"]["requests"], row["speedup"], row["baseline"]) for row in rows} == {
        (3.0, 7, 2.5, "vllm")
    }
    assert "first token 8 / 30 / 40 ms (20 / 30 / 40)" in capsys.readouterr().out


@pytest.mark.parametrize("spec", serving_load.METHODS)
def test_methods_under_load_can_be_served(spec):
    assert obstacle(methods.parse(spec).for_layer(10, 32), Geometry(32, 8, 128, 128)) == ""


def test_a_line_of_the_table_has_both_engines_percentiles():
    kinds = ("first_token_ms", "token_ms", "request_ms")
    row = {
        "case": {"model": "m", "method": "dense", "rate": 4.0, "seed": 3, "requests": 9},
        "failed": 0,
        **{key: [1000.0, 1500.0, 2000.0] for key in kinds},
        **{f"baseline_{key}": [500.0, 700.0, 900.0] for key in kinds},
    }
    cells = [cell(row) for cell in table_kinds.serving_load.cells.values()]
    latencies = ["1.00, 1.50, 2.00 (0.50, 0.70, 0.90)", "1000.00, 1500.00, 2000.00 (500.00, 700.00, 900.00)"]
    assert cells[1:] == ["3", "`dense`", *latencies, latencies[0], "0 of 9"]

"""Counts of vLLM's workers reach the process that serves metrics; without vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foveate import methods
from foveate.integrations.vllm import metrics
from foveate.ops import Logits
from foveate.runtime import EngineSteps

prometheus = pytest.importorskip("prometheus_client")


def config(rank=0, ranks=1):
    return SimpleNamespace(parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=ranks))


def a_step(steps):
    memory = torch.zeros(9, 2, 4, 8)
    steps.begin(torch.tensor([5, 20]), torch.ones(2, 5, dtype=torch.int32), 20, [5, 20])
    for layer in steps.methods:
        steps.attend(layer, torch.zeros(2, 4, 1, 8), memory, memory, Logits(1.0))


def collected(folder):
    found = metrics.Collector(folder).collect()
    return {sample.name: sample.value for one in found for sample in one.samples}


def kascade():
    method = methods.parse("kascade_paper:top_k=4,anchors=[1],decode_only=true")
    return EngineSteps({n: method.for_layer(n, 3) for n in range(3)}, torch.device("cpu"))


READ = {
    "foveate:decode_steps_total": 1,
    "foveate:dense_tokens_total": 0,
    "foveate:decode_tokens_total": 2,
    "foveate:keys_read_total": 25 + 12.5 + 8 + 8,  # layer 0; keys scored, and those read, in layers 1 and 2
    "foveate:keys_available_total": 75,
    "foveate:selections_total": 2,
}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FOVEATE_METRICS_DIR", str(tmp_path / "counts"))
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(metrics, "_EVERY", 0.0)
    return tmp_path / "counts"


def test_files_of_all_workers_are_added_up(folder):
    assert collected(folder) == {}
    workers = [kascade(), kascade()]
    meters = [metrics.Meter(steps, config()) for steps in workers]
    for steps, meter in zip(workers, meters):
        a_step(steps)
        meter.update()
    assert collected(folder) == {name: 2 * value for name, value in READ.items()}
    assert (folder.stat().st_mode & 0o777) == 0o700


def test_other_ranks_of_an_engine_publish_nothing(folder):
    steps = kascade()
    a_step(steps)
    metrics.Meter(steps, config(rank=1, ranks=2)).update()
    assert collected(folder) == {}
    metrics.Meter(steps, config(rank=2, ranks=2)).update()  # the first rank of the second engine
    assert collected(folder) == READ


def test_counts_are_published_now_and_then(folder, monkeypatch):
    monkeypatch.setattr(metrics, "_EVERY", 100.0)
    steps = kascade()
    meter = metrics.Meter(steps, config())
    for _ in range(3):
        a_step(steps)
        meter.update()
    assert collected(folder) == READ


def test_nothing_waits_for_the_device(folder, monkeypatch):
    """What is on its way is published when it has arrived, with the counts of the time when it left."""
    steps, arrived = kascade(), []
    event = SimpleNamespace(query=lambda: bool(arrived))
    meter = metrics.Meter(steps, config())
    monkeypatch.setattr(meter, "_fetch", lambda: (steps.keys_read(), event))
    a_step(steps)
    meter.update()
    a_step(steps)
    meter.update()
    assert collected(folder) == {}
    arrived.append(True)
    meter.update()
    assert collected(folder) == READ


def test_audits_are_histograms(folder):
    steps = kascade()
    meters = [metrics.Meter(steps, config()) for _ in range(2)]
    a_step(steps)
    for meter in meters:
        meter.observe({"agreement": torch.tensor([1.0, 0.0]), "kl": torch.tensor([0.02, 5.0])})
        meter.update()
    found = {(s.name, s.labels.get("le")): s.value for one in metrics.Collector(folder).collect() for s in one.samples}
    assert found["foveate:audit_agreement_bucket", "0.0"] == 2
    assert found["foveate:audit_agreement_sum", None] == 2
    assert found["foveate:audit_agreement_count", None] == found["foveate:audit_agreement_bucket", "+Inf"] == 4
    kl = {end: found["foveate:audit_kl_nats_bucket", end] for end in ("0.01", "0.03", "3.0", "+Inf")}
    assert kl == {"0.01": 0, "0.03": 2, "3.0": 2, "+Inf": 4}
    assert found["foveate:audit_kl_nats_sum", None] == pytest.approx(10.04)
    assert not any("mass_read" in name for name, _ in found)
    metrics.Meter(steps, config(rank=1, ranks=2)).observe({"kl": torch.tensor([1.0])})  # another rank's are the same


def test_where_several_processes_serve_metrics_their_files_are_used(tmp_path):
    program = """
        import sys
        sys.path[:0] = sys.argv[1:]
        from test_vllm_metrics import a_step, config, kascade, metrics, torch
        metrics._EVERY = 0.0
        groups = [kascade(), kascade()]
        meters = [metrics.Meter(steps, config()) for steps in groups]
        for _ in range(2):
            for steps, meter in zip(groups, meters):
                a_step(steps)
                meter.observe({"mass_read": torch.tensor([0.5, 0.97])})
                meter.update()
    """
    here = Path(__file__).resolve().parent
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(program), str(here), str(here.parents[1])]
    subprocess.run(command, env=environment, check=True)
    registry = prometheus.CollectorRegistry()
    from prometheus_client import multiprocess

    multiprocess.MultiProcessCollector(registry, str(tmp_path))
    samples = [sample for one in registry.collect() for sample in one.samples]
    assert {s.name: s.value for s in samples if s.name in READ} == {name: 4 * value for name, value in READ.items()}
    mass = {s.labels["le"]: s.value for s in samples if s.name == "foveate:audit_mass_read_bucket"}
    assert (mass["0.5"], mass["0.95"], mass["0.98"]) == (4, 4, 8)


def test_the_first_process_serves_and_removes_what_workers_write(tmp_path):
    program = """
        import json, os, sys
        from pathlib import Path
        from prometheus_client import REGISTRY, generate_latest
        from foveate.integrations.vllm import metrics
        metrics.serve()
        metrics.serve()
        folder = Path(os.environ["FOVEATE_METRICS_DIR"])
        assert not folder.exists() and b"foveate" not in generate_latest(REGISTRY)
        metrics._File(7).set(dict.fromkeys(metrics.METRICS, 3))
        text = generate_latest(REGISTRY).decode()
        assert "foveate:keys_read_total 3.0" in text, text
        print(json.dumps(str(folder)))
    """
    environment = {name: value for name, value in os.environ.items() if name != "FOVEATE_METRICS_DIR"}
    environment |= {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    folder = Path(json.loads(done.stdout))
    assert folder.parent == tmp_path
    assert not folder.exists()

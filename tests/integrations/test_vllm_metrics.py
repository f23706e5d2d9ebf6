"""Counts of vLLM's workers reach the process that serves metrics; without vLLM."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foveate import methods
from foveate.integrations.vllm import metrics, published
from foveate.ops import Logits
from foveate.runtime import EngineSteps

prometheus = pytest.importorskip("prometheus_client")


def config(rank=0, ranks=1, engine=0):
    parallel = SimpleNamespace(rank=rank, tensor_parallel_size=ranks, data_parallel_index=engine)
    return SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(served_model_name="tiny"))


def a_step(steps):
    memory = torch.zeros(9, 2, 4, 8)
    steps.begin(torch.tensor([5, 20]), torch.ones(2, 5, dtype=torch.int32), 20, [5, 20])
    for layer in steps.methods:
        steps.attend(layer, torch.zeros(2, 4, 1, 8), memory, memory, Logits(1.0))


def collected():
    return {sample.name: sample.value for one in published.Collector().collect() for sample in one.samples}


def by_engine():
    """What is collected, by engine; one model is served."""
    found: dict[str, dict[str, float]] = {}
    for sample in (sample for one in published.Collector().collect() for sample in one.samples):
        assert sample.labels["model_name"] == "tiny"
        found.setdefault(sample.labels["engine"], {})[sample.name] = sample.value
    return found


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


@pytest.fixture(autouse=True)
def of_this_test(monkeypatch):
    gc.collect()  # what other tests have published
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(metrics, "_EVERY", 0.0)


def test_files_of_all_workers_are_added_up():
    assert collected() == {}
    workers = [kascade(), kascade()]
    meters = [metrics.Meter(steps, config()) for steps in workers]
    for steps, meter in zip(workers, meters):
        a_step(steps)
        meter.update()
    assert collected() == {name: 2 * value for name, value in READ.items()}


def test_other_ranks_of_an_engine_publish_nothing():
    steps = kascade()
    a_step(steps)
    metrics.Meter(steps, config(rank=1, ranks=2)).update()
    assert collected() == {}
    first = metrics.Meter(steps, config(rank=2, ranks=2))  # of the second engine
    first.update()
    assert collected() == READ


def test_engines_of_data_parallelism_are_told_apart():
    """Each has its own samples, under vLLM's own labels."""
    workers = {0: [kascade()], 1: [kascade(), kascade()]}
    meters = [(steps, metrics.Meter(steps, config(engine=n))) for n, own in workers.items() for steps in own]
    for steps, meter in meters:
        a_step(steps)
        meter.observe({"kl": torch.tensor([0.02])})
        meter.update()
    found = by_engine()
    assert found.keys() == {"0", "1"}
    for name, value in READ.items():
        assert (found["0"][name], found["1"][name]) == (value, 2 * value)
    assert [found[n]["foveate:audit_kl_nats_count"] for n in "01"] == [1, 2]


def test_counts_are_published_now_and_then(monkeypatch):
    monkeypatch.setattr(metrics, "_EVERY", 100.0)
    steps = kascade()
    meter = metrics.Meter(steps, config())
    for _ in range(3):
        a_step(steps)
        meter.update()
    assert collected() == READ


def test_nothing_waits_for_the_device(monkeypatch):
    """What is on its way is published when it has arrived, with the counts of the time when it left."""
    steps, arrived = kascade(), []
    event = SimpleNamespace(query=lambda: bool(arrived))
    meter = metrics.Meter(steps, config())
    monkeypatch.setattr(meter, "_fetch", lambda: (steps.keys_read(), event))
    a_step(steps)
    meter.update()
    a_step(steps)
    meter.update()
    assert collected() == {}
    arrived.append(True)
    meter.update()
    assert collected() == READ


def test_audits_are_histograms():
    steps = kascade()
    meters = [metrics.Meter(steps, config()) for _ in range(2)]
    a_step(steps)
    for meter in meters:
        meter.observe({"agreement": torch.tensor([1.0, 0.0]), "kl": torch.tensor([0.02, 5.0])})
        meter.update()
    found = {(s.name, s.labels.get("le")): s.value for one in published.Collector().collect() for s in one.samples}
    assert found["foveate:audit_agreement_bucket", "0.0"] == 2
    assert found["foveate:audit_agreement_sum", None] == 2
    assert found["foveate:audit_agreement_count", None] == found["foveate:audit_agreement_bucket", "+Inf"] == 4
    kl = {end: found["foveate:audit_kl_nats_bucket", end] for end in ("0.01", "0.03", "3.0", "+Inf")}
    assert kl == {"0.01": 0, "0.03": 2, "3.0": 2, "+Inf": 4}
    assert found["foveate:audit_kl_nats_sum", None] == pytest.approx(10.04)
    assert not any("mass_read" in name for name, _ in found)
    metrics.Meter(steps, config(rank=1, ranks=2)).observe({"kl": torch.tensor([1.0])})  # another rank's are the same


@pytest.mark.full
def test_where_several_processes_serve_metrics_their_files_are_used(tmp_path):
    program = """
        import sys
        sys.path[:0] = sys.argv[1:]
        from test_vllm_metrics import a_step, config, kascade, metrics, torch
        metrics._EVERY = 0.0
        groups = [kascade(), kascade()]
        meters = [metrics.Meter(steps, config(engine=int(sys.argv[3]))) for steps in groups]
        for _ in range(2):
            for steps, meter in zip(groups, meters):
                a_step(steps)
                meter.observe({"mass_read": torch.tensor([0.5, 0.97])})
                meter.update()
    """
    here = Path(__file__).resolve().parent
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(program), str(here), str(here.parents[1])]
    for engine in "01":  # a process each
        subprocess.run([*command, engine], env=environment, check=True)
    registry = prometheus.CollectorRegistry()
    from prometheus_client import multiprocess

    multiprocess.MultiProcessCollector(registry, str(tmp_path))
    samples = [sample for one in registry.collect() for sample in one.samples]
    for engine in "01":
        own = [s for s in samples if s.labels["engine"] == engine and s.labels["model_name"] == "tiny"]
        counts = {s.name: s.value for s in own if s.name in READ}
        assert counts == {name: 4 * value for name, value in READ.items()}
        mass = {s.labels["le"]: s.value for s in own if s.name == "foveate:audit_mass_read_bucket"}
        assert (mass["0.5"], mass["0.95"], mass["0.98"]) == (4, 4, 8)


WORKER = """
    import sys, time
    from foveate.integrations.vllm.published import METRICS, Published
    own = Published(["tiny", "0"])
    own.set(dict.fromkeys(METRICS, 30000))
    own.set(dict.fromkeys(METRICS, int(sys.argv[1])))
    if len(sys.argv) > 2:
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", sys.argv[2], "5"], stdout=subprocess.PIPE, text=True)
        child.stdout.readline()
    print("there", flush=True)
    time.sleep(600)
"""


def test_workers_of_workers_are_found_and_nothing_is_left_when_they_are_killed(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    program = textwrap.dedent(WORKER)
    command = [sys.executable, "-c", program, "3", program]
    how = {"stdout": subprocess.PIPE, "text": True, "env": environment, "start_new_session": True}
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment)
    worker = subprocess.Popen(command, **how)
    try:
        assert worker.stdout.readline() == "there\n"
        assert collected()["foveate:keys_read_total"] == 3 + 5
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        stranger.kill()
        worker.wait()
        stranger.wait()
    assert collected() == {}
    assert list(tmp_path.iterdir()) == []


def test_merely_installed_nothing_is_published_or_changed(tmp_path):
    program = """
        import os, sys
        from prometheus_client import REGISTRY, generate_latest
        from foveate.integrations.vllm import published
        before = dict(os.environ), set(os.listdir("/proc/self/fd"))
        published.serve()
        published.serve()
        assert b"foveate" not in generate_latest(REGISTRY)
        assert (dict(os.environ), set(os.listdir("/proc/self/fd"))) == before
        own = published.Published(["tiny", "0"])
        own.set(dict.fromkeys(published.METRICS, 3))
        said = 'foveate:keys_read_total{engine="0",model_name="tiny"} 3.0'
        assert said in generate_latest(REGISTRY).decode()
    """
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, check=True)
    assert list(tmp_path.iterdir()) == []

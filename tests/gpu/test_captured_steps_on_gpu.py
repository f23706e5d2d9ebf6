"""A step over an engine's blocks, captured once as a CUDA graph, gives what fresh steps on the GPU give."""

import pytest
import torch

from foveate.ops import dispatch
from foveate.runtime import CudaRecorder
from tests.served import BATCHES, SPECS, Served

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["references", "kernels"], autouse=True)
def kernels(request, monkeypatch):
    """Without kernels, and with them."""
    monkeypatch.setenv("FOVEATE_KERNELS", "1" if request.param == "kernels" else "0")
    if request.param == "kernels":
        pytest.importorskip("triton")
        assert "attend" in dispatch.kernel_status().split(", ")
    return request.param == "kernels"


def captured(served, steps, kernels):
    """With kernels, the summaries of pages are made within the graph, too."""

    def run(steps):
        if kernels:
            served.write(steps)
        return served.run(steps)

    return served.capture(steps, CudaRecorder(torch.device("cuda")), run)


@pytest.mark.parametrize("spec", SPECS)
def test_replays_equal_fresh_steps(spec, kernels):
    served = Served("cuda")
    steps, fresh = served.steps(spec), served.steps(spec)
    recording = captured(served, steps, kernels)
    for name, (lengths, prompts) in BATCHES.items():
        served.fill(lengths)
        before = float(steps.keys_read()), float(fresh.keys_read())
        served.begin(steps, lengths, prompts)
        if not kernels:
            served.write(steps)
        recording.replay()
        served.begin(fresh, lengths, prompts)
        served.write(fresh)
        close = {"rtol": 1e-4, "atol": 1e-4}
        found = served.run(fresh)
        torch.testing.assert_close(recording.out, found, msg=lambda text, name=name: f"{name}: {text}", **close)
        torch.testing.assert_close(found, served.expected(spec, lengths, prompts), **close)
        if not fresh.dense:
            read = float(steps.keys_read()) - before[0], float(fresh.keys_read()) - before[1]
            assert read[0] == pytest.approx(read[1])


@pytest.mark.parametrize("spec", SPECS)
def test_a_step_waits_for_nothing_and_a_replay_allocates_nothing(spec, kernels):
    served = Served("cuda", torch.bfloat16)
    steps = served.steps(spec)
    recording = captured(served, steps, kernels)
    for lengths, prompts in BATCHES.values():
        served.fill(lengths)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            served.begin(steps, lengths, prompts)
            before = torch.cuda.memory_stats()["allocated_bytes.all.current"]
            served.begin(steps, lengths, prompts)
            recording.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == before, "more is held"
        torch.cuda.synchronize()
        assert recording.out.isfinite().all()

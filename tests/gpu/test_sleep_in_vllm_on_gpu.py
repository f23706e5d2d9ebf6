"""An engine of vLLM's that sleeps, level 1, drops its blocks, and in 0.26 what is allocated beside them."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from tests.integrations.test_in_vllm import PAGES, SMALL, folder, run  # noqa: F401

pytestmark = pytest.mark.gpu
ENGINE = {"dtype": "bfloat16", "enforce_eager": False, "max_num_batched_tokens": 64, "gpu_memory_utilization": 0.1}


@pytest.mark.parametrize("spec", [PAGES, SMALL])
@pytest.mark.parametrize("runner", ["0", "1"], ids=["v1", "v2"])
def test_an_engine_that_has_slept_goes_on(folder, spec, runner):  # noqa: F811
    """With the graphs that it has captured: answers, and what was read for them, are what they were."""

    def served(**more):
        how = {"method": spec, "dense_below": 1}
        environment = {"VLLM_USE_V2_MODEL_RUNNER": runner}
        return run(folder, how, environment=environment, **more, **ENGINE | {"enable_sleep_mode": True})

    once, twice = served(), served(times=2, job={"sleep": True})
    assert twice["tokens"] == once["tokens"] * 2
    assert twice["read"] == pytest.approx({name: 2 * count for name, count in once["read"].items()})
    assert 0 < once["read"]["keys_read"] < once["read"]["keys_available"]

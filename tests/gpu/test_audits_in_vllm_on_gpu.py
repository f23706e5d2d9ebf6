"""Audits within vLLM on a GPU, where a decode step is a replay of one graph."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from tests.integrations.test_in_vllm import FULL, SMALL, folder, run  # noqa: F401

pytestmark = pytest.mark.gpu
ENGINE = {"dtype": "bfloat16", "enforce_eager": False, "max_num_batched_tokens": 64, "gpu_memory_utilization": 0.1}


@pytest.mark.parametrize("runner", ["0", "1"], ids=["v1", "v2"])
def test_an_audit_changes_no_token_and_tells_what_a_step_loses(folder, runner):  # noqa: F811
    def served(spec, audit):
        how = {"method": spec, "dense_below": 1, "audit": audit}
        return run(folder, how, environment={"VLLM_USE_V2_MODEL_RUNNER": runner}, **ENGINE)

    plain, few, full = served(SMALL, 0), served(SMALL, 1.0), served(FULL, 1.0)
    assert few["tokens"] == plain["tokens"] != full["tokens"]
    assert few["read"]["keys_read"] == plain["read"]["keys_read"]
    for found, small in ((few, True), (full, False)):
        audits = {name: (sum(numbers[:-1]), numbers[-1]) for name, numbers in found["audits"].items()}
        (rows, agreeing), (_, kl), (_, mass) = (audits[name] for name in ("agreement", "kl", "mass_read"))
        assert 20 < rows < found["read"]["rows"], "steps in which every row decodes"
        if small:
            assert agreeing < rows
            assert kl / rows > 0.01
            assert 0.05 < mass / rows < 0.95
        else:
            assert agreeing / rows > 0.97, "bf16 rounds by other kernels"
            assert kl / rows < 0.01
            assert mass / rows > 0.99

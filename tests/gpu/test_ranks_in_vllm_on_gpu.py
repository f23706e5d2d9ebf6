"""Two GPUs within vLLM: ranks choose together inside CUDA graphs, and an audit of them changes no token."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from tests.integrations.test_in_vllm import OF_OTHER_HEADS, PAGES, SMALL, run, written

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
TOGETHER = f"{SMALL},pool=layer,pooling=sqrt"
ENGINE = {"dtype": "bfloat16", "enforce_eager": False, "max_num_batched_tokens": 64, "gpu_memory_utilization": 0.1}
RANKS = {
    "tensor_parallel_size": 2,
    "disable_custom_all_reduce": True,
    "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model of four KV heads, as wide as FlashAttention's kernels of two ranks ask for."""
    return written(tmp_path_factory.mktemp("wide"), num_attention_heads=8, num_key_value_heads=4)


def served(folder, spec, runner, audit=0.0, **more):
    environment = {"VLLM_USE_V2_MODEL_RUNNER": runner, "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
    how = None if spec is None else {"method": spec, "dense_below": 1, "audit": audit}
    more |= {"attention_backend": "FLASH_ATTN"} if spec is None else {}
    return run(folder, how, environment=environment, **ENGINE | more)


def agreement(one, two):
    """The share of tokens before the first that differs, of all prompts."""
    before = [next((n for n, (a, b) in enumerate(zip(x, y)) if a != b), len(x)) for x, y in zip(one, two)]
    return sum(before) / sum(map(len, one))


@pytest.mark.parametrize("runner", ["0", "1"], ids=["v1", "v2"])
@pytest.mark.parametrize("spec", [TOGETHER, OF_OTHER_HEADS, PAGES])
def test_two_ranks_answer_as_one_as_often_as_vllms_own(wide, spec, runner):
    """bf16 rounds sums of ranks otherwise, in vLLM's own attention, too."""
    own = [served(wide, None, runner, **more)["tokens"][0] for more in ({}, RANKS)]
    found = [served(wide, spec, runner, **more) for more in ({}, RANKS)]
    assert agreement(*(one["tokens"][0] for one in found)) >= agreement(*own) - 0.1
    assert found[1]["read"]["rows"] > found[1]["read"]["dense_rows"]


@pytest.mark.parametrize("runner", ["0", "1"], ids=["v1", "v2"])
def test_an_audit_over_ranks_changes_no_token(wide, runner):
    plain, audited = (served(wide, TOGETHER, runner, audit, **RANKS) for audit in (0.0, 1.0))
    assert audited["tokens"] == plain["tokens"]
    audits = {name: (sum(numbers[:-1]), numbers[-1]) for name, numbers in audited["audits"].items()}
    (rows, agreeing), (_, mass) = (audits[name] for name in ("agreement", "mass_read"))
    assert rows > 20
    assert agreeing < rows
    assert 0.05 < mass / rows < 0.95

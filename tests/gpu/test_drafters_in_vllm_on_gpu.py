"""Beside a drafter within vLLM on a GPU, where graphs hold steps of several tokens a row.

Model runner V2 of vLLM 0.26 has neither drafter; vLLM chooses V1 where no variable names a runner.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from tests.integrations.test_in_vllm import NEW, PROMPTS, SMALL, folder, run, written  # noqa: F401

pytestmark = pytest.mark.gpu
ENGINE = {"dtype": "bfloat16", "enforce_eager": False, "max_num_batched_tokens": 64, "gpu_memory_utilization": 0.1}


@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_beside_a_drafter_tokens_are_vllms_own(folder, tmp_path, drafter):  # noqa: F811
    """vLLM's attention verifies the drafts and reads all keys; each row is counted once a step."""
    speculation = {"method": drafter, "num_speculative_tokens": 3}
    if drafter == "draft_model":
        speculation["model"] = str(written(tmp_path, num_attention_heads=4, num_key_value_heads=2))
    else:
        speculation |= {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
    how = {"speculative_config": speculation, **ENGINE}
    own = run(folder, None, attention_backend="FLASH_ATTN", **how)
    found = run(folder, {"method": SMALL, "dense_below": 0}, **how)
    assert found["tokens"] == own["tokens"]
    counts, read = found["counts"], found["read"]
    assert counts["vllm:spec_decode_num_draft_tokens"] > 0
    assert 0 < read["dense_rows"] == read["rows"] <= len(PROMPTS) * (NEW - 1)
    assert read["keys_read"] == read["keys_available"] > 0

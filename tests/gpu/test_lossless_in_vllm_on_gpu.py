"""Lossless decoding within vLLM on a GPU, with graphs of drafts that choose keys and of drafts that read them again.

On a GPU of their own: vLLM refuses to begin where another process frees memory meanwhile.
"""

from __future__ import annotations

import functools
import statistics

import pytest
import torch
import transformers

pytest.importorskip("vllm", reason="needs vLLM")

from tests.integrations.test_in_vllm import FULL, NEW, PAGES, PROMPTS, SMALL, folder, run  # noqa: F401

pytestmark = pytest.mark.gpu
ENGINE = {"dtype": "float16", "enforce_eager": False, "max_num_batched_tokens": 64, "gpu_memory_utilization": 0.1}
TIE = 0.1
"""Where tokens differ, the largest :func:`gap` that rounding explains. On an H200 the gap is 0.03 between vLLM's own
tokens with graphs and without them. Drafts that read all keys have 0.06 beside the latter, and 0.103 beside the former,
which fails."""
ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def served(folder, spec, **more):  # noqa: F811
    how = {"environment": ENVIRONMENT, "times": 2, **ENGINE, **more}
    return run(folder, spec, **how if spec is not None else how | {"attention_backend": "FLASH_ATTN"})


def gap(folder, one, other):  # noqa: F811
    """How far the two tokens of answers' first differences are below the best logit, in standard deviations of logits.

    The median over answers, in fp32. On a CPU, fp16 and fp32 differ by 0.01 in this model, whose attention is sharp,
    and a sparse method and dense attention by 1.1.
    """
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), [0.0]
    for both in zip(one["tokens"], other["tokens"]):
        for prompt, *answers in zip(PROMPTS, *both):
            assert {len(answer) for answer in answers} == {NEW}
            first = next((n for n, (a, b) in enumerate(zip(*answers)) if a != b), None)
            if first is not None:
                with torch.no_grad():
                    logits = model(torch.tensor([prompt + answers[0][:first]])).logits[0, -1]
                chosen = logits[[answer[first] for answer in answers]]
                found.append(float((logits.max() - chosen.min()) / logits.std()))
    return statistics.median(found)


@pytest.fixture(scope="module")
def own(folder):  # noqa: F811
    """vLLM's own tokens, with graphs and without: compiled and eager, it rounds otherwise."""
    return functools.cache(lambda graphs: served(folder, None, enforce_eager=not graphs))


def drafted(folder, spec, graphs=True, waits=False):  # noqa: F811
    speculation = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 4}
    how = {"speculative_config": speculation, "async_scheduling": waits, "enforce_eager": not graphs}
    return served(folder, {"method": spec, "lossless": True, "dense_below": 0}, **how)


@pytest.mark.parametrize(("spec", "graphs", "waits"), [(SMALL, True, False), (SMALL, False, True), (PAGES, True, True)])
def test_tokens_are_vllms_own(folder, own, spec, graphs, waits):  # noqa: F811
    found = drafted(folder, spec, graphs, waits)
    assert gap(folder, found, own(graphs)) < TIE
    assert 0.01 < accepted(found) < 0.85


def test_drafts_that_read_all_keys_are_dense_attentions_tokens_but_for_ties(folder, own):  # noqa: F811
    found = drafted(folder, FULL)
    assert gap(folder, found, own(True)) < TIE
    assert accepted(found) > 0.85


def test_the_tokens_of_few_keys_are_no_ties(folder, own):  # noqa: F811
    assert gap(folder, served(folder, {"method": SMALL, "dense_below": 0}), own(True)) > 5 * TIE


def accepted(found):
    """The share of the drafts that are accepted."""
    counts = found["counts"]
    return counts["vllm:spec_decode_num_accepted_tokens"] / counts["vllm:spec_decode_num_draft_tokens"]

"""Lossless decoding within vLLM on a GPU, with graphs of drafts that choose keys and of drafts that read them again."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from tests.integrations.test_in_vllm import FULL, NEW, PAGES, SMALL, folder, run  # noqa: F401

pytestmark = pytest.mark.gpu
ENGINE = {"dtype": "bfloat16", "enforce_eager": False, "max_num_batched_tokens": 64, "gpu_memory_utilization": 0.1}
ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def served(folder, spec, **more):  # noqa: F811
    how = {"environment": ENVIRONMENT, "times": 2, **ENGINE, **more}
    return run(folder, spec, **how if spec is not None else how | {"attention_backend": "FLASH_ATTN"})


def same(one, other):
    """The share of tokens before the first that differs: in bf16 two tokens may tie."""
    pairs = [pair for both in zip(one["tokens"], other["tokens"]) for pair in zip(*both)]
    assert {len(answer) for pair in pairs for answer in pair} == {NEW}
    return sum(next((n for n, (a, b) in enumerate(zip(*pair)) if a != b), NEW) for pair in pairs) / NEW / len(pairs)


@pytest.fixture(scope="module")
def own(folder):  # noqa: F811
    """vLLM's own tokens, with graphs and without: compiled and eager, its bf16 rounds otherwise."""
    return functools.cache(lambda graphs: served(folder, None, enforce_eager=not graphs))


def drafted(folder, spec, graphs=True, waits=False):  # noqa: F811
    speculation = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 4}
    how = {"speculative_config": speculation, "async_scheduling": waits, "enforce_eager": not graphs}
    return served(folder, {"method": spec, "lossless": True, "dense_below": 0}, **how)


@pytest.mark.parametrize(("spec", "graphs", "waits"), [(SMALL, True, False), (SMALL, False, True), (PAGES, True, True)])
def test_tokens_are_vllms_own(folder, own, spec, graphs, waits):  # noqa: F811
    found = drafted(folder, spec, graphs, waits)
    assert same(found, own(graphs)) > 0.9
    assert 0.01 < accepted(found) < 0.85


def test_drafts_that_read_all_keys_are_dense_attentions_tokens_but_for_ties(folder, own):  # noqa: F811
    found = drafted(folder, FULL)
    assert same(found, own(True)) > 0.9
    assert accepted(found) > 0.85


def accepted(found):
    """The share of the drafts that are accepted."""
    counts = found["counts"]
    return counts["vllm:spec_decode_num_accepted_tokens"] / counts["vllm:spec_decode_num_draft_tokens"]

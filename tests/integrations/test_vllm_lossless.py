"""Lossless decoding within vLLM on a CPU: tokens are dense attention's, whatever the method drafts."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.integrations.test_in_vllm import (
    BY_PAGES,
    CHUNKS,
    FULL,
    NEW,
    PAGES,
    PROMPTS,
    SMALL,
    folder,  # noqa: F401
    own,  # noqa: F401
    run,
)


def drafts(folder, length, **more):  # noqa: F811
    """Options of an engine whose model drafts for itself."""
    speculation = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": length, **more}
    return {"speculative_config": speculation, **CHUNKS}


def lossless(folder, spec, length, job=None, dense_below=0, **engine):  # noqa: F811
    settings = {"method": spec, "lossless": True, "dense_below": dense_below}
    found = run(folder, settings, second=True, times=2, job=job, **drafts(folder, length) | engine)
    counts = found["counts"]
    drafted, accepted = (counts[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    return found, accepted / drafted


@pytest.mark.parametrize(("spec", "length"), [(SMALL, 4), (SMALL, 1), (PAGES, 3), (BY_PAGES, 3)])
def test_tokens_are_those_of_dense_attention(folder, own, spec, length):  # noqa: F811
    """In mixed batches, with prompts in chunks and, the second time, from cached blocks."""
    found, accepted = lossless(folder, spec, length)
    assert found["tokens"] == [own, own]
    assert sum(found["cached"]) > len(PROMPTS)
    assert 0.01 < accepted < 0.98, "some drafts are accepted, and some are not"
    assert found["read"]["keys_read"] == found["read"]["keys_available"] > 0, "verifying passes alone are counted"


def test_drafts_that_read_all_keys_are_accepted(folder, own):  # noqa: F811
    found, accepted = lossless(folder, FULL, 4)
    assert found["tokens"] == [own, own]
    assert accepted > 0.95, "all but those behind an answer's end"


def test_a_preempted_request_goes_on(folder, own):  # noqa: F811
    """Blocks for three requests at a time; the others wait, or come again."""
    found, _ = lossless(folder, SMALL, 4, num_gpu_blocks_override=30)
    assert found["tokens"] == [own, own]


def test_answers_that_end_where_the_model_does_and_rows_that_are_dense(folder, own):  # noqa: F811
    """The longest request has no room left, one asks for dense drafts, and short ones get them."""
    longest = max(map(len, PROMPTS)) + NEW
    job = {"sampling": [{"extra_args": {"foveate": "dense"}} if row == 1 else {} for row in range(len(PROMPTS))]}
    found, accepted = lossless(folder, SMALL, 5, job, dense_below=200, max_model_len=longest)
    assert found["tokens"] == [own, own]
    assert 0.01 < accepted < 0.98


def test_requests_with_a_temperature_get_tokens_of_their_own_seed(folder):  # noqa: F811
    """The same twice, and others than by another seed."""

    def sampled(first):
        sampling = [{"temperature": 0.9, "seed": first + row} for row in range(len(PROMPTS))]
        return lossless(folder, SMALL, 3, {"sampling": sampling})[0]["tokens"]

    (one, two), (other, _) = sampled(11), sampled(111)
    assert one == two
    assert sum(a != b for a, b in zip(one, other)) > len(PROMPTS) // 2

"""Which steps are audited, and what is compared of them; without vLLM."""

from __future__ import annotations

import pytest
import torch

from foveate.integrations.vllm.audit import Share, compared


@pytest.mark.parametrize(("share", "picked"), [(0, 0), (0.001, 2), (0.25, 500), (0.3, 600), (1, 2000)])
def test_a_share_of_the_steps_is_picked_evenly(share, picked):
    own = Share(share)
    found = [own.due() for _ in range(2000)]
    assert sum(found) == picked
    assert max(sum(found[n : n + 20]) for n in range(1980)) <= 20 * share + 1


def test_rows_are_compared_by_the_greedy_token_and_the_divergence():
    dense = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [0.0, 1.0, -torch.inf]])
    given = torch.tensor([[0.0, 2.0, 1.0], [0.0, 3.0, 0.0], [0.0, 1.0, -torch.inf]])
    found = compared(dense, given)
    assert found["agreement"].tolist() == [1, 0, 1]
    p, q = dense[1].double().softmax(0), given[1].double().softmax(0)
    expected = float((p * (p / q).log()).sum())
    torch.testing.assert_close(found["kl"], torch.tensor([0.0, expected, 0.0]))

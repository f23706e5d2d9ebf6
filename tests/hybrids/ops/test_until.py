"""Attention to keys that come and go, against attention written out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foveate.hybrids.ops import attend_until, until
from tests.helpers import LAYOUTS, LargestTensor, assert_close, naive, problem, shapes


def mask_of(gone, queries):
    at = torch.arange(queries)[:, None]
    return (torch.arange(gone.shape[2]) - (gone.shape[2] - queries) <= at) & (at < gone[:, :, None])


@given(shapes(), st.integers(0, 1000), st.sampled_from(LAYOUTS))
def test_every_query_sees_the_keys_that_are_there(shape, seed, layout):
    generator = torch.Generator().manual_seed(seed)
    gone = torch.randint(-2, shape.queries + 3, (shape.batch, shape.kv_heads, shape.keys), generator=generator)
    q, k, v = problem(shape, seed, layout=layout)
    out = attend_until(q, k, v, gone, scaling=0.3, window=seed % 30, retained=seed % 7).out
    assert_close(out, naive(q, k, v, 0.3, mask_of(gone, shape.queries)).out)


def test_blocks_of_queries_are_one_prompt(monkeypatch):
    """No tensor of all pairs exists, whatever the length."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 700, 16), torch.randn(1, 2, 730, 16)
    gone = torch.randint(0, 701, (1, 2, 730))
    whole = attend_until(q, k, k, gone, scaling=0.3).out
    monkeypatch.setattr("foveate.ops._math.SCRATCH_BYTES", 1 << 16)
    with LargestTensor() as largest:
        blocks = attend_until(q, k, k, gone, scaling=0.3).out
    torch.testing.assert_close(blocks, whole)
    assert largest.bytes <= 4 << 16


def test_what_is_refused():
    q, k, gone = torch.zeros(1, 4, 5, 16), torch.zeros(1, 2, 7, 16), torch.zeros(1, 2, 7).long()
    with pytest.raises(ValueError, match=r"k \(1, 2, 4, 16\)"):
        until.attend_until(q, k[:, :, :4], k[:, :, :4], gone[..., :4], scaling=1.0)
    with pytest.raises(ValueError, match="not 0 and -3"):
        until.attend_until(q, k, k, gone, scaling=1.0, retained=-3)

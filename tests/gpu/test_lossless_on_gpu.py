"""Lossless decoding on a GPU: its kernels against references in fp64, and passes that are replayed from CUDA graphs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import foveate
from foveate import ops
from foveate.ops import KV, Logits, dispatch
from foveate.ops.attend import newest
from foveate.ops.retain import reference
from tests.combinations import every_pair
from tests.helpers import left_padded, tiny_model
from tests.problems import in_blocks

pytestmark = pytest.mark.gpu
SPECS = [
    "kascade:top_k=8,min_k=4,anchors=2",
    "kascade_pages:top_k=8,min_k=4,anchors=2,first_layer=pages,page_size=4",
    "pages:top_k=24,page_size=4,rank=2",
    "quest:top_k=24,page_size=4",
    "lessismore:top_k=9,sinks=2",
]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("FOVEATE_KERNELS", raising=False)
    assert {"attend_newest", "put_token"} <= set(dispatch.kernel_status().split(", "))


def draw(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


@every_pair(
    ("dtype", [torch.bfloat16, torch.float16, torch.float32]),
    ("heads", [(3, 3), (12, 2), (8, 1), (32, 4), (64, 8)]),
    ("dim", [64, 80, 128, 256]),
    ("queries", [2, 5, 9, 17]),
    ("number", [61, 4096, 40_001]),
    ("extra", [{}, {"sinks": True}, {"softcap": 3.0}]),
    ("blocks", [False, True]),
)
def test_the_newest_tokens_read_the_keys_up_to_their_own(dtype, heads, dim, queries, number, extra, blocks):
    (num_heads, kv_heads), batch = heads, 3
    q = draw(batch, queries, num_heads, dim, dtype=dtype).transpose(1, 2)
    k, v = (draw(batch, kv_heads, number, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    lengths = torch.tensor([number, queries, number // 2], device="cuda")
    for b, length in enumerate(lengths.tolist()):
        k[b, :, length:] = v[b, :, length:] = float("nan")
    sinks = draw(num_heads, dtype=dtype, seed=3) if extra.get("sinks") else None
    how = {"logits": Logits(dim**-0.5, sinks, extra.get("softcap"))}
    memory, table = (k, v), None
    if blocks:
        *memory, table = in_blocks(k, v, 16)
    found = ops.attend_newest(q, KV(*memory, table, lengths), **how).out
    assert torch.equal(found, ops.attend_newest(q, KV(*memory, table, lengths), **how).out)
    exact = KV(*(x.nan_to_num(0.0).double() for x in (k, v)), lengths=lengths)
    how["logits"] = dataclasses.replace(how["logits"], sinks=None if sinks is None else sinks.double())
    expected = newest.attend_newest(q.double(), exact, **how).out
    tolerance = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 2e-5}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("number", [1, 5, 17])
def test_tokens_are_put(number):
    k, v = (draw(3, number, 4, dim, dtype=torch.bfloat16, seed=dim).transpose(1, 2) for dim in (64, 80))
    slots, found = torch.tensor([7, 0, 80], device="cuda"), []
    for put in (ops.put_token, reference.put_token):
        memory = [torch.zeros(3, 4, 100, x.shape[3], dtype=x.dtype, device="cuda") for x in (k, v)]
        found.append((put(KV(*memory), k, v, slots), *memory))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("length", [1, 4, True])
def test_answers_are_dense_attentions(spec, length):
    """In fp32 to the last token, whether passes run one by one or are replayed."""
    model, batch = tiny_model().cuda(), {name: x.cuda() for name, x in left_padded([60, 41, 9]).items()}
    how = {"max_new_tokens": 120, "min_new_tokens": 120, "do_sample": False, "pad_token_id": 0}
    expected, stats = model.generate(**batch, **how), []
    for graph in (False, True):
        with foveate.attached(model, spec, dense_below=0, lossless=length, cuda_graph=graph):
            assert torch.equal(model.generate(**batch, **how), expected)
            stats.append(foveate.stats(model))
    eager, replayed = stats
    assert replayed.graphs.replayed > 20
    assert replayed.graphs.captured >= (2 if length == 1 else 3)
    if length is not True:  # by time, the length is another in each run
        assert replayed.drafts == eager.drafts
        for one, other in zip(eager.layers, replayed.layers):
            assert one.keys_read_per_step == pytest.approx(other.keys_read_per_step)

"""Kernels that read keys and values in eight bits against themselves and their references over the same numbers."""

import pytest
import torch

from foveate.ops import KV, BlockTable, Logits, PageRecord
from foveate.ops.attend import decode, decode_kernel
from foveate.ops.attend.pooled import attend_pooled
from foveate.ops.block_table import EIGHT_BITS
from foveate.ops.compress import low_rank, low_rank_kernel
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.score import pooled, pooled_kernel

pytestmark = pytest.mark.usefixtures("poisoned")

B, HEADS, KV_HEADS, DIM, BLOCK, LENGTH = 2, 6, 2, 16, 16, 75
LENGTHS = torch.tensor([LENGTH, 40])
SCALES = 0.05, 3.0
"""Of keys and values: what is stored, times this, is what is meant."""


@pytest.fixture(params=[torch.float32, torch.float16])
def problem(request):
    """Queries, blocks in eight bits, the same numbers in the queries' dtype, and a table."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, HEADS, 1, DIM, generator=generator).to(request.param)
    number = B * -(-LENGTH // BLOCK)
    table = BlockTable(torch.randperm(number, generator=generator).int().view(B, -1) + 1, LENGTH)
    kv = torch.randn(number + 1, KV_HEADS, BLOCK, 2 * DIM, generator=generator).mul(20).to(EIGHT_BITS)
    stored = kv[..., :DIM], kv[..., DIM:]
    return q, stored, [x.to(q.dtype) for x in stored], table


def calls(q, k, v, table, kernel):
    """By name, what every verb gives over blocks of keys and values."""
    attend, score = (decode_kernel, pooled_kernel) if kernel else (decode, pooled)
    pooling = decode_kernel.attend_pooled if kernel else attend_pooled
    generator = torch.Generator().manual_seed(1)
    indices = torch.stack([torch.randperm(40, generator=generator)[:20] for _ in range(B * KV_HEADS)])
    indices = indices.view(B, KV_HEADS, 20).int()
    pages = torch.tensor([[[0, 2, 8], [1, 3, 4]], [[0, 1, -1], [2, 4, -1]]], dtype=torch.int32)
    logits = Logits(0.3 * SCALES[0])
    how, kv, shorter = {"logits": logits}, KV(k, v, table), KV(k, v, table, LENGTHS)
    found = {
        "attend": attend.attend(q, shorter, need_lse=True, **how),
        "indices": attend.attend_indices(q, kv, indices, need_lse=True, **how),
        "whole": attend.attend_indices(q, kv, indices, whole=torch.tensor([0, 33]), need_lse=True, **how),
        "pages": attend.attend_pages(q, shorter, pages, 8, need_lse=True, **how),
        "pooled": pooling(q, shorter, **how),
    }
    found = {f"{name} {part}": x for name, one in found.items() for part, x in zip(("out", "lse", "mass"), one)}
    found["mass"] = score.pooled_mass(q, shorter, **how)
    found["mass of pages"] = score.pooled_mass_of_pages(q, shorter, pages, 8, **how)
    there = torch.arange(LENGTH) < LENGTHS[:, None, None]
    cut = {name: x for name, x in found.items() if x is not None}
    for name in ("mass", "pooled mass"):  # after a row's keys it may be anything
        cut[name] = cut[name].where(there, 0)
    return cut


def test_they_are_read_as_the_same_numbers_in_more_bits(problem):
    q, stored, same, table = problem
    found, expected = (calls(q, *memory, table, kernel=True) for memory in (stored, same))
    assert found.keys() == expected.keys()
    assert len(found) == 13
    for name, x in found.items():
        assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize(("dim", "rest"), [(DIM, 1), (24, 0), (24, 1)], ids=["odd rows", "masked", "masked, odd rows"])
def test_values_of_any_width_and_stride(dim, rest):
    """Values that cannot be read in pairs, and pairs beyond the last dimension."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, HEADS, 1, dim, generator=generator).half()
    table = BlockTable(torch.arange(B * -(-LENGTH // BLOCK), dtype=torch.int32).view(B, -1), LENGTH)
    kv = torch.randn(table.table.numel(), KV_HEADS, BLOCK, 2 * dim + rest, generator=generator).to(EIGHT_BITS)
    k, v = kv[..., :dim], kv[..., dim : 2 * dim]
    kv, how = KV(k, v, table, LENGTHS), {"logits": Logits(0.3)}
    found = decode_kernel.attend(q, kv, **how).out
    torch.testing.assert_close(found, decode.attend(q, kv, **how).out, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("size", [1.0, 1e30, 1e-30])
def test_queries_in_bf16_of_any_size(size):
    """Which fp16 could not hold."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, HEADS, 1, DIM, generator=generator).mul(size).bfloat16()
    table = BlockTable(torch.arange(B * -(-LENGTH // BLOCK), dtype=torch.int32).view(B, -1), LENGTH)
    kv = torch.randn(table.table.numel(), KV_HEADS, BLOCK, 2 * DIM, generator=generator).to(EIGHT_BITS)
    k, v = kv[..., :DIM], kv[..., DIM:]
    how, exact = {"logits": Logits(0.3 / size), "need_lse": True}, KV(k.float(), v.float(), table, LENGTHS)
    found, meant = decode_kernel.attend(q, KV(k, v, table, LENGTHS), **how), decode.attend(q.float(), exact, **how)
    torch.testing.assert_close(found.out.float(), meant.out, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(found.lse, meant.lse, rtol=1e-3, atol=1e-3)


def test_references_read_them_alike(problem):
    q, stored, _, table = problem
    found, expected = (calls(q, *stored, table, kernel) for kernel in (True, False))
    for name, x in found.items():
        tolerance = 2e-4 if q.dtype == torch.float32 else 2e-3
        torch.testing.assert_close(x, expected[name], rtol=10 * tolerance, atol=tolerance, msg=name)


def test_scales_belong_to_the_logits_and_the_output(problem):
    q, stored, _, table = problem
    (k, v), what = [x.float() * scale for x, scale in zip(stored, SCALES)], calls(q, *stored, table, kernel=True)
    meant = decode.attend(q.float(), KV(k, v, table, LENGTHS), logits=Logits(0.3)).out
    torch.testing.assert_close(what["attend out"].float() * SCALES[1], meant, rtol=2e-3, atol=0.05)


@pytest.mark.parametrize("page_size", [4, 8])
def test_summaries_are_those_of_the_same_numbers(page_size):
    generator, form = torch.Generator().manual_seed(0), PageRecord(DIM, page_size, 2, 4)
    keys = torch.randn(5, KV_HEADS, BLOCK, 2 * DIM, generator=generator).to(EIGHT_BITS)[..., :DIM]
    slots, found = torch.tensor([page_size - 1, -1, 3 * BLOCK + 2 * page_size - 1, 7]), []
    for memory, module in ((keys, low_rank_kernel), (keys.float(), low_rank_kernel), (keys, low_rank)):
        records = torch.zeros(5, KV_HEADS, BLOCK // page_size, form.bytes, dtype=torch.uint8)
        module.compress_written(memory, records, slots, form)
        found.append(records)
    assert torch.equal(found[0], found[1])
    assert found[0].any()
    factors = [low_rank.factors(one[found[0].any(-1)], form) for one in (found[0], found[2])]
    torch.testing.assert_close(factors[0].mean, factors[1].mean)


def test_without_blocks_they_are_refused(problem):
    q, stored, _, _ = problem
    k, v = (x[:B] for x in stored)
    with pytest.raises(UnsupportedError, match=r"queries in torch\.float.* with keys in torch\.float8_e4m3fn"):
        decode_kernel.attend(q, KV(k, v), logits=Logits(0.3))
    with pytest.raises(UnsupportedError, match=r"with keys in torch\.float8_e4m3fn"):
        pooled_kernel.pooled_mass(q, KV(k), logits=Logits(0.3))

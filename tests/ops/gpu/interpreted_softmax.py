"""The online softmax and the merge of parts against a softmax over everything, under Triton's interpreter."""

import pytest
import torch
import triton
import triton.language as tl

from foveate.ops.gpu.softmax import LOG2E, LOWEST, log_sum_exp, merge, normalised, online, store_part

ROWS, KEYS, DIM, BLOCK, PARTS = 16, 64, 16, 16, 4


@triton.jit
def attend_parts(
    logit_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    blocks,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    NATURAL: tl.constexpr,
):
    """A part of ``blocks`` blocks of keys for each program: ``out [parts, ROWS, DIM]``, ``lse [parts, ROWS]``."""
    row, dim, lane = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, BLOCK)
    top, weight = tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM], tl.float32)
    for block in tl.range(tl.program_id(0) * blocks, (tl.program_id(0) + 1) * blocks):
        key = block * BLOCK + lane
        logits = tl.load(logit_ptr + row[:, None] * KEYS + key[None, :]) * LOG2E
        v = tl.load(v_ptr + key[:, None] * DIM + dim[None, :])
        top, weight, out = online(logits, v, top, weight, out)
    place = tl.program_id(0) * ROWS + row
    store_part(out_ptr, lse_ptr, place, row < ROWS, top, weight, out, DIM, NATURAL)


@triton.jit
def merge_all(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """Merges the parts of all rows at once, or (``SINGLE``) of a row for each program, two at a time."""
    dim = tl.arange(0, DIM)
    if SINGLE:
        row = tl.program_id(0)
        top, weight, out = tl.full([], LOWEST, tl.float32), 0.0, tl.zeros([DIM], tl.float32)
        for first in tl.static_range(0, PARTS, 2):
            part = first + tl.arange(0, 2)
            at = part * ROWS + row
            found = tl.load(part_ptr + at[:, None] * DIM + dim[None, :])
            top, weight, out = merge(found, tl.load(part_lse_ptr + at), top, weight, out)
        tl.store(out_ptr + row * DIM + dim, normalised(weight, out))
        tl.store(lse_ptr + row, log_sum_exp(top, weight, NATURAL=True))
    else:
        row = tl.arange(0, ROWS)
        top, weight = tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32)
        out = tl.zeros([ROWS, DIM], tl.float32)
        for first in tl.static_range(0, PARTS, 2):
            part = first + tl.arange(0, 2)
            at = part[:, None] * ROWS + row[None, :]
            found = tl.load(part_ptr + at[:, :, None] * DIM + dim[None, None, :])
            top, weight, out = merge(found, tl.load(part_lse_ptr + at), top, weight, out)
        store_part(out_ptr, lse_ptr, row, row < ROWS, top, weight, out, DIM, NATURAL=True)


def problem(loudness):
    """Logits of which some are -inf: of single keys, of whole parts, and of a whole row."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, KEYS, generator=generator) * loudness
    logits = logits.masked_fill(torch.rand(ROWS, KEYS, generator=generator) < 0.2, float("-inf"))
    logits[1, : KEYS // PARTS] = float("-inf")
    logits[2, KEYS // PARTS :] = float("-inf")
    logits[3] = float("-inf")
    return logits, torch.randn(KEYS, DIM, generator=generator)


def expected(logits, v):
    """By fp64: zeros and -inf for the row of no keys."""
    return logits.double().softmax(-1).nan_to_num(0.0) @ v.double(), logits.double().logsumexp(-1)


@pytest.mark.parametrize("loudness", [1.0, 30.0, 1000.0])
def test_blocks_in_turn_are_one_softmax(loudness):
    logits, v = problem(loudness)
    out, lse = torch.full((ROWS, DIM), torch.nan), torch.full((ROWS,), torch.nan)
    attend_parts[(1,)](logits, v, out, lse, KEYS // BLOCK, ROWS, KEYS, DIM, BLOCK, NATURAL=True)
    for mine, its in zip((out, lse), expected(logits, v)):
        torch.testing.assert_close(mine.double(), its, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loudness", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("single", [False, True])
def test_merged_parts_are_one_softmax(loudness, single):
    logits, v = problem(loudness)
    parts, lses = torch.full((PARTS, ROWS, DIM), torch.nan), torch.full((PARTS, ROWS), torch.nan)
    attend_parts[(PARTS,)](logits, v, parts, lses, KEYS // BLOCK // PARTS, ROWS, KEYS, DIM, BLOCK, NATURAL=False)
    out, lse = torch.full((ROWS, DIM), torch.nan), torch.full((ROWS,), torch.nan)
    merge_all[(ROWS if single else 1,)](parts, lses, out, lse, ROWS, DIM, PARTS, SINGLE=single)
    for mine, its in zip((out, lse), expected(logits, v)):
        torch.testing.assert_close(mine.double(), its, rtol=1e-5, atol=1e-4)

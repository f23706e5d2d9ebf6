"""Top-k of rows that fit into registers whole: a Triton kernel, and the function by which kernels of longer rows choose
from short ones."""

import triton
import triton.language as tl

from foveate.ops.select.kth_kernel import (
    LOWEST,
    above_all,
    choose,
    count_valid,
    find_kth,
    put,
    put_end,
    row_of,
    scores_of,
)

VARYING = ["stride_b", "stride_h", "heads", "number", "k", "length_stride"]
"""What changes from step to step, or from batch to batch: no reason to compile anew."""


@triton.jit(do_not_specialize=VARYING)
def topk_of_short_rows(
    score_ptr,
    stride_b, stride_h,
    count_ptr, count_stride, length_ptr, length_stride, found_ptr,
    heads, number, k,
    VECTOR: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """The k largest of short rows: writes ``found [rows, k]``, ascending and then -1. A program owns a row, the scores
    of one head in one row of the batch, and reads it once."""
    row = tl.program_id(0).to(tl.int64)
    score_ptr, number, allowed = row_of(
        score_ptr, stride_b, stride_h, count_ptr, count_stride, length_ptr, length_stride, row, heads, number, k, VECTOR
    )
    choose_of_short_row(score_ptr, number, allowed, found_ptr + row * k, k, VECTOR, HELD)


@triton.jit
def choose_of_short_row(score_ptr, number, allowed, found_ptr, k, VECTOR: tl.constexpr, HELD: tl.constexpr):
    """Writes ``found [k]`` of one row of at most ``HELD`` scores, which are all in registers.

    Shapes: N = HELD scores.
    """
    # 1. Load the row.
    index = tl.arange(0, HELD)  # [N]
    x = scores_of(score_ptr, index, number, VECTOR)  # [N]

    # 2. Find the k-th largest score.
    valid = count_valid(x)
    kth, room, crowded = find_kth(x, allowed, LOWEST + 1, valid, above_all(x))

    # 3. Write the indices of the chosen scores, ascending, and -1 behind them.
    chosen, _ = choose(x, kth, room, crowded, 0)  # [N]
    put(found_ptr, 0, index, chosen)
    put_end(found_ptr, tl.minimum(valid, allowed), k, 1024)

"""How much attention a page's keys hold, by its low-rank summary."""

import torch
from torch import Tensor

from foveate.ops._math import block_length, capped, first_keys, matmul_fp32
from foveate.ops.compress.low_rank import PageRecord, factors


def page_lse(
    rows: Tensor,
    records: Tensor,
    form: PageRecord,
    scaling: float,
    *,
    weights: Tensor | None = None,
    lengths: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Log-sum-exp of the logits of each page's keys as its summary approximates them: the log of the page's mass.

    The logit of a key is ``scaling * (q . mean + sum_i (q . direction_i) coefficient_i)``.

    Args:
        rows: ``[B, Hkv, G, D]``, the queries of a group.
        records: uint8 ``[B, Hkv, P, form.bytes]`` of :func:`~foveate.ops.compress_pages`; read through their strides.
        weights: fp32 ``[B, Hkv, D]``, powers of two: what the keys were multiplied by, and queries are divided by.
        lengths: int ``[B]`` or ``[B, Hkv]``: only the first so many pages are there, the others may hold anything;
            None: all are.
        softcap: the cap of logits, see :func:`~foveate.ops.key_logits`.

    Returns:
        fp32 ``[B, Hkv, G, P]``; -inf where no page is.

    Raises:
        ValueError: for records of another form, or records or weights that do not fit the queries.
    """
    form.check(records, rows, weights)
    rows = rows.float() if weights is None else rows.float() / weights[:, :, None]
    number = records.shape[2]
    found = rows.new_empty(*rows.shape[:3], number, dtype=torch.float32)
    step = block_length(8 * rows.shape[:3].numel() * form.page_size, number)
    for first in range(0, number, step):
        held = factors(records[:, :, first : first + step], form)
        middle = matmul_fp32(rows, held.mean.mT)
        along = matmul_fp32(rows, held.directions.flatten(2, 3).mT).unflatten(-1, (-1, form.rank))
        logits = middle[..., None] + (along[..., None] * held.coefficients[:, :, None]).sum(-2)
        found[..., first : first + step] = capped(logits.mul_(scaling), softcap).logsumexp(-1)
    if lengths is not None:
        found.masked_fill_(~first_keys(lengths, number)[:, :, None], float("-inf"))
    return found

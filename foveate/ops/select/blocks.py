"""Top-k of long rows of scores, for which the maximum of each block of scores is known."""

import torch
from torch import Tensor

from foveate.ops.select.reference import topk


def topk_of_blocks(
    scores: Tensor, maxima: Tensor, visible: Tensor, k: int, block: int, starts: Tensor | None = None
) -> Tensor:
    """The k largest scores of each row, ties to the smaller index.

    Args:
        scores: fp32 ``[B, S, T]``; -inf is never chosen.
        maxima: fp32 ``[B, S, ceil(T / block)]``: the largest score in each block, over the keys that the row may
        choose. visible: int64 ``[S]``: a row may choose among this many keys, from the first on.
        k: how many keys to choose.
        block: scores that share one maximum, a power of two.
        starts: int64 ``[B]``: the first key that the rows of a batch entry may choose; None: 0. The maxima of earlier
            blocks are -inf.

    Returns:
        int32 ``[B, S, k]``: indices, ascending, and then -1 if a row has fewer than k.

    Raises:
        ValueError: if scores that may be chosen are NaN. A GPU does not check this; the code that computed the scores
            knows it.
    """
    del maxima, block  # what can be known of a block without reading it is of use to the kernel alone
    number = scores.shape[-1]
    if not number:
        return torch.full((*scores.shape[:2], k), -1, dtype=torch.int32, device=scores.device)
    keys = torch.arange(number, device=scores.device)
    unseen = keys >= visible[:, None]
    if starts is not None:
        unseen = unseen | (keys < starts[:, None, None])
    found = topk(scores.masked_fill(unseen, float("-inf")), k).to(torch.int32)
    return torch.nn.functional.pad(found, (0, k - found.shape[-1]), value=-1)

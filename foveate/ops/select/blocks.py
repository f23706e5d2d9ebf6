"""Top-k of long rows of scores whose blocks have known maxima."""

import torch
from torch import Tensor

from foveate.ops.select.reference import topk


def topk_of_blocks(scores: Tensor, maxima: Tensor, visible: Tensor, k: int, block: int) -> Tensor:
    """The k largest scores of each row, ties to the smaller index.

    Args:
        scores: fp32 ``[B, S, T]``; -inf is never chosen.
        maxima: fp32 ``[B, S, ceil(T / block)]``: the largest score of each block among those that the row may choose.
        visible: int64 ``[S]``: how many keys, from the first on, a row may choose from.
        k: how many to choose.
        block: scores that have one maximum, a power of two.

    Returns:
        int32 ``[B, S, k]``: indices, ascending, and -1 where there are fewer.

    Raises:
        ValueError: when scores that may be chosen are NaN (on a GPU the caller looks at the maxima).
    """
    del maxima, block  # what can be known of a block without reading it is of use to the kernel alone
    number = scores.shape[-1]
    if not number:
        return torch.full((*scores.shape[:2], k), -1, dtype=torch.int32, device=scores.device)
    unseen = torch.arange(number, device=scores.device) >= visible[:, None]
    found = topk(scores.masked_fill(unseen, float("-inf")), k).to(torch.int32)
    return torch.nn.functional.pad(found, (0, k - found.shape[-1]), value=-1)

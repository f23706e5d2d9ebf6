"""Token compression: gated sums over windows, optionally overlapping with the window before (DeepSeek-V4)."""

from typing import NamedTuple

import torch
from torch import Tensor


class Carry(NamedTuple):
    """State that one call of :func:`compress_tokens` hands to the next."""

    values: Tensor
    """``[B, n, W]``: tokens of the last, incomplete window."""
    gates: Tensor
    """``[B, n, W]``: their gates."""
    before: tuple[Tensor, Tensor] | None
    """Values and gates ``[B, ratio, D]`` of the first series of the last complete window; the gates are -inf before the
    first window is complete. None without overlap."""


def compress_tokens(
    values: Tensor, gates: Tensor, bias: Tensor, *, overlap: bool, carry: Carry | None = None
) -> tuple[Tensor, Carry]:
    """Compress every ``ratio`` tokens into one entry: ``C_w = Σ_j softmax_j(Z_j + B_j) ⊙ V_j``, per dimension.

    Without overlap j runs over the tokens of window w. With overlap a token has two series of D dimensions each, and j
    runs over the first series of window w - 1 and the second of window w; window 0 has only the second.

    Args:
        values: ``[B, L, W]``: the new tokens; W is D, or 2 D with overlap.
        gates: ``[B, L, W]``.
        bias: ``[ratio, W]``: added to the gates, by position in the window.
        overlap: whether windows overlap, as described above.
        carry: state returned by the previous call, or None at the first token.

    Returns:
        ``[B, n, D]`` for the n windows completed by this call, in the dtype of ``values`` (softmax and sum in fp32),
        and the state for the next call. However a sequence is split into calls, the entries are the same.

    Raises:
        ValueError: for shapes that do not agree, tensors that are not floating, and a carry of another batch size or
            width, or made with the other ``overlap``.
    """
    _check(values, gates, bias, overlap, carry)
    ratio, width = bias.shape
    if carry is not None:
        values, gates = torch.cat([carry.values, values], 1), torch.cat([carry.gates, gates], 1)
        before = carry.before
    elif overlap:
        shape, dtype = (values.shape[0], ratio, width // 2), torch.promote_types(gates.dtype, bias.dtype)
        before = values.new_zeros(shape), gates.new_full(shape, float("-inf"), dtype=dtype)
    else:
        before = None
    count = values.shape[1] // ratio
    left = Carry(values[:, count * ratio :], gates[:, count * ratio :], before)
    if not count:
        return values.new_zeros(values.shape[0], 0, width // 2 if overlap else width), left
    windows = values[:, : count * ratio].unflatten(1, (count, ratio))
    scores = gates[:, : count * ratio].unflatten(1, (count, ratio)) + bias
    if overlap:
        (first, windows), (first_scores, scores) = windows.chunk(2, -1), scores.chunk(2, -1)
        left = left._replace(before=(first[:, -1], first_scores[:, -1]))
        windows = torch.cat([torch.cat([before[0][:, None], first[:, :-1]], 1), windows], 2)
        scores = torch.cat([torch.cat([before[1][:, None], first_scores[:, :-1]], 1), scores], 2)
    entries = (windows.float() * scores.float().softmax(2)).sum(2)
    return entries.to(values.dtype), left


def _check(values: Tensor, gates: Tensor, bias: Tensor, overlap: bool, carry: Carry | None) -> None:
    if bias.dim() != 2 or not bias.numel():
        raise ValueError(f"bias must be [ratio, W] with both of at least 1, not {list(bias.shape)}")
    ratio, width = bias.shape
    if values.dim() != 3 or values.shape != gates.shape or values.shape[2] != width or (overlap and width % 2):
        raise ValueError(
            f"values {list(values.shape)}, gates {list(gates.shape)} and bias {list(bias.shape)} do not fit"
            + (" two series" if overlap else "")
        )
    for name, x in (("values", values), ("gates", gates), ("bias", bias)):
        if not x.is_floating_point():
            raise ValueError(f"{name} must be floating, not {x.dtype}")
    if carry is None:
        return
    batch, (tokens, gates_of_tokens, before) = values.shape[0], carry
    if (before is not None) != overlap:
        raise ValueError(f"carry must be of a call with overlap={overlap}, as this one, not {not overlap}")
    shape = batch, tokens.shape[1] if tokens.dim() == 3 else None, width
    if tokens.shape != shape or gates_of_tokens.shape != shape:
        raise ValueError(
            f"carry must hold tokens [{batch}, n, {width}], not {list(tokens.shape)} and {list(gates_of_tokens.shape)}"
        )
    shape = batch, ratio, width // 2
    if overlap and any(x.shape != shape for x in before):
        raise ValueError(f"carry must hold a window {list(shape)}, not {[list(x.shape) for x in before]}")

"""What attention returns, and learned sinks as its arguments have them."""

from typing import NamedTuple

from torch import Tensor


class Attended(NamedTuple):
    """What :func:`attend` and its relatives return. A field that the caller did not ask for is None."""

    out: Tensor
    """``[B, Hq, Lq, Dv]``, in the dtype of q."""
    lse: Tensor | None = None
    """``[B, Hq, Lq]`` fp32: log-sum-exp of the logits, scaled and capped. A query that saw no key has -inf here, and
    the output 0."""
    mass: Tensor | None = None
    """``[B, Hkv, Lk]`` fp32: softmax probability summed over the queries and over the heads of the group."""

    def into(self, out: Tensor | None) -> "Attended":
        """The same result with its output copied to ``out``; with None the result itself."""
        return self if out is None else self._replace(out=out.copy_(self.out))


def rows_of_heads(logits: Tensor, num_kv_heads: int, length: int) -> Tensor:
    """A logit of each query head, ``[Hq]``, for the rows of :func:`fold_group`: fp32 ``[1, Hkv, G * Lq, 1]``."""
    return logits.float().repeat_interleave(length).view(1, num_kv_heads, -1, 1)

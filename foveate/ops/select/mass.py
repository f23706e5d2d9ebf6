"""How many nodes to take: in the order of their mass, until the rest is small enough."""

from torch import Tensor

from foveate.ops.checks import check_share


def by_mass(mass: Tensor, rest: float) -> tuple[Tensor, Tensor]:
    """As many of the heaviest as leave at most ``rest`` out (top-p).

    Args:
        mass: fp32 ``[B, Hkv, N]``, >= 0: shares of the attention.
        rest: largest sum of the masses not taken, 0 to 1.

    Returns:
        ``(order [B, Hkv, N], counts [B, Hkv])``: heaviest first, ties to the smaller index, and how many of them.

    Raises:
        ValueError: for a rest that is no share.
    """
    check_share("rest", rest)
    ordered, order = mass.sort(dim=-1, descending=True, stable=True)
    left = ordered.flip(-1).cumsum(-1).flip(-1)
    return order, (left > rest).sum(-1)

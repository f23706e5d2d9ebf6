"""Attention of one query a row over all keys, and how much each of them got of it."""

from torch import Tensor

from foveate.ops.attend.attended import Attended
from foveate.ops.attend.decode import attend
from foveate.ops.kv import KV
from foveate.ops.logits import Logits
from foveate.ops.score.pooled import pooled_mass


def attend_pooled(
    q: Tensor,
    kv: KV,
    *,
    logits: Logits,
    pooling: str = "post_softmax",
    pool: str = "kv_head",
    out: Tensor | None = None,
) -> Attended:
    """Attention over all keys, with its log-sum-exp, and their scores as :func:`pooled_mass` has them.

    What Kascade's first layer does (Kascade, section 3.1), which reads all keys and chooses for others.

    Args:
        q: ``[B, Hq, 1, D]``.
        kv, logits, out: see :func:`attend`.
        pooling, pool: see :func:`pooled_mass`.

    Returns:
        ``out [B, Hq, 1, Dv]``, ``lse [B, Hq, 1]`` and ``mass``, fp32 ``[B, Hkv, N]``, ``[B, 1, N]`` of a whole layer.

    Raises:
        ValueError: for a pooling or a pool that there is not.
    """
    k, v = kv.in_one_piece(q)
    kv = KV(k, v, lengths=kv.lengths)
    scores = pooled_mass(q, kv, logits=logits, pooling=pooling, pool=pool)
    return attend(q, kv, logits=logits, need_lse=True, out=out)._replace(mass=scores)

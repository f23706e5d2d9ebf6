"""Attention of one query a row over all keys, with the share of the attention that each key gets."""

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
    """Attention over all keys, with its log-sum-exp and with scores of the keys as :func:`pooled_mass` computes them.

    Kascade's first layer uses it (Kascade, section 3.1): the layer reads all keys and chooses keys for other layers.

    Args:
        q: ``[B, Hq, 1, D]``.
        kv, logits, out: see :func:`attend`.
        pooling, pool: see :func:`pooled_mass`.

    Returns:
        ``out [B, Hq, 1, Dv]``, ``lse [B, Hq, 1]`` and ``mass``, fp32 ``[B, Hkv, N]``, or ``[B, 1, N]`` with
        ``pool="layer"``.

    Raises:
        ValueError: for an unknown ``pooling`` or ``pool``.
    """
    k, v = kv.in_one_piece(q)
    kv = KV(k, v, lengths=kv.lengths)
    scores = pooled_mass(q, kv, logits=logits, pooling=pooling, pool=pool)
    return attend(q, kv, logits=logits, need_lse=True, out=out)._replace(mass=scores)

"""Attention of one query a row over all keys, and how much each of them got of it."""

from torch import Tensor

from foveate.ops.attend.attended import Attended
from foveate.ops.attend.decode import attend
from foveate.ops.block_table import BlockTable
from foveate.ops.score.pooled import pooled_mass


def attend_pooled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    lengths: Tensor | None = None,
    sink_logits: Tensor | None = None,
    softcap: float | None = None,
    pooling: str = "post_softmax",
    pool: str = "kv_head",
    block_table: BlockTable | None = None,
) -> Attended:
    """Attention over all keys, with its log-sum-exp, and their scores as :func:`pooled_mass` has them.

    What Kascade's first layer does (Kascade, section 3.1), which reads all keys and chooses for others.

    Args:
        q: ``[B, Hq, 1, D]``.
        k, v: ``[B, Hkv, N, D]`` and ``[B, Hkv, N, Dv]``; read through their strides.
        scaling: factor of the logits.
        lengths: see :func:`pooled_mass`.
        sink_logits, softcap, block_table: see :func:`attend`.
        pooling, pool: see :func:`pooled_mass`.

    Returns:
        ``out [B, Hq, 1, Dv]``, ``lse [B, Hq, 1]`` and ``mass``, fp32 ``[B, Hkv, N]``, ``[B, 1, N]`` of a whole layer.

    Raises:
        ValueError: for a pooling or a pool that there is not.
    """
    if block_table is not None:
        k, v = block_table.gather(q, k, v)
    how = {"scaling": scaling, "lengths": lengths, "sink_logits": sink_logits, "softcap": softcap}
    scores = pooled_mass(q, k, pooling=pooling, pool=pool, **how)
    return attend(q, k, v, need_lse=True, **how)._replace(mass=scores)

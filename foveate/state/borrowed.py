"""Caches over contiguous memory that is not their own: the keys of one pass, a prompt that another cache has read."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor

from foveate.ops import Logits
from foveate.state.cache import SlotCache
from foveate.state.channels import buffer
from foveate.state.contiguous import Contiguous
from foveate.state.counters import Counters
from foveate.state.description import Channel, Evicts, Geometry, RowNumber


def cache_of(
    k: Tensor,
    v: Tensor,
    num_heads: int,
    forward: dict[Hashable, Any] | None = None,
    row: int | None = None,
    logits: Logits | None = None,
) -> SlotCache:
    """A cache over given keys and values, not copied, for a forward pass without a cache (training).

    Args:
        k, v: ``[B, Hkv, L, D(v)]``.
        num_heads: query heads.
        forward: shared by the layers of the pass, see :meth:`SlotCache.shared_key`.
        row: index of the row when a padded batch is computed row by row; None: the whole batch.
        logits: how the layer's logits are made, as far as that is not their scaling; None: without sinks and cap.
    """
    cache = SlotCache(Geometry(num_heads, k.shape[1], k.shape[3], v.shape[3]), k.shape[0], k.dtype, k.device)
    cache.forward, cache._row = {} if forward is None else forward, row
    if logits is not None:
        cache.sink_logits, cache.softcap = logits.sinks, logits.softcap
    cache.store = Contiguous.over(cache.store.shape, k, v)
    cache.capacity = k.shape[2]
    cache._advance(k.shape[2], k.shape[2])
    return cache


def branch_of(
    cache: SlotCache,
    channels: Mapping[str, Channel | RowNumber],
    evicts: Evicts,
    counters: Counters,
    filled: Mapping[str, str],
) -> SlotCache:
    """A cache of the same tokens for another method, which shares the memory of keys and values.

    A branch writes its new tokens to the slots after the shared ones, and so does the next branch: use one at a time. A
    branch that evicts in decode copies keys and values before it overwrites them.

    Args:
        channels, evicts, counters: of the other method.
        filled: channels to copy: for each name in the branch, the name in the cache. Others are empty.
    """
    one = SlotCache(cache.geometry, cache.batch_size, cache.dtype, cache.device, channels, evicts, counters)
    one.rows = one.rows | {name: list(cache.rows[name]) for name in one.rows if name not in one.own_numbers}
    one.capacity, one.store = cache.capacity, cache.store.shared()
    one.sink_logits, one.softcap, one.rotary = cache.sink_logits, cache.softcap, cache.rotary
    for name, spec in one._slot_specs().items():
        one.tensors[name] = buffer(name, spec, cache.store.shape, cache.capacity)
    for name, here in filled.items():
        one.tensors[name].copy_(cache.tensors[here])
    if evicts:
        one.tensors["positions"][:, :, : cache.used] = cache.positions
    one._count_bytes()
    return one

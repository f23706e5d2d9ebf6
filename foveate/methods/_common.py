"""Functions that several methods share."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foveate import ops
from foveate.methods.base import setting
from foveate.ops.checks import check_number
from foveate.state import SlotCache


def eviction_setting() -> Any:
    """The setting ``evict_every``, for methods with dense prompts that evict when a prompt ends."""
    return setting(0, "evict also after so many tokens of a prompt, each time by what was read so far; 0: never")


def occupied(cache: SlotCache) -> Tensor | None:
    """bool ``[B, Hkv or 1, used]``, True where a slot holds a token; None when every slot holds one."""
    mask, lengths = cache.stored()
    return mask if lengths is None else ops.first_keys(lengths, cache.used)


def scored_lengths(cache: SlotCache) -> Tensor | None:
    """The number of keys scored in each row, int64 ``[B]``: 0 for a row that reads all keys. None: all keys are
    scored."""
    return None if cache.stored()[1] is None else cache.plan.for_sparse_rows(operator.pos, of="counts")


def recent(cache: SlotCache, window: int) -> Tensor:
    """bool ``[B, Hkv or 1, used]``: the slots whose tokens are among the last ``window`` of their row.

    A row with fewer than ``window`` tokens has True in its empty slots, too; ``cache.stored()`` tells them apart.
    """
    return cache.positions >= cache.plan.per_row(operator.sub, window)[:, None, None]


def newest_slots(cache: SlotCache) -> Tensor:
    """The slot of each row's newest token in a decode step, int64 ``[B, Hkv, 1]``."""
    if cache.evicts.in_decode:  # in a slot that an evicted token has left, or the last one
        newest = cache.positions == (cache.plan["lengths"] - 1)[:, None, None]
        return newest.to(torch.uint8).argmax(-1, keepdim=True)
    return (cache.plan["counts"] - 1)[:, None, None].expand(-1, cache.geometry.num_kv_heads, 1)


def note_queries(cache: SlotCache, q: Tensor, window: int) -> None:
    """Keep the last ``window`` queries of a prompt in the channel ``queries [B, Hq, window, D]``."""
    queries, new = cache.channel("queries"), q[:, :, -window:]
    kept = queries[:, :, new.shape[2] :].clone()  # older queries that stay, and move to the front
    queries[:, :, : kept.shape[2]] = kept
    queries[:, :, kept.shape[2] :] = new


def observed_mass(cache: SlotCache, window: int, scaling: float) -> tuple[Tensor | None, int]:
    """The attention of a prompt's last ``window`` queries, or of all queries of a turn with fewer.

    Returns:
        The mass that each of these queries gives to each slot, summed over the queries, fp32 ``[B, Hq, used]``, and the
        number of queries. The mass is None when the turn has no tokens.
    """
    observing = min(window, cache.rows["observed"][0])
    if not observing:
        return None, 0
    queries = cache.channel("queries")[:, :, window - observing :]
    how = {"offset": cache.used - observing, "mask": cache.positions >= 0 if cache.uneven else None}
    return ops.query_mass(queries, ops.KV(cache.keys), logits=cache.logits(scaling), **how), observing


def window_votes(cache: SlotCache, window: int, scaling: float) -> Tensor | None:
    """The attention of a prompt's last ``window`` queries to the tokens before the window, fp32
    ``[B, Hq, used - window]``; None when the turn has no tokens."""
    mass, observing = observed_mass(cache, window, scaling)
    return mass[:, :, : cache.used - window] if observing else None


def keep_heavy(cache: SlotCache, scores: Tensor, allowed: int, window: int, sinks: int = 0) -> Tensor | None:
    """The slots to keep when a prompt ends, ``allowed`` for each KV head, int64 ``[B, Hkv, allowed]``; None: all slots.

    They are the first ``sinks`` tokens, the last ``window`` tokens, and the tokens with the best ``scores``, fp32
    ``[B, Hkv, used]``, among the others. Raises ValueError when ``allowed`` is less than window and sinks.
    """
    if cache.used <= allowed:
        return None
    check_number("allowed", allowed, window + sinks)
    always = recent(cache, window)
    if sinks:
        always = always | ((cache.positions >= 0) & (cache.positions < sinks))
    return ops.keep_best(scores, allowed, always)


def estimated_attention(cache: SlotCache, rows: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """The attention that query rows give to stand-ins for the cached keys: fp32 ``[B, Hkv, G, used]``; 0 in empty
    slots.

    Args:
        rows: fp32 ``[B, Hkv, G, any]``, one for each query head of a GQA group.
        keys: fp32 ``[B, Hkv, used, any]``, one stand-in for each slot, such as a quantized copy of its key.
    """
    logits = ops.key_logits(rows, keys, cache.logits(scaling))
    logits = logits.masked_fill((cache.positions < 0)[:, :, None], -torch.inf).flatten(1, 2)[:, :, None]
    mass = ops.with_sinks(ops.Attended(logits.softmax(3), logits.logsumexp(3)), cache.sink_logits).out
    return mass.view(*rows.shape[:3], -1)


def evict_weakest(
    cache: SlotCache, scores: Tensor | Callable[[Tensor], Tensor], over: Callable[..., Any], window: int
) -> None:
    """Evict the weakest token outside the window from every row that holds more tokens than it may.

    Args:
        scores: fp32 ``[B, Hkv, used]``, or a function that computes them from the tokens' positions, int32
            ``[B, Hkv, used]``.
        over: given the number of tokens that a row holds and its length, says whether the row holds too many. It takes
            ints, or int64 tensors with an element for each row.
        window: the newest tokens of a row, which are never evicted.
    """
    rows = cache.plan.where(over)
    if rows is not None:
        before = cache.plan.per_row(operator.sub, window) if window > 0 else None
        cache.evict(rows, scores=scores(cache.positions) if callable(scores) else scores, before=before)

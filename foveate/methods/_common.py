"""What several methods do alike."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foveate import ops
from foveate.methods.base import Method, setting
from foveate.ops.checks import check_number
from foveate.state import SlotCache


def eviction_setting() -> Any:
    """The setting ``evict_every``, for methods with dense prompts that evict when a prompt ends."""
    return setting(0, "evict also after so many tokens of a prompt, each time by what was read so far; 0: never")


def occupied(cache: SlotCache) -> Tensor | None:
    """bool ``[B, Hkv or 1, used]``, True where a slot holds a token; None when all of them do."""
    mask, lengths = cache.stored()
    return mask if lengths is None else ops.first_keys(lengths, cache.used)


def attend_all(cache: SlotCache, q: Tensor, scaling: float, need_mass: bool = False) -> ops.Attended:
    """Attention of one token per row over every token that the cache holds, counted."""
    mask, lengths = cache.stored()
    cache.count_read()
    mask = None if mask is None else mask[:, :, None]
    how = {"mask": mask, "lengths": lengths, "need_mass": need_mass, "block_table": cache.block_table}
    return ops.attend(q, *cache.memory, logits=cache.logits(scaling), out=cache.out, **how)


def attend_fetched(cache: SlotCache, q: Tensor, scaling: float, need_mass: bool = False) -> ops.Attended:
    """:func:`attend_all` of a cache in host memory, which holds few tokens; not in a captured step."""
    cache.count_read()
    slots = torch.arange(cache.used, device=q.device).expand(cache.batch_size, cache.geometry.num_kv_heads, -1)
    how = {"lengths": cache.stored()[1], "need_mass": need_mass, "logits": cache.logits(scaling)}
    return ops.attend(q, *cache.fetch_slots(slots), **how)


def attend_hot(cache: SlotCache, q: Tensor, chosen: Tensor, scaling: float, page_size: int = 0) -> Tensor:
    """Attention to keys of a cache in host memory, whose pages are on the device.

    Args:
        q: ``[B, Hq, 1, D]``.
        chosen: pages of ``page_size`` keys or, if that is 0, slots: int ``[B, Hkv, K]``, -1 for none.

    Returns:
        ``[B, Hq, 1, Dv]``.
    """
    memory, table = cache.hot()
    logits, (batch, heads) = cache.logits(scaling), chosen.shape[:2]
    q_rows, sinks = q.reshape(batch * heads, -1, 1, q.shape[3]), logits.sinks  # each KV head as a row of its own
    how = {"logits": logits._replace(sinks=None), "need_lse": sinks is not None, "block_table": table}
    chosen = chosen.reshape(batch * heads, 1, -1)
    if page_size:
        lengths = cache.plan.each(torch.repeat_interleave, heads, of="counts")
        found = ops.attend_pages(q_rows, *memory, chosen, page_size, lengths=lengths, **how)
    else:
        found = ops.attend_indices(q_rows, *memory, chosen, **how)
    found = ops.Attended(*(None if x is None else x.reshape(*q.shape[:3], *x.shape[3:]) for x in found[:2]))
    return ops.with_sinks(found, sinks).out


def attend_chosen(
    cache: SlotCache, q: Tensor, chosen: Tensor, scaling: float, page_size: int = 0, **how: Any
) -> Tensor:
    """Attention to what a decode step has chosen; an audited step also notes what was chosen, and its log-sum-exp.

    Args:
        q: ``[B, Hq, 1, D]``.
        chosen: pages of ``page_size`` keys or, if that is 0, slots: int ``[B, H, K]``, -1 for none. Pages of a cache in
            host memory are on the device.
        how: further arguments of :func:`foveate.ops.attend_pages` or :func:`foveate.ops.attend_indices`.

    Returns:
        ``[B, Hq, 1, Dv]``.
    """
    if cache.offloaded:
        return attend_hot(cache, q, chosen, scaling, page_size)
    how |= {"whole": cache.plan.whole, "block_table": cache.block_table, "out": cache.out}
    how |= {"logits": cache.logits(scaling), "need_lse": cache.audited is not None}
    attend, size = (ops.attend_pages, (page_size,)) if page_size else (ops.attend_indices, ())
    found = attend(q, *cache.memory, chosen, *size, **how)
    if cache.audited is not None:
        cache.audited.append((found.lse, chosen))
    return found.out


def count_scored(method: Method, cache: SlotCache) -> None:
    """Count what a decode step scores of all keys in order to choose some, as :meth:`Method.scored` declares it."""
    plan, described = cache.plan, (cache.geometry, cache.dtype)
    kept = "scored_at" in cache.specs  # scores, so that a row is scored in some steps

    def scored_now() -> float | Tensor:
        if not plan.captured and not kept:
            live = cache.rows["live"]
            return sum(method.scored(tokens, *described) for tokens in live) / len(live)
        live = plan.choosing(torch.Tensor.double, of="live")
        now = cache.channel("scored_at") == plan["lengths"] if kept else 1
        return (method.scored(live, *described) * now).sum()

    key = ("scored", method.spec, method.role.name, *described)  # once for all layers that score alike
    alike = plan.captured or not kept
    cache.count("keys_read", plan.once(key, scored_now) if alike else scored_now())


def scored_lengths(cache: SlotCache) -> Tensor | None:
    """How many keys of each row are scored, int64 ``[B]``: 0 of a row that is read whole; None: all in use."""
    return None if cache.stored()[1] is None else cache.plan.choosing(operator.pos, of="counts")


def recent(cache: SlotCache, window: int) -> Tensor:
    """bool ``[B, Hkv or 1, used]``: the slots whose tokens are among the last ``window`` of their row.

    In rows of fewer tokens their empty slots are among these; ``cache.stored()`` tells them apart.
    """
    return cache.positions >= cache.plan.each(operator.sub, window)[:, None, None]


def note_queries(cache: SlotCache, q: Tensor, window: int) -> None:
    """Keep the last ``window`` queries of a prompt in the channel ``queries [B, Hq, window, D]``."""
    queries, new = cache.channel("queries"), q[:, :, -window:]
    kept = queries[:, :, new.shape[2] :].clone()  # those that move up
    queries[:, :, : kept.shape[2]] = kept
    queries[:, :, kept.shape[2] :] = new


def observed_mass(cache: SlotCache, window: int, scaling: float) -> tuple[Tensor | None, int]:
    """What the last queries of a prompt attend to: ``window`` of them, or all of a shorter turn.

    Returns:
        Their mass, fp32 ``[B, Hq, used]`` (None when the turn has no tokens), and how many they are.
    """
    observing = min(window, cache.rows["observed"][0])
    if not observing:
        return None, 0
    queries = cache.channel("queries")[:, :, window - observing :]
    how = {"offset": cache.used - observing, "mask": cache.positions >= 0 if cache.uneven else None}
    return ops.query_mass(queries, cache.keys, logits=cache.logits(scaling), **how), observing


def window_votes(cache: SlotCache, window: int, scaling: float) -> Tensor | None:
    """What the last queries of a prompt attend to before its window, fp32 ``[B, Hq, used - window]``; None where the
    turn has no tokens."""
    mass, observing = observed_mass(cache, window, scaling)
    return mass[:, :, : cache.used - window] if observing else None


def keep_heavy(cache: SlotCache, scores: Tensor, allowed: int, window: int, sinks: int = 0) -> Tensor | None:
    """Slots to keep when a prompt ends: the first tokens, the recent window and the best of the others, ``allowed`` in
    all."""
    if cache.used <= allowed:
        return None
    check_number("allowed", allowed, window + sinks)
    always = recent(cache, window)
    if sinks:
        always = always | ((cache.positions >= 0) & (cache.positions < sinks))
    return ops.keep_best(scores, allowed, always)


def estimated_attention(cache: SlotCache, rows: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Attention by keys that stand for those of the cache: fp32 ``[B, Hkv, G, used]``; 0 in empty slots.

    Args:
        rows, keys: fp32 ``[B, Hkv, G, any]`` and ``[B, Hkv, used, any]``.
    """
    logits = ops.key_logits(rows, keys, cache.logits(scaling))
    logits = logits.masked_fill((cache.positions < 0)[:, :, None], -torch.inf).flatten(1, 2)[:, :, None]
    mass = ops.with_sinks(ops.Attended(logits.softmax(3), logits.logsumexp(3)), cache.sink_logits).out
    return mass.view(*rows.shape[:3], -1)


def evict_weakest(
    cache: SlotCache, scores: Tensor | Callable[[Tensor], Tensor], over: Callable[..., Any], window: int
) -> None:
    """Evict the weakest token outside the window from every row that holds more than it may.

    Args:
        scores: fp32 ``[B, Hkv, used]``, or what makes them of the tokens' positions, int32.
        over: whether one does, from the tokens that it holds and its length: of ints, or of each in int64 tensors.
    """
    rows = cache.plan.where(over)
    if rows is not None:
        before = cache.plan.each(operator.sub, window) if window > 0 else None
        cache.evict(rows, scores=scores(cache.positions) if callable(scores) else scores, before=before)

"""A decode step of one layer, the same for all methods and for eager, captured and engine steps.

The method chooses what is read; this attends, counts, and hands choices on to the layers that read them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foveate import ops
from foveate.methods import Method
from foveate.methods.handed_on import hand_on, handed_on
from foveate.ops import KV, Attended, Choice
from foveate.ops.choice import ALL, ALL_WITH_MASS
from foveate.runtime import returned
from foveate.runtime.drafts import Drafting
from foveate.state import SlotCache
from foveate.state.step_plan import StepPlan


def decode(
    method: Method,
    cache: SlotCache,
    q: Tensor,
    scaling: float,
    *,
    dense: bool = False,
    need_lse: bool = False,
    check: bool = False,
    drafting: Drafting | None = None,
) -> tuple[Attended, Choice]:
    """Attention of one token a row, whose keys and values the cache holds already.

    Args:
        method: the layer's method.
        q: ``[B, Hq, 1, D]``.
        scaling: factor of the logits.
        dense: whether to read all keys, because the context is too short for sparsity to pay.
        need_lse: whether the log-sum-exp of chosen keys or pages is needed.
        check: whether to check what :meth:`Method.choose` returns.
        drafting: if the token belongs to a draft, the layer's choice for that draft; None: it belongs to no draft.

    Returns:
        The output ``[B, Hq, 1, Dv]``, and the choice that was read.
    """
    kind, plan = type(method), cache.plan
    if kind.note_newest is not Method.note_newest:
        method.note_newest(cache, q)
    choice = _chosen(method, cache, q, scaling, plan, dense, check, drafting)
    attended = _attend(method, cache, q, choice, scaling, plan, need_lse)
    if choice.scores is not None:
        readers = method.choose_by(cache, attended.mass)
        hand_on(cache, method, _counted_whole(plan, readers))
        if drafting is not None:
            drafting.keep(choice._replace(scores=None, readers=readers), plan)
    if kind.learn is not Method.learn:
        method.learn(cache, choice, attended)
    if method.evicts.in_decode:
        method.evict(cache, scaling)
    replay = method.replay
    if replay is not None and replay.maintains and not plan.captured and replay.maintenance_due(plan.decoded):
        replay.maintain(cache)
    return attended, choice


def _chosen(
    method: Method,
    cache: SlotCache,
    q: Tensor,
    scaling: float,
    plan: StepPlan,
    dense: bool,
    check: bool,
    drafting: Drafting | None,
) -> Choice:
    """What is read, counted as far as it is known before attention."""
    choice, role = None, method.role
    again = drafting is not None and drafting.begun
    if not dense and role.reads_choice_of is not None:
        choice = handed_on(cache, method)
        if "indices_reused" in method.counters:
            cache.count("indices_reused", 1)
        cache.count_read(choice.read)
        return choice
    if again:
        choice = drafting.again(plan)
    elif not dense and type(method).choose is not Method.choose:
        choice = method.choose(cache, q, scaling)
        if check:
            returned.check_choice(method, choice, q, cache)
    if choice is None:
        choice = ALL_WITH_MASS if method.needs_mass else ALL
    elif isinstance(choice, Tensor):
        choice = Choice.of(choice & (cache.positions >= 0))
    if drafting is not None and not again:
        drafting.keep(choice, plan)
    if choice.readers is not None:
        hand_on(cache, method, _counted_whole(plan, choice.readers))
    if choice.reads_all:
        cache.count_read()
    elif choice.cover is None:
        choice = _counted_whole(plan, choice)
        if choice.readers is None and role.has_readers:
            hand_on(cache, method, choice)
        if not again:
            _count_scored(method, cache, plan)
        cache.count_read(choice.read)
    return choice


def _counted_whole(plan: StepPlan, choice: Choice) -> Choice:
    """A choice that counts all keys of the rows that are read whole."""
    return choice._replace(read=plan.count_dense_rows(choice.read))


def _count_scored(method: Method, cache: SlotCache, plan: StepPlan) -> None:
    """Count what a step scores of all keys in order to choose some, as :meth:`Method.scored` declares it."""
    described = (cache.geometry, cache.dtype)
    if cache.uneven:  # KV heads hold numbers of tokens of their own
        held = (cache.positions >= 0).sum(-1).double()
        cache.count("keys_read", method.scored(held, *described))
        return

    def scored_now() -> float | Tensor:
        if not plan.captured and not method.scored_at:
            live = cache.rows["live"]
            return sum(method.scored(tokens, *described) for tokens in live) / len(live)
        live = plan.for_sparse_rows(torch.Tensor.double, of="live")
        now = cache.channel(method.scored_at) == plan["lengths"] if method.scored_at else 1
        return (method.scored(live, *described) * now).sum()

    key = ("scored", method.spec, method.role.name, *described)  # once for all layers that score alike
    alike = plan.captured or not method.scored_at
    cache.count("keys_read", plan.cached(key, scored_now) if alike else scored_now())


# Attention


def _attend(
    method: Method, cache: SlotCache, q: Tensor, choice: Choice, scaling: float, plan: StepPlan, need_lse: bool
) -> Attended:
    """Attention to what is chosen."""
    if choice.attended is not None:
        return choice.attended
    if cache.store.fetches:
        return _attend_fetched(method, cache, q, choice, scaling)
    logits = cache.logits(scaling)
    if choice.cover is not None:
        tree, refinement, sums = choice.cover
        covered = ops.summaries.attend_summaries(q, cache.view(), tree, refinement, logits=logits, sums=sums)
        return _counted(method, cache, covered)
    how = {"logits": logits, "out": cache.out}
    if choice.scores is not None:
        pooling, pool = choice.scores
        return ops.attend_pooled(q, cache.view(cache.stored()[1]), pooling=pooling, pool=pool, **how)
    if choice.reads_all:
        mask, lengths = cache.stored()
        how |= {"mask": None if mask is None else mask[:, :, None], "need_mass": choice.need_mass}
        return ops.attend(q, cache.view(lengths), **how)
    how |= {"whole": plan.whole, "need_lse": need_lse}
    if choice.pages is not None:
        kv = cache.view(plan["counts"])
        return ops.attend_pages(q, kv, choice.pages, choice.page_size, counts=choice.counts, **how)
    counts = choice.read.expand(-1, cache.geometry.num_kv_heads) if choice.packed else None
    how |= {"heads": choice.heads, "counts": counts, "need_mass": choice.need_mass}
    attended = ops.attend_indices(q, cache.view(), choice.keys, **how)
    if choice.rest is None:
        return attended
    value, share = choice.rest
    if plan.whole is not None:  # nothing is left out in a row that is read whole
        share = share.where(plan.whole[:, None, None] == 0, 0)
    return attended._replace(out=attended.out.float().lerp(value, share[..., None]).to(attended.out.dtype))


def _counted(method: Method, cache: SlotCache, covered: ops.summaries.Covered) -> Attended:
    cache.count_read(covered.read)
    if "pages_refined" in method.counters:
        cache.count("pages_refined", covered.refined)
    return Attended(covered.out, covered.lse)


def _attend_fetched(method: Method, cache: SlotCache, q: Tensor, choice: Choice, scaling: float) -> Attended:
    """Attention over keys that a step fetches from their store."""
    logits, heads = cache.logits(scaling), cache.geometry.num_kv_heads
    if choice.cover is not None:
        tree, refinement, sums = choice.cover
        how = {"logits": logits, "sums": sums}
        covered = ops.summaries.attend_summaries_fetched(q, cache.fetch_slots, heads, tree, refinement, **how)
        return _counted(method, cache, covered)
    if choice.reads_all:  # the context is short: what is chosen of a long one is on the device
        slots = torch.arange(cache.used, device=q.device).expand(cache.batch_size, heads, -1)
        kv = KV(*cache.fetch_slots(slots), lengths=cache.stored()[1])
        return ops.attend(q, kv, logits=logits, need_mass=choice.need_mass)
    if choice.pages is not None:
        pages, counts = choice.pages.expand(-1, heads, -1), choice.counts
        if counts is not None:  # what is in the places behind would be fetched
            number = pages.shape[2]
            unused = cache.plan.cached(("unused places", counts, number), lambda: ~ops.first_keys(counts, number))
            pages = pages.masked_fill(unused, -1)
        return _attend_rows(cache, q, pages, scaling, choice.fetched, choice.page_size)
    chosen = choice.keys if choice.heads is None else choice.keys[:, choice.heads]
    chosen = chosen.masked_fill(~ops.first_keys(choice.read, chosen.shape[2]), -1) if choice.packed else chosen
    return _attend_rows(cache, q, chosen, scaling, choice.fetched)


def _attend_rows(
    cache: SlotCache, q: Tensor, chosen: Tensor, scaling: float, again: bool, page_size: int = 0
) -> Attended:
    """Attention to pages of ``page_size`` keys or, if that is 0, to slots: int ``[B, Hkv, K]``; ``again``: their pages
    are fetched already. Each KV head of a sequence is a row of its own."""
    fetched, logits, (batch, heads) = cache.fetch(chosen, page_size, again), cache.logits(scaling), chosen.shape[:2]
    q_rows, sinks = q.reshape(batch * heads, -1, 1, q.shape[3]), logits.sinks
    how = {"logits": logits.without_sinks(), "need_lse": sinks is not None}
    if fetched.page_size:
        found = ops.attend_pages(q_rows, fetched.kv, fetched.places, fetched.page_size, **how)
    else:
        found = ops.attend_indices(q_rows, fetched.kv, fetched.places, **how)
    found = Attended(*(None if x is None else x.reshape(*q.shape[:3], *x.shape[3:]) for x in found[:2]))
    return ops.with_sinks(found, sinks)

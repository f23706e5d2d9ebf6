"""Checks of the values that a method's hooks return. They are made while a prompt is read, when it ends, and in the
first sparse step after it; later steps are not checked. An error names class, hook and remedy in one sentence."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from foveate.methods import Method
from foveate.ops import Attended, Choice
from foveate.ops._math import on_host
from foveate.state import SlotCache

_OF_THE_CACHE = ("keys", "values", "positions", "block_table")
_NOTED = "slots to keep"
"""Key of the findings of :func:`check_slots` in the dict that the layers of a pass share: for each layer its method,
its slots in use, and the findings on the device."""


def check_channels(method: Method, channels: Mapping[str, Any]) -> None:
    """Raises ValueError for a channel that has the name of one of the cache's own tensors."""
    for name in _OF_THE_CACHE:
        if name in channels:
            raise ValueError(f"{_hook(method, 'channels')} names a channel {name!r}, as the cache's own; rename it")


def check_attended(method: Method, hook: str, attended: Any, q: Tensor, value_dim: int) -> None:
    """Raises ValueError unless ``attended``, which a hook returned, is the attention of ``q [B, Hq, n, D]``."""
    if not isinstance(attended, Attended):
        raise ValueError(f"{_hook(method, hook)} returned {_kind(attended)}; return an ops.Attended")
    out, wanted = attended.out, [*q.shape[:3], value_dim]
    if not isinstance(out, Tensor) or list(out.shape) != wanted:
        found = list(out.shape) if isinstance(out, Tensor) else _kind(out)
        raise ValueError(f"{_hook(method, hook)} returned {found}; return a tensor {wanted}, [B, Hq, n, Dv]")


def check_slots(method: Method, keep: Any, cache: SlotCache) -> Tensor:
    """Check the slots that :meth:`Method.prompt_end` returned.

    Slots on a GPU are checked on the GPU, without a wait: :func:`check_noted` reads the findings at the end of the pass
    over the prompt.

    Returns:
        The slots, each clamped to the cache's slots, so that an invalid slot does no harm before it is reported.

    Raises:
        ValueError: if the method never evicts; for slots outside of the cache and for a slot given twice; for -1 if the
            method does not evict unevenly; and for another dtype or shape than int64 ``[K]`` or ``[B, Hkv, K]``.
    """
    who = _hook(method, "prompt_end")
    batch, heads, used = cache.batch_size, cache.geometry.num_kv_heads, cache.used
    wanted = f"int64 slots [K] or [{batch}, {heads}, K]"
    if not method.evicts:
        raise ValueError(
            f"{who} returned slots to keep, and {type(method).__name__}.evicts is Evicts.NEVER; declare "
            "evicts: ClassVar[Evicts] = Evicts.AT_PROMPT_END"
        )
    if not isinstance(keep, Tensor):
        raise ValueError(f"{who} returned {_kind(keep)}; return a tensor, {wanted}")
    if keep.dtype == torch.bool:
        raise ValueError(f"{who} returned a bool mask; return {wanted}, such as mask.nonzero()[:, 0] of a mask [K]")
    if keep.dtype != torch.int64:
        raise ValueError(f"{who} returned {keep.dtype}; return {wanted}, such as .long()")
    if keep.dim() != 1 and (keep.dim() != 3 or list(keep.shape[:2]) != [batch, heads]):
        raise ValueError(f"{who} returned slots {list(keep.shape)}; return {wanted}")
    times = keep.new_zeros((*keep.shape[:-1], used + 1), dtype=torch.int32)
    nearest = keep.clamp(-1, used - 1)
    times.scatter_add_(-1, nearest + 1, torch.ones_like(keep, dtype=torch.int32))
    found = torch.stack([(keep != nearest).any(), (keep == -1).any(), (times[..., 1:] > 1).any()])
    if on_host(found):
        _check_slots(method, used, *found.tolist())
    else:
        cache.forward.setdefault(_NOTED, []).append((method, used, found))
    return nearest


def check_noted(forward: dict[Hashable, Any]) -> None:
    """Raise for invalid slots that :func:`check_slots` has found on the device in the layers of a pass, which share
    ``forward``.

    Waits for the device once.
    """
    noted = forward.pop(_NOTED, [])
    if noted:
        found = torch.stack([one.to(noted[0][2].device) for *_, one in noted]).tolist()
        for (method, used, _), one in zip(noted, found):
            _check_slots(method, used, *one)


def _check_slots(method: Method, used: int, outside: bool, none: bool, twice: bool) -> None:
    """Raise for slots outside of a cache that uses ``used`` slots, for -1 if the method needs a slot in each place, and
    for a slot given twice."""
    who = _hook(method, "prompt_end")
    if outside:
        raise ValueError(f"{who} returned slots outside of 0 to {used - 1}; return slots below cache.used")
    if none and not method.evicts.unevenly:
        when = "IN_DECODE" if method.evicts.in_decode else "AT_PROMPT_END"
        raise ValueError(
            f"{who} returned -1, for no slot, and {type(method).__name__}.evicts has no Evicts.UNEVENLY; give every KV "
            f"head as many slots (of scores without NaN), or declare evicts: ClassVar[Evicts] = Evicts.{when} | "
            "Evicts.UNEVENLY"
        )
    if twice:
        raise ValueError(f"{who} returned a slot more than once; return each slot that is kept once, such as .unique()")


def check_choice(method: Method, choice: Any, q: Tensor, cache: SlotCache) -> None:
    """Raises ValueError for an invalid result of :meth:`Method.choose` for ``q [B, Hq, 1, D]``."""
    if isinstance(choice, Choice):
        if choice.attended is not None:
            check_attended(method, "choose", choice.attended, q, cache.geometry.value_dim)
        _check_parts(method, choice, cache)
        if not choice.reads_all and choice.cover is None and choice.read is None:
            raise ValueError(f"{_hook(method, 'choose')} returned a Choice without read; say how many keys are read")
        return
    if choice is None:
        return
    who, wanted = _hook(method, "choose"), [cache.batch_size, cache.geometry.num_kv_heads, cache.used]
    if not isinstance(choice, Tensor):
        raise ValueError(f"{who} returned {_kind(choice)}; return a bool mask, an ops.Choice, or None for all keys")
    if choice.dtype != torch.bool:
        raise ValueError(f"{who} returned {choice.dtype}; return a bool mask {wanted}, or ops.Choice(keys=slots, ...)")
    if choice.dim() != 3 or any(size not in (1, all_) for size, all_ in zip(choice.shape, wanted)):
        raise ValueError(f"{who} returned a mask {list(choice.shape)}; return one that broadcasts to {wanted}")
    if on_host(choice) and cache.sink_logits is None:
        empty = ~(choice & (cache.positions >= 0)).any(-1)
        if empty.any():
            row, head = empty.nonzero()[0].tolist()
            raise ValueError(
                f"{who} chose no key for KV head {head} of row {row}, which has {cache.lengths[row]} tokens: choose at "
                "least one for each; cache.lengths and cache.positions have an entry for each row"
            )


def _check_parts(method: Method, choice: Choice, cache: SlotCache) -> None:
    """Raises ValueError for a combination of a choice's parts that no step supports."""
    who = _hook(method, "choose")
    if choice.scores is not None and not choice.reads_all:
        raise ValueError(
            f"{who} returned a Choice of scores and of what is read: scores are of a step that reads all keys"
        )
    for part, given in (("rest", choice.rest is not None), ("need_mass", choice.need_mass)):
        beside_all = part == "need_mass" and choice.reads_all
        if given and choice.keys is None and not beside_all:
            raise ValueError(f"{who} returned a Choice with {part} without keys; it is of the keys that are read")
        if given and cache.store.fetches and not beside_all:
            raise ValueError(f"{who} returned a Choice with {part}, which is not there of keys in host memory")


def _hook(method: Method, hook: str) -> str:
    return f"{type(method).__name__}.{hook}"


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"

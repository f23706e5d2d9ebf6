"""Choices of keys that a layer hands on to later layers of the same pass, through :attr:`SlotCache.forward`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foveate.methods.base import Method
from foveate.ops import Choice, TileKeys
from foveate.state import SlotCache


def hand_on(cache: SlotCache, method: Method, choice: Choice | TileKeys) -> None:
    """Leave a layer's choice in ``cache.forward`` for the layers that read it.

    The choice of the layer ``role.before`` is dropped, because all its readers have run.
    """
    role = method.role
    if isinstance(choice, Choice):
        choice = _of_all_heads(cache, method, _for_readers(method, choice))
    cache.forward.pop(cache.shared_key((method.name, role.before)), None)
    cache.forward[cache.shared_key((method.name, role.layer))] = choice


def _for_readers(method: Method, choice: Choice) -> Choice:
    """The keys of a choice, without the fields that only the choosing layer's own step needs."""
    keys, read = choice.keys, choice.read
    if keys is None or read is None or choice.heads is not None:
        raise ValueError(
            f"layer {method.role.layer} ({method.name}) has readers, which take the keys that it chooses: its choice "
            "must have keys and read, and no heads"
        )
    return Choice(keys=keys, read=read.expand(keys.shape[:2]), packed=choice.packed)


def left_for(cache: SlotCache, method: Method) -> tuple[Any, Tensor | None]:
    """The choice that an earlier layer has left for this one, and for each head of this layer the head of the earlier
    layer whose choice it reads; None: each head reads the head with its own number.

    Raises:
        LookupError: when no earlier layer of this pass has left a choice.
        ValueError: when the role names heads that the layer does not have.
    """
    role = method.role
    if (left := cache.forward.get(cache.shared_key((method.name, role.reads_choice_of)))) is None:
        raise LookupError(f"no earlier layer of this forward pass has left {(method.name, role.reads_choice_of)!r}")
    left = left.to(cache.device)
    if cache.ranks is not None:
        return _of_own_heads(cache, left, role.heads), None
    if role.heads is None:
        return left, None
    check_heads(method, cache.geometry.num_kv_heads)
    return left, cache.plan.constant(role.heads)


def handed_on(cache: SlotCache, method: Method) -> Choice:
    """The choice of an earlier layer that this layer reads; see :func:`left_for`."""
    choice, heads = left_for(cache, method)
    return choice if heads is None else choice._replace(heads=heads, read=choice.read.index_select(1, heads))


def check_heads(method: Method, number: int) -> None:
    """Raise ValueError if a layer's role names heads to read and they are not ``number`` indices of KV heads, one for
    each KV head."""
    heads, layer = method.role.heads, method.role.layer
    if heads is not None and (len(heads) != number or not all(head in range(number) for head in heads)):
        raise ValueError(
            f"{method.name}: heads of layer {layer} must be {number} numbers below {number}, one for each KV head, "
            f"not {list(heads)}"
        )


def _of_all_heads(cache: SlotCache, method: Method, choice: Choice) -> Choice:
    """The choice that readers need. It has the heads of all ranks if a reader's head reads a head of another number."""
    if cache.ranks is None or not method.role.remapped:
        return choice
    keys = cache.of_all_heads(choice.keys)
    return choice._replace(keys=keys, read=choice.read[:, :1].expand(keys.shape[:2]))  # heads read equally many keys


def _of_own_heads(cache: SlotCache, choice: Choice, heads: tuple[int, ...] | None) -> Choice:
    """The part of a choice with all ranks' heads that the heads of this rank read."""
    own, ranks = cache.geometry.num_kv_heads, cache.ranks
    if choice.keys.shape[1] == own:
        return choice
    every = range(own * ranks.size) if heads is None else heads
    here = cache.plan.constant(every[own * ranks.rank :][:own])
    return choice._replace(keys=choice.keys.index_select(1, here), read=choice.read.index_select(1, here))

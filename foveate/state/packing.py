"""The content of a layer's cache as plain tensors and numbers, from which an equal cache is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from foveate.state.cache import SlotCache
from foveate.state.description import Geometry
from foveate.state.eviction import Freed

FACTS = ("rows", "freed", "ordered", "uneven")
"""What :func:`pack` says besides tensors."""


def contents(cache: SlotCache) -> tuple[Tensor, Tensor]:
    """Keys and values of all slots in use, ``[B, Hkv, used, D(v)]``; of a cache in host memory, copies there."""
    return cache.store.contents(cache.used)


def pack(cache: SlotCache) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The used slots' tensors by name, and :data:`FACTS` as JSON values; :func:`unpack` reads both."""
    tensors = dict(zip(("keys", "values"), contents(cache)))
    if cache.evicts:
        tensors["positions"] = cache.positions
    for name, spec in cache.specs.items():
        entries = -(-cache.used // spec.per) if spec.per else None
        tensors[name] = cache.tensors[name][:, :, :entries] if spec.per else cache.tensors[name]
    if cache.freed is not None:
        tensors["freed"] = cache.freed.slots
    facts = {
        "rows": cache.rows,
        "freed": None if cache.freed is None else cache.freed.rows,
        "ordered": cache.ordered,
        "uneven": cache.uneven,
    }
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, facts


def unpack(
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    geometry: Geometry,
    device: torch.device,
    empty: Callable[[Geometry, int, torch.dtype, torch.device], SlotCache],
) -> SlotCache:
    """A cache with the content that :func:`pack` returned, and with counters of its own.

    Args:
        geometry: the geometry of the model's layer.
        device: the cache's device; the store may keep keys and values elsewhere.
        empty: makes an empty cache from geometry, number of rows, dtype and device, for the method whose state was
            packed. Its store may differ from the store of the packed cache.

    Raises:
        ValueError: for a tensor or fact that is missing, superfluous or invalid; the message begins with its name.
    """
    _same_names(facts, FACTS)
    k, v = _keys_and_values(tensors, geometry)
    cache = empty(geometry, k.shape[0], k.dtype, device)
    evicts = bool(cache.evicts)
    _check_rows(cache, facts, k.shape[2])
    cache.rows = {name: list(facts["rows"][name]) for name in cache.rows}
    cache.ordered, cache.uneven = facts["ordered"], facts["uneven"]
    cache.reserve(k.shape[2])
    cache.store.fill(k, v)
    per_slot = {name: spec.per for name, spec in cache.specs.items()} | ({"positions": 1} if evicts else {})
    freed = [] if facts["freed"] is None else ["freed"]
    _same_names(tensors, ("keys", "values", *per_slot, *freed))
    for name, per in per_slot.items():
        room = cache.tensors[name][:, :, : -(-k.shape[2] // per)] if per else cache.tensors[name]
        _check_tensor(name, tensors[name], room)
        room.copy_(tensors[name])
    for name, spec in cache.specs.items():
        _check_numbers(name, tensors[name], spec.least)
    if evicts:
        _check_positions(cache, k.shape[2])
    if freed:
        _check_tensor("freed", tensors["freed"], k.new_empty(k.shape[:2], dtype=torch.int64))
        cache.freed = Freed(tensors["freed"], list(facts["freed"]))
        _check_freed(cache, k.shape[2])
    return cache


def _keys_and_values(tensors: Mapping[str, Tensor], geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Keys and values that a layer of this geometry can have; raises ValueError for others."""
    shapes = [tuple(tensors[name].shape) if name in tensors else () for name in ("keys", "values")]
    if any(len(shape) != 4 for shape in shapes) or shapes[0][:3] != shapes[1][:3] or 0 in shapes[0]:
        raise ValueError(f"keys and values: must be there as [B, Hkv, n, D] and [B, Hkv, n, Dv], not {shapes}")
    found = (shapes[0][1], shapes[0][3], shapes[1][3])
    if found != (geometry.num_kv_heads, geometry.head_dim, geometry.value_dim):
        raise ValueError(
            f"keys and values: of {found[0]} KV heads and dims {found[1:]}, and the model's layer has "
            f"{geometry.num_kv_heads} of {(geometry.head_dim, geometry.value_dim)}"
        )
    k, v = tensors["keys"], tensors["values"]
    if not k.is_floating_point() or k.dtype != v.dtype:
        raise ValueError(f"keys and values: must be of one floating-point type, not {k.dtype} and {v.dtype}")
    if not bool(k.isfinite().all() & v.isfinite().all()):
        raise ValueError("keys and values: hold NaN or infinite numbers")
    return k, v


def _same_names(given: Mapping[str, Any], expected: tuple[str, ...]) -> None:
    for name in given:
        if name not in expected:
            raise ValueError(f"{name}: is not known; allowed are {', '.join(expected)}")
    for name in expected:
        if name not in given:
            raise ValueError(f"{name}: is missing")


def _check_tensor(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise ValueError(f"{name}: is {tensor.dtype} {list(tensor.shape)}, and must be {like.dtype} {list(like.shape)}")


def _check_numbers(name: str, tensor: Tensor, least: float | None) -> None:
    """Refuse a method's state with NaN, or with entries that are infinite or below the least that it can have."""
    if tensor.is_floating_point() and bool(tensor.isnan().any()):
        raise ValueError(f"{name}: holds NaN")
    if least is not None and not bool(((tensor >= least) & tensor.isfinite()).all()):
        raise ValueError(f"{name}: holds entries that are infinite or below {least:g}")


def _check_rows(cache: SlotCache, facts: Mapping[str, Any], used: int) -> None:
    """Refuse row numbers, and other facts, that no cache of this method has."""
    size = cache.batch_size
    for name in ("ordered", "uneven"):
        if type(facts[name]) is not bool:
            raise ValueError(f"{name}: must be true or false, not {facts[name]!r}")
    freed, rows = facts["freed"], facts["rows"]
    if freed is not None and (type(freed) is not list or len(freed) != size or {*map(type, freed)} != {bool}):
        raise ValueError(f"freed: must be null or {size} times true or false, not {freed!r}")
    if not isinstance(rows, dict):
        raise ValueError(f"rows: must be an object, not {rows!r}")
    try:
        _same_names(rows, tuple(cache.rows))
    except ValueError as error:
        raise ValueError(f"rows.{error}") from None
    for name, numbers in rows.items():
        whole = type(numbers) is list and len(numbers) == size and {*map(type, numbers)} == {int}
        if not whole or min(numbers) < 0:
            raise ValueError(f"rows.{name}: must be {size} whole numbers from 0, not {numbers!r}")
    evicts = bool(cache.evicts)
    for b in range(size):
        length, count, live = (rows[name][b] for name in ("lengths", "counts", "live"))
        if not (live <= count <= length if evicts else live == count == length):
            raise ValueError(f"rows: row {b} of {length} tokens cannot hold {live} in {count} slots")
        for name in ("prompt", "observed"):
            if rows[name][b] > length:
                raise ValueError(f"rows.{name}: row {b} has {length} tokens, not {rows[name][b]}")
    decoded = {length - prompt for length, prompt in zip(rows["lengths"], rows["prompt"])}
    if not any(rows["observed"]) and len(decoded) > 1:
        raise ValueError(f"rows.prompt: rows have decoded different numbers of tokens, {sorted(decoded)}")
    if max(rows["counts"]) != used:
        raise ValueError(f"rows.counts: keys has {used} slots, and not {max(rows['counts'])} are in use")
    if not evicts and (facts["uneven"] or not facts["ordered"] or freed is not None):
        raise ValueError("uneven, ordered, freed: must be false, true and null for a method that never evicts")
    if freed is not None and not cache.evicts.in_decode:
        raise ValueError("freed: must be null for a method that does not evict in decode")


def _check_positions(cache: SlotCache, used: int) -> None:
    """Refuse positions that name other tokens than the rows have, or another number."""
    positions, live = cache.positions, cache.plan["live"]
    slots = torch.arange(used, device=cache.device)
    beyond = (slots >= cache.plan["counts"][:, None])[:, None]
    lengths = cache.plan["lengths"][:, None, None]
    held = (positions >= 0).sum(-1)
    wrong = (positions < -1) | (positions >= lengths) | (beyond & (positions >= 0))
    ranked = positions.sort(-1).values
    twice = (ranked[..., 1:] == ranked[..., :-1]) & (ranked[..., 1:] >= 0)
    number = held.amax(-1) != live if cache.uneven else (held != live[:, None]).any(-1)
    if bool(wrong.any()) or bool(number.any()) or bool(twice.any()):
        raise ValueError("positions: do not fit lengths, counts and live of the rows")
    before = positions.cummax(-1).values[..., :-1]  # the newest token in the slots before
    if cache.ordered and bool(((positions[..., 1:] >= 0) & (positions[..., 1:] < before)).any()):
        raise ValueError("ordered: is true, and positions are not in order")


def _check_freed(cache: SlotCache, used: int) -> None:
    """Refuse slots for the next token that hold another."""
    slots, rows = cache.freed
    if bool(((slots < -1) | (slots >= used)).any()):
        raise ValueError(f"freed: must name slots below {used}")
    there = slots >= 0
    if bool((there & (cache.positions.gather(2, slots.clamp(min=0)[..., None])[..., 0] >= 0)).any()):
        raise ValueError("freed: names slots that hold tokens")
    if there.all(-1).tolist() != rows:
        raise ValueError(f"freed: {rows} does not say which rows have a slot in every KV head")

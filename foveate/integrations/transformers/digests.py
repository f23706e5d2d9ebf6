"""Digests of tensors, and of all weights of a model: which file a cache is of, and which model it was made by."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK = 1 << 15
"""Words of eight bytes that are summed up to one number; no more, so that PyTorch computes each on one CPU core, which
is no slower and waits for no other core."""


@torch.no_grad()
def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A digest of each tensor's bytes, shape and dtype, computed on its device; 32 hexadecimal digits.

    A sum of the bytes in words of 64 bits, each multiplied by an odd number of its place: a change of one word always
    changes the sum, and one of several as good as always. It does not defend against forgery.
    """
    sums = {name: [_sums(part) for part in _plain(tensor)] for name, tensor in tensors.items()}
    there: dict[torch.device, list[Tensor]] = {}
    for one in (one for parts in sums.values() for one in parts):
        there.setdefault(one.device, []).append(one)
    host = {device: iter(torch.cat(found).tolist()) for device, found in there.items()}  # one wait for each device
    found = {}
    for name, tensor in tensors.items():
        numbers = [next(host[one.device]) for one in sums[name] for _ in range(len(one))]
        text = f"{tensor.dtype} {tuple(tensor.shape)} {numbers}"
        found[name] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return found


def weights_digest(model: nn.Module) -> str:
    """A digest of all that a model computes with: parameters, buffers of its state, and active adapters of PEFT.

    Every call reads all weights: PyTorch does not show every write to a tensor (``.data``, merged adapters). Adapters
    that are not active, and where ``base_layer`` stands in a name, make no difference.

    Args:
        model: without a wrapper around it.

    Raises:
        ValueError: when weights are not at hand (on the meta device, without accelerate's hooks).
    """
    skipped, adapters = _adapters(model)
    tensors = {
        name: _at_hand(model, name, tensor)
        for name, tensor in sorted(model.state_dict(keep_vars=True).items())
        if isinstance(tensor, Tensor) and not name.startswith(skipped)
    }
    first = {id(tensor): name for name, tensor in tensors.items()}  # tied weights once
    found = digests({name: tensors[name] for name in first.values()})
    every = [(name.replace(".base_layer.", "."), found[first[id(tensor)]]) for name, tensor in tensors.items()]
    return hashlib.blake2b(f"{sorted(every)} {adapters}".encode(), digest_size=16).hexdigest()


def _adapters(model: nn.Module) -> tuple[tuple[str, ...], list[Any]]:
    """Prefixes of the weights of adapters that are not applied, and which are applied where, with their factors."""
    skipped, applied = [], []
    for name, module in model.named_modules():
        holders = getattr(module, "adapter_layer_names", None)
        if holders is None or not hasattr(module, "active_adapters"):
            continue
        off = module.disable_adapters or getattr(module, "merged", False)
        active = [] if off else list(module.active_adapters)
        for holder in holders:
            inside = getattr(module, holder, None)
            names = inside.keys() if hasattr(inside, "keys") else ()
            skipped += [f"{name}.{holder}.{adapter}" for adapter in names if adapter not in active]
        scaling = getattr(module, "scaling", None) or {}
        used = [(adapter, scaling.get(adapter)) for adapter in active if any(map(adapter.__eq__, _named(module)))]
        if used:
            applied.append((name, used))
    return tuple(skipped), applied


def _named(module: nn.Module) -> Iterator[str]:
    """The adapters that a layer of PEFT has, whether or not they are active."""
    for holder in module.adapter_layer_names:
        inside = getattr(module, holder, None)
        yield from inside.keys() if hasattr(inside, "keys") else ()


def _at_hand(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """A tensor with its content; one that accelerate offloads is taken from where it is kept."""
    if not tensor.is_meta:
        return tensor
    owner, _, leaf = name.rpartition(".")
    kept = getattr(getattr(model.get_submodule(owner), "_hf_hook", None), "weights_map", None)
    if kept is None or leaf not in kept:
        raise ValueError(f"{name} is on the meta device, so that it cannot be told which model a cache is of")
    return kept[leaf]


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The ordinary tensors that a tensor consists of: several for quantised and sharded ones."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor.data


def _sums(tensor: Tensor) -> Tensor:
    """The weighted sums of a tensor's chunks, int64 ``[n]``."""
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    whole = len(flat) // 8 * 8
    if flat.storage_offset() % 8:
        flat = flat.clone()
    words, rest = flat[:whole].view(torch.int64), flat.new_zeros(8)
    rest[: len(flat) - whole] = flat[whole:]
    many, at_once = len(words) // _CHUNK, 256 if flat.is_cuda else 1
    sums = [
        _mixed(part, _places(flat.device)) for part in words[: many * _CHUNK].view(-1, _CHUNK).split(at_once) if many
    ]
    left = words[many * _CHUNK :]
    sums += [_mixed(one[None], _places(flat.device)[: len(one)]) for one in (left, rest.view(torch.int64))]
    return torch.cat(sums)


def _mixed(words: Tensor, places: Tensor) -> Tensor:
    """Sum of each row ``[n]`` of ``words [n, m]``, whose words are mixed with their places ``[m]``."""
    mixed = words * places
    return mixed.bitwise_xor_(mixed >> 32).sum(-1)  # a multiplication alone would lose a pair of highest bits


@functools.lru_cache(maxsize=16)
def _places(device: torch.device) -> Tensor:
    """An odd number for each place in a chunk, int64 ``[_CHUNK]``; the same in every release."""
    with torch.inference_mode(False):
        mixed = torch.arange(1, _CHUNK + 1, device=device) * -7046029254386353131
        mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
        return mixed | 1

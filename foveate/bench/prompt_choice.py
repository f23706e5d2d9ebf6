"""How well a prompt's tiles choose approximately: beside the exact choice, and by the attention that it keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._top_k_by_mass import TopKByMass
from foveate.ops.attend.tiles import side_by_side
from foveate.state import SlotCache


def quality(policy: TopKByMass, exact: TopKByMass, cache: SlotCache, q: Tensor, scaling: float) -> dict[str, float]:
    """What a layer's choice for a prompt is worth beside an exact one.

    Args:
        policy, exact: of the same layer, with the same tiles and the same budget.
        cache: with the prompt's keys, which are the last ``q`` tokens'.
        q: ``[B, Hq, Lq, D]``.

    Returns:
        ``recall``, the share of the exact choice that the other one has, and ``mass``, the attention that it keeps
        relative to what the exact one keeps; both of all tiles together.
    """
    offset, group = cache.used - q.shape[2], cache.geometry.group
    how = {"scaling": scaling, "offset": offset, "softcap": cache.softcap}
    attended = ops.attend_causal(q, cache.keys, cache.values, sink_logits=cache.sink_logits, need_lse=True, **how)
    lse, tile = attended.lse, policy.prompt_tile(group)
    del attended
    mine, its = (one.select_tiles(cache, q, lse, tile, scaling, offset) for one in (policy, exact))
    kept = torch.zeros(2, dtype=torch.float64, device=q.device)
    for first, mass in ops.tile_mass(q, cache.keys, lse, tile=tile, **how):
        first -= offset // tile
        mass = mass.mean(1, keepdim=True) if its.words.shape[1] == 1 else mass
        kept += torch.stack([_of_chosen(one, first, mass) for one in (mine, its)])
    recall = _bits(mine.words & its.words) / _bits(its.words)
    return {"recall": float(recall), "mass": float(kept[0] / kept[1])}


def _of_chosen(chosen: ops.TileKeys, first: int, mass: Tensor) -> Tensor:
    """The sum of masses ``[B, H, T, n]`` of the keys that the tiles ``first .. first + T - 1`` have chosen."""
    some = slice(first, first + mass.shape[2] + 1)
    begins, starts, places = chosen.begins[some], chosen.starts[some], chosen.places[some]
    keys = ops.keys_of_bits(chosen.words, begins, starts, places[-1] - places[0]).keys
    keys = side_by_side(keys, starts - starts[0])
    return mass.gather(3, keys.clamp_min(0).long()).masked_fill(keys < 0, 0.0).sum(dtype=torch.float64)


def _bits(words: Tensor) -> Tensor:
    """How many bits are set."""
    return torch.stack([(words >> bit & 1).sum() for bit in range(ops.WORD_KEYS)]).sum()

"""What a layer's attention costs in a decode step, by what Kascade makes of the layer, measured on this device.

Keys are chosen as by a given method, by default a tenth of the context for each KV head.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

import torch

from foveate.errors import UserError
from foveate.lab.results import timing
from foveate.methods import Method, make
from foveate.methods.kascade import Kascade
from foveate.runtime.decode import decode
from foveate.state import Counters, SlotCache
from foveate.state.borrowed import branch_of, cache_of

_WARM_UP, _REPEATS = 3, 15
_BEYOND_CACHES = 256 << 20  # bytes of keys and values that no cache of a device holds


@torch.inference_mode()
def measure(
    method: Kascade,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    batch: int,
    dtype: torch.dtype,
    device: str,
) -> dict[str, float]:
    """Median milliseconds by kind of layer: ``dense`` attention, ``first`` (layer 0, which also chooses), ``anchor``,
    ``reuse``.

    Keys are random. If a cache of the device could hold the keys of a layer, up to four layers take turns.
    """
    layers = list(range(4))
    kascade = dataclasses.replace(method, anchors=[0, 2], decode_only=True, rest="none")  # layer 0 chooses for layer 1
    kinds = {"dense": (make("dense"), 0), "first": (kascade, 0), "anchor": (kascade, 2), "reuse": (kascade, 1)}
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype, device=device)

    shape, scaling, forward = (batch, kv_heads, context, head_dim), head_dim**-0.5, {}
    number = min(-(-_BEYOND_CACHES // (2 * math.prod(shape) * dtype.itemsize)), 4)
    caches = [cache_of(random(*shape), random(*shape), heads, forward) for _ in range(number)]
    q = random(batch, heads, 1, head_dim)

    def after_prompt(method: Method, cache: SlotCache) -> SlotCache:
        """The cache with what the method keeps beside keys and values, of the same forward pass."""
        counters = Counters().declare(method.counters)
        branch = branch_of(cache, method.channels(cache.geometry), method.evicts, counters, {})
        branch.forward = cache.forward
        method.prompt_end(branch, scaling)
        return branch

    found, first = {}, kascade.for_layer(0, len(layers), layers)
    for name, (kind, layer) in kinds.items():
        one = kind.for_layer(layer, len(layers), layers)
        decode(first, after_prompt(first, caches[0]), q, scaling)  # what a reuse layer reads
        own = [after_prompt(one, cache) for cache in caches]

        def step(one: Method = one, own: list[SlotCache] = own) -> None:
            for cache in own:
                decode(one, cache, q, scaling)

        for _ in range(_WARM_UP):
            step()
        found[name] = statistics.median(timing.milliseconds(step, device) for _ in range(_REPEATS)) / number
    return found


def total(costs: dict[str, float], anchors: int, layers: int) -> float:
    """Milliseconds of the attention of all layers with ``anchors`` anchors, layer 0 among them."""
    return costs["first"] + (anchors - 1) * costs["anchor"] + (layers - anchors) * costs["reuse"]


def affordable(costs: dict[str, float], share: float, layers: Sequence[int], context: int) -> int:
    """The most anchors among some layers within a share of dense attention's time.

    Raises `UserError` if one anchor takes longer; `context` is where the costs were measured.
    """
    if layers[0] != 0:  # the first of these is an anchor like the others
        costs = {**costs, "first": costs["anchor"]}
    dense = len(layers) * costs["dense"]
    totals = [total(costs, number, len(layers)) for number in range(1, len(layers) + 1)]
    fitting = [number for number, one in enumerate(totals, 1) if one <= share * dense]
    if not fitting:
        raise UserError(
            f"time-share {share} cannot be kept: at {context:,} tokens attention with one anchor "
            f"takes {totals[0] / dense:.2f} of dense attention's time on this device"
        )
    return fitting[-1]

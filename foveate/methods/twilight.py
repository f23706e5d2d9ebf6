"""Twilight: the fewest keys that hold a share of the attention, as keys in four bits estimate it."""

import torch

from foveate import ops
from foveate.methods import About, Evicts, ReadsChosen, register, setting
from foveate.methods.base import NEVER_FASTER


@register
class Twilight(ReadsChosen):
    """Each query head chooses the fewest keys whose estimated attention reaches ``p``; a group reads what its heads
    choose. The estimate reads all keys, rounded to four bits (the paper's *Full*)."""

    name = "twilight"
    about = About(
        "Twilight, Lin et al. 2025, arXiv:2502.02770",
        full_budget={"p": 1.0},
        small_budget={"p": 0.3, "min_k": 6},
        estimates=True,
    )

    allows_eviction = Evicts.IN_DECODE | Evicts.UNEVENLY
    sparse_from_tokens = NEVER_FASTER  # the estimate reads all keys without a kernel

    p: float = setting(0.85, "share of the estimated attention that the chosen keys reach")
    min_k: int = setting(128, "least number of keys that a query head chooses")

    def __post_init__(self):
        self._check("p", isinstance(self.p, float) and 0 < self.p <= 1, "a float in (0, 1]")
        self._check_count("min_k", 1)

    def copies(self, keys):
        low, high = keys.float().aminmax(dim=-1, keepdim=True)
        step = ((high - low) / 15).clamp_min(1e-9)
        codes = ((keys - low) / step).round().to(torch.uint8)
        return {"codes": codes[..., ::2] | codes[..., 1::2] << 4, "scales": torch.cat([low, step], -1)}

    def choose(self, cache, q, scaling):
        codes, (low, step) = cache.channel("codes"), cache.channel("scales").split(1, -1)
        keys = torch.stack([codes & 15, codes >> 4], -1).flatten(-2) * step + low
        mass = self.attention(cache, q, keys, scaling)
        order, counts = ops.select.by_mass(mass.flatten(1, 2), 1 - self.p)
        ranks = order.argsort(-1)
        return (ranks < counts.clamp_min(self.min_k)[..., None]).view(mass.shape).any(2)

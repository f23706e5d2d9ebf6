"""The ablations of the LuKA paper (section 3.2, figures 4 and 6), as a user's file with a method of its own.

    foveate compare --import benchmarks/methods/luka_ablated.py --method luka_ablated:compressor=random,top_k=0.05 ...

`luka_ablated` is `luka_paper` written out in PyTorch, on what `foveate.methods` exports alone. It also has a random
compressor, summaries with values of zero, a temperature, and the fixed-threshold rule. It is slow.
"""

import math

import torch

from foveate import ops
from foveate.methods import About, Channel, Method, register, setting

EVERY = 16
"""Decoded tokens between two rounds of making pages (section 4.4)."""
QUERIES = 128
"""Prompt queries whose attention is computed at once."""


@register
class LuKAAblated(Method):
    """Reads summaries of old pages, all tokens of the refined ones, the first tokens and the newest."""

    name = "luka_ablated"
    about = About(
        "LuKA, Fei et al. 2025, sections 3.2 and 5",
        full_budget={"top_k": 1.0, "mass": "exact"},
        small_budget={"page_size": 4, "sinks": 2, "tail": 9, "top_k": 2},
        estimates=True,
    )
    needs_prompt_end = True
    counters = ("pages_refined",)

    page_size: int = setting(16, "tokens of a page")
    sinks: int = setting(0, "first tokens that stay raw")
    tail: int = setting(128, "least number of recent tokens that stay raw")
    compressor: str = setting(
        "attention", "what stands for a page: mean, attention (weights by it) or random (a token)"
    )
    temperature: float = setting(7.0, "of weights by attention: tau, 7 in the authors' evaluation, not in the paper")
    zero_values: bool = setting(False, "summaries have values of zero (figure 6)")
    top_k: int | float = setting(3, "pages refined: a number (0: none), or a share of the pages")
    threshold: float = setting(0.0, "refine the pages with more than this mass (epsilon) instead of top_k; 0: top_k")
    mass: str = setting("preserve", "mass of a refined page: its summary's (preserve, equation 3) or its own (exact)")
    bias: str = setting("none", "added to a summary's logit: none, log (of its tokens) or entropy (of their weights)")
    seed: int = setting(0, "of random tokens")

    def __post_init__(self):
        for name, least in {"page_size": 2, "sinks": 0, "tail": 1, "seed": 0}.items():
            self._check_count(name, least)
        self._check_choice("compressor", "mean", "attention", "random")
        self._check_choice("mass", "exact", "preserve")
        self._check_choice("bias", "none", "log", "entropy")
        self._check("temperature", self.temperature > 0, "above 0")
        self._check("zero_values", isinstance(self.zero_values, bool), "true or false")
        self._check("threshold", 0 <= self.threshold < 1, "at least 0 and below 1")
        self._check_budget("top_k", 0)

    def channels(self, geometry):
        per_page = {"per": self.page_size, "recomputed": True}
        return {
            "mass": Channel(least=0.0),  # accumulated attention, over the heads of a group
            "made": Channel(per=self.page_size, least=0.0),  # 1 for a page with a summary
            "entropy": Channel(**per_page),
            "summary_k": Channel((geometry.head_dim,), dtype=None, **per_page),
            "summary_v": Channel((geometry.value_dim,), dtype=None, **per_page),
        }

    # Making pages

    def observe(self, cache, q, attended, scaling):
        """Add up what prompt queries attend to."""
        if self.compressor != "attention":
            return
        at = torch.arange(cache.used, device=q.device)
        for part, queries in zip(q.split(QUERIES, 2), at[-q.shape[2] :].split(QUERIES)):
            logits = self._logits(cache, part, cache.keys, scaling)
            mass = logits.masked_fill(at > queries[:, None], -torch.inf).softmax(-1)
            cache.channel("mass").add_(mass.sum((2, 3)))

    def prompt_end(self, cache, scaling):
        self._make_pages(cache)

    def _make_pages(self, cache):
        """Summarise the oldest tokens without a page that are not in the tail."""
        size = self.page_size
        number = (cache.used - self.sinks) // size
        if number <= 0:
            return
        lengths = (cache.positions >= 0).sum(-1, keepdim=True)
        index = torch.arange(number, device=lengths.device)
        made = cache.channel("made")[:, :, :number]
        new = (index < (lengths - self.tail - self.sinks) // size) & (made == 0)

        def of_pages(x):
            return x[:, :, self.sinks : self.sinks + number * size].unflatten(2, (number, size))

        if self.compressor == "mean":
            weights = torch.full_like(of_pages(cache.channel("mass")), 1 / size)
        elif self.compressor == "attention":
            received = of_pages(cache.channel("mass")) / cache.geometry.group
            weights = (received / self.temperature).softmax(-1)
        else:
            weights = random_tokens(index, cache.geometry.num_kv_heads, size, self.seed).expand(len(made), -1, -1, -1)

        def average(x):
            return (weights[:, :, :, None] @ of_pages(x).float())[:, :, :, 0]

        values = torch.zeros_like(cache.values) if self.zero_values else cache.values
        found = {"summary_k": average(cache.keys), "summary_v": average(values)}
        for name, x in (found | {"entropy": torch.special.entr(weights).sum(-1)}).items():
            channel = cache.channel(name)[:, :, :number]
            channel[new] = x[new].to(channel.dtype)
        made[new] = 1

    # Decode

    def learn(self, cache, choice, attended):
        if cache.plan.decoded % min(EVERY, self.page_size) == 0:
            self._make_pages(cache)

    def choose(self, cache, q, scaling):
        """Algorithm 1 with one level of pages; all query heads of the layer choose together, by their largest mass."""
        size, number = self.page_size, max(0, cache.used - self.sinks) // self.page_size
        made = cache.channel("made")[:, :, :number] > 0
        paged = torch.zeros_like(cache.positions, dtype=torch.bool)  # which tokens a summary stands for
        paged[:, :, self.sinks : self.sinks + number * size] = made.repeat_interleave(size, -1)
        there = cache.positions >= 0
        own = self._logits(cache, q, cache.keys, scaling)[:, :, :, 0]  # of each token, [B, Hkv, G, L]
        raw = own.masked_fill(~(there & ~paged)[:, :, None], -torch.inf)
        summaries = self._logits(cache, q, cache.channel("summary_k")[:, :, :number], scaling)[:, :, :, 0]
        entropy = cache.channel("entropy")[:, :, None, :number]
        summaries = summaries + {"none": 0.0, "log": math.log(size), "entropy": entropy}[self.bias]
        summaries = summaries.masked_fill(~made[:, :, None], -torch.inf)
        refined = self._refined(torch.cat([summaries, raw], -1).softmax(-1)[..., :number], made)
        inside = own[..., self.sinks : self.sinks + number * size].unflatten(-1, (number, size))
        if self.mass == "preserve":  # equations 2 and 3
            inside = inside.log_softmax(-1) + summaries[..., None]
        children = inside.masked_fill(~refined[:, :, None, :, None], -torch.inf).flatten(-2)
        summaries = summaries.masked_fill(refined[:, :, None], -torch.inf)
        masses = torch.cat([summaries, children, raw], -1).softmax(-1)
        values = cache.values
        pages = values[:, :, self.sinks : self.sinks + number * size]
        out = masses.to(values.dtype) @ torch.cat([cache.channel("summary_v")[:, :, :number], pages, values], 2)
        cache.channel("mass").add_(masses[..., -cache.used :].sum(2))
        cache.count("pages_refined", refined.sum(-1).double())
        read = ((there & ~paged).sum(-1) + made.sum(-1) + size * refined.sum(-1)).double()
        return ops.Choice(attended=ops.Attended(out.flatten(1, 2)[:, :, None]), read=read)

    def _refined(self, mass, made):
        """Which pages are refined, bool ``[B, Hkv, P]``, by the masses ``[B, Hkv, G, P]`` of those that are made."""
        mass = mass.amax((1, 2))[:, None].masked_fill(~made[:, :1], -1.0)
        if self.threshold:
            return (mass > self.threshold).expand(made.shape)
        pages = made[:, :1].sum(-1, keepdim=True)
        allowed = self.top_k
        if isinstance(allowed, float):
            allowed = (allowed * pages.double() + 1e-9).floor().clamp_min(1)
        rank = mass.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        return ((rank < allowed) & made[:, :1]).expand(made.shape)

    def _logits(self, cache, q, keys, scaling):
        """fp32 ``[B, Hkv, G, n, N]`` of queries ``[B, Hq, n, D]`` and keys ``[B, Hkv, N, D]``."""
        how = cache.logits(scaling)
        if how.sinks is not None or how.softcap is not None:
            raise ValueError(f"{self.name}: models with learned sinks or capped logits are not supported")
        rows = q.unflatten(1, (keys.shape[1], -1)).float()
        return rows @ keys.float()[:, :, None].mT * scaling


def random_tokens(page, heads, size, seed):
    """All weight on one token of each page, the same whenever it is drawn: fp32 ``[1, heads, P, size]``.

    Args:
        page: int64 ``[P]``, numbers of the pages.
    """
    head = torch.arange(heads, device=page.device)[:, None]
    x = (page * 0x9E3779B1 + head * 0x85EBCA77 + seed * 0xC2B2AE3D + 1) & 0xFFFFFFFF
    for _ in range(2):  # a 32-bit hash, so that neighbours are unrelated
        x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    return torch.nn.functional.one_hot(((x >> 16) ^ x) % size, size).float()[None]

"""DuoAttention: some KV heads read everything, the others the first keys and the newest ones."""

import dataclasses

import torch

from foveate import ops
from foveate.methods import About, ReadsChosen, register, setting


@register
class Duo(ReadsChosen):
    """Streaming heads read the first keys and the newest ones, in prompts, too; the other KV heads read all keys. All
    keys stay in memory, because a layer stores the same number of tokens for each of its KV heads."""

    name = "duo"
    about = About(
        "DuoAttention, Xiao et al. 2024, arXiv:2410.10819",
        example="duo:heads=[0,3]",
        full_budget={"heads": []},
        small_budget={"heads": [0], "sinks": 2, "recent": 9},
    )
    sparse_from_tokens, needs_prompt_end = None, False

    heads: tuple = setting(None, "KV heads that stream: a list for all layers, or a list of lists, one a layer")
    sinks: int = setting(64, "first keys that streaming heads read")
    recent: int = setting(256, "newest keys that streaming heads read, the query's own included")

    def __post_init__(self):
        self._check_nested("heads")
        self._check_count("sinks")
        self._check_count("recent", 1)

    def for_layer(self, layer, num_layers, among=None):
        if not any(isinstance(one, tuple) for one in self.heads):
            return self
        self._check("heads", len(self.heads) == num_layers, f"a list of {num_layers} lists, as the model has layers")
        return dataclasses.replace(self, heads=self.heads[layer])

    def prompt(self, cache, q, scaling):
        start, heads, logits, outs = cache.used - q.shape[2], cache.geometry.num_kv_heads, cache.logits(scaling), []
        self._check("heads", max(self.heads, default=0) < heads, f"numbers below {heads}, as the layer has KV heads")
        lower = (torch.arange(start, cache.used, device=q.device) + 1 - self.recent).clamp_min(0)
        kv = cache.view()
        for head, (queries, k, v) in enumerate(zip(*(x.chunk(heads, 1) for x in (q, kv.k, kv.v)))):
            sinks = None if logits.sinks is None else logits.sinks.chunk(heads)[head]
            how = {"logits": dataclasses.replace(logits, sinks=sinks), "offset": start}
            streaming = {"lower": lower, "sinks": self.sinks} if head in self.heads else {}
            attend = ops.attend_window if streaming else ops.attend_causal
            outs.append(attend(queries, ops.KV(k, v), **how, **streaming).out)
        return ops.Attended(torch.cat(outs, 1))

    def choose(self, cache, q, scaling):
        whole = cache.plan.constant(head not in self.heads for head in range(cache.geometry.num_kv_heads))
        newest = cache.positions >= (cache.plan["lengths"] - self.recent)[:, None, None]
        return newest | (cache.positions < self.sinks) | (whole > 0)[:, None]

"""The ablations of the Kascade paper's figures 5 and 6, as a user's file with a method of its own.

    foveate compare --import benchmarks/methods/kascade_ablated.py --method kascade_ablated:pooling=pre_softmax ...

Without a calibration every layer but the first chooses its own keys, which is the oracle of figure 5; with one the
method is `kascade_paper` (figure 6). It is written out in PyTorch, on what `foveate.methods` exports alone, can pool
queries instead of attention, and can leave the map of heads out. It is slow, and makes masks of a tile by all keys.
"""

import dataclasses
import json
from pathlib import Path

import torch

from foveate import ops
from foveate.methods import About, Method, Role, register, setting


@register
class KascadeAblated(Method):
    """Reads the keys of the highest score, in prompts a choice for each tile of queries; layer 0 is dense."""

    name = "kascade_ablated"
    about = About(
        "Kascade, Deshmukh et al. 2025, arXiv:2512.16391, sections 3.1, 3.4 and 3.5",
        full_budget={"top_k": 1.0},
        small_budget={"top_k": 9, "tile": 1},
    )
    stateful = False
    needs_prompt_end = True
    counters = ("indices_reused",)

    top_k: int | float = setting(0.1, "keys read: a number, or a share of the tokens so far")
    min_k: int = setting(128, "least number of keys when top_k is a share")
    tile: int = setting(128, "queries of a prompt that share their keys, the heads of a group counted")
    pooling: str = setting("post_softmax", "what is averaged: attention (post_softmax) or queries (pre_softmax)")
    calibration: str = setting("", "file of `foveate calibrate`: anchors and heads; left out: every layer chooses")
    remap: bool = setting(True, "read the anchor's heads that the calibration names; false: those of the same number")

    def __post_init__(self):
        self._check_budget("top_k")
        self._check_count("min_k")
        self._check_count("tile", 1)
        self._check_choice("pooling", "post_softmax", "pre_softmax")
        self._check("remap", isinstance(self.remap, bool), "true or false")
        self._check("calibration", isinstance(self.calibration, str), "a file of `foveate calibrate`")

    def for_layer(self, layer, num_layers, among=None):
        own, anchor, heads = dataclasses.replace(self), layer or None, None  # what the layer reads; None: all keys
        if self.calibration:
            found = json.loads(Path(self.calibration).read_text(encoding="utf-8"))
            layers = found["model"]["layers"]
            if layers != num_layers:
                raise ValueError(f"{self.name}: {self.calibration} is of {layers} layers, the model has {num_layers}")
            anchor = max((one for one in found["anchors"] if one <= layer), default=None)
            heads = found["heads"].get(str(layer)) if self.remap and anchor != layer else None
        own.__dict__.update(layer=layer, anchor=anchor, heads=heads)
        return own

    layer = anchor = heads = None  # set by for_layer

    @property
    def role(self):
        if self.anchor is None:
            return Role("dense", reads_all=True)
        if self.anchor != self.layer:
            return Role("reading", self.anchor, self.heads, layer=self.layer)
        return Role(self.name, chooses=True, layer=self.layer, has_readers=True, reads_all=not self.layer)

    def prompt_tile(self, group):
        return 0 if self.anchor is None else max(1, self.tile // group)

    def prompt(self, cache, q, scaling):
        dense = super().prompt(cache, q, scaling)
        if self.anchor is None:
            return dense
        span, offset, heads = self.prompt_tile(cache.geometry.group), cache.used - q.shape[2], cache.keys.shape[1]
        begins = range(offset - offset % span, cache.used, span)
        chosen = [] if self.anchor == self.layer else cache.forward[cache.shared_key((self.name, self.anchor))]
        outs = []
        for number, begin in enumerate(begins):
            first, end = max(begin, offset), min(begin + span, cache.used)
            rows = q[:, :, first - offset : end - offset].unflatten(1, (heads, -1)).float()  # [B, Hkv, G, n, D]
            causal = torch.arange(end, device=q.device) <= torch.arange(first, end, device=q.device)[:, None]
            logits = self._logits(cache, rows, scaling, end)
            if self.anchor == self.layer:
                scores = self._scores(cache, rows, logits.masked_fill(~causal, -torch.inf), scaling)[..., :begin]
                chosen.append(
                    first_of(scores, torch.full_like(scores[:, :1, :1], self.count(begin), dtype=torch.int64))
                )
            before = chosen[number] if self.heads is None else chosen[number][:, self.heads]
            seen = torch.cat([before, before.new_ones(*before.shape[:2], end - begin)], 2)
            logits = logits.masked_fill(~(causal & seen[:, :, None, None]), -torch.inf)
            outs.append((logits.softmax(-1) @ cache.values[:, :, None, :end].float()).flatten(1, 2))
        if self.anchor == self.layer:
            cache.forward[cache.shared_key((self.name, self.layer))] = chosen
        return dense if self.layer == 0 else dense._replace(out=torch.cat(outs, 2).to(dense.out.dtype))

    def choose(self, cache, q, scaling):
        if self.anchor is None:
            return None
        there = cache.positions >= 0
        rows = q.unflatten(1, (there.shape[1], -1)).float()
        logits = self._logits(cache, rows, scaling, cache.used).masked_fill(~there[:, :, None, None], -torch.inf)
        scores = self._scores(cache, rows, logits, scaling).masked_fill(~there, -torch.inf)
        counts = torch.tensor([[[self.count(int(one))] for one in row] for row in there.sum(-1)])
        choice = ops.Choice.of(first_of(scores, counts.to(q.device)))
        return choice if self.layer else ops.Choice(readers=choice)

    def scored(self, tokens, geometry, dtype):
        return tokens * geometry.key_share

    def count(self, length):
        """Keys read of so many."""
        share = isinstance(self.top_k, float)
        return min(max(int(self.top_k * length + 1e-9), self.min_k, 1) if share else self.top_k, length)

    def _scores(self, cache, rows, logits, scaling):
        """What each key is worth to the queries of a tile: ``[B, Hkv, G, n, D]``, ``[..., n, N] -> [B, Hkv, N]``."""
        if self.pooling == "post_softmax":
            return logits.softmax(-1).mean((2, 3))
        return self._logits(cache, rows.mean((2, 3), keepdim=True), scaling, logits.shape[-1])[:, :, 0, 0]

    def _logits(self, cache, rows, scaling, end):
        how = cache.logits(scaling)
        if how.sinks is not None or how.softcap is not None:
            raise ValueError(f"{self.name}: models with learned sinks or capped logits are not supported")
        return rows @ cache.keys[:, :, None, :end].float().mT * scaling


def first_of(scores, counts):
    """The highest of the scores ``[B, Hkv, N]``, the earlier of equal ones, as bool: as many as ``counts`` says, a
    number or one of each row and head, ``[B, Hkv, 1]``."""
    return scores.argsort(dim=-1, descending=True, stable=True).argsort(-1) < counts

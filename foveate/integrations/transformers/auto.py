"""Anchors for Kascade from the first long prompt that an attached model is given."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

import torch
import transformers
from torch import Tensor, nn

from foveate.calibration import Measured, choose, least_tokens
from foveate.integrations.transformers.facts import kv_heads
from foveate.integrations.transformers.study import Study
from foveate.runtime import Policy

KEYS, TOKENS = 64, 8192
"""Keys chosen for a tile, and most tokens looked at."""
_log = logging.getLogger("foveate")


class Auto:
    """Watches the first prompt that is long enough, on which every layer is dense, and chooses the anchors.

    Of a batch the longest row is watched. What follows in the same sequences, and all later ones, is sparse.

    Args:
        policies: of the attached layers; those that wait for anchors get another method.
        config: the decoder's.
    """

    def __init__(self, policies: Mapping[int, Policy], config: transformers.PreTrainedConfig):
        self._policies, self._config = policies, config
        self._study: Study | None = None
        self._tokens, self._told, self._found = 0, False, False

    def before_forward(
        self, decoder: nn.Module, ids: Tensor, mask: Tensor | None, cache: transformers.Cache | None
    ) -> None:
        """A forward pass is about to read ``ids [B, n]``: what the last one has shown is used from now on.

        Args:
            cache: that of the attached model, whose layers are given the methods found.
        """
        study = self._study
        if study is not None and study.elsewhere and not (study.complete or study.over):
            return
        self.stop()
        if study is not None and study.complete:
            self._choose(*study.result())
        if not self._found and (cache is None or cache.get_seq_length() == 0):
            self._begin(decoder, ids, mask)
        if self._found and cache is not None:
            for index, layer in enumerate(cache.layers):
                if index in self._policies:
                    layer.method = self._policies[index].method

    def stop(self) -> None:
        """Watch no more."""
        if self._study is not None:
            self._study.end()
        self._study = None

    def _begin(self, decoder: nn.Module, ids: Tensor, mask: Tensor | None) -> None:
        row, columns = 0, torch.arange(ids.shape[1], device=ids.device)
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dim() != 2:
                self._tell("finds its anchors in a prompt whose mask has two dimensions; until then it is dense")
                return
            mask = mask[:, : ids.shape[1]]  # it may cover chunks to come
            row = int(mask.sum(1).argmax())
            columns = mask[row].nonzero()[:, 0]
        columns = columns[:TOKENS]
        methods = [policy.method for policy in self._policies.values()]
        tile = next(method.tile for method in methods if method.self_calibrating)
        group = self._config.num_attention_heads // kv_heads(self._config)
        least, self._tokens = least_tokens(KEYS, tile, group), len(columns)
        if len(columns) >= least:
            self._study = Study(decoder, self._policies, KEYS, tile, row, columns)
        else:
            self._tell(f"finds its anchors in a first forward pass of at least {least} tokens; until then it is dense")

    def _tell(self, text: str) -> None:
        """Says once why there are no anchors yet."""
        if not self._told:
            self._told = True
            _log.warning("kascade %s", text)

    def _choose(self, measured: Measured, importance: Tensor) -> None:
        policies, layers = self._policies, sorted(self._policies)
        waiting = [layer for layer in layers if policies[layer].method.self_calibrating]
        for among in dict.fromkeys(policies[layer].method.among for layer in waiting):
            method, at = policies[among[0]].method, torch.tensor([layers.index(layer) for layer in among])
            captured = measured.captured[:, at][:, :, :, at]
            choice = choose(lambda captured=captured: [captured], importance[at], method.anchors)
            anchors = [among[one] for one in choice.anchors]
            heads = {str(among[layer]): heads for layer, heads in choice.heads.items()}
            found = dataclasses.replace(method, anchors=anchors, heads=heads, calibration="")
            for layer in among:
                policies[layer].method = found.for_layer(layer, self._config.num_hidden_layers, among)
            _log.warning(
                "kascade found the anchors %s on %d tokens of the first prompt; `foveate calibrate` finds them on many "
                "prompts, and keeps them",
                anchors,
                self._tokens,
            )
        self._found = True


def auto_for(policies: Mapping[int, Policy], config: transformers.PreTrainedConfig) -> Auto | None:
    """What finds the anchors of layers that wait for them; None if there are none."""
    return Auto(policies, config) if any(policy.method.self_calibrating for policy in policies.values()) else None

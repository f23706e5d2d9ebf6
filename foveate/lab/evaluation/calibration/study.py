"""Watching a model read one prompt: how alike its layers attend, and how much attention changes what passes through."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.errors import UserError
from foveate.integrations.transformers.support import Watch
from foveate.lab.evaluation.calibration.similarity import Measured, Similarity
from foveate.runtime import Policy


def attention_modules(model: nn.Module, layers: Iterable[int]) -> dict[int, nn.Module]:
    """The attention modules of an attached model's layers, ascending."""
    found = {
        module.layer_idx: module for module in model.modules() if "foveate" in vars(module) and module is not model
    }
    return {layer: found[layer] for layer in sorted(layers)}


class Study:
    """One sequence's prompt, watched as an attached model reads it, until every layer was seen or :meth:`end`.

    Args:
        model: the attached model, or its decoder.
        policies: of the layers that are watched.
        k, tile, pools_layer: see :class:`Similarity`.
    """

    def __init__(self, model: nn.Module, policies: Mapping[int, Policy], k: int, tile: int, pools_layer: bool = False):
        self._policies = policies
        self._similarity = Similarity(k, tile, pools_layer)
        self._passing: dict[int, _Passing] = {}
        self._importance: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        modules = attention_modules(model, policies)
        blocks = {id(child): block for block in model.modules() for child in block.children()}
        for layer, module in modules.items():
            self._watch_block(layer, blocks[id(module)], module)
        for policy in policies.values():
            policy.on_attention = self._similarity.look

    @property
    def complete(self) -> bool:
        """Whether every layer was seen."""
        return len(self._importance) == len(self._similarity.layers) == len(self._policies)

    def end(self) -> None:
        """Watch no more."""
        for policy in self._policies.values():
            policy.on_attention = None
        for hook in self._hooks:
            hook.remove()

    def result(self) -> tuple[Measured, Tensor]:
        """What the layers' attention has in common, and the importance of each, fp32 ``[L]``, by ascending layer."""
        importance = torch.stack([self._importance[layer].cpu() for layer in self._similarity.layers])
        if not bool(torch.isfinite(importance).all()):
            layer = self._similarity.layers[int((~torch.isfinite(importance)).nonzero()[0])]
            raise UserError(f"layer {layer}: the hidden states of a prompt are not finite (NaN or infinite)")
        return self._similarity.result(), importance

    def _watch_block(self, layer: int, block: nn.Module, attention: nn.Module) -> None:
        """Watch a block to measure 1 - the cosine of its input and of its state after attention (Kascade, section 3.3).

        The state after attention is the input of the first module after attention that reads neither attention's input
        nor something made of attention's output alone, such as a norm of it. If there is no such module, as in blocks
        whose MLP runs beside attention, the state is the sum of the block's input and attention's output.
        """
        self._hooks.append(block.register_forward_pre_hook(Watch(self._enter, layer, block), with_kwargs=True))
        for child in block.children():
            note = self._attended if child is attention else self._passed
            self._hooks.append(child.register_forward_hook(Watch(note, layer, child), with_kwargs=True))
        self._hooks.append(block.register_forward_hook(Watch(self._exit, layer, block), with_kwargs=True))

    def _enter(self, layer: int, stream: Tensor, out: Any) -> None:
        self._passing[layer] = _Passing(stream)

    def _attended(self, layer: int, stream: Tensor, out: Any) -> None:
        if layer in self._passing:
            out = _first(out)
            self._passing[layer].added = out
            self._passing[layer].aside = [stream, out]

    def _passed(self, layer: int, stream: Tensor, out: Any) -> None:
        passing = self._passing.get(layer)
        if passing is None or passing.added is None or not isinstance(stream, Tensor):
            return
        if any(stream is one for one in passing.aside):
            passing.aside = [*passing.aside, _first(out)]
        elif stream.shape == passing.before.shape:
            self._leave(layer, stream)

    def _exit(self, layer: int, stream: Tensor, out: Any) -> None:
        passing = self._passing.get(layer)
        if passing is not None and passing.added is not None:
            self._leave(layer, passing.before + passing.added)

    def _leave(self, layer: int, stream: Tensor) -> None:
        before = self._passing.pop(layer).before.to(stream.device)
        x, y = (one.detach().float() for one in (before, stream))
        self._importance[layer] = (1 - F.cosine_similarity(x, y, dim=-1)).mean()
        if self.complete:
            self.end()


@dataclasses.dataclass
class _Passing:
    """What is known of a block while it runs."""

    before: Tensor
    added: Tensor | None = None  # attention's output
    aside: Sequence[Any] = ()  # attention's input and output, and what was made of these alone


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out

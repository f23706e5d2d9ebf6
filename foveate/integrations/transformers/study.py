"""Watching a model read one prompt: how alike its layers attend, and how much attention changes what passes through."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.calibration import Measured, Similarity

if TYPE_CHECKING:
    from foveate.integrations.transformers.attach import Attachment


def attention_modules(model: nn.Module, layers: Iterable[int]) -> dict[int, nn.Module]:
    """The attention modules of an attached model's layers, ascending."""
    found = {
        module.layer_idx: module for module in model.modules() if "foveate" in vars(module) and module is not model
    }
    return {layer: found[layer] for layer in sorted(layers)}


class Study:
    """One prompt of an attached model, watched as it is read until every layer was seen, or :meth:`end`.

    Args:
        k, tile: see :class:`~foveate.calibration.Similarity`.
        row: the sequence of the batch that is watched.
        columns: its tokens, int64 ``[n]``; None for all.
    """

    def __init__(
        self,
        model: nn.Module,
        attachment: Attachment,
        k: int,
        tile: int,
        row: int = 0,
        columns: Tensor | None = None,
    ):
        self._attachment, self._row, self._columns = attachment, row, columns
        self._similarity = Similarity(k, tile)
        self._before: dict[int, Tensor] = {}
        self._importance: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self._thread = threading.get_ident()
        modules = attention_modules(model, attachment.policies)
        blocks = {id(child): block for block in model.modules() for child in block.children()}
        for layer, module in modules.items():
            self._watch_block(layer, blocks[id(module)], module)
        for policy in attachment.policies.values():
            policy.look = self._look

    @property
    def elsewhere(self) -> bool:
        """Whether it is the pass of another thread that is watched."""
        return threading.get_ident() != self._thread

    @property
    def complete(self) -> bool:
        """Whether every layer was seen."""
        return len(self._importance) == len(self._similarity.layers) == len(self._attachment.policies)

    def end(self) -> None:
        """Watch no more."""
        for policy in self._attachment.policies.values():
            policy.look = None
        for hook in self._hooks:
            hook.remove()

    def result(self) -> tuple[Measured, Tensor]:
        """What the layers' attention has in common, and the importance of each, fp32 ``[L]``, by ascending layer."""
        importance = torch.stack([self._importance[layer].cpu() for layer in self._similarity.layers])
        if not bool(torch.isfinite(importance).all()):
            layer = self._similarity.layers[int((~torch.isfinite(importance)).nonzero()[0])]
            raise ValueError(f"layer {layer}: the hidden states of a prompt are not finite (NaN or infinite)")
        return self._similarity.result(), importance

    def _pick(self, x: Tensor, dim: int) -> Tensor:
        x = x[self._row : self._row + 1]
        return x if self._columns is None else x.index_select(dim, self._columns.to(x.device))

    def _look(self, layer: int, q: Tensor, k: Tensor, scaling: float) -> None:
        if threading.get_ident() == self._thread:
            self._similarity.look(layer, self._pick(q, 2), self._pick(k, 2), scaling)

    def _watch_block(self, layer: int, block: nn.Module, attention: nn.Module) -> None:
        """1 - cosine of what enters a block and what it is after attention was added (Kascade, section 3.3)."""

        behind = _behind_attention(block)
        self._hooks.append(block.register_forward_pre_hook(_Hook(self._enter, layer, block), with_kwargs=True))
        if behind is not None:
            self._hooks.append(behind.register_forward_pre_hook(_Hook(self._leave, layer, behind), with_kwargs=True))
        else:
            self._hooks.append(attention.register_forward_hook(_Hook(self._add, layer, attention), with_kwargs=True))

    def _enter(self, layer: int, stream: Tensor, out: Any) -> None:
        self._before[layer] = stream

    def _leave(self, layer: int, stream: Tensor, out: Any) -> None:
        if layer in self._before:
            x, y = (self._pick(one.detach(), 1).float() for one in (self._before.pop(layer), stream))
            self._importance[layer] = (1 - F.cosine_similarity(x, y, dim=-1)).mean()
            if self.complete:
                self.end()

    def _add(self, layer: int, stream: Tensor, out: Any) -> None:
        self._leave(layer, self._before[layer] + (out[0] if isinstance(out, tuple) else out), None)


class _Hook:
    """A hook of one module in one thread: on copies of the module, and in passes of other threads, it does nothing."""

    def __init__(self, note: Callable[[int, Tensor, Any], None], layer: int, module: nn.Module):
        self._note, self._layer, self._module, self._thread = note, layer, module, threading.get_ident()

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None, out: Any = None) -> None:
        if module is self._module and threading.get_ident() == self._thread:
            stream = args[0] if args else (kwargs or {}).get("hidden_states")
            self._note(self._layer, stream, out)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self


def remove_hooks(model: nn.Module) -> None:
    """Take off what an interrupted study has left, also that of the model which this one is a copy of."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Hook)]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_with_kwargs.pop(key, None)


def _behind_attention(block: nn.Module) -> nn.Module | None:
    """The module of a decoder block whose input is the residual stream with attention added; None if there is none."""
    if hasattr(block, "pre_feedforward_layernorm"):  # Gemma: norms on both sides
        return block.pre_feedforward_layernorm
    if hasattr(block, "post_feedforward_layernorm"):  # OLMo 2: norms behind
        return block.mlp
    return getattr(block, "post_attention_layernorm", None)

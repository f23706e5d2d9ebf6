"""Watching a model read one prompt: how alike its layers attend, and how much attention changes what passes through."""

from __future__ import annotations

from collections.abc import Iterable
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
        modules = attention_modules(model, attachment.policies)
        blocks = {id(child): block for block in model.modules() for child in block.children()}
        for layer, module in modules.items():
            self._watch_block(layer, blocks[id(module)], module)
        for policy in attachment.policies.values():
            policy.look = self._look

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
        importance = torch.stack([self._importance[layer] for layer in self._similarity.layers]).cpu()
        if not bool(torch.isfinite(importance).all()):
            layer = self._similarity.layers[int((~torch.isfinite(importance)).nonzero()[0])]
            raise ValueError(f"layer {layer}: the hidden states of a prompt are not finite (NaN or infinite)")
        return self._similarity.result(), importance

    def _pick(self, x: Tensor, dim: int) -> Tensor:
        x = x[self._row : self._row + 1]
        return x if self._columns is None else x.index_select(dim, self._columns.to(x.device))

    def _look(self, layer: int, q: Tensor, k: Tensor, scaling: float) -> None:
        self._similarity.look(layer, self._pick(q, 2), self._pick(k, 2), scaling)

    def _watch_block(self, layer: int, block: nn.Module, attention: nn.Module) -> None:
        """1 - cosine of what enters a block and what it is after attention was added (Kascade, section 3.3)."""

        def first(args: tuple, kwargs: dict[str, Any]) -> Tensor:
            return args[0] if args else kwargs["hidden_states"]

        def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            self._before[layer] = first(args, kwargs)

        def compare(after: Tensor) -> None:
            x, y = (self._pick(one.detach(), 1).float() for one in (self._before.pop(layer), after))
            self._importance[layer] = (1 - F.cosine_similarity(x, y, dim=-1)).mean()
            if self.complete:
                self.end()

        def leave(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            compare(first(args, kwargs))

        def add(module: nn.Module, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
            compare(self._before[layer] + (out[0] if isinstance(out, tuple) else out))

        self._hooks.append(block.register_forward_pre_hook(enter, with_kwargs=True))
        behind = _behind_attention(block)
        if behind is not None:
            self._hooks.append(behind.register_forward_pre_hook(leave, with_kwargs=True))
        else:
            self._hooks.append(attention.register_forward_hook(add, with_kwargs=True))


def _behind_attention(block: nn.Module) -> nn.Module | None:
    """The module of a decoder block whose input is the residual stream with attention added; None if there is none."""
    if hasattr(block, "pre_feedforward_layernorm"):  # Gemma: norms on both sides
        return block.pre_feedforward_layernorm
    if hasattr(block, "post_feedforward_layernorm"):  # OLMo 2: norms behind
        return block.mlp
    return getattr(block, "post_attention_layernorm", None)

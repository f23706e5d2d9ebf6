"""A trainable compressor of pages: which of its children a summary listens to (LuKA, section 6, tried one)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

SCHEMA = 1


class PageSummariser(nn.Module):
    """Weights of a page's children from their keys, for every layer and KV head.

    The weights are ``softmax(k · direction)`` over the children, so that a summary stays an average of what it stands
    for; a direction of zero is the mean, from which training starts. Gradients flow through :meth:`forward`.

    Args:
        num_layers, num_kv_heads, head_dim: shapes of the model.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int):
        super().__init__()
        self.direction = nn.Parameter(torch.zeros(num_layers, num_kv_heads, head_dim))
        self._moved: dict[torch.device, Tensor] = {}  # frozen copies, by the device of the keys

    def forward(self, k: Tensor, layer: int, used: Tensor | None = None) -> Tensor:
        """fp32 ``[B, Hkv, N, S]``, summing to 1 over the used children of each group.

        Args:
            k: ``[B, Hkv, N, S, D]``: keys of the children.
            layer: which layer's parameters.
            used: bool ``[B, Hkv or 1, N, S]``, or None when every child is there.
        """
        logits = torch.einsum("bhnsd,hd->bhns", k.float(), self._on(k.device)[layer])
        return (logits if used is None else logits.masked_fill(~used, float("-inf"))).softmax(-1)

    def _on(self, device: torch.device) -> Tensor:
        if self.direction.requires_grad:
            return self.direction.to(device)
        if device not in self._moved:
            self._moved[device] = self.direction.to(device)
        return self._moved[device]

    def save(self, path: str | Path) -> None:
        """Write the parameters as safetensors."""
        layers, heads, dim = self.direction.shape
        facts = {"schema": SCHEMA, "num_layers": layers, "num_kv_heads": heads, "head_dim": dim}
        save_file({"direction": self.direction.detach().contiguous()}, path, {"foveate.summariser": json.dumps(facts)})

    @classmethod
    def load(cls, path: str | Path) -> PageSummariser:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: when the file is missing, damaged, or something else.
        """
        try:
            with safe_open(path, "pt") as file:
                facts = json.loads((file.metadata() or {})["foveate.summariser"])
                direction = file.get_tensor("direction")
            schema, *shape = (facts[name] for name in ("schema", "num_layers", "num_kv_heads", "head_dim"))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a page summariser ({error})") from None
        if schema != SCHEMA:
            raise ValueError(f"{path}: schema {schema}, but this version reads {SCHEMA}; train it again")
        if list(direction.shape) != shape:
            raise ValueError(f"{path}: not a page summariser (its tensor has the shape {tuple(direction.shape)})")
        loaded = cls(*shape)
        loaded.direction.data.copy_(direction)
        return loaded.requires_grad_(False)

"""The loss on text that training never sees."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn

from foveate.hybrids.training.configuration import TrainingConfig
from foveate.hybrids.training.mixture import held_out_batches
from foveate.hybrids.training.tokens import TokenStore


class HeldOut:
    """Windows of the held-out text, the same at every measurement."""

    def __init__(self, store: TokenStore, config: TrainingConfig):
        length = config.batch.length
        rows = max(1, config.batch.device_tokens // length)
        self.batches = held_out_batches(store, length, rows, config.log.held_out)

    @torch.no_grad()
    def measure(
        self, network: nn.Module, device: torch.device, autocast: Callable[[], AbstractContextManager]
    ) -> float:
        """Nats a token. Every process measures all of it: their forward passes must match."""
        network.eval()
        total, rows = torch.zeros((), device=device), 0
        with torch.compiler.set_stance("force_eager"):  # compiling the layers for inference takes minutes
            for part in self.batches:
                on_device = {name: value.to(device) for name, value in part.items()}
                with autocast():
                    made = network(**on_device, use_cache=False)
                total += made.loss.float() * len(part["input_ids"])
                rows += len(part["input_ids"])
        network.train()
        return (total / rows).item()

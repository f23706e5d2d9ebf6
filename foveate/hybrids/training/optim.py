"""AdamW and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

from foveate.hybrids.training.configuration import OptimSettings
from foveate.hybrids.training.network import evicting_layers


def adamw(network: nn.Module, settings: OptimSettings) -> torch.optim.AdamW:
    """AdamW, fused on a GPU. Parameters with fewer than two dimensions do not decay.

    Each group has a `share` by which the learning rate is multiplied: `settings.scores` for retention scores, else 1.
    """
    layers = evicting_layers(network) if settings.scores < 1 else []
    scores = {parameter for layer in layers for parameter in layer.scores.parameters()}
    grouped: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in filter(lambda parameter: parameter.requires_grad, network.parameters()):
        decay = settings.weight_decay if parameter.ndim > 1 else 0.0
        grouped.setdefault((settings.scores if parameter in scores else 1.0, decay), []).append(parameter)
    groups = [
        {"params": parameters, "weight_decay": decay, "share": share} for (share, decay), parameters in grouped.items()
    ]
    fused = all(parameter.is_cuda for parameters in grouped.values() for parameter in parameters)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=fused)


def learning_rate(step: int, steps: int, settings: OptimSettings) -> float:
    """Of a step, the first being 0: a linear rise, then half a cosine down to `final` times the highest."""
    warmup = round(settings.warmup * steps)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return settings.lr * (settings.final + (1 - settings.final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))

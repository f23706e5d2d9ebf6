"""AdamW and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

from foveate.training.configuration import OptimSettings


def adamw(network: nn.Module, settings: OptimSettings) -> torch.optim.AdamW:
    """AdamW, fused on a GPU. What has fewer than two dimensions does not decay."""
    decaying: tuple[list, list] = ([], [])
    for parameter in network.parameters():
        if parameter.requires_grad:
            decaying[parameter.ndim < 2].append(parameter)
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in zip(decaying, (settings.weight_decay, 0.0))
        if parameters
    ]
    fused = all(parameter.is_cuda for group in decaying for parameter in group)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused)


def learning_rate(step: int, steps: int, settings: OptimSettings) -> float:
    """Of a step, the first being 0: a linear rise, then half a cosine down to `final` times the highest."""
    warmup = round(settings.warmup * steps)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return settings.lr * (settings.final + (1 - settings.final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))

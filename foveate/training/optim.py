"""AdamW and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from foveate.training.configuration import OptimSettings


def adamw(network: nn.Module, settings: OptimSettings, apart: Iterable[nn.Parameter] = ()) -> torch.optim.AdamW:
    """AdamW, fused on a GPU. What has fewer than two dimensions, or says `_no_weight_decay`, does not decay.

    Args:
        apart: parameters that share no group with others.
    """
    alone = {id(parameter) for parameter in apart}
    kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in network.parameters():
        if parameter.requires_grad:
            spared = parameter.ndim < 2 or getattr(parameter, "_no_weight_decay", False)
            kinds.setdefault((id(parameter) in alone, spared), []).append(parameter)
    groups = [
        {"params": kinds[kind], "weight_decay": 0.0 if kind[1] else settings.weight_decay} for kind in sorted(kinds)
    ]
    fused = all(parameter.is_cuda for group in kinds.values() for parameter in group)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused)


def learning_rate(step: int, steps: int, settings: OptimSettings) -> float:
    """Of a step, the first being 0: a linear rise, then half a cosine down to `final` times the highest."""
    warmup = round(settings.warmup * steps)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return settings.lr * (settings.final + (1 - settings.final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))

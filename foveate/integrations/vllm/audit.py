"""Proof while serving: some decode steps also run densely, and their logits are compared with those that are served.

The dense run comes first. It writes keys and values of the new tokens that the served run replaces, so that answers are
what they are without an audit. Earlier tokens are the same for both: an audit tells what the present step loses.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class Share:
    """Picks a share of the steps, evenly; ranks that count the same steps pick the same."""

    def __init__(self, share: float):
        self.share, self.owed = share, 0.0

    def due(self) -> bool:
        """Whether the next step is picked."""
        self.owed += self.share
        due = self.owed >= 1 - 1e-9
        self.owed -= due
        return due


def install() -> None:
    """Have vLLM's model runner compare the steps that are audited; once in a process."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    inner = GPUModelRunner._model_forward
    if getattr(inner, "audits", False):
        return

    @functools.wraps(inner)
    def forward(runner: Any, *args: Any, **kwargs: Any) -> Any:
        steps = audited_steps()
        if not steps:
            return inner(runner, *args, **kwargs)
        with contextlib.ExitStack() as stack:
            noted = [stack.enter_context(step.steps.audit()) for step in steps]
            stack.enter_context(_without_graphs())
            dense = runner.model.compute_logits(inner(runner, *args, **kwargs)[: steps[0].real])
        mass = [x[: steps[0].real] for layers in noted for x in layers]
        out = inner(runner, *args, **kwargs)
        given = runner.model.compute_logits(out[: steps[0].real])
        if dense is not None:  # another rank has them
            steps[0].audited.observe(compared(dense, given) | {"mass_read": torch.stack(mass).mean(0)})
        return out

    forward.audits = True
    GPUModelRunner._model_forward = forward


def audited_steps() -> list[Any]:
    """The steps of the present forward pass, one a group of layers, if it is to be audited."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    found = metadata.values() if isinstance(metadata, dict) else ()
    steps = {id(step): step for one in found if (step := getattr(one, "foveate", None)) is not None}
    return list(steps.values()) if all(step.audited for step in steps.values()) else []


@contextlib.contextmanager
def _without_graphs() -> Iterator[None]:
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    mode, context.cudagraph_runtime_mode = context.cudagraph_runtime_mode, CUDAGraphMode.NONE
    try:
        yield
    finally:
        context.cudagraph_runtime_mode = mode


def compared(dense: Tensor, given: Tensor) -> dict[str, Tensor]:
    """Whether rows of logits ``[B, V]`` have the same greedy token, and their KL divergence in nats, ``[B]``."""
    p, q = (x.float().log_softmax(-1) for x in (dense, given))
    agreement = (dense.argmax(-1) == given.argmax(-1)).float()
    return {"agreement": agreement, "kl": (p.exp() * (p - q)).nan_to_num(0.0).sum(-1).clamp_min(0)}

"""Proof while serving: some decode steps also run densely, and the dense logits are compared with the served logits.

The dense run comes first. The served run then replaces the keys and values of the new tokens that the dense run has
written, so an audit does not change answers. Both runs read the same earlier tokens, so an audit measures what the
present step alone loses.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
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
    """Have vLLM's model runners compare the steps that are audited; once in a process."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not getattr(GPUModelRunner._model_forward, "audits", False):
        GPUModelRunner._model_forward = _audited_forward(GPUModelRunner._model_forward)
        SecondModelRunner.execute_model = _audited_execution(SecondModelRunner.execute_model)


def _audited_forward(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap model runner V1's forward pass, which runs with inputs and metadata prepared."""

    @functools.wraps(inner)
    def forward(runner: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.forward_context import get_forward_context

        steps = audited_steps(get_forward_context().attn_metadata)
        if not steps:
            return inner(runner, *args, **kwargs)
        dense = Dense(runner.model, steps)
        with _without_graphs():
            dense.run(lambda: inner(runner, *args, **kwargs))
        out = inner(runner, *args, **kwargs)
        dense.compare(out)
        return out

    forward.audits = True
    return forward


def _audited_execution(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap model runner V2's step, within which the model's state is asked for metadata, then for inputs.

    What the runner does next may be the replay of a graph, so the dense run comes when inputs are asked for.
    """

    @functools.wraps(inner)
    def execute_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run"):
            return inner(runner, *args, **kwargs)
        state, step, audits = runner.model_state, {}, []
        own_metadata, own_inputs = state.prepare_attn, state.prepare_inputs

        def prepare_attn(batch: Any, mode: Any, tables: Any, slots: Any, groups: Any, config: Any, **more: Any) -> Any:
            metadata = own_metadata(batch, mode, tables, slots, groups, config, **more)
            step.update(metadata=metadata, slots=slots, config=config)
            return metadata

        def prepare_inputs(batch: Any, requests: Any) -> dict[str, Any]:
            inputs = own_inputs(batch, requests)
            if steps := audited_steps(step.get("metadata")):
                audits.append(dense := Dense(runner.model, steps))
                with _context_of(runner, batch, **step):
                    dense.run(lambda: runner.model(**_inputs_of(batch) | inputs))
            return inputs

        state.prepare_attn, state.prepare_inputs = prepare_attn, prepare_inputs
        try:
            out = inner(runner, *args, **kwargs)
        finally:
            del state.prepare_attn, state.prepare_inputs
        for dense in audits:
            dense.compare(runner.execute_model_state.hidden_states)
        return out

    return execute_model


def _inputs_of(batch: Any) -> dict[str, Any]:
    """The inputs that model runner V2 gives a text model, without the inputs that the model's state adds."""
    given = {"input_ids": batch.input_ids, "positions": batch.positions}
    return given | {"inputs_embeds": None, "intermediate_tensors": None}


def _context_of(runner: Any, batch: Any, metadata: Any, slots: Tensor, config: Any) -> Any:
    """The context in which model runner V2 runs a model without graphs."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor, set_forward_context
    from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

    tokens = batch.num_tokens_after_padding
    return set_forward_context(
        metadata,
        runner.vllm_config,
        num_tokens=tokens,
        cudagraph_runtime_mode=CUDAGraphMode.NONE,
        batch_descriptor=BatchDescriptor(num_tokens=tokens, has_lora=runner.lora_config is not None),
        slot_mapping=build_slot_mappings_by_layer(slots, config),
        is_padding=batch.is_padding,
    )


class Dense:
    """The dense run of a step that is audited.

    Args:
        model: vLLM's.
        steps: of the step, one a group of layers.
    """

    def __init__(self, model: Any, steps: Sequence[Any]):
        self.model, self.steps = model, steps

    def run(self, forward: Callable[[], Tensor]) -> None:
        """Run ``forward``, which gives hidden states ``[T, H]``, with all keys."""
        with contextlib.ExitStack() as stack:
            noted = [stack.enter_context(step.steps.audit()) for step in self.steps]
            self.logits = self._logits_of(forward())
        self.noted = {
            "mass_read": [x[: self.steps[0].real] for group in noted for x in group.mass],
            "ranks_alike": [x[: self.steps[0].real] for group in noted for x in group.alike],
        }

    @torch.inference_mode()
    def compare(self, served: Tensor) -> None:
        """Compare the served run's hidden states ``[T, H]`` with the dense run's, and count."""
        given = self._logits_of(served)
        if self.logits is not None:  # another rank has them
            found = {name: torch.stack(layers).mean(0) for name, layers in self.noted.items() if layers}
            self.steps[0].audited.observe(compared(self.logits, given) | found)

    def _logits_of(self, hidden: Tensor) -> Tensor | None:
        return self.model.compute_logits(hidden[: self.steps[0].real])


def audited_steps(metadata: Any) -> list[Any]:
    """The steps of a forward pass, one a group of layers, if it is to be audited; ``metadata`` is a dict by layer."""
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

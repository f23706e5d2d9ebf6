"""CUDA graphs for the decode steps of `generate`: when steps are replayed, and what `generate` calls for a step."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer
from transformers.generation import GenerationMode

from foveate.integrations.transformers import announcements, releases
from foveate.integrations.transformers.cache import Cache
from foveate.integrations.transformers.layers import CacheLayer, recurrent_states
from foveate.methods import replay_obstacle
from foveate.ops._dispatch import runs_kernel
from foveate.runtime import CaptureError, CudaRecorder, ReplayedSteps, Use
from foveate.runtime.recorder import Recorder

if TYPE_CHECKING:
    from foveate.integrations.transformers.attach import Attachment

_WATCHING = ("output_attentions", "output_hidden_states", "output_router_logits")
_SHAPES = ("dynamic", "longrope")
"""Rotary embeddings that depend on the length of the context."""
_OWN_HOOKS = ("foveate.integrations.transformers.hooks", "transformers.")
"""Modules whose forward hooks a replay may skip: what they check does not change from step to step."""
_PLAIN = (bool, int, float, str, type(None))


class Graphs:
    """Whether and how an attached model replays its decode steps.

    Args:
        mode: True, False or "auto".

    Raises:
        ValueError: for another mode.
    """

    def __init__(self, mode: bool | str):
        if not (isinstance(mode, bool) or mode == "auto"):
            raise ValueError(f"cuda_graph must be True, False or 'auto', not {mode!r}")
        self.mode, self.use = mode, Use()
        self.recorder: Recorder | None = None
        """Replaces CUDA graphs as the way to record steps; None: CUDA graphs."""
        self._of_devices: dict[torch.device, CudaRecorder] = {}
        self._broken = ""

    def obstacle(self, model: nn.Module, attachment: Attachment) -> str:
        """Why steps of this model and method are never replayed; empty when they are."""
        if self.mode is False:
            return "switched off"
        if self._broken:
            return self._broken
        config = attachment.config
        moving = sorted(layer for layer, kind in attachment.unchanged.items() if "sliding-window" in kind)
        if moving:
            layers = ", ".join(map(str, moving))
            return f"layers {layers} stay as they are, with a cache whose memory moves"
        for policy in attachment.policies.values():
            if obstacle := replay_obstacle(policy.method):
                return obstacle
        rope = getattr(config, "rope_parameters", None) or {}
        kinds = {rope.get("rope_type")} | {one.get("rope_type") for one in rope.values() if isinstance(one, dict)}
        if kinds & set(_SHAPES):
            return f"{sorted(kinds & set(_SHAPES))[0]} rotary embeddings depend on the length of the context"
        if getattr(config, "mixers", None) is not None:
            return f"its {config.mixers[0]} layers keep a memory of their own, which a captured step cannot write to"
        if model.training:
            return "the model is in training mode"
        if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
            return "the model is spread over several devices"
        if (getattr(model, "_tp_size", None) or 1) > 1:
            return "the model is tensor-parallel"
        if self.recorder is None and model.device.type != "cuda":
            return f"the model is on the {model.device.type.upper()}, and CUDA graphs need a GPU"
        if self.mode == "auto" and self.recorder is None and not runs_kernel("attend"):
            return (
                "without the kernels of decoding, which stop where a row ends, replays can be slower (insist with True)"
            )
        return ""

    def require(self, reason: str) -> None:
        """Note why steps are not replayed.

        Raises:
            ValueError: when the attachment insists on it, with ``cuda_graph=True``.
        """
        self.use.reason = reason
        if reason and self.mode is True:
            raise ValueError(f"cuda_graph=True is not possible: {reason}; with cuda_graph='auto' it would be left out")

    def check_generation(self, mode: GenerationMode, use_cache: bool | None) -> None:
        """Check at the start of a call of `generate` whether its steps can be replayed.

        Raises:
            ValueError: as :meth:`require`, when they cannot.
        """
        if self.mode is False:
            return
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            self.require(f"{mode.value} takes other steps than one token for each sequence after the other")
        elif use_cache is False:
            self.require("use_cache=False computes all tokens at every step")

    def recorder_for(self, device: torch.device) -> Recorder:
        """The recorder of steps on a device; its graphs share memory."""
        return self.recorder or self._of_devices.setdefault(device, CudaRecorder(device))

    def broke(self, error: CaptureError) -> None:
        """Stop recording steps after one could not be captured, and warn."""
        self._broken = f"a step could not be captured ({error})"
        self.require(self._broken)
        warnings.warn(f"foveate: {self._broken}; steps are run one by one", stacklevel=3)

    def __deepcopy__(self, memo):
        return Graphs(self.mode)


class DecodeCall:
    """What `generate` calls for a decode step and for a chunk of a prompt: runs the model or replays a step."""

    def __init__(self, model: nn.Module, attachment: Attachment):
        self.model, self.attachment = model, attachment

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        graphs, cache = self.attachment.graphs, inputs.get(releases.CACHE)
        if args or not isinstance(cache, Cache) or not _is_step(cache, inputs):
            return self.model(*args, **inputs)
        reason = graphs.obstacle(self.model, self.attachment) or _refusal(cache, inputs, self.attachment)
        if cache.steps is None:  # else there was nothing when the call of `generate` began
            reason = reason or _hooked(self.model)
        if graphs.mode is not False:
            graphs.require(reason)
        if reason or _runs_alone(cache):
            return self.model(**inputs)
        given = {key: value for key, value in inputs.items() if key not in (releases.CACHE, "attention_mask")}
        tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
        if "position_ids" not in tensors:
            ids = tensors["input_ids"]
            tensors["position_ids"] = ids.new_full((1, 1), cache.get_seq_length())
        options = {key: value for key, value in given.items() if key not in tensors}
        if cache.steps is None:
            cache.steps = ReplayedSteps(graphs.recorder_for(self.model.device), graphs.use)
        try:
            out = self._replayed(cache, tensors, options)
        except CaptureError as error:
            graphs.broke(error)
            return self.model(**inputs)
        return releases.with_cache(out, cache)

    def _replayed(self, cache: Cache, tensors: dict[str, Tensor], options: dict[str, Any]) -> Any:
        """Decode one token for every row; the output does not name the cache."""

        def run(**given: Any) -> Any:
            return releases.without_cache(self.model(**given, **{releases.CACHE: cache}))

        def written() -> list[Tensor]:
            recurrent = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
            return [state for layer in recurrent for state in recurrent_states(layer)]

        layers = [layer for layer in cache.layers if isinstance(layer, CacheLayer)]
        return cache.steps(layers, run, tensors, options, written)


class TakesDecodeCall:
    """Replaces the model's ``_valid_auto_compile_criteria``, so that `generate` uses ``get_compiled_call``."""

    def __init__(self, model: nn.Module, attachment: Attachment):
        self.model, self.attachment = model, attachment

    def __call__(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        return self.attachment.graphs.mode is not False


class GetDecodeCall:
    """Replaces the model's ``get_compiled_call``, which returns what `generate` calls for a step."""

    def __init__(self, model: nn.Module, attachment: Attachment):
        self.call = DecodeCall(model, attachment)

    def __call__(self, compile_config: Any) -> DecodeCall:
        announcements.asked_for_steps(self.call.attachment.uid)
        return self.call


def _is_step(cache: Cache, inputs: dict[str, Any]) -> bool:
    """Whether each sequence gets one token, but not the first after a prompt, which may set up a method's state."""
    ids = inputs.get("input_ids")
    if ids is None or ids.dim() != 2 or ids.shape[1] != 1:
        return False
    return cache.phase.prompt_end_known and cache.get_seq_length() > (cache.phase.prompt_end or 0)


def _refusal(cache: Cache, inputs: dict[str, Any], attachment: Attachment) -> str:
    """Why this step cannot be replayed where others can; empty when it can."""
    if cache.phase.assistant or any(layer.record_past for layer in cache.layers if isinstance(layer, CacheLayer)):
        return "the cache records its past, for assisted decoding"
    watched = [name for name in _WATCHING if inputs.get(name)]
    if watched:
        return f"{watched[0]}=True returns more than the logits"
    if any(policy.look is not None for policy in attachment.policies.values()):
        return "its attention is being watched"
    odd = [key for key, value in inputs.items() if key != releases.CACHE and not isinstance(value, (Tensor, *_PLAIN))]
    if odd:
        return f"the model is given {odd[0]}, a {type(inputs[odd[0]]).__name__}"
    return ""


def _hooked(model: nn.Module) -> str:
    """Which forward hook of someone else a replay would skip; empty without one."""
    for name, module in model.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not getattr(hook, "__module__", "").startswith(_OWN_HOOKS):
                return f"{name or 'the model'} has a forward hook, which a replay does not call"
    return ""


def _runs_alone(cache: Cache) -> bool:
    """Whether this step is followed by maintenance that cannot be captured."""
    return any(layer.method.replay.maintenance_due(layer.store.decoded + 1) for layer in cache.maintained_alone)

"""What `generate` calls for a decode step of an attached model: runs the model, or replays a step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from foveate.integrations.transformers import announcements, releases
from foveate.integrations.transformers.attachment import Attachment, OfModel
from foveate.integrations.transformers.cache import Cache
from foveate.integrations.transformers.layers import CacheLayer, recurrent_states
from foveate.runtime import CaptureError, Policy, ReplayedSteps

_WATCHING = ("output_attentions", "output_hidden_states", "output_router_logits")
_OWN_HOOKS = ("foveate.integrations.transformers.hooks", "transformers.")
"""Modules whose forward hooks a replay may skip: what they check does not change from step to step."""
_PLAIN = (bool, int, float, str, type(None))


class DecodeCall(OfModel):
    """What `generate` calls for a decode step and for a chunk of a prompt: runs the model or replays a step."""

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        cache = inputs.get(releases.CACHE)
        if args or not isinstance(cache, Cache) or not _is_step(cache, inputs):
            return self.model(*args, **inputs)
        if not can_replay(self.model, self.attachment, cache, inputs):
            return self.model(**inputs)
        given = {key: value for key, value in inputs.items() if key not in (releases.CACHE, "attention_mask")}
        tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
        if "position_ids" not in tensors:
            ids = tensors["input_ids"]
            tensors["position_ids"] = ids.new_full((1, 1), cache.get_seq_length())
        options = {key: value for key, value in given.items() if key not in tensors}
        seen = cache.get_seq_length()
        try:
            out = replayed(self.model, cache, tensors, options)
        except CaptureError as error:
            self.attachment.graphs.broke(error)
            return self.model(**inputs)
        cache.ids.write(seen, inputs["input_ids"])
        return releases.with_cache(out, cache)


def can_replay(model: nn.Module, attachment: Attachment, cache: Cache, inputs: Mapping[str, Any]) -> bool:
    """Whether a decode step of the model with these inputs can be captured; if so, the cache has what replays it.

    Raises:
        ValueError: as :meth:`Graphs.require`, when it cannot.
    """
    graphs = attachment.graphs
    reason = attachment.replay_obstacle(model) or _refusal(cache, inputs, attachment.policies)
    if cache.steps is None:  # else there was nothing when the call of `generate` began
        reason = reason or _hooked(model)
    if graphs.mode is not False:
        graphs.require(reason)
    if not reason and cache.steps is None:
        cache.steps = ReplayedSteps(graphs.recorder_for(model.device), graphs.use)
    return not reason


def replayed(
    model: nn.Module, cache: Cache, tensors: dict[str, Tensor], options: dict[str, Any], **kind: Hashable
) -> Any:
    """Decode one token for every row; the output does not name the cache.

    Args:
        tensors, options: inputs that change with each step, and the others.
        kind: see :class:`ReplayedSteps`.
    """

    def run(**given: Any) -> Any:
        return releases.without_cache(model(**given, **{releases.CACHE: cache}))

    def written() -> list[Tensor]:
        recurrent = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
        return [state for layer in recurrent for state in recurrent_states(layer)]

    layers = [layer for layer in cache.layers if isinstance(layer, CacheLayer)]
    return cache.steps(layers, run, tensors, options, written, **kind)


class EnableCompiledCall(OfModel):
    """Replaces the model's ``_valid_auto_compile_criteria``, so that `generate` uses ``get_compiled_call``."""

    def __call__(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        return self.attachment.graphs.mode is not False


class GetDecodeCall:
    """Replaces the model's ``get_compiled_call``, which returns what `generate` calls for a step."""

    def __init__(self, model: nn.Module, attachment: Attachment):
        self.call = DecodeCall(model, attachment)

    def __call__(self, compile_config: Any) -> DecodeCall:
        announcements.asked_for_steps(self.call.attachment.uid)
        return self.call


class RefuseContinuousBatching:
    """Replaces the model's ``init_continuous_batching``, which `generate_batch` calls."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise ValueError(
            "an attached model does not run continuous batching (generate_batch): Transformers' paged attention reads "
            "the cache there, without the method. Use generate, serve with vLLM (docs/guide/serve.md), or detach it"
        )


def _is_step(cache: Cache, inputs: dict[str, Any]) -> bool:
    """Whether each sequence gets one token, but not the first after a prompt, which may set up a method's state."""
    ids = inputs.get("input_ids")
    if ids is None or ids.dim() != 2 or ids.shape[1] != 1:
        return False
    return cache.phase.prompt_end_known and cache.get_seq_length() > (cache.phase.prompt_end or 0)


def _refusal(cache: Cache, inputs: Mapping[str, Any], policies: Mapping[int, Policy]) -> str:
    """Why this step cannot be replayed where others can; empty when it can."""
    if cache.phase.assistant or any(layer.record_past for layer in cache.layers if isinstance(layer, CacheLayer)):
        return "the cache records its past, for assisted decoding"
    watched = [name for name in _WATCHING if inputs.get(name)]
    if watched:
        return f"{watched[0]}=True returns more than the logits"
    if any(policy.on_attention is not None for policy in policies.values()):
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

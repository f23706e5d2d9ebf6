"""What runs before and after a forward pass of an attached model, and when `generate` prepares its cache."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.generation import GenerationMode

from foveate.errors import FoveateWarning
from foveate.integrations.transformers import announcements, attention, padding, releases
from foveate.integrations.transformers.attachment import Attachment, OfModel
from foveate.integrations.transformers.cache import Cache
from foveate.integrations.transformers.layers import CacheLayer
from foveate.integrations.transformers.positions import length_kinds, max_positions, rotated_otherwise
from foveate.integrations.transformers.support import forgets, refuse_weights
from foveate.methods import sparse_prompt
from foveate.runtime import handover, returned

LONG_PROMPT, CHUNK = 1 << 15, 1 << 14
"""`generate` reads a prompt in chunks if all its rows together have more than ``LONG_PROMPT`` tokens; a chunk has
``CHUNK`` tokens. A pass over 131,072 tokens at once would need several gigabytes beside the cache."""
_log = logging.getLogger("foveate")


class BeforeForward(OfModel):
    """Pre-hook of the decoder: every forward with a cache runs on a foveate cache that belongs to this model."""

    @torch.compiler.disable
    def __call__(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any]):
        config, attachment = decoder.config, self.attachment
        if config._attn_implementation != attention.IMPLEMENTATION:
            raise RuntimeError(
                f"the model's attention implementation was changed to {config._attn_implementation!r} after "
                "foveate.attach, so keys would be handed to a cache whose attention never took them; it must stay "
                f"{attention.IMPLEMENTATION!r} until foveate.detach"
            )
        given = releases.arguments(decoder, args, kwargs)
        refuse_weights(given.get("output_attentions", config.output_attentions))
        cache, training = given.get("cache"), decoder.training
        ids = next((given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None)
        if ids is not None and ids.shape[1] == 0:
            name = "input_ids" if given.get("input_ids") is not None else "inputs_embeds"
            raise ValueError(f"{name} has shape {tuple(ids.shape)}: there must be at least one token")
        if ids is not None:
            _check_columns(given, ids.shape[0], 0 if cache is None else cache.get_seq_length(), ids.shape[1])
        self._check_announced(given, ids)
        if cache is not None and not training:
            check_cache(cache, attachment)
            if ids is not None and ids.shape[1] > 1:
                _check_continues(self.model, cache, ids.shape[1])
                _warn_of_chunks(cache, attachment)
            if ids is not None and not cache.phase.within_step:
                cache.check_rotation(attachment.config, ids.shape[1])
        if training and getattr(decoder, "gradient_checkpointing", False):
            methods = {n: policy.method for n, policy in attachment.policies.items() if sparse_prompt(policy.method)}
            readers = [n for n, method in methods.items() if method.role.reads_choice_of is not None]
            if readers:
                raise ValueError(
                    f"gradient checkpointing is not possible with {attachment.method.name}: layer {readers[0]} "
                    "reads what an earlier layer has chosen, which is not kept until the backward pass"
                )
        attachment.forward.clear()
        cache = give_cache(self.model, given, config)
        if isinstance(cache, Cache):
            seen, fed = cache.get_seq_length(), ids is not None and not cache.phase.within_step
            if fed:
                padding.check(given, cache)
                padding.place(decoder, given, cache, ids.shape[1], ids.device)
                cache.reserve_memory(ids.shape[0], max(seen + ids.shape[1], cache.phase.prompt_end or 0))
                cache.ids.check_rows(ids.shape[0], seen)
            cache.begin_forward()
            attachment.remember(cache)
            handover.begin(attachment.uid, cache.phase, cache)
            if fed and cache.ids.columns < seen + ids.shape[1]:
                cache.ids.write(seen, ids)
        else:
            if ids is not None and not training:
                padding.place(decoder, given, None, ids.shape[1], ids.device)
            handover.begin(attachment.uid, None)
        return (), releases.for_module(decoder, given)

    def _check_announced(self, given: dict[str, Any], ids: Tensor | None) -> None:
        """Refuse a first forward pass of `generate` without the cache that it prepared, or of more than its prompt."""
        announced = announcements.announced(self.attachment.uid)
        expected = None if announced is None else announced.cache()
        if expected is None:
            return
        cache = given.get("cache")
        if cache is None and given.get("use_cache") and length_kinds(self.attachment.config):
            # Phi's models drop a cache of another rotation, and are given the whole prompt
            cache = given["cache"] = expected.anew(self.model)
        elif cache is None and given.get("use_cache"):
            raise releases.unknown("`generate` prepared a foveate cache, but calls the model without one")
        if cache is not expected:
            return
        fed, prompt_end = cache.get_seq_length() + (0 if ids is None else ids.shape[1]), cache.phase.prompt_end
        if announced.prompt_only and prompt_end is not None and fed > prompt_end:
            if given.get("inputs_embeds") is not None and not cache.get_seq_length():
                cache.phase.prompt_end = fed  # the model has put embeddings before the prompt, as PEFT's virtual tokens
                return
            raise releases.unknown(f"`generate` feeds a prompt of {fed} tokens, and prepared one of {prompt_end}")
        if announced.owes_steps:
            self.attachment.graphs.require(
                f"Transformers {transformers.__version__} does not ask the model for what runs a decode step"
            )


class BeforeWhole(OfModel):
    """Pre-hook of a model that contains the decoder and may build a cache itself: it is given a foveate cache."""

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        given = releases.arguments(module, args, kwargs)
        if not module.training and given.get("cache") is None and give_cache(self.model, given, self.attachment.config):
            _check_one_sequence(given.get("attention_mask"), given.get("position_ids"))
        cache, ids = given.get("cache"), given.get("input_ids")
        if isinstance(cache, Cache) and not cache.phase.within_step:
            if ids is not None and given.get("inputs_embeds") is None:
                cache.ids.write(cache.get_seq_length(), ids)
            if given.get("position_ids") is None:
                self.attachment.restore_offsets(cache)
        return (), releases.for_module(module, given)


class AfterForward:
    """Hook of the decoder, also called when its forward failed: checks that every attached layer ran its method.

    It ends the pass on the cache, which is refused if that never happens. After a prompt it also checks, once, that
    their results are finite, and the slots that they keep.
    """

    def __init__(self, attachment: Attachment):
        self.attachment = attachment

    @torch.compiler.disable
    def __call__(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        one = handover.end(self.attachment.uid)
        if one is None:
            return
        cache = one.cache()
        if out is None:
            if cache is not None:
                cache.end_forward(failed=True)
            return
        reached = one.reached
        number = self.attachment.config.num_hidden_layers
        missed = sorted(index for index in self.attachment.policies if index < number and index not in reached)
        if missed:
            layers = ", ".join(map(str, missed))
            raise releases.unknown(
                f"{type(decoder).__name__} computed the attention of layers {layers} without foveate, which was to "
                f"apply {self.attachment.method.name} there"
            )
        if any(one.finite is not None for one in reached.values()):  # there was a prompt
            self._check_finite(reached, out[0], releases.full_attention_mask(kwargs.get("attention_mask")))
        returned.check_noted(one.forward if cache is None else cache.phase.forward)
        if cache is not None:
            cache.offsets = self.attachment.offsets()
            cache.end_forward(failed=False)

    def _check_finite(self, reached: dict[int, handover.Reached], hidden: Tensor, mask: Tensor | None) -> None:
        attention.check_finite(reached, hidden.dtype)
        finite = hidden[:, -1].isfinite().all(-1)
        if mask is not None and mask.dim() == 2:  # a row may end with padding
            finite = finite | (mask[:, -1] == 0).to(finite.device)
        if not bool(finite.all()):
            raise attention.not_finite("the hidden states after the last layer are", hidden.dtype)


class Prefill(OfModel):
    """Stands in for the model's ``_prefill``, with which `generate` reads a prompt on the cache that it prepared."""

    def __call__(
        self,
        input_ids: Tensor,
        generation_config: transformers.GenerationConfig,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        given, mask = model_kwargs.get(releases.CACHE), model_kwargs.get("attention_mask")
        seen = given.get_seq_length() if isinstance(given, Cache) else 0
        chunk = generation_config.prefill_chunk_size
        end = given.phase.prompt_end or 0 if isinstance(given, Cache) else 0
        parts = chunk and seen + chunk < end
        if parts and (reason := rotated_otherwise(self.attachment.config, seen + chunk, end)):
            raise ValueError(f"prefill_chunk_size={chunk}: {reason}; leave it out")
        try:
            if isinstance(given, Cache) and not given.phase.assistant and input_ids.shape[1] == given.phase.prompt_end:
                given.ids.check(input_ids, seen, mask)
            if chunk := self._chunk(input_ids, generation_config, model_kwargs):
                generation_config.prefill_chunk_size = chunk
                _log.info("a prompt of %s tokens is read in chunks of %s", f"{input_ids.shape[1]:,}", f"{chunk:,}")
            with announcements.prefilling(self.attachment.uid):
                out = type(self.model)._prefill(self.model, input_ids, generation_config, model_kwargs, *args, **kwargs)
        except BaseException:
            if isinstance(given, Cache) and not given.phase.assistant and given.get_seq_length() == seen:
                given.cancel()
            raise
        cache = releases.returned_cache(out)
        if isinstance(cache, Cache) and cache.get_seq_length() < (cache.phase.prompt_end or 0):
            raise ValueError(
                f"attention_mask or position_ids cover {cache.phase.prompt_end} tokens, but the prompt has "
                f"{cache.get_seq_length()}, earlier turns included: pass as many"
            )
        return out

    def _chunk(
        self, ids: Tensor, generation_config: transformers.GenerationConfig, model_kwargs: dict[str, Any]
    ) -> int | None:
        """Tokens of a chunk for a long prompt of text, so that a pass over it needs little memory; None: one piece.

        A chunk holds whole tiles of the method's selections, so outputs equal the outputs of the prompt in one piece.
        """
        rows, length = ids.shape
        cache = model_kwargs.get(releases.CACHE)
        if generation_config.prefill_chunk_size is not None or rows * length <= LONG_PROMPT:
            return None
        if not isinstance(cache, Cache) or cache.get_seq_length() or self.attachment.whole_prompt:
            return None
        if not takes_chunks(cache):
            return None
        positions = model_kwargs.get("position_ids")
        if positions is not None and positions.dim() != 2:
            return None
        plain = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", releases.CACHE)
        if generation_config.output_hidden_states or any(
            value is not None for name, value in model_kwargs.items() if name not in plain
        ):
            return None
        mask, tile = model_kwargs.get("attention_mask"), self.attachment.prompt_tile
        if tile > 1 and mask is not None and not bool(mask.all()):  # tiles of padded rows begin elsewhere in each
            return None
        chunk = max(CHUNK // rows // tile, 1) * tile
        return None if rotated_otherwise(self.attachment.config, chunk, length) else chunk


def takes_chunks(cache: Cache) -> bool:
    """Whether a prompt in several passes is that in one: recurrent layers of some models (Jamba) begin each anew."""
    return all(type(layer) in (CacheLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


class PreparePositions(OfModel):
    """Stands in for the model's ``_prepare_position_ids_for_generation``, which reads offsets off the model."""

    def __call__(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
        cache = model_kwargs.get(releases.CACHE)
        if isinstance(cache, Cache):
            self.attachment.restore_offsets(cache)
        return type(self.model)._prepare_position_ids_for_generation(self.model, inputs_tensor, model_kwargs)


class PrepareCache(OfModel):
    """Stands in for the model's ``_prepare_cache_for_generation``: builds a foveate cache and sets the prompt's end."""

    def __call__(
        self,
        generation_config: transformers.GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        refuse_weights(generation_config.output_attentions)
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} cannot be combined with an attached "
                "method, which brings its own cache; leave it out"
            )
        self.attachment.graphs.check_generation(generation_mode, generation_config.use_cache)
        prompt_end = _prompt_end(generation_config, model_kwargs)
        # the last token generated is never fed
        new = max(max_cache_length - prompt_end, (generation_config.max_new_tokens or 1) - 1)
        _warn_of_positions(model_kwargs.get("position_ids"), prompt_end, new, self.attachment)
        if generation_config.use_cache is False:
            return
        cache, assistant = model_kwargs.get(releases.CACHE), bool(generation_config.is_assistant)
        if cache is None:
            cache = model_kwargs[releases.CACHE] = Cache(self.model)
        else:
            check_cache(cache, self.attachment)
            cache._is_user_defined = True
            seen = cache.get_seq_length()
            if seen and not assistant:
                if generation_mode == GenerationMode.ASSISTED_GENERATION:
                    raise ValueError(
                        f"assisted decoding must start on an empty cache; leave {releases.CACHE} out, which holds "
                        f"{seen} tokens"
                    )
                if prompt_end <= seen:
                    raise ValueError(
                        f"the cache holds {seen} tokens, but input_ids and attention_mask cover {prompt_end}: pass the "
                        "whole conversation, or the new tokens with an attention_mask over all of it"
                    )
                _check_continues(self.model, cache, prompt_end - seen)
        mask = model_kwargs.get("attention_mask")
        if assistant and mask is not None:  # Transformers takes drafted and sampled pad tokens for padding
            mask = model_kwargs["attention_mask"] = mask.cummax(1).values
        _check_rows(mask)
        cache.reserve_memory(batch_size, prompt_end + new)
        cache.begin(prompt_end, assistant, generation_mode == GenerationMode.ASSISTED_GENERATION)
        if assistant:
            cache.activate_past_recording()
        one_by_one = generation_mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        announcements.announce(
            self.attachment.uid,
            cache,
            owes_steps=one_by_one and self.attachment.graphs.mode is not False,
            prompt_only=one_by_one and not assistant,
        )


def _warn_of_chunks(cache: Cache, attachment: Attachment) -> None:
    """Warn, once a cache, of several tokens right after a first pass that was taken for the whole prompt."""
    phase = cache.phase
    if not phase.prompt_end_guessed or phase.prompt_end != cache.get_seq_length():
        return
    method = next((one.method for one in attachment.policies.values() if one.method.needs_prompt_end), None)
    if method is not None:
        warnings.warn(
            f"{method.name} takes the first forward pass on a cache for the whole prompt, and the tokens after it for "
            "decoded ones. If they are more of the prompt, start again with foveate.Cache(model, prompt_length=...), "
            "which says how many tokens are prompt in all; if not, say so with the length of the first pass",
            FoveateWarning,
            stacklevel=2,
        )
    phase.prompt_end_guessed = False


def _check_continues(model: nn.Module, cache: Cache, new: int) -> None:
    """Refuse several tokens on a cache that is not empty where the model would forget what it holds."""
    if new > 1 and cache.get_seq_length() and forgets(model):
        raise ValueError(
            f"{type(model).__name__} cannot take {new} tokens on a cache of {cache.get_seq_length()}: its recurrent "
            "layers begin each pass of several tokens with an empty state; pass the whole conversation with a new "
            "cache, as foveate.ask and foveate chat do"
        )


def _check_columns(given: dict[str, Any], batch: int, seen: int, new: int) -> None:
    """Refuse a 2-D mask, or positions, of other tokens than those in the cache and the new ones; cut a longer mask."""
    mask, position_ids = given.get("attention_mask"), given.get("position_ids")
    if isinstance(mask, Tensor) and mask.dim() < 3:
        if seen and mask.shape[-1] < seen + new and given.get("inputs_embeds") is not None:
            raise ValueError(
                f"{new} embeddings are new, and attention_mask knows {mask.shape[-1]} of {seen + new} tokens. PEFT up "
                "to 0.21 repeats its virtual tokens before every token where Transformers (from 5.24) calls the cache "
                "`cache`: install releases of both that fit each other"
            )
        if mask.dim() < 2 or mask.shape[0] != batch or mask.shape[1] < seen + new:
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}, but the cache holds {seen} tokens and {new} are new: "
                f"pass a mask of shape {(batch, seen + new)} over all of them"
            )
        if mask.shape[1] > seen + new:
            given["attention_mask"] = mask[:, : seen + new]
    if position_ids is not None and position_ids.shape[-2:] not in {(batch, new), (1, new), (new,)}:
        raise ValueError(
            f"position_ids have shape {tuple(position_ids.shape)}, but {new} tokens are new in each of {batch} rows: "
            "pass as many, or, to `generate`, which makes them of attention_mask, a mask of shape "
            f"{(batch, seen + new)}"
        )


def _check_one_sequence(mask: Any, position_ids: Tensor | None) -> None:
    """Refuse sequences packed into a row of a new cache; some whole models tell them apart there, and others do not."""
    if mask is None and position_ids is not None and position_ids.dim() == 2 and bool((position_ids.diff() != 1).any()):
        raise ValueError(
            "position_ids do not go on by one within a row, as where sequences are packed: pass use_cache=False, or "
            "each sequence in a row of its own"
        )


def _prompt_end(generation_config: transformers.GenerationConfig, model_kwargs: dict[str, Any]) -> int:
    """How many tokens are prompt, padding and earlier turns included."""
    given = [model_kwargs.get(name) for name in ("attention_mask", "position_ids")]
    lengths = [tensor.shape[-1] for tensor in given if tensor is not None]
    if not lengths:  # a mask of ones is dropped by releases after 5.17
        lengths = [getattr(generation_config, "_mask_length", None)]
    if not isinstance(lengths[0], int):
        raise releases.unknown("`generate` prepares a cache without the length of its prompt")
    return lengths[0]


def _check_rows(mask: Tensor | None) -> None:
    """Refuse a batch whose next tokens would follow padding."""
    if mask is None or mask.dim() != 2 or not mask.shape[1]:
        return
    empty, ended = (~mask.bool()).all(1), mask[:, -1] == 0
    if bool((empty | ended).any()):
        row = int((empty | ended).nonzero()[0])
        if bool(empty[row]):
            raise ValueError(f"row {row} of attention_mask is all padding: every sequence needs at least one token")
        raise ValueError(
            f"row {row} of attention_mask ends with padding, so its next token would follow padding: pad on the left "
            "(tokenizer.padding_side = 'left')"
        )


def _warn_of_positions(position_ids: Tensor | None, prompt_end: int, new: int, attachment: Attachment) -> None:
    """Warn, once, of a call of `generate` that goes beyond the positions that the model has."""
    if attachment.positions is None:
        attachment.positions = max_positions(attachment.config.to_dict())
    if not attachment.positions:
        return
    known = position_ids is not None and position_ids.numel() > 0
    needed = (int(position_ids.max()) + 1 if known else prompt_end) + new
    if needed > attachment.positions:
        warnings.warn(
            f"the prompt and what is to be generated come to {needed} positions, beyond the model's "
            f"max_position_embeddings of {attachment.positions}: what the model makes of them may be nonsense",
            FoveateWarning,
            stacklevel=2,
        )
        attachment.positions = 0


def give_cache(model: nn.Module, given: dict[str, Any], config: transformers.PreTrainedConfig) -> Any:
    """The cache that a forward pass is given; where it is to have one and lacks it, an empty one is added for it."""
    cache, use_cache = given.get("cache"), given.get("use_cache")
    if cache is None and not model.training and (config.use_cache if use_cache is None else use_cache):
        cache = Cache(model)
        given |= {"cache": cache, "use_cache": True}
    return cache


def check_cache(cache: Any, attachment: Attachment) -> None:
    """Refuse a cache that is not foveate's or belongs to another model or method."""
    if not isinstance(cache, Cache):
        raise ValueError(
            f"{releases.CACHE} is a {type(cache).__name__}: with an attached method pass foveate.Cache(model), a cache "
            "that generate returned, or none"
        )
    if cache.owner != attachment.uid:
        raise ValueError(f"{releases.CACHE} was made for another model or another attached method; start a new cache")
    if not cache.phase.within_step:
        cache.phase.check_whole()

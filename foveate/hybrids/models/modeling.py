"""Hybrids of Gated DeltaNet with attention, a window, learnable token eviction or native sparse attention."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from foveate.errors import FoveateWarning
from foveate.hybrids.layers import (
    GatedDeltaNet,
    LearnedEviction,
    NativeSparseAttention,
    Retention,
    Rotary,
    SlidingWindowAttention,
    rotate,
)
from foveate.hybrids.models.cache import HybridCache
from foveate.hybrids.models.configuration import HybridConfig
from foveate.hybrids.state import Packing

_CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What the installed release of Transformers calls the cache."""


@dataclass
class HybridOutput(CausalLMOutputWithPast):
    """A causal language model's output, and what the lte layers scored."""

    retention: tuple[Tensor, ...] | None = None
    """Retention scores of each lte layer, fp32 ``[B, Hkv, L]`` in (0, 1); when asked for."""
    lesson: Tensor | None = None
    """Mean over lte layers of the loss by which their scores learn, a scalar; in training, where they have one."""


class HybridAttention(nn.Module):
    """Full attention with rotary positions, through Transformers' attention interface."""

    def __init__(self, config: HybridConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling, self.attention_dropout, self.is_causal = config.head_dim**-0.5, 0.0, True
        width, kv_width = (heads * self.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(
        self,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        attention_mask: Any,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """``[B, L, hidden_size]`` to the same."""
        q, k, v = (
            proj(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, angles), rotate(k, angles)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, _ = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.o_proj(out.flatten(2))


class HybridMLP(nn.Module):
    """A gated linear unit with SiLU."""

    def __init__(self, config: HybridConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


def _mixer(config: HybridConfig, layer_idx: int) -> nn.Module:
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    kind = config.mixers[layer_idx]
    if kind == "gdn":
        return GatedDeltaNet(config.hidden_size, config.gdn_heads, config.gdn_head_dim, config.rms_norm_eps)
    if kind == "lte":
        scores = {"kind": config.lte_scores, "dropout": config.lte_dropout, "dropout_at": config.lte_dropout_at}
        scores["cap"] = config.lte_cap
        sizes = (config.lte_window, config.lte_buffer, config.lte_sinks)
        how = (config.rope_base, scores, config.lte_whole_prompt, config.lte_gradient)
        return LearnedEviction(config.hidden_size, *heads, *sizes, *how)
    if kind == "swa":
        return SlidingWindowAttention(config.hidden_size, *heads, config.sliding_window - 1, config.rope_base)
    if kind == "nsa":
        heads = (config.nsa_heads, config.nsa_kv_heads, config.nsa_head_dim)
        sizes = (config.nsa_block, config.nsa_blocks, config.nsa_window)
        return NativeSparseAttention(config.hidden_size, *heads, *sizes, config.rope_base, config.nsa_compression)
    return HybridAttention(config, layer_idx)


class HybridLayer(GradientCheckpointingLayer):
    """A mixer and a gated linear unit, each after a norm and beside a residual."""

    def __init__(self, config: HybridConfig, layer_idx: int):
        super().__init__()
        self.kind, self.layer_idx = config.mixers[layer_idx], layer_idx
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = _mixer(config, layer_idx)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = HybridMLP(config)

    def forward(self, hidden: Tensor, inputs: _Inputs, cache: Cache | None = None) -> tuple[Tensor, Retention | None]:
        """The hidden states after the layer, and an lte layer's retention scores in training or when asked for."""
        x, retention = self.mixer_norm(hidden).to(hidden.dtype), None
        if self.kind == "attn":
            x = self.mixer(x, inputs.angles, inputs.mask, cache, **inputs.kwargs)
        else:
            memory = None if cache is None else cache.layers[self.layer_idx].memory
            packing = inputs.packing
            x = x if packing is None else packing.pack(x)
            if self.kind == "gdn":
                x = self.mixer(x, memory, packing)
            elif self.kind == "nsa":
                x = self.mixer(x, inputs.packed, memory, packing)
            else:
                x, retention = self.mixer(x, inputs.packed, memory, packing, inputs.output_retention)
            x = x if packing is None else packing.unpack(x)
            if cache is not None:
                cache.layers[self.layer_idx].seen += hidden.shape[1]
        hidden = hidden + x
        return hidden + self.mlp(self.mlp_norm(hidden).to(hidden.dtype)), retention


@dataclass
class _Inputs:
    """What all layers of a forward pass share."""

    angles: tuple[Tensor, Tensor] | None
    mask: Any
    packing: Packing | None
    packed: Tensor
    """Positions of the tokens, int64 ``[B or 1, L]``, packed where the batch is."""
    output_retention: bool
    kwargs: dict[str, Any]


class HybridPreTrainedModel(PreTrainedModel):
    """Weights of hybrids: initialised, saved, loaded."""

    config_class = HybridConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HybridLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _keep_in_fp32_modules_strict = ["log_rate", "step_bias"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Normal weights of ``initializer_range``; what adds to the residual is kaiming-uniform over
        ``sqrt(2 * layers)``."""
        if isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, self.config.initializer_range)
        elif isinstance(module, nn.RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, nn.Linear):
            module.weight.normal_(0.0, self.config.initializer_range)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, GatedDeltaNet):
            module.reset_gates()
        elif isinstance(module, LearnedEviction):
            module.scores.reset()
        if isinstance(module, (GatedDeltaNet, SlidingWindowAttention, NativeSparseAttention, HybridAttention)):
            self._init_output(module.o_proj.weight)
        elif isinstance(module, HybridMLP):
            self._init_output(module.down_proj.weight)

    def _init_output(self, weight: Tensor) -> None:
        nn.init.kaiming_uniform_(weight, a=5**0.5)
        weight /= (2 * self.config.num_hidden_layers) ** 0.5


class HybridModel(HybridPreTrainedModel):
    """The decoder of a hybrid, without its head."""

    def __init__(self, config: HybridConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(HybridLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Rotary(config.head_dim, config.rope_base)
        self.gradient_checkpointing = False
        self._said_long = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        output_retention: bool = False,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states after the last norm, ``[B, L, hidden_size]``.

        Args:
            attention_mask: ``[B, columns so far]``, 0 where there is padding.
            cache, past_key_values: a :class:`~foveate.hybrids.models.HybridCache`; the two names are one argument.
            position_ids: ``[B or 1, L]``, one after another in each row.
            output_retention: return the retention scores of lte layers, which training needs; of a padded batch
                they are packed, a row's tokens first.

        Raises:
            ValueError: for neither or both of ids and embeddings, a cache of another kind, a mask that is not 2-D,
                positions that do not follow one another where a layer counts on that, or attention weights asked for.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if use_cache and cache is None:
            cache = HybridCache(self.config)
        if kwargs.pop("output_attentions", None):
            raise ValueError(
                "output_attentions=True is not possible: most layers of a hybrid hold no attention weights"
            )
        states = [hidden] if kwargs.pop("output_hidden_states", self.config.output_hidden_states) else None
        self._check(cache, attention_mask, hidden.shape[1])
        inputs = self._inputs(hidden, attention_mask, position_ids, cache, output_retention, kwargs)
        retention = []
        for layer in self.layers:
            hidden, retained = layer(hidden, inputs, cache)
            if states is not None:
                states.append(hidden)
            if retained is not None:
                retention.append(retained)
        hidden = self.norm(hidden).to(hidden.dtype)
        states = None if states is None else (*states[:-1], hidden)
        out = BaseModelOutputWithPast(last_hidden_state=hidden, hidden_states=states, **{_CACHE: cache})
        if output_retention:
            out["retention"] = tuple(one.scores for one in retention)
            lessons = [one.lesson for one in retention if one.lesson is not None]
            out["lesson"] = torch.stack(lessons).mean() if lessons else None
        return out

    def _check(self, cache: Cache | None, mask: Tensor | None, columns: int) -> None:
        if cache is not None:
            own = [hasattr(layer, "memory") for layer in cache.layers]
            if own != [mixer != "attn" for mixer in self.config.mixers]:
                raise ValueError(
                    "cache must be a foveate.hybrids.models.HybridCache of this model's configuration, not a "
                    f"{type(cache).__name__}"
                )
        if mask is not None and mask.dim() != 2:
            raise ValueError(f"attention_mask must be [B, columns], not {list(mask.shape)}")
        seen = 0 if cache is None else cache.get_seq_length()
        if mask is not None and mask.shape[1] != seen + columns:
            raise ValueError(
                f"attention_mask covers {mask.shape[1]} columns, but the cache holds {seen} and {columns} are new"
            )
        trained = self.config.max_position_embeddings
        if seen + columns > trained and not self._said_long:
            self._said_long = True
            warnings.warn(
                f"the sequence is longer than the {trained} tokens that the model was trained on",
                FoveateWarning,
                stacklevel=4,
            )

    def _inputs(
        self,
        hidden: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        cache: Cache | None,
        output_retention: bool,
        kwargs: dict[str, Any],
    ) -> _Inputs:
        columns, seen = hidden.shape[1], 0 if cache is None else cache.get_seq_length()
        given = positions is not None
        if positions is None and mask is not None:
            positions = (mask.long().cumsum(1) - 1).clamp_min(0)[:, -columns:]
        elif positions is None:
            positions = torch.arange(seen, seen + columns, device=hidden.device)[None]
        angles = causal = packing = None
        if "attn" in self.config.mixers:
            angles = self.rotary.angles(positions)
            how = {"config": self.config, "inputs_embeds": hidden, "attention_mask": mask, "position_ids": positions}
            causal = create_causal_mask(**how, **{_CACHE: cache})
        if set(self.config.mixers) != {"attn"}:
            packing = Packing.of(mask, columns)
        packed = positions if packing is None else packing.pack(positions.expand(hidden.shape[0], -1))
        if given and "lte" in self.config.mixers and columns > 1:
            follows = packed[:, 1:] == packed[:, :-1] + 1
            if not bool((follows if packing is None else follows | ~packing.real[:, 1:]).all()):
                raise ValueError(
                    "position_ids must follow one another in each row: lte layers undo the rotation of keys"
                )
        return _Inputs(angles, causal, packing, packed, output_retention, kwargs)


def _next_token_loss(hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Cross-entropy of the next tokens, of a hidden state and the head's weight; see `weighted_loss`."""
    return weighted_loss(F.linear(hidden, weight), labels, weights)


def weighted_loss(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Mean cross-entropy of the next tokens, as Transformers' models have it: labels of -100 are left out.

    Args:
        logits: `[B, L, vocab_size]`.
        labels: int64 `[B, L]`, at their own tokens.
        weights: fp32 `[B, L]`, by which labels weigh in the mean; None: all alike.
    """
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    logits = logits.float().flatten(0, 1)
    if weights is None:
        return F.cross_entropy(logits, targets)
    weights = F.pad(weights, (0, 1))[:, 1:].flatten() * (targets != -100)
    return (F.cross_entropy(logits, targets, reduction="none") * weights).sum() / weights.sum()


class HybridForCausalLM(HybridPreTrainedModel, GenerationMixin):
    """A hybrid with a language-modelling head; trains, and generates in every mode of `generate`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: HybridConfig):
        super().__init__(config)
        self.model = HybridModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._compiled_loss: Callable[..., Tensor] | None = None
        self.post_init()

    def compile(self, **options: Any) -> None:
        """Compile each layer and the loss, in place, for training on sequences of one length.

        Layers of one kind share what is compiled; the gated delta rule, which has kernels of its own, is left out.
        """
        options = {"dynamic": False} | options
        for layer in self.model.layers:
            layer.compile(**options)
        self._compiled_loss = torch.compile(_next_token_loss, **options)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Cache | None = None,
        output_retention: bool = False,
        label_weights: Tensor | None = None,
        **kwargs: Any,
    ) -> HybridOutput:
        """Logits ``[B, L, vocab_size]`` and, with labels ``[B, L]``, the mean loss; see :meth:`HybridModel.forward`.

        ``label_weights``, fp32 ``[B, L]``, are how much labels weigh in that mean. A compiled model in training returns
        the loss alone, and never holds its logits in fp32.
        """
        kwargs = {name: value for name, value in kwargs.items() if name != "return_dict" and value is not None}
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache if cache is not None else past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_retention=output_retention,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        loss = logits = None
        if labels is not None and self._compiled_loss is not None and self.training and not kwargs:
            loss = self._compiled_loss(hidden, self.lm_head.weight, labels, label_weights)
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, kept])
        if labels is not None and loss is None and label_weights is not None:
            loss = weighted_loss(logits, labels, label_weights)
        elif labels is not None and loss is None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        retention, cache = outputs.get("retention"), outputs.get(_CACHE)
        states = outputs.hidden_states
        extra = {"retention": retention, "lesson": outputs.get("lesson"), _CACHE: cache}
        return HybridOutput(loss=loss, logits=logits, hidden_states=states, **extra)

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As Transformers', with a cache of this model's own kind."""
        given = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
        if given is None and generation_config.use_cache is not False:
            if generation_config.cache_implementation not in (None, "dynamic"):
                raise ValueError(
                    f"cache_implementation={generation_config.cache_implementation!r}: a hybrid has a cache of its own"
                )
            model_kwargs[_CACHE] = HybridCache(self.config)
            if generation_config.is_assistant:
                model_kwargs[_CACHE].activate_past_recording()
        else:
            given = (generation_config, model_kwargs, generation_mode, batch_size, *args)
            super()._prepare_cache_for_generation(*given, **kwargs)

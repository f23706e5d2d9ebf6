"""Tiny random models of the families that people run, by the name that docs/guide/models.md gives them."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

from tests.helpers import prepare

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOWS = {"sliding_window": 8, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
_EXPERTS |= {"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
_DELTA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_CONVOLUTIONS = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
_MAMBA_2 = {"num_hidden_layers": 4, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Llama 4": (
        "Llama4TextConfig",
        {**_EXPERTS, "intermediate_size_mlp": 64, "no_rope_layers": [1, 0], "attention_chunk_size": 512},
    ),
    "Mistral": ("MistralConfig", {"sliding_window": None}),
    "Ministral": ("MinistralConfig", _WINDOWS),
    "Mixtral": ("MixtralConfig", {**_EXPERTS, "sliding_window": None}),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen2-MoE": ("Qwen2MoeConfig", {**_EXPERTS, "shared_expert_intermediate_size": 32}),
    "Qwen3": ("Qwen3Config", {}),
    "Qwen3-MoE": ("Qwen3MoeConfig", _EXPERTS),
    "Gemma": ("GemmaConfig", {}),
    "Gemma 2": ("Gemma2Config", {**_WINDOWS, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}),
    "Gemma 3": ("Gemma3TextConfig", {**_WINDOWS, "query_pre_attn_scalar": 16}),
    "Gemma 4": ("Gemma4TextConfig", {**_WINDOWS, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB}),
    "OLMo": ("OlmoConfig", {}),
    "OLMo 2": ("Olmo2Config", {}),
    "OLMo 3": ("Olmo3Config", _WINDOWS),
    "OLMoE": ("OlmoeConfig", _EXPERTS),
    "FlexOLMo": ("FlexOlmoConfig", _EXPERTS),
    "MiniMax-M2": ("MiniMaxM2Config", _EXPERTS),
    "GLM": ("GlmConfig", {}),
    "GLM 4": ("Glm4Config", {}),
    "GLM 4 MoE": ("Glm4MoeConfig", _EXPERTS),
    "Phi 3": ("Phi3Config", {"partial_rotary_factor": 1.0}),
    "Granite": ("GraniteConfig", {}),
    "Granite MoE": ("GraniteMoeConfig", _EXPERTS),
    "SmolLM3": ("SmolLM3Config", {}),
    "Cohere": ("CohereConfig", {}),
    "Cohere 2": ("Cohere2Config", _WINDOWS),
    "EXAONE 4": ("Exaone4Config", _WINDOWS),
    "ERNIE 4.5": ("Ernie4_5Config", {}),
    "ERNIE 4.5 MoE": ("Ernie4_5_MoeConfig", {**_EXPERTS, "moe_k": 2, "moe_num_experts": 4}),
    "Hunyuan": ("HunYuanDenseV1Config", {}),
    "Hunyuan MoE": ("HunYuanMoEV1Config", {**_EXPERTS, "moe_topk": 2}),
    "Nemotron": ("NemotronConfig", {}),
    "Seed-OSS": ("SeedOssConfig", {}),
    "Apertus": ("ApertusConfig", {}),
    "Arcee": ("ArceeConfig", {}),
    "StarCoder 2": ("Starcoder2Config", {"sliding_window": None}),
    "dots.llm1": ("Dots1Config", {**_EXPERTS, "n_shared_experts": 1}),
    "Helium": ("HeliumConfig", {}),
    "gpt-oss": ("GptOssConfig", {**_EXPERTS, **_WINDOWS}),
    "LFM2": ("Lfm2Config", _CONVOLUTIONS),
    "Qwen3-Next": ("Qwen3NextConfig", {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 32}),
    "Qwen3.5": ("Qwen3_5TextConfig", _DELTA),
    "Qwen3.5-MoE": ("Qwen3_5MoeTextConfig", {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 32}),
    "OLMo hybrid": ("OlmoHybridConfig", _DELTA),
    "LFM2-MoE": ("Lfm2MoeConfig", {**_EXPERTS, **_CONVOLUTIONS}),
    "Falcon-H1": ("FalconH1Config", {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}),
    "Jamba": (
        "JambaConfig",
        {
            **_EXPERTS,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "Bamba": ("BambaConfig", {**_MAMBA_2, "attn_layer_indices": [1, 3]}),
    "Granite hybrid": (
        "GraniteMoeHybridConfig",
        {**_EXPERTS, **_MAMBA_2, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 32},
    ),
    "Nemotron-H": (
        "NemotronHConfig",
        {
            **_EXPERTS,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention", "mlp", "attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
        },
    ),
}

KINDS = ("Llama", "Mixtral", "Gemma 2", "gpt-oss", "LFM2", "Qwen3-Next", "Falcon-H1", "Nemotron-H")
"""One of each kind: plain, experts, windows and a cap, sinks, and layers of four kinds that are not attention."""

RECURRENT = [
    "LFM2",
    "LFM2-MoE",
    "Qwen3-Next",
    "Qwen3.5",
    "Qwen3.5-MoE",
    "OLMo hybrid",
    "Falcon-H1",
    "Jamba",
    "Bamba",
    "Granite hybrid",
    "Nemotron-H",
]
"""Those with layers that are not attention, or attention beside something else."""


def family_config(name: str):
    """The configuration of a family."""
    kind, settings = FAMILIES[name]
    return getattr(transformers, kind)(**SIZES | settings)


@functools.cache
def family(name: str):
    """The model of a family: not to be changed, but for what is attached to it."""
    config = family_config(name)
    torch.manual_seed(0)
    # what releases run by default leaves out the cap of logits (5.17)
    how = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    model = prepare(transformers.AutoModelForCausalLM.from_config(config, **how))
    for parameter, weight in model.named_parameters():
        if parameter.endswith("sinks"):  # that matter
            torch.nn.init.normal_(weight, 1.0, 1.5)
    return model

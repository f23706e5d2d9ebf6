"""Tiny random multimodal models around such decoders, by the name that docs/models.md gives them."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

from tests.families import _DELTA, _EXPERTS, _SIZES, _WINDOWS, VOCAB
from tests.helpers import prepare

IMAGE = 90
"""The token that stands for a part of an image."""
_LLAMA = _SIZES | {"model_type": "llama"}
_MISTRAL = _SIZES | {"model_type": "mistral", "sliding_window": None}
_QWEN2 = _SIZES | {"model_type": "qwen2"}
_COHERE2 = _SIZES | _WINDOWS | {"model_type": "cohere2"}
_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_channels": 3,
    "image_size": 28,
    "patch_size": 14,
}
_CLIP = _VISION | {"model_type": "clip_vision_model", "projection_dim": 32}
_SIGLIP = _VISION | {"model_type": "siglip_vision_model"}
_PIXTRAL = _VISION | {"model_type": "pixtral", "head_dim": 16}
_GRID = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "depth": 1, "num_heads": 2}
_GRID_32 = _GRID | {"hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 64}
_TABLE = _GRID_32 | {"num_position_embeddings": 16}
_TOKENS = {"video_token_id": 93, "vision_start_token_id": 94, "vision_end_token_id": 95}
_FRAMES = {"video_token_id": 93, "image_start_token_id": 94, "image_end_token_id": 95}
_LAST = {"vision_feature_layer": -1}
_PINPOINTS = _LAST | {"image_grid_pinpoints": [[28, 28]]}
_AUDIO = {"num_mel_bins": 8, "max_source_positions": 16}

WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma 3": (
        "Gemma3Config",
        {
            "text_config": _SIZES | _WINDOWS | {"query_pre_attn_scalar": 16},
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 4,
        },
    ),
    "Gemma 4": (
        "Gemma4Config",
        {
            "text_config": _SIZES | _WINDOWS | {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB},
            "vision_config": _VISION | {"head_dim": 16, "num_key_value_heads": 2, "patch_size": 4},
            "audio_config": None,
        },
    ),
    "Qwen2-VL": (
        "Qwen2VLConfig",
        {"text_config": _SIZES | _MROPE, "vision_config": _GRID | {"embed_dim": 32, "hidden_size": 64}, **_TOKENS},
    ),
    "Qwen2.5-VL": (
        "Qwen2_5_VLConfig",
        {
            "text_config": _SIZES | _MROPE,
            "vision_config": _GRID_32 | {"window_size": 56, "fullatt_block_indexes": [0]},
            **_TOKENS,
        },
    ),
    "Qwen3-VL": (
        "Qwen3VLConfig",
        {"text_config": _SIZES | _MROPE, "vision_config": _TABLE | {"deepstack_visual_indexes": [0]}, **_TOKENS},
    ),
    "Qwen3-VL-MoE": (
        "Qwen3VLMoeConfig",
        {
            "text_config": _SIZES | _EXPERTS | _MROPE,
            "vision_config": _TABLE | {"deepstack_visual_indexes": [0]},
            **_TOKENS,
        },
    ),
    "Qwen3.5": ("Qwen3_5Config", {"text_config": _SIZES | _DELTA, "vision_config": _TABLE, **_TOKENS}),
    "LLaVA": ("LlavaConfig", {"text_config": _LLAMA, "vision_config": _CLIP, "image_seq_length": 4, **_LAST}),
    "Pixtral": (
        "LlavaConfig",
        {"text_config": _MISTRAL, "vision_config": _PIXTRAL, "vision_feature_select_strategy": "full", **_LAST},
    ),
    "LLaVA-NeXT": ("LlavaNextConfig", {"text_config": _MISTRAL, "vision_config": _CLIP, **_PINPOINTS}),
    "LLaVA-NeXT-Video": ("LlavaNextVideoConfig", {"text_config": _LLAMA, "vision_config": _CLIP, **_PINPOINTS}),
    "LLaVA-OneVision": ("LlavaOnevisionConfig", {"text_config": _QWEN2, "vision_config": _SIGLIP, **_PINPOINTS}),
    "VipLLaVA": ("VipLlavaConfig", {"text_config": _LLAMA, "vision_config": _CLIP, "vision_feature_layers": [-1]}),
    "Video-LLaVA": ("VideoLlavaConfig", {"text_config": _LLAMA, "vision_config": _CLIP, **_LAST}),
    "Mistral 3": (
        "Mistral3Config",
        {"text_config": _MISTRAL, "vision_config": _PIXTRAL, "spatial_merge_size": 2, **_LAST},
    ),
    "InternVL": (
        "InternVLConfig",
        {
            "text_config": _QWEN2,
            "vision_config": _VISION
            | {"image_size": [28, 28], "patch_size": [14, 14], "model_type": "internvl_vision"},
            "image_seq_length": 1,
        },
    ),
    "Idefics 2": (
        "Idefics2Config",
        {
            "text_config": _MISTRAL,
            "vision_config": _VISION | {"model_type": "idefics2_vision"},
            "perceiver_config": {
                "hidden_size": 64,
                "resampler_n_latents": 2,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 16,
                "num_key_value_heads": 1,
            },
        },
    ),
    "Idefics 3": ("Idefics3Config", {"text_config": _LLAMA, "vision_config": _VISION, "scale_factor": 2}),
    "SmolVLM": ("SmolVLMConfig", {"text_config": _LLAMA, "vision_config": _VISION, "scale_factor": 2}),
    "Aya Vision": (
        "AyaVisionConfig",
        {"text_config": _COHERE2, "vision_config": _SIGLIP, "downsample_factor": 2, **_LAST},
    ),
    "Cohere 2 Vision": (
        "Cohere2VisionConfig",
        {"text_config": _COHERE2, "vision_config": _SIGLIP, "downsample_factor": 2},
    ),
    "GLM-4V": (
        "Glm4vConfig",
        {"text_config": _SIZES | _MROPE, "vision_config": _GRID_32 | {"image_size": 28}, **_FRAMES},
    ),
    "Aria": (
        "AriaConfig",
        {
            "text_config": _SIZES | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
            "vision_config": _VISION | {"model_type": "idefics3_vision"},
            "projector_patch_to_query_dict": {4: 2},
            **_LAST,
        },
    ),
    "LFM2-VL": (
        "Lfm2VlConfig",
        {
            "text_config": _SIZES
            | {"model_type": "lfm2", "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
            "vision_config": _VISION | {"num_patches": 4},
            "downsample_factor": 2,
            "projector_hidden_size": 64,
        },
    ),
    "Voxtral": ("VoxtralConfig", {"text_config": _LLAMA, "audio_config": _VISION | _AUDIO, "audio_token_id": IMAGE}),
    "Qwen2-Audio": (
        "Qwen2AudioConfig",
        {
            "text_config": _QWEN2,
            "audio_config": {
                "model_type": "qwen2_audio_encoder",
                "d_model": 32,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 32,
                **_AUDIO,
            },
            "audio_token_index": IMAGE,
        },
    ),
}


@functools.cache
def whole(name: str):
    """The multimodal model of this name: not to be changed, but for what is attached to it."""
    kind, settings = WHOLE[name]
    images = {"image_token_id": IMAGE, "image_token_index": IMAGE} if "vision_config" in settings else {}
    config = getattr(transformers, kind)(**images | {"tie_word_embeddings": False} | settings)
    torch.manual_seed(0)
    model = prepare(getattr(transformers, kind.replace("Config", "ForConditionalGeneration"))._from_config(config))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2, generator=generator)
    return model


def image(name: str) -> dict[str, torch.Tensor]:
    """A prompt of text around an image, for the families of :data:`IMAGES`."""
    parts, how = IMAGES[name]
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 88, (1, 30), generator=generator)
    ids[0, 4] = 94
    ids[0, 5 : 5 + parts] = IMAGE
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | {
        key: torch.randn(shape, generator=generator) if isinstance(shape, tuple) else torch.tensor(shape)
        for key, shape in how.items()
    }


_GRID_IMAGE = {"pixel_values": (16, 3 * 2 * 14 * 14), "image_grid_thw": [[1, 4, 4]]}
_TYPES = [[0] * 5 + [1] * 4 + [0] * 21]
IMAGES: dict[str, tuple[int, dict[str, Any]]] = {
    "LLaVA": (4, {"pixel_values": (1, 3, 28, 28)}),
    "VipLLaVA": (4, {"pixel_values": (1, 3, 28, 28)}),
    "InternVL": (1, {"pixel_values": (1, 3, 28, 28)}),
    "Idefics 3": (1, {"pixel_values": (1, 1, 3, 28, 28)}),
    "SmolVLM": (1, {"pixel_values": (1, 1, 3, 28, 28)}),
    "Pixtral": (4, {"pixel_values": (1, 3, 28, 28), "image_sizes": [[28, 28]]}),
    "Qwen2-VL": (4, _GRID_IMAGE | {"mm_token_type_ids": _TYPES}),
    "Qwen2.5-VL": (4, _GRID_IMAGE | {"mm_token_type_ids": _TYPES}),
    "Qwen3-VL": (4, _GRID_IMAGE | {"mm_token_type_ids": _TYPES}),
    "Cohere 2 Vision": (1, {"pixel_values": (1, 3, 28, 28)}),
    "Gemma 3": (4, {"pixel_values": (1, 3, 28, 28), "token_type_ids": _TYPES}),
}
"""Parts of the image in the prompt, and what else the model is given: values, or shapes of random tensors."""

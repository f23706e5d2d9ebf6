"""Tiny random models that read images too, by the name that docs/guide/models.md gives them."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

from tests.families import SIZES, family_config
from tests.helpers import prepare, tokens

IMAGE = 90
"""The id that stands for a part of an image in a prompt."""
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_channels": 3,
    "image_size": 28,
    "patch_size": 14,
}
_PATCHES = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 14, "image_size": 28}
_PATCHES |= {"out_hidden_size": 64, "num_position_embeddings": 4, "fullatt_block_indexes": [0]}
_PATCHES |= {"deepstack_visual_indexes": [0]}
_RESAMPLER = {"hidden_size": 64, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2}
_RESAMPLER |= {"resampler_head_dim": 16, "num_key_value_heads": 1}


def _rotary(*sections: int, **more: Any) -> dict[str, Any]:
    """Rotary positions of time, height and width."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more}}


def _kind(name: str, **more: Any) -> dict[str, Any]:
    return {**_VISION, "model_type": name, **more}


_PIXTRAL = _kind("pixtral", image_size=56)

WRAPPERS: dict[str, tuple[str, str | dict[str, Any], dict[str, Any]]] = {
    "Gemma 3": ("Gemma3Config", "Gemma 3", {"vision_config": _VISION, "mm_tokens_per_image": 4}),
    "Gemma 4": ("Gemma4Config", "Gemma 4", {"vision_config": None, "audio_config": None}),
    "LLaVA": ("LlavaConfig", "Llama", {"vision_config": _kind("clip_vision_model")}),
    "LLaVA-NeXT": ("LlavaNextConfig", "Mistral", {"vision_config": _kind("clip_vision_model")}),
    "LLaVA-OneVision": ("LlavaOnevisionConfig", "Qwen2", {"vision_config": _kind("siglip_vision_model")}),
    "VipLLaVA": (
        "VipLlavaConfig",
        "Llama",
        {"vision_config": _kind("clip_vision_model"), "vision_feature_layers": [-1]},
    ),
    "Video-LLaVA": ("VideoLlavaConfig", "Llama", {"vision_config": _kind("clip_vision_model")}),
    "Pixtral": ("LlavaConfig", "Mistral", {"vision_config": _PIXTRAL, "vision_feature_select_strategy": "full"}),
    "Mistral 3": ("Mistral3Config", "Mistral", {"vision_config": _PIXTRAL}),
    "InternVL": (
        "InternVLConfig",
        "Qwen2",
        {"vision_config": {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]}},
    ),
    "Idefics 2": ("Idefics2Config", "Mistral", {"vision_config": _VISION, "perceiver_config": _RESAMPLER}),
    "Idefics 3": ("Idefics3Config", "Llama", {"vision_config": _VISION}),
    "SmolVLM": ("SmolVLMConfig", "Llama", {"vision_config": _VISION}),
    "Aya Vision": ("AyaVisionConfig", "Cohere 2", {"vision_config": _kind("siglip_vision_model")}),
    "Cohere 2 Vision": ("Cohere2VisionConfig", "Cohere 2", {"vision_config": _kind("siglip_vision_model")}),
    "Qwen2-VL": (
        "Qwen2VLConfig",
        _rotary(2, 3, 3),
        {"vision_config": {**_PATCHES, "embed_dim": 32, "hidden_size": 64}},
    ),
    "Qwen2.5-VL": ("Qwen2_5_VLConfig", _rotary(2, 3, 3), {"vision_config": _PATCHES}),
    "Qwen3-VL": ("Qwen3VLConfig", _rotary(2, 3, 3), {"vision_config": _PATCHES}),
    "Qwen3.5": (
        "Qwen3_5Config",
        "Qwen3.5",
        {"vision_config": {**_PATCHES, "deepstack_visual_indexes": []}},
    ),
    "GLM 4V": ("Glm4vConfig", _rotary(1, 1, 2, partial_rotary_factor=0.5), {"vision_config": _PATCHES}),
    "GOT-OCR 2": (
        "GotOcr2Config",
        "Qwen2",
        {"vision_config": {**_VISION, "image_size": 64, "patch_size": 16, "output_channels": 16, "mlp_dim": 32}},
    ),
    "LFM2-VL": ("Lfm2VlConfig", "LFM2", {"vision_config": {**_VISION, "num_patches": 4}}),
}
"""The whole configuration, the text decoder's (a family's name, or settings), and what else it is made of."""


@functools.cache
def wrapper(name: str):
    """The whole model of a name, vision and text: not to be changed, but for what is attached to it."""
    kind, text, settings = WRAPPERS[name]
    given: dict[str, Any] = dict.fromkeys(("image_token_id", "image_token_index"), IMAGE)
    for part in ("image_start", "image_end", "vision_start", "vision_end", "video_start", "video_end", "video"):
        given[f"{part}_token_id"] = IMAGE + 1
    given |= {
        "tie_word_embeddings": False,
        "text_config": family_config(text) if isinstance(text, str) else SIZES | text,
    }
    config = getattr(transformers, kind)(**given | settings)
    torch.manual_seed(0)
    return prepare(transformers.AutoModelForImageTextToText.from_config(config))


_GRID = {"pixel_values": (16, 1176), "image_grid_thw": [[1, 4, 4]]}
_ONE = {"pixel_values": (1, 3, 28, 28)}
IMAGES: dict[str, tuple[int, dict[str, Any]]] = {
    "Gemma 3": (4, _ONE),
    "LLaVA": (4, _ONE),
    "VipLLaVA": (4, _ONE),
    "Mistral 3": (2, {"pixel_values": (1, 3, 56, 28), "image_sizes": [[56, 28]]}),
    "Pixtral": (4, {**_ONE, "image_sizes": [[28, 28]]}),
    "InternVL": (1, _ONE),
    "Idefics 2": (4, {"pixel_values": (1, 1, 3, 28, 28)}),
    "Idefics 3": (1, {"pixel_values": (1, 1, 3, 28, 28)}),
    "SmolVLM": (1, {"pixel_values": (1, 1, 3, 28, 28)}),
    "Aya Vision": (1, _ONE),
    "Cohere 2 Vision": (1, _ONE),
    "Qwen2-VL": (4, _GRID),
    "Qwen2.5-VL": (4, _GRID),
    "Qwen3-VL": (4, _GRID),
    "Qwen3.5": (4, _GRID),
    "GLM 4V": (4, _GRID),
}
"""How many tokens stand for an image, and what a model is given for it: shapes of random values, and numbers."""


def with_image(name: str) -> dict[str, Any]:
    """A prompt of 40 tokens with an image in it, for `generate`."""
    count, inputs = IMAGES[name]
    ids = tokens(40).clamp(max=IMAGE - 1)
    ids[:, 5 : 5 + count] = IMAGE
    generator = torch.Generator().manual_seed(1)
    given = {
        key: torch.randn(value, generator=generator) if isinstance(value, tuple) else torch.tensor(value)
        for key, value in inputs.items()
    }
    if _rotates_images(name) or name == "Gemma 3":
        given["token_type_ids" if name == "Gemma 3" else "mm_token_type_ids"] = (ids == IMAGE).long()
    return {"input_ids": ids, **given}


def _rotates_images(name: str) -> bool:
    return "image_grid_thw" in IMAGES[name][1]

"""The backend on a CPU, for tests: there vLLM's own packs keys and values as its kernels like them, so all is ours."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from foveate.integrations.vllm.builder import (
    Step,
    StepBuilder,
    check_layer,
    decode,
    keys_and_values,
    logits_of,
    scales_of,
    summarise,
)
from foveate.integrations.vllm.rows import Prompt, attend_prompt, prompts_from, write_tokens
from foveate.integrations.vllm.settings import FP8
from foveate.ops.block_table import EIGHT_BITS


class FoveateOnCPU(AttentionBackend):
    """Full causal attention over blocks ``[N, Hkv, n, 2 D]``, keys and values side by side."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list] = ["auto", "float16", "bfloat16", *FP8]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        return Impl

    @staticmethod
    def get_builder_cls() -> type:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list:
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple:
        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)


@dataclass
class Metadata:
    """Of one batch."""

    num_actual_tokens: int
    foveate: Step | None
    prompts: list[Prompt]


class Builder(StepBuilder, AttentionMetadataBuilder):
    """Rows that decode as a :class:`Step`, all others as prompts."""

    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.prepare(vllm_config, layer_names, device, kv_cache_spec.block_size)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        common = common_attn_metadata
        step = self.step_of(common)
        prompts = step.prompts or [] if step is not None and step.decodes else self.prompts_of(common, 0)
        return Metadata(common.num_actual_tokens, step, prompts)

    def prompts_of(self, common: Any, decodes: int) -> list[Prompt]:
        return prompts_from(common, decodes)


class Impl(AttentionImpl):
    """Writes keys and values, and attends to them by foveate's references."""

    serves_foveate = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ):
        check_layer(alibi_slopes, kv_sharing_target_layer_name)
        if sliding_window is not None or attn_type != "decoder":
            raise ValueError("foveate on a CPU serves models of full causal attention alone")
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, float(scale), num_kv_heads
        self.kv_cache_dtype, self.logits_soft_cap, self.sinks = kv_cache_dtype, logits_soft_cap, sinks
        self.index: int | None = None

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        if kv_cache.dtype == torch.uint8:
            key, value = (x / scale for x, scale in zip((key, value), scales_of(layer)[1:]))
            kv_cache = kv_cache.view(EIGHT_BITS)
        write_tokens(key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:  # vLLM measures memory
            return output.zero_()
        if attn_metadata.foveate is not None:
            summarise(self, layer, kv_cache, attn_metadata.foveate)
        if attn_metadata.foveate is not None and attn_metadata.foveate.decodes:
            decode(self, layer, query, kv_cache, attn_metadata.foveate, output)
        logits, scale = logits_of(self), 1.0
        if kv_cache.dtype == torch.uint8:
            _, of_keys, scale = scales_of(layer)
            logits = dataclasses.replace(logits, scaling=logits.scaling * of_keys)
        for row in attn_metadata.prompts:
            attend_prompt(row, query, *keys_and_values(self, kv_cache), output, logits)
            if scale != 1.0:
                output[row.first : row.end] *= scale
        return output

"""The backend on a GPU: vLLM's FlashAttention, except for decoded tokens in layers that a method makes sparse."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from foveate.integrations.vllm.builder import (
    Step,
    StepBuilder,
    check_layer,
    decode,
    index_of,
    largest_graph,
    summarise,
)
from foveate.integrations.vllm.rows import rows_from
from foveate.integrations.vllm.settings import FP8, methods_of
from foveate.ops.dispatch import runs_kernel


class FoveateOnGPU(FlashAttentionBackend):
    """Layers of sliding windows, prompts and short contexts are FlashAttention's. KV is neither copied nor moved."""

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

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        return False


class Builder(StepBuilder, FlashAttentionMetadataBuilder):
    """FlashAttention's metadata, with the decoding rows' :class:`Step` in its attribute ``foveate``.

    A batch of decoding rows alone may run within one CUDA graph, which reads what :meth:`build` has written to the
    device. Other batches run attention between graphs (piecewise), where FlashAttention reads all keys.
    """

    supports_update_block_table = False
    """A group of layers with equal shapes may not take over another's metadata, which holds that one's layers."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.prepare(vllm_config, layer_names, device, kv_cache_spec.block_size)
        whole = vllm_config.compilation_config.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        supported = self.get_cudagraph_support(vllm_config, kv_cache_spec) != AttentionCGSupport.NEVER
        if self.steps is not None and whole and supported:
            self.largest_graph = largest_graph(vllm_config)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Steps of decoding rows can be in a graph, unless the method copies keys: for rows of any length a graph would
        need too much memory for the copies.

        References, which run where kernels are turned off, copy keys, too.
        """
        if vllm_config.speculative_config is not None:
            return AttentionCGSupport.UNIFORM_BATCH  # FlashAttention verifies drafts in graphs of several tokens a row
        copies = not runs_kernel("attend_indices")
        copies |= any(method.replay and method.replay.copies_keys for method in methods_of(vllm_config).values())
        return AttentionCGSupport.NEVER if copies else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.foveate = self.step_of(common_attn_metadata)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        metadata = super().build(0, common_attn_metadata)
        metadata.foveate = self.captured_step_of(common_attn_metadata)
        return metadata

    def prompts_of(self, common: Any, decodes: int) -> Any:
        if all(map(self.steps.reads_all, self.steps.methods)):
            return None  # every layer's whole batch is vLLM's
        full, self.use_full_cuda_graph = self.use_full_cuda_graph, False  # its buffer is the whole batch's
        try:
            return super().build(0, rows_from(common, decodes))
        finally:
            self.use_full_cuda_graph = full


class Impl(FlashAttentionImpl):
    """FlashAttention's, which also writes keys and values."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.index: int | None = None
        self.serves_foveate = self.attn_type == "decoder" and self.sliding_window == (-1, -1)
        if self.serves_foveate:
            check_layer(self.alibi_slopes, self.kv_sharing_target_layer_name)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        step: Step | None = getattr(attn_metadata, "foveate", None) if self.serves_foveate else None
        if step is not None:
            summarise(self, layer, kv_cache, step)
        decodes = step is not None and step.decodes
        whole = decodes and step.steps.reads_all(index_of(self, layer))
        if whole:
            step.steps.read_by_engine(index_of(self, layer))
        if not decodes or whole:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if step.prompts is not None:
            n = step.decodes
            super().forward(layer, query[n:], key[n:], value[n:], kv_cache, step.prompts, output[n:])
        decode(self, layer, query, kv_cache, step, output)
        return output

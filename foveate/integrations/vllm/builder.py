"""What the backends' metadata builders share: the step that a batch's decoding rows run."""

from __future__ import annotations

import dataclasses
import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch

from foveate.integrations.vllm import audit, requests
from foveate.integrations.vllm.metrics import Meter
from foveate.integrations.vllm.ranks import tensor_parallel
from foveate.integrations.vllm.rows import decoding_rows, layer_index, verifying_rows
from foveate.integrations.vllm.settings import (
    ALL_DENSE,
    FP8,
    check_engine,
    facts_of,
    layer_methods,
    served,
    settings_of,
    wants_lossless,
)
from foveate.ops import Logits
from foveate.ops.block_table import EIGHT_BITS
from foveate.ops.dispatch import runs_kernel
from foveate.runtime import EngineSteps
from foveate.state import Geometry

_log = logging.getLogger("vllm.foveate")


@dataclass
class Step:
    """A batch. Its decoding rows are the first ones, of one token each."""

    steps: EngineSteps
    slots: torch.Tensor
    """int ``[T]``: where the new tokens of all rows are."""
    decodes: int
    """How many rows decode."""
    prompts: Any
    """What attends to the other rows; None without any, where no row decodes, and where vLLM attends to all rows."""
    audited: Meter | None = None
    """What counts an audit, if the step is audited."""
    real: int = 0
    """Rows that are no padding."""


def engine_steps(vllm_config: Any, layer_names: list[str], device: torch.device, block_size: int) -> EngineSteps | None:
    """The steps of a group of layers; None where the group has no layers of full attention.

    Args:
        block_size: tokens of a block that block tables name.

    Raises:
        ValueError: for what cannot be served.
    """
    check_engine(vllm_config)
    settings, model = served(vllm_config), vllm_config.model_config
    layers = {
        name: layer for name, layer in vllm_config.compilation_config.static_forward_context.items() if serves(layer)
    }
    geometries = {
        layer_index(name): Geometry(layer.num_heads, layer.num_kv_heads, layer.head_size, layer.head_size)
        for name, layer in layers.items()
    }
    facts = facts_of(model)
    methods = layer_methods(settings.method, geometries, facts, vllm_config.parallel_config.tensor_parallel_size)
    own = {layer_index(name) for name in layer_names if name in layers}
    for index in own:
        if (chooser := methods[index].role.reads_choice_of) not in (None, *own):
            raise ValueError(
                f"foveate: layer {index} reads the choice of layer {chooser}, which vLLM puts into another group of "
                "layers"
            )
    chosen = {index: method for index, method in methods.items() if index in own}
    if not chosen:
        return None
    ranks = tensor_parallel(vllm_config)
    if ranks is not None:
        roles = [(index, method.name, *method.role) for index, method in chosen.items()]
        shared = {"roles of layers": f"{roles}", "model": f"{facts}", "kernels": f"{runs_kernel('attend_indices')}"}
        ranks.check_alike({"settings": f"{settings}", **shared})
    steps = EngineSteps(chosen, device, settings.dense_below, geometries[min(chosen)], ranks)
    _log.info("foveate: %d layers decode by %s", len(chosen), settings.method.spec)
    cache, lossless = vllm_config.cache_config, wants_lossless(vllm_config)
    chooses = lossless or vllm_config.speculative_config is None
    for index, geometry in geometries.items():  # before memory is given to others
        if index in own and chosen[index].channels(geometry) and chooses:
            number = (cache.num_gpu_blocks or 0) * cache.block_size // block_size
            shape = (number, geometry.num_kv_heads, block_size, geometry.head_dim)
            dtype = EIGHT_BITS if cache.cache_dtype in FP8 else model.dtype
            steps.allocate(index, geometry, torch.empty(shape, dtype=dtype, device="meta"))
    return steps


def largest_graph(vllm_config: Any) -> int:
    """The largest number of rows for which vLLM captures a whole step. Warns if batches may be larger."""
    most = vllm_config.scheduler_config.max_num_seqs
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or ()
    largest = max((size for size in sizes if size <= most), default=0)
    if 0 < largest < most:
        _warn_once(
            f"foveate: vLLM captures no CUDA graph of batches of more than {largest} requests, which are dense: give "
            f"{largest} as --max-num-seqs, which is {most}, or larger --cudagraph-capture-sizes"
        )
    return largest


_warn_once = functools.cache(_log.warning)
"""A model has builders for each of its groups of layers."""


def serves(layer: Any) -> bool:
    """Whether a layer of vLLM's is foveate's to attend."""
    return getattr(getattr(layer, "impl", None), "serves_foveate", False)


class StepBuilder:
    """A mixin of metadata builders. ``self.steps`` runs the group's layers."""

    reorder_batch_threshold = 1
    speculates = False
    """Whether rows bring drafted tokens: several tokens of a row, which vLLM's own attention reads at once."""
    lossless = False
    """Whether foveate drafts them."""
    draft: int | None = None
    """Of a batch of tokens that foveate drafts, how many tokens of the draft come before; None: a batch of vLLM's."""

    def prepare(self, vllm_config: Any, layer_names: list[str], device: torch.device, block_size: int) -> None:
        self.steps = engine_steps(vllm_config, layer_names, device, block_size)
        self.meter = None if self.steps is None else Meter(self.steps, vllm_config)
        self.audit = audit.Share(settings_of(vllm_config.additional_config).audit)
        if self.steps is not None:
            requests.install(getattr(vllm_config, "use_v2_model_runner", False))
            if self.audit.share:
                audit.install()
        self.longest, self.dtype = vllm_config.model_config.max_model_len, vllm_config.model_config.dtype
        self.speculates = vllm_config.speculative_config is not None
        self.lossless = wants_lossless(vllm_config)
        if self.speculates and not self.lossless and self.steps is not None:
            _warn_once(f"foveate: {ALL_DENSE}")
        self.warm: set[tuple[int, int | None]] = set()
        """Numbers of rows, and of drafted tokens before, for which the layers have run once."""
        self.largest_graph = 0
        """The most rows of a step that vLLM replays as a whole; 0 where it replays none."""
        layers = (vllm_config.compilation_config.static_forward_context[name] for name in layer_names)
        self.layers = sorted(filter(serves, layers), key=lambda layer: index_of(layer.impl, layer))
        """The layers of the group that foveate serves."""

    def step_of(self, common: Any) -> Step | None:
        """Start the step of a batch; None when nothing is foveate's.

        The same for a batch whose step vLLM runs eagerly, or between piecewise graphs, as for one that it replays.
        """
        if self.steps is None:
            return None
        if self.speculates and self.draft is None:
            self.meter.update()
            self.steps.count_dense(verifying_rows(common))
            return self.verifying_step(common)
        found = decoding_rows(common, requests.dense_rows())
        if not found.rows:
            return Step(self.steps, common.slot_mapping, 0, None)
        if self.draft is None:
            self.meter.update()
        how = {"bound": found.bound, "tokens": found.tokens, "rows": found.real}
        how |= {"prompts": found.prompts, "dense": found.dense, "draft": self.draft}
        mixed = found.rows < common.num_reqs
        how["launched"] = self.largest_graph > 0 and (mixed or found.rows > self.largest_graph)
        self.steps.begin(common.seq_lens[: found.rows], common.block_table_tensor[: found.rows], **how)
        prompts = self.prompts_of(common, found.rows) if mixed else None
        comparable = self.steps.choosing and not (mixed or found.prompts or found.dense or self.steps.dense)
        audited = self.meter if comparable and self.audit.due() else None
        return Step(self.steps, common.slot_mapping, found.rows, prompts, audited, found.real)

    def captured_step_of(self, common: Any) -> Step | None:
        """Start a step that vLLM captures next; None when nothing is foveate's. Of ``common`` the memory counts."""
        if self.steps is None:
            return None
        if self.speculates and self.draft is None:
            return self.verifying_step(common)
        number = common.num_reqs
        step, rows = Step(self.steps, common.slot_mapping, number, None), common.seq_lens[:number]
        begin = functools.partial(
            self.steps.begin_capture, rows, common.block_table_tensor, self.longest, draft=self.draft
        )
        begin()
        if (number, self.draft) not in self.warm:  # idle ranks of data parallelism ask again at each step
            self.warm.add((number, self.draft))
            self.run_once(step)
            begin()
        return step

    def verifying_step(self, common: Any) -> Step | None:
        """The step for a batch to which vLLM alone attends. Foveate's own drafts need the page summaries of its tokens;
        None without lossless decoding."""
        return Step(self.steps, common.slot_mapping, 0, None) if self.lossless else None

    def run_once(self, step: Step) -> None:
        """Run the layers of a step on queries of zeros: kernels are compiled and loaded before a capture.

        vLLM's own run before a capture may have rows of one key, for which other kernels serve than for long ones.
        """
        for layer in self.layers:
            impl, memory = layer.impl, layer.kv_cache
            summarise(impl, layer, memory, step)
            if not step.steps.reads_all(index_of(impl, layer)):
                shape = (step.decodes, impl.num_heads, impl.head_size)
                out = torch.zeros(shape, dtype=self.dtype, device=memory.device)
                decode(impl, layer, torch.zeros_like(out), memory, step, out)

    def prompts_of(self, common: Any, decodes: int) -> Any:
        """What attends to the rows after the first ``decodes``."""
        raise NotImplementedError


def summarise(impl: Any, layer: Any, kv_cache: torch.Tensor, step: Step) -> None:
    """Summarise the pages that a batch's new tokens fill, after these have been written to ``kv_cache``."""
    index = index_of(impl, layer)
    if step.steps.summarises(index):
        step.steps.written(index, impl.num_heads, *keys_and_values(impl, kv_cache), step.slots)


def decode(impl: Any, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, step: Step, out: torch.Tensor) -> None:
    """Attention of the decoding rows of a layer, written to ``out``.

    Args:
        query: ``[T, Hq, D]``; the first tokens are the decoding rows'.
        kv_cache: ``[N, Hkv, n, 2 D]``, keys and values side by side.
        out: ``[T, Hq, D]``, in the order of ``query``.
    """
    n, memory = step.decodes, keys_and_values(impl, kv_cache)
    q, scaling, of_values = query[:n, :, None], impl.scale, 1.0
    if memory[0].dtype == EIGHT_BITS:
        of_queries, of_keys, of_values = scales_of(layer)
        scaling *= of_keys
        if q.dtype != out.dtype:  # vLLM has rounded queries, too, for its own kernels
            q, scaling = q.to(out.dtype), scaling * of_queries
    logits, out = dataclasses.replace(logits_of(impl), scaling=scaling), out[:n, :, None]
    step.steps.attend(index_of(impl, layer), q, *memory, logits, out)
    if of_values != 1.0:
        out.mul_(of_values)


def keys_and_values(impl: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a layer's memory. Raises ValueError for another layout than ``[N, Hkv, n, 2 D]``.

    Eight bits, which vLLM allocates as bytes, are floats (e4m3).
    """
    if kv_cache.dim() != 4 or kv_cache.shape[1::2] != (impl.num_kv_heads, 2 * impl.head_size):
        raise ValueError(
            f"foveate: expected keys and values as [blocks, {impl.num_kv_heads}, tokens, {2 * impl.head_size}], and "
            f"vLLM gives {list(kv_cache.shape)}"
        )
    kv_cache = kv_cache.view(EIGHT_BITS) if kv_cache.dtype == torch.uint8 else kv_cache
    return kv_cache[..., : impl.head_size], kv_cache[..., impl.head_size :]


def scales_of(layer: Any) -> tuple[float, float, float]:
    """What queries, keys and values in eight bits stand for, over what is stored.

    Raises:
        ValueError: for a scale of each head.
    """
    if layer._k_scale.numel() > 1 or layer._v_scale.numel() > 1:
        raise ValueError("foveate does not support an fp8 KV cache with a scale for each head")
    return layer._q_scale_float, layer._k_scale_float, layer._v_scale_float


def logits_of(impl: Any) -> Logits:
    """How a layer's logits are made."""
    return Logits(impl.scale, impl.sinks, impl.logits_soft_cap or None)


def index_of(impl: Any, layer: Any) -> int:
    """A layer's index in the model."""
    if impl.index is None:
        impl.index = layer_index(layer.layer_name)
    return impl.index


def check_layer(alibi_slopes: Any, kv_sharing_target_layer_name: str | None) -> None:
    """Raise ValueError for attention that a layer has and no method knows."""
    if alibi_slopes is not None:
        raise ValueError("foveate does not support ALiBi")
    if kv_sharing_target_layer_name is not None:
        raise ValueError("foveate does not support layers that share the keys of another layer")

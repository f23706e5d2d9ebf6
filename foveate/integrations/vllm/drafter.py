"""What drafts in a worker of vLLM: the served model itself, by a method. See :mod:`.lossless`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, prepare_inputs_to_capture
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from foveate.integrations.vllm import releases
from foveate.ops.dispatch import runs_kernel


class Drafter(DraftModelSpeculator):
    """Drafts tokens of all rows of a batch, one after the other.

    The first token of a draft chooses keys, and the later ones read them again: each kind has CUDA graphs of its own.
    A graph that reads has its keys from the graph that chooses for the same number of rows.
    """

    supports_mm_inputs = False

    def __init__(self, vllm_config: Any, device: torch.device):
        super().__init__(vllm_config, device)
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        """How many tokens of the present draft come before the present one."""
        self.starts = torch.arange(self.max_num_reqs + 1, dtype=torch.int32)
        self.starts_on_device = self.starts.to(device)
        self.choosing_graphs: CudaGraphManager | None = None
        self.reading_graphs: CudaGraphManager | None = None
        """None: drafts have one token. vLLM drops both after it has measured their memory, and has them made anew."""

    @property
    def longest(self) -> int:
        """Tokens of the longest request, which vLLM may lower after the drafter is made."""
        return self.vllm_config.model_config.max_model_len

    @property
    def builders(self) -> list[Any]:
        """The metadata builders of foveate's backend, which verifying passes use, too."""
        return [group.get_metadata_builder(0) for groups in self.attn_groups for group in groups]

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        return target_model

    def set_attn(
        self,
        model_state: Any,
        kv_cache_config: Any,
        block_tables: Any,
        target_input_buffers: Any,
        target_attn_groups: Sequence[Sequence[Any]],
    ) -> None:
        """Take what verifying passes attend by."""
        self.model_state, self.kv_cache_config, self.block_tables = model_state, kv_cache_config, block_tables
        self.attn_groups = target_attn_groups

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL and runs_kernel("attend_indices")
        mode = CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE
        made = functools.partial(CudaGraphManager, self.vllm_config, self.device, mode, decode_query_len=1)
        self.choosing_graphs, self.reading_graphs = made(), made() if self.num_speculative_steps > 1 else None

    @torch.inference_mode()
    def capture(self) -> None:
        for kind, graphs in enumerate((self.choosing_graphs, self.reading_graphs)):
            if graphs is not None and graphs.needs_capture():
                graphs.capture(functools.partial(self.capturable, kind), f"Capturing drafts, {kind + 1} of 2")

    def capturable(self, kind: int, batch: Any, warmup: bool) -> Callable[[Any], None]:
        """A token of a draft as vLLM captures it.

        Args:
            batch: vLLM's description of a batch, by which graphs are found.
        """
        if kind:  # reads what the first token has chosen
            self.choosing_graphs.run_fullgraph(batch)
        rows, tokens = batch.num_reqs or batch.num_tokens, batch.num_tokens
        given = (self.model_state, self.input_buffers, self.block_tables, self.attn_groups, self.kv_cache_config)
        with self.drafting(kind):
            metadata, slots = prepare_inputs_to_capture(rows, tokens, *given, **releases.capturing_one_token())
        return lambda mode: self.draft(rows, tokens, metadata, slots)

    @contextlib.contextmanager
    def drafting(self, number: int) -> Iterator[None]:
        """Within it builders give metadata for a token of a draft that ``number`` tokens of it precede."""
        for builder in self.builders:
            builder.draft = number
        try:
            yield
        finally:
            for builder in self.builders:
                builder.draft = None

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        *more: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **others: Any,
    ) -> Tensor:
        """Draft tokens after the newest one of each row, int64 ``[B, k]``, as vLLM asks its speculators to.

        Args:
            input_batch: of the pass before, which has verified a draft or read prompts.
            num_sampled: int ``[B]``; 0 for a row whose prompt goes on, which drafts after its next token.
            num_rejected: int ``[B]``: how many of the pass's last tokens the row does not keep.
            last_sampled, next_prefill_tokens: by the row's place in vLLM's table of requests.
            num_speculative_tokens: how many are wanted; None: the configured number. None is drafted while the prompts
                of all rows go on.
        """
        rows, buffers = input_batch.num_reqs, self.input_buffers
        wanted = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        read = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        if dummy_run or not wanted or bool((read < input_batch.prefill_len_np).all()):
            return self.draft_tokens[:rows]
        self._copy_request_inputs(rows, input_batch.idx_mapping, temperature, seeds)
        places, held = input_batch.idx_mapping.long(), input_batch.seq_lens[:rows] - num_rejected[:rows]
        of_prompts = next_prefill_tokens.view(-1, next_prefill_tokens.shape[-1])[0, places]
        newest = last_sampled.view(-1)[places].where(num_sampled[:rows] > 0, of_prompts)
        buffers.input_ids[:rows] = newest
        buffers.positions[:rows] = held.clamp_max(self.longest - 1)
        buffers.seq_lens.zero_()
        buffers.seq_lens[:rows] = (held + 1).clamp_max(self.longest)
        torch.clamp(self.starts_on_device, max=rows, out=buffers.query_start_loc)
        batch = self.choosing_graphs.dispatch(rows, rows, 1, 0)
        for number in range(wanted):
            self.number.fill_(number)
            metadata, slots = self.metadata(input_batch, number, batch.num_reqs or rows, batch.num_tokens)
            if batch.cg_mode == CUDAGraphMode.FULL:
                (self.reading_graphs if number else self.choosing_graphs).run_fullgraph(batch)
            else:
                self.draft(rows, batch.num_tokens, metadata, slots)
        return self.draft_tokens[:rows]

    def metadata(self, before: Any, number: int, rows: int, tokens: int) -> tuple[Any, Any]:
        """Attention metadata and slots of a draft's token, for every layer by its name.

        Args:
            before: the batch of the pass before the draft.
            number: of the draft's tokens that precede.
            rows, tokens: of the batch, padding included.
        """
        real, buffers, tables = before.num_reqs, self.input_buffers, self.block_tables
        starts = buffers.query_start_loc[: rows + 1]
        slots = tables.compute_slot_mappings(before.idx_mapping, starts[: real + 1], buffers.positions[:real], tokens)
        bounds = (before.seq_lens_cpu_upper_bound[:real] + number + 1).clamp_max(self.longest)
        with self.drafting(number):
            metadata = build_attn_metadata(
                attn_groups=self.attn_groups,
                num_reqs=rows,
                num_tokens=tokens,
                query_start_loc_gpu=starts,
                query_start_loc_cpu=self.starts[: rows + 1].clamp_max(real),
                max_query_len=1,
                seq_lens=buffers.seq_lens[:rows],
                max_seq_len=int(bounds.max()),
                block_tables=[table[:rows] for table in tables.input_block_tables],
                slot_mappings=slots,
                kv_cache_config=self.kv_cache_config,
                seq_lens_cpu_upper_bound=torch.nn.functional.pad(bounds, (0, rows - real)),
                is_prefilling=torch.zeros(rows, dtype=torch.bool),
            )
        return metadata, build_slot_mappings_by_layer(slots, self.kv_cache_config)

    def draft(self, rows: int, tokens: int, metadata: Any, slots: Any) -> None:
        """Run the model over a token of each row, draw the next one, and make it the input of the next run."""
        buffers = self.input_buffers
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=tokens,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            batch_descriptor=BatchDescriptor(num_tokens=tokens),
            slot_mapping=slots,
        ):
            hidden = self.model(
                input_ids=buffers.input_ids[:tokens],
                positions=buffers.positions[:tokens],
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        positions, lengths = buffers.positions[:rows], buffers.seq_lens[:rows]
        of_requests = (self.idx_mapping[:rows], self.temperature, self.seeds)
        noise = positions + releases.own_noise()  # by which a draft is drawn, and no later token
        drawn = self.sample_draft(hidden[:rows], noise, *of_requests, self.number[0], self.draft_logits)
        self.draft_tokens[:rows].index_copy_(1, self.number, drawn[:, None].to(self.draft_tokens.dtype))
        buffers.input_ids[:rows] = drawn
        positions.add_(1).clamp_(max=self.longest - 1)
        lengths.add_(lengths > 0).clamp_(max=self.longest)  # 0 in a row of padding

"""The names of vLLM that the plugin touches and vLLM promises to nobody, each looked up in the sources.

Sources are those of the installed vLLM, or of a folder VLLM_SOURCES that holds the package ``vllm`` of another release,
such as an unpacked wheel; nothing of them runs.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import os
from pathlib import Path

import pytest

if not (given := os.environ.get("VLLM_SOURCES")) and importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)
ROOT = Path(given) / "vllm" if given else Path(importlib.util.find_spec("vllm").origin).parent

CLASSES = {
    # the plugin's registration
    ("v1/attention/backends/registry.py", "AttentionBackendEnum"): ["CUSTOM", "CPU_ATTN", "is_overridden", "get_path"],
    # what a batch is (rows.py)
    ("v1/attention/backend.py", "CommonAttentionMetadata"): [
        *("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound", "block_table_tensor"),
        *("slot_mapping", "is_prefilling", "num_reqs", "num_actual_tokens", "max_seq_len", "replace"),
    ],
    # what FlashAttention lends (gpu.py, builder.py)
    ("v1/attention/backends/flash_attn.py", "FlashAttentionImpl"): [
        *("num_heads", "num_kv_heads", "head_size", "scale", "sliding_window", "attn_type", "alibi_slopes"),
        *("kv_sharing_target_layer_name", "sinks", "logits_soft_cap", "forward", "do_kv_cache_update"),
    ],
    ("v1/attention/backends/flash_attn.py", "FlashAttentionMetadataBuilder"): [
        *("supports_update_block_table", "use_full_cuda_graph", "get_cudagraph_support", "build"),
    ],
    ("v1/attention/backend.py", "AttentionMetadataBuilder"): ["build_for_cudagraph_capture", "reorder_batch_threshold"],
    ("v1/attention/backend.py", "AttentionCGSupport"): ["NEVER", "UNIFORM_SINGLE_TOKEN_DECODE"],
    ("model_executor/layers/attention/attention.py", "Attention"): ["impl", "layer_name", "kv_cache"],
    # what an audit takes hold of (audit.py)
    ("v1/worker/gpu_model_runner.py", "GPUModelRunner"): ["_model_forward", "model", "input_batch"],
    ("forward_context.py", "ForwardContext"): ["attn_metadata", "cudagraph_runtime_mode"],
    ("v1/worker/gpu/model_runner.py", "GPUModelRunner"): [
        *("execute_model", "execute_model_state", "model_state", "model", "vllm_config", "lora_config"),
    ],
    ("v1/worker/gpu/model_runner.py", "ExecuteModelState"): ["hidden_states"],
    ("v1/worker/gpu/input_batch.py", "InputBatch"): [
        *("input_ids", "positions", "is_padding", "num_tokens_after_padding", "req_ids", "num_reqs", "seq_lens"),
        *(
            "idx_mapping",
            "num_computed_tokens_np",
            "num_scheduled_tokens",
            "prefill_len_np",
            "seq_lens_cpu_upper_bound",
        ),
    ],
    # the ranks of a tensor parallelism (ranks.py)
    ("distributed/parallel_state.py", "GroupCoordinator"): [
        *("all_reduce", "all_gather", "world_size", "rank_in_group", "cpu_group"),
    ],
    # what tells of a request's own setting (requests.py)
    ("v1/engine/input_processor.py", "InputProcessor"): ["_validate_params", "vllm_config"],
    ("exceptions.py", "VLLMValidationError"): ["__init__"],
    ("sampling_params.py", "SamplingParams"): ["extra_args"],
    ("v1/core/sched/output.py", "SchedulerOutput"): ["finished_req_ids", "scheduled_new_reqs"],
    ("v1/core/sched/output.py", "NewRequestData"): ["req_id", "sampling_params"],
    ("v1/worker/gpu_input_batch.py", "InputBatch"): ["req_ids"],
    # what is configured (settings.py, builder.py, backend.py)
    ("config/vllm.py", "VllmConfig"): [
        *("additional_config", "model_config", "cache_config", "parallel_config", "scheduler_config", "lora_config"),
        *("attention_config", "compilation_config", "speculative_config", "kv_transfer_config", "load_config"),
        *("use_v2_model_runner", "_get_v2_model_runner_unsupported_features"),
    ],
    # what drafts for lossless decoding (drafter.py)
    ("v1/worker/gpu/spec_decode/speculator.py", "DraftModelSpeculator"): [
        *("load_draft_model", "set_attn", "init_cudagraph_manager", "capture", "propose", "load_model"),
        *("max_num_reqs", "num_speculative_steps", "input_buffers", "idx_mapping", "temperature", "seeds"),
        *("draft_tokens", "draft_logits", "_copy_request_inputs", "sample_draft", "vllm_config", "device"),
    ],
    ("v1/worker/gpu/cudagraph_utils.py", "CudaGraphManager"): ["capture", "needs_capture", "dispatch", "run_fullgraph"],
    ("v1/worker/gpu/cudagraph_utils.py", "BatchExecutionDescriptor"): ["cg_mode", "num_tokens", "num_reqs"],
    ("v1/worker/gpu/block_table.py", "BlockTables"): ["compute_slot_mappings", "input_block_tables"],
    ("v1/worker/gpu/input_batch.py", "InputBuffers"): ["input_ids", "positions", "query_start_loc", "seq_lens"],
    ("config/attention.py", "AttentionConfig"): ["backend"],
    ("config/cache.py", "CacheConfig"): ["block_size", "num_gpu_blocks", "cache_dtype"],
    ("config/scheduler.py", "SchedulerConfig"): ["max_num_seqs"],
    ("config/parallel.py", "ParallelConfig"): [
        *("rank", "tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size", "use_ubatching"),
        *("data_parallel_size", "data_parallel_index"),
    ],
    ("config/compilation.py", "CompilationConfig"): [
        *("static_forward_context", "cudagraph_capture_sizes", "cudagraph_mode"),
    ],
    ("config/compilation.py", "CUDAGraphMode"): ["FULL", "decode_mode", "has_full_cudagraphs"],
    ("config/speculative.py", "SpeculativeConfig"): [
        *("method", "model", "num_speculative_tokens", "draft_sample_method", "uses_draft_model"),
    ],
    ("config/load.py", "LoadConfig"): ["download_dir"],
    ("config/model.py", "ModelConfig"): [
        *("hf_text_config", "use_mla", "is_mm_prefix_lm", "dtype", "max_model_len", "revision", "model"),
        *("is_multimodal_model", "enable_prompt_embeds", "enforce_eager", "runner_type", "served_model_name"),
    ],
    # what a command is asked for (launch.py)
    ("engine/arg_utils.py", "EngineArgs"): [
        *("additional_config", "attention_backend", "attention_config", "block_size", "data_parallel_size", "dtype"),
        *("decode_context_parallel_size", "enable_dbo", "enforce_eager", "kv_cache_dtype", "kv_offloading_size"),
        *(
            "kv_transfer_config",
            "model",
            "pipeline_parallel_size",
            "runner",
            "spec_method",
            "spec_model",
            "spec_tokens",
        ),
        *("speculative_config", "ubatch_size"),
        *("trust_remote_code", "enable_lora", "tensor_parallel_size", "hf_overrides", "hf_config_path"),
        *("config_format", "load_format"),
    ],
    ("entrypoints/cli/serve.py", "ServeSubcommand"): ["subparser_init"],
    ("utils/argparse_utils.py", "FlexibleArgumentParser"): ["parse_args"],
}
"""Names by file and class."""

SCALES = ["_k_scale", "_v_scale", "_q_scale_float", "_k_scale_float", "_v_scale_float"]
"""Of a layer, which functions of its module set."""

PASSED = [
    ("v1/worker/gpu_model_runner.py", "is_prefilling"),
    ("v1/worker/gpu/model_states/default.py", "is_prefilling"),
    ("v1/worker/gpu/attn_utils.py", "is_prefilling"),
    ("v1/worker/gpu/model_states/default.py", "seq_lens_cpu_upper_bound"),
]
"""What both model runners hand on in a call: which rows are prompts, and bounds of lengths."""

SEAM = ["self.model_state.prepare_attn", "self.model_state.prepare_inputs", "self.cudagraph_manager.run_fullgraph"]
HANDED = ["input_batch", "batch_desc.cg_mode", "block_tables", "slot_mappings", "attn_groups", "kv_cache_config"]
"""What model runner V2's step calls, in order, and gives the first by position."""

CALLED = [
    ("forward_context.py", "BatchDescriptor", ["num_tokens", "has_lora"]),
    (
        "forward_context.py",
        "set_forward_context",
        ["attn_metadata", "num_tokens", "cudagraph_runtime_mode", "batch_descriptor", "slot_mapping", "is_padding"],
    ),
    ("v1/worker/gpu/attn_utils.py", "build_slot_mappings_by_layer", ["slot_mappings", "kv_cache_config"]),
    (
        "v1/worker/gpu/attn_utils.py",
        "build_attn_metadata",
        [
            *("attn_groups", "num_reqs", "num_tokens", "query_start_loc_gpu", "query_start_loc_cpu", "max_query_len"),
            *("seq_lens", "max_seq_len", "block_tables", "slot_mappings", "kv_cache_config", "is_prefilling"),
            "seq_lens_cpu_upper_bound",
        ],
    ),
    ("v1/worker/gpu/spec_decode/__init__.py", "init_speculator", ["vllm_config", "device"]),
]

DRAFTED = [
    (
        "prepare_inputs_to_capture",
        *("num_reqs", "num_tokens", "model_state", "input_buffers", "block_tables", "attn_groups", "kv_cache_config"),
    ),
    ("dispatch", "self", "num_reqs", "num_tokens", "uniform_token_count", "num_active_loras"),
]
"""Functions of runner V2's graphs that drafts give arguments by position."""


REQUESTS = [
    ("v1/engine/input_processor.py", "process_inputs", ["self._validate_params(params, ", "EngineCoreRequest("]),
    (
        "v1/worker/gpu_model_runner.py",
        "execute_model",
        ["self._update_states(scheduler_output)", "self._build_attention_metadata("],
    ),
    (
        "v1/worker/gpu/model_runner.py",
        "execute_model",
        ["self.add_requests(scheduler_output)", "self.prepare_attn(input_batch)", "self.model_state.prepare_attn("],
    ),
    (
        "v1/worker/gpu/model_runner.py",
        "execute_model",
        [
            "self.add_requests(scheduler_output)",
            "self.prepare_dummy_attn(input_batch",
            "self.model_state.prepare_attn(",
        ],
    ),
]
"""By file and function: calls as they begin, in order. A request's setting is read in all but the last."""


@functools.cache
def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def names_of(path: str, name: str) -> set[str]:
    """What a class defines or sets, in its body or by ``self``, and what it inherits from classes of the same file."""
    classes = {one.name: one for one in ast.walk(tree(path)) if isinstance(one, ast.ClassDef)}
    found, todo = set(), [name]
    while todo:
        here = classes.get(todo.pop())
        if here is None:
            continue
        todo += [base.value.id if isinstance(base, ast.Subscript) else getattr(base, "id", "") for base in here.bases]
        for node in ast.walk(here):
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


@pytest.mark.parametrize(("path", "name"), CLASSES, ids=lambda part: part.rpartition("/")[2])
def test_names_that_the_plugin_reads_are_there(path, name):
    assert set(CLASSES[path, name]) <= names_of(path, name)


def test_layers_have_scales_of_keys_in_eight_bits():
    nodes = list(ast.walk(tree("model_executor/layers/attention/attention.py")))
    found = {one.attr for one in nodes if isinstance(one, ast.Attribute)}
    found |= {one.value for one in nodes if isinstance(one, ast.Constant)}  # names of buffers
    assert set(SCALES) <= found


def test_model_runner_v1_runs_the_model_by_the_method_that_an_audit_replaces():
    called = [
        ast.unparse(one.func) for one in ast.walk(tree("v1/worker/gpu_model_runner.py")) if isinstance(one, ast.Call)
    ]
    assert called.count("self._model_forward") == 1
    assert "self.model.compute_logits" in called


def test_model_runner_v2_asks_for_metadata_then_for_inputs_and_then_runs_the_model():
    """As an audit has it, which runs the model densely when inputs are asked for."""
    runner = tree("v1/worker/gpu/model_runner.py")
    (step,) = [one for one in ast.walk(runner) if getattr(one, "name", "") == "execute_model"]
    calls = [one for one in ast.walk(step) if isinstance(one, ast.Call)]
    lines = {name: [one.lineno for one in calls if ast.unparse(one.func) == name] for name in SEAM}
    assert all(map(lines.get, SEAM))
    assert all(max(lines[a]) < min(lines[b]) for a, b in itertools.pairwise(SEAM))
    metadata = next(one for one in calls if ast.unparse(one.func) == SEAM[0])
    assert [ast.unparse(one).removeprefix("self.") for one in metadata.args] == HANDED
    (dummy,) = [
        one for one in ast.walk(runner) if isinstance(one, ast.Call) and ast.unparse(one.func) == "self.execute_model"
    ]
    assert "dummy_run" in [one.arg for one in dummy.keywords], "as an audit tells such a run from a step"


@pytest.mark.parametrize(("path", "name", "begun"), REQUESTS)
def test_requests_are_checked_and_told_before_metadata_is_built(path, name, begun):
    (function,) = [one for one in ast.walk(tree(path)) if getattr(one, "name", "") == name]
    calls = [one for one in ast.walk(function) if isinstance(one, ast.Call)]
    lines = [[one.lineno for one in calls if ast.unparse(one).startswith(text)] for text in begun]
    assert all(lines)
    assert all(max(a) < min(b) for a, b in itertools.pairwise(lines))


@pytest.mark.parametrize(("path", "name", "taken"), CALLED)
def test_functions_that_audits_and_drafts_call_take_what_they_give(path, name, taken):
    (one,) = [one for one in tree(path).body if getattr(one, "name", "") == name]
    if isinstance(one, ast.ClassDef):
        names = [field.target.id for field in one.body if isinstance(field, ast.AnnAssign)]
    else:
        names = [argument.arg for argument in one.args.args]
    assert set(taken) <= set(names)


@pytest.mark.parametrize("expected", DRAFTED, ids=lambda expected: expected[0])
def test_arguments_that_drafts_give_by_position(expected):
    """And others by name, or not at all."""
    name, *taken = expected
    nodes = ast.walk(tree("v1/worker/gpu/cudagraph_utils.py"))
    (one,) = [one for one in nodes if isinstance(one, ast.FunctionDef) and one.name == name]
    names = [argument.arg for argument in one.args.args]
    assert names[: len(taken)] == taken
    required = names[len(taken) : len(names) - len(one.args.defaults)]
    assert required == [name for name in ("full_cudagraph",) if name in names]


def test_model_runner_v2_drafts_after_it_has_sampled():
    """By the speculator's own arguments, with what the last pass left in the block tables."""
    calls = [one for one in ast.walk(tree("v1/worker/gpu/model_runner.py")) if isinstance(one, ast.Call)]
    (proposed,) = [one for one in calls if ast.unparse(one.func) == "self.speculator.propose" and one.args]
    given = ["input_batch", "attn_metadata", "slot_mappings_by_layer", "spec_hidden_states", "aux_hidden_states"]
    given += ["num_sampled", "num_rejected", "self.req_states.last_sampled_tokens"]
    assert [ast.unparse(one) for one in proposed.args][: len(given)] == given


def test_drafts_are_drawn_by_noise_of_their_own():
    """vLLM gives it to them, or foveate, see ``releases.own_noise``."""
    salted = "_DRAFT_NOISE_SALT" in (ROOT / "v1/worker/gpu/sample/gumbel.py").read_text(encoding="utf-8")
    speculator = (ROOT / "v1/worker/gpu/spec_decode/speculator.py").read_text(encoding="utf-8")
    assert salted != ("                positions + 1,\n" in speculator)


@pytest.mark.parametrize(("path", "argument"), PASSED)
def test_what_model_runners_hand_on(path, argument):
    """And no constant None."""
    given = [one.value for one in ast.walk(tree(path)) if isinstance(one, ast.keyword) and one.arg == argument]
    assert any(not isinstance(one, ast.Constant) for one in given)


def test_model_runner_v2_tells_prompts_by_how_much_of_them_is_computed():
    """So that a prompt's last token is a prompt's, and a token after it is not."""
    found = [ast.unparse(one) for one in ast.walk(tree("v1/worker/gpu/model_runner.py")) if isinstance(one, ast.Assign)]
    assert "is_prefilling_np = num_computed_prefill_tokens_np < prefill_len_np" in found

"""Decode steps within vLLM's full CUDA graphs: what is captured once serves any batch. Operations stand for a graph."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from foveate import methods
from foveate.lab.recorded import record
from foveate.ops import KV, BlockTable, Logits, attend
from foveate.runtime import EngineSteps

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadataBuilder

from foveate.integrations.vllm import gpu, requests
from foveate.integrations.vllm.audit import Share
from tests.integrations.test_vllm_rows import BLOCK, DIM, HEADS, KV_HEADS, Common, batch
from tests.integrations.test_vllm_settings import KASCADE, engine

LAYERS, ROWS, LONGEST, BELOW = 4, 5, 80, 100
SPECS = [
    "dense",
    "kascade_paper:top_k=4,anchors=[1],decode_only=true",
    "kascade:top_k=0.2,min_k=4,anchors=[0,2]",
    'kascade_paper:top_k=4,anchors=[1],heads={"2": [1, 0]},decode_only=true',  # numbers that the first run sends
    "omnikv:top_k=4,filters=[0],wait=1",
    "oracle_topk:top_k=4,decode_only=true",
]
BATCHES = [
    ([60, 33, 71, 40, 25], [], []),
    ([61, 34, 72, 41, 26], [], [2]),  # of a request that reads all keys
    ([21, 80, 5, 19, 20], [], []),  # row by row: of these only the second is long
    ([9, 2, 3, 5, 7], [], []),
    ([40, 55, 0, 0, 0], [], []),
    ([40, 55, 70, 0, 0], [1], []),  # the last token of a prompt
    ([40, 55, 70, 0, 0], [1], [2]),
    ([62, 35, 73, 42, 27], [], []),
]


def flash_attention(self, layer, query, key, value, kv_cache, metadata, output, *scales):
    table = BlockTable(metadata.block_table_tensor, LONGEST)
    kv = KV(kv_cache[..., :DIM], kv_cache[..., DIM:], table, metadata.seq_lens)
    output.copy_(attend(query[:, :, None], kv, logits=Logits(self.scale)).out[:, :, 0])
    return output


class Engine:
    """A builder, layers and buffers as vLLM has them."""

    def __init__(self, spec):
        generator = self.generator = torch.Generator().manual_seed(0)
        self.memory = torch.randn(LAYERS, ROWS * 20 + 1, KV_HEADS, BLOCK, 2 * DIM, generator=generator)
        self.blocks = torch.randperm(ROWS * 20, generator=generator).int().view(ROWS, 20) + 1
        self.table, self.lengths = torch.zeros(ROWS, 20, dtype=torch.int32), torch.ones(ROWS, dtype=torch.int32)
        self.slots, self.q = torch.full((ROWS,), -1), torch.zeros(LAYERS, ROWS, HEADS, DIM)
        self.layers = []
        for n in range(LAYERS):
            impl = object.__new__(gpu.Impl)
            impl.__dict__ |= {
                "index": None,
                "memory": None,
                "serves_foveate": True,
                "head_size": DIM,
                "scale": 0.3,
                "sinks": None,
            }
            impl.__dict__ |= {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "logits_soft_cap": 0}
            name = f"model.layers.{n}.self_attn.attn"
            self.layers.append(SimpleNamespace(layer_name=name, impl=impl, kv_cache=self.memory[n]))
        self.builder = self.new_builder(spec)

    def new_builder(self, spec):
        builder, method = object.__new__(gpu.Builder), methods.parse(spec)
        of_layers = {n: method.for_layer(n, LAYERS) for n in range(LAYERS)}
        builder.steps = EngineSteps(of_layers, torch.device("cpu"), BELOW)
        builder.meter, builder.longest = SimpleNamespace(update=lambda: None), LONGEST
        builder.largest_graph, builder.audit, builder.dtype = ROWS, Share(0), torch.float32
        builder.layers, builder.use_full_cuda_graph, builder.warm = self.layers, True, set()
        return builder

    def common(self, lengths, prompts):
        """What vLLM tells of a batch that is padded to the rows of a graph, in buffers at fixed addresses."""
        starts = torch.tensor([0, *(int(n > 0) for n in lengths)]).cumsum(0).int()
        held, prefilling = torch.tensor(lengths), torch.tensor([row in prompts for row in range(ROWS)])
        given = (ROWS, ROWS, max(lengths), self.table, self.slots, prefilling, held)
        return Common(starts, starts, self.lengths, *given)

    def fill(self, lengths):
        self.q.normal_(generator=self.generator)
        self.blocks = self.blocks.roll(1, 0)
        self.lengths.copy_(torch.tensor(lengths))
        self.table.copy_(self.blocks.where(self.lengths[:, None] > 0, 0))

    def dense(self, common):
        both = zip(self.layers, self.q, strict=True)
        return torch.stack([flash_attention(x.impl, x, q, 0, 0, x.kv_cache, common, q.clone()) for x, q in both])

    def run(self, metadata):
        outs = []
        for layer, q in zip(self.layers, self.q, strict=True):
            outs.append(layer.impl.forward(layer, q, None, None, layer.kv_cache, metadata, torch.zeros_like(q)))
        return torch.stack(outs)


@pytest.fixture
def built(monkeypatch):
    """Whether each metadata of FlashAttention may use the buffer of full graphs."""
    calls = []

    def build(self, prefix, common, fast=False):
        calls.append(self.use_full_cuda_graph)
        return copy.copy(common)

    monkeypatch.setattr(FlashAttentionImpl, "forward", flash_attention)
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", build)
    return calls


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_captured_once_serves_every_batch(built, spec, monkeypatch):
    served = Engine(spec)
    fresh = served.new_builder(spec)
    captured = served.builder.build_for_cudagraph_capture(served.common([1] * ROWS, []))
    recording = record(lambda: served.run(captured))
    assert float(served.builder.steps.keys_read()) == served.builder.steps.totals.rows == 0
    sparse_seen = False
    for lengths, prompts, asked in BATCHES:
        monkeypatch.setattr(requests, "_rows", [row in asked for row in range(ROWS)] if asked else None)
        served.fill(lengths)
        common = served.common(lengths, prompts)
        before = float(served.builder.steps.keys_read()), float(fresh.steps.keys_read())
        served.builder.build(0, common)
        recording.replay()
        found = served.run(fresh.build(0, common))
        torch.testing.assert_close(recording.out, found)
        if not fresh.steps.dense:
            after = float(served.builder.steps.keys_read()), float(fresh.steps.keys_read())
            assert after[0] - before[0] == pytest.approx(after[1] - before[1])
        assert served.builder.steps.totals == fresh.steps.totals
        dense = served.dense(common)
        real = sum(n > 0 for n in lengths)
        whole = [row for row, n in enumerate(lengths) if n * real < BELOW or row in (*prompts, *asked)]
        torch.testing.assert_close(found[:, whole], dense[:, whole])
        sparse = [row for row in range(ROWS) if row not in whole]
        sparse_seen |= bool(sparse) and not torch.allclose(found[:, sparse], dense[:, sparse], atol=1e-3)
    assert sparse_seen == (spec != "dense")


def test_prompts_do_not_use_the_buffer_of_graphs(built):
    builder = Engine(SPECS[1]).builder
    builder.steps = EngineSteps(builder.steps.methods, torch.device("cpu"), dense_below=0)
    builder.build(0, batch([1, 1, 5], [30, 9, 12], [False, False, True]))
    assert built == [True, False]
    assert builder.use_full_cuda_graph


def test_nothing_is_made_for_prompts_where_vllm_attends_to_the_whole_batch(built):
    metadata = Engine(SPECS[1]).builder.build(0, batch([1, 1, 5], [30, 9, 12], [False, False, True]))
    assert (built, metadata.foveate.prompts, metadata.foveate.steps.dense) == ([True], None, True)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("dense", AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        (KASCADE, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        ("lessismore", AttentionCGSupport.NEVER),
    ],
)
def test_which_methods_run_within_graphs(spec, expected, monkeypatch):
    monkeypatch.setattr(gpu, "runs_kernel", lambda verb: True)
    assert gpu.Builder.get_cudagraph_support(engine(spec), None) is expected
    drafting = engine(spec, speculative_config=object())  # vLLM's own attention verifies, several tokens a row
    assert gpu.Builder.get_cudagraph_support(drafting, None) is AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize(
    ("spec", "mode", "largest"),
    [(KASCADE, "FULL_AND_PIECEWISE", 8), (KASCADE, "PIECEWISE", 0), ("lessismore", "FULL_AND_PIECEWISE", 0)],
)
def test_a_builder_knows_the_largest_graph(spec, mode, largest, monkeypatch):
    monkeypatch.setattr(gpu, "runs_kernel", lambda verb: True)
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "__init__", lambda self, *given: None)
    monkeypatch.setattr(gpu.Builder, "prepare", lambda self, *given: self.__dict__.update(steps=(), largest_graph=0))
    config = engine(spec)
    config.scheduler_config = SimpleNamespace(max_num_seqs=8)
    graphs = {"cudagraph_mode": CUDAGraphMode[mode], "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    config.compilation_config = SimpleNamespace(**graphs)
    builder = gpu.Builder(SimpleNamespace(block_size=BLOCK), [], config, torch.device("cpu"))
    assert builder.largest_graph == largest


def test_no_graph_holds_what_references_copy():
    assert gpu.Builder.get_cudagraph_support(engine(KASCADE), None) is AttentionCGSupport.NEVER


def test_a_capture_runs_the_layers_once_and_counts_nothing(built, monkeypatch):
    """vLLM asks for a step's metadata as of a capture again and again, on idle ranks of data parallelism."""
    served, runs = Engine(KASCADE), []
    once = served.builder.run_once
    monkeypatch.setattr(served.builder, "run_once", lambda step: (runs.append(step), once(step)))
    served.fill([60, 33, 71, 40, 25])
    served.run(served.builder.build(0, served.common([60, 33, 71, 40, 25], [])))
    steps = served.builder.steps
    before = float(steps.keys_read()), steps.totals.rows, steps.totals.steps
    for _ in range(3):
        served.run(served.builder.build_for_cudagraph_capture(served.common([1] * ROWS, [])))
    assert len(runs) == 1
    assert before[0] > 0
    assert (float(steps.keys_read()), steps.totals.rows, steps.totals.steps) == before

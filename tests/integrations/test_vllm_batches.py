"""Which rows of a batch vLLM's FlashAttention reads on a GPU, and which the method; a reference stands for it here."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from foveate import methods
from foveate.ops import Logits
from foveate.ops.block_table import EIGHT_BITS
from foveate.runtime import EngineSteps
from foveate.state import Geometry

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadataBuilder

from foveate.integrations.vllm import builder, gpu
from foveate.integrations.vllm.audit import Share
from foveate.integrations.vllm.rows import attend_prompt, prompts_from, write_tokens
from tests.integrations.test_vllm_rows import BLOCK, DIM, HEADS, KV_HEADS, batch

LAYERS, BLOCKS = 4, 50
SPEC = "kascade_paper:top_k=4,anchors=[1],decode_only=true"
"""Layer 0 reads all keys and chooses none."""
MIXED = ([1, 1, 1, 5], [30, 9, 17, 12], [False, False, True, True])
"""Two rows decode; the last token of a prompt, and a chunk of another, do not."""

DECODING = ([1, 1], [30, 9], [False, False])


def steps(dense_below=0, spec=SPEC):
    method, geometry = methods.parse(spec), Geometry(HEADS, KV_HEADS, DIM, DIM)
    found = EngineSteps({n: method.for_layer(n, LAYERS) for n in range(LAYERS)}, torch.device("cpu"), dense_below)
    for n, one in found.methods.items():
        if one.channels(geometry):
            found.allocate(n, geometry, torch.empty(BLOCKS, KV_HEADS, BLOCK, DIM, device="meta"))
    return found


@pytest.fixture
def read(monkeypatch):
    """How many rows FlashAttention has read in each of its calls."""
    calls = []

    def forward(self, layer, query, key, value, kv_cache, metadata, output, *scales):
        if metadata is None:
            return output.fill_(0)
        calls.append(metadata.num_reqs)
        if kv_cache.dtype == torch.uint8:
            kv_cache = kv_cache.view(EIGHT_BITS).float() * layer.of_stored
            query = query.float() * layer._q_scale_float
        for row in prompts_from(metadata, 0):
            attend_prompt(row, query, kv_cache[..., :DIM], kv_cache[..., DIM:], output, Logits(self.scale))
        return output

    monkeypatch.setattr(FlashAttentionImpl, "forward", forward)
    monkeypatch.setattr(
        FlashAttentionMetadataBuilder, "build", lambda self, prefix, common, fast=False: copy.copy(common)
    )
    return calls


def run(rows, dense_below=0, serves=True, spec=SPEC, largest_graph=0, scales=None):
    """The outputs of each layer by the backend, what they should be of each row, and the steps.

    With ``scales``, of queries, keys and values, these are in eight bits, and what they stand for is expected.
    """
    common, generator = batch(*rows), torch.Generator().manual_seed(0)
    ours_builds, ours = object.__new__(gpu.Builder), steps(dense_below, spec)
    ours_builds.steps, ours_builds.meter = ours if serves else None, SimpleNamespace(update=lambda: None)
    ours_builds.audit = Share(0)
    ours_builds.use_full_cuda_graph, ours_builds.largest_graph = True, largest_graph
    metadata = ours_builds.build(0, common)
    cache = torch.randn(LAYERS, BLOCKS, KV_HEADS, BLOCK, 2 * DIM, generator=generator)
    tokens = int(common.query_start_loc[-1])
    found, sparse, dense = [], [], []
    alone = steps(spec=spec)
    decodes = next((n for n, new in enumerate(rows[2]) if new), len(rows[2]))
    if decodes:
        lengths = common.seq_lens[:decodes]
        alone.begin(lengths, common.block_table_tensor[:decodes], int(lengths.max()), lengths.tolist())
    for n in range(LAYERS):
        impl = object.__new__(gpu.Impl)
        impl.__dict__ |= {
            "index": None,
            "memory": None,
            "serves_foveate": serves,
            "head_size": DIM,
            "scale": 0.3,
            "sinks": None,
        }
        impl.num_heads, impl.num_kv_heads = HEADS, KV_HEADS
        impl.logits_soft_cap = 0
        layer = SimpleNamespace(layer_name=f"model.layers.{n}.self_attn.attn")
        q, k, v = (torch.randn(tokens, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
        write_tokens(k, v, cache[n], common.slot_mapping)
        out, given = torch.full_like(q, 9.0), (q, cache[n])
        if scales is not None:
            layer._q_scale_float, layer._k_scale_float, layer._v_scale_float = scales
            layer._k_scale = layer._v_scale = torch.ones(1)
            layer.of_stored = torch.tensor(scales[1:]).repeat_interleave(DIM)
            given = (q / scales[0]).to(EIGHT_BITS), (cache[n] / layer.of_stored).to(EIGHT_BITS).view(torch.uint8)
            q, cache[n] = given[0].float() * scales[0], given[1].view(EIGHT_BITS).float() * layer.of_stored
        found.append(impl.forward(layer, given[0], k, v, given[1], metadata, out))
        dense.append(torch.zeros_like(q))
        for row in prompts_from(common, 0):
            attend_prompt(row, q, cache[n, ..., :DIM], cache[n, ..., DIM:], dense[-1], Logits(0.3))
        sparse.append(dense[-1].clone())
        if decodes:
            keys = (cache[n][..., :DIM], cache[n][..., DIM:])
            sparse[-1][:decodes] = alone.attend(n, q[:decodes, :, None], *keys, Logits(0.3))[:, :, 0]
    return torch.stack(found), torch.stack(sparse), torch.stack(dense), ours


def test_rows_that_decode_are_the_methods_and_the_others_flash_attentions(read):
    found, sparse, dense, ours = run(MIXED)
    torch.testing.assert_close(found, sparse)
    assert not torch.allclose(found[1:, :2], dense[1:, :2], atol=1e-3)
    assert read == [4, 2, 2, 2]
    assert float(ours.keys_read()) == pytest.approx(39 + 39 / 2 + 3 * 2 * 4)


def test_where_all_rows_decode_only_dense_layers_are_flash_attentions(read):
    found, sparse, _, _ = run(DECODING)
    torch.testing.assert_close(found, sparse)
    assert read == [2]


@pytest.mark.parametrize("rows", [([1, 5], [30, 9], [True, True]), ([6], [6], [True])])
def test_prompts_alone_are_no_step(read, rows):
    found, _, dense, ours = run(rows)
    torch.testing.assert_close(found, dense)
    assert read == [len(rows[0])] * LAYERS
    assert ours.totals.steps == 0


def test_short_contexts_are_flash_attentions(read):
    found, _, dense, ours = run(MIXED, dense_below=100)
    torch.testing.assert_close(found, dense)
    assert read == [4] * LAYERS
    assert (ours.totals.dense_rows, float(ours.keys_read()), ours.totals.keys_available) == (2, 4 * 39, 4 * 39)


@pytest.mark.parametrize("spec", [SPEC, "pages:top_k=24,page_size=4,weighted=false"])
@pytest.mark.parametrize("rows", [MIXED, DECODING])
def test_keys_in_eight_bits_are_read_with_their_scales(read, rows, spec):
    found, sparse, dense, _ = run(rows, spec=spec, scales=(0.02, 0.05, 0.1))
    exact = spec == SPEC  # summaries are of the stored keys, whose rounding the expected ones have otherwise
    torch.testing.assert_close(found, sparse, atol=1e-4 if exact else 0.2, rtol=1e-4)
    assert not torch.allclose(found[1:, :2], dense[1:, :2], atol=1e-2)


def test_a_scale_for_each_head_is_refused():
    layer = SimpleNamespace(_k_scale=torch.ones(2), _v_scale=torch.ones(1))
    with pytest.raises(ValueError, match="an fp8 KV cache with a scale for each head"):
        builder.scales_of(layer)


@pytest.mark.parametrize(
    ("rows", "largest_graph", "dense_below", "dense"),
    [
        (MIXED, 8, 1, True),
        (MIXED, 8, 0, False),
        (MIXED, 0, 1, False),  # where vLLM replays no step, a mixed one launches no more than others
        (DECODING, 1, 1, True),
        (DECODING, 2, 1, False),
    ],
)
def test_rows_of_steps_that_no_graph_holds_are_flash_attentions(
    read, monkeypatch, rows, largest_graph, dense_below, dense
):
    """Rows beside prompts above all: nothing of the method's is launched for them, but with dense_below=0."""
    launched, attend = [], EngineSteps.attend
    monkeypatch.setattr(EngineSteps, "attend", lambda own, *given: launched.append(own) or attend(own, *given))
    found, sparse, of_all_keys, ours = run(rows, dense_below, largest_graph=largest_graph)
    torch.testing.assert_close(found, of_all_keys if dense else sparse)
    assert (read == [len(rows[0])] * LAYERS) == dense, "one call a layer, of all rows at once"
    assert launched.count(ours) == (0 if dense else LAYERS - 1), "but for layer 0, which reads all keys"
    assert (ours.totals.steps, ours.totals.dense_rows) == (1, 2 * dense)
    assert (float(ours.keys_read()) == ours.totals.keys_available) == dense


@pytest.mark.parametrize("rows", [DECODING, MIXED, ([4, 4], [30, 9], [False, False])])
def test_beside_a_drafter_every_row_is_flash_attentions_and_those_that_verify_are_counted(read, monkeypatch, rows):
    monkeypatch.setattr(builder.StepBuilder, "speculates", True)
    found, _, dense, ours = run(rows)
    torch.testing.assert_close(found, dense)
    assert read == [len(rows[0])] * LAYERS, "one call a layer, of all rows at once"
    assert (ours.totals.steps, ours.totals.rows, ours.totals.dense_rows) == (1, 2, 2)
    assert float(ours.keys_read()) == ours.totals.keys_available == 39 * LAYERS


def test_layers_of_sliding_windows_are_flash_attentions(read):
    found, _, dense, ours = run(MIXED, serves=False)
    torch.testing.assert_close(found, dense)
    assert (read, ours.totals.steps) == ([4] * LAYERS, 0)


def test_nothing_is_read_while_memory_is_measured(read):
    impl = object.__new__(gpu.Impl)
    impl.serves_foveate = True
    out = torch.full((3, HEADS, DIM), 9.0)
    assert impl.forward(None, out, None, None, None, None, out.clone()).abs().max() == 0
    assert read == []


@pytest.mark.parametrize("dense_below", [0, 100])
@pytest.mark.parametrize(
    ("rows", "filled"),
    [
        (([1, 1], [32, 9], [False, False]), [(8, 0)]),
        (([1, 6], [29, 13], [False, True]), [(12, 0), (13, 0)]),
        (([8], [8], [True]), [(1, 0), (2, 0)]),
    ],
)
def test_pages_that_new_tokens_fill_are_summarised_in_every_batch(read, rows, filled, dense_below):
    ours = run(rows, dense_below, spec="locks:top_k=8,page_size=4,rank=2")[-1]
    for n in range(LAYERS):
        records = ours._caches[n].tensors["records"]
        assert records.any(-1).any(1).nonzero().tolist() == [list(place) for place in filled]

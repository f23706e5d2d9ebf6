"""Which rows of a vLLM batch decode, and what a CPU does with the others; without vLLM."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from foveate import methods
from foveate.integrations.vllm import builder
from foveate.integrations.vllm.rows import (
    Decoding,
    attend_prompt,
    decoding_rows,
    layer_index,
    prompts_from,
    rows_from,
    write_tokens,
)
from foveate.ops import Logits
from foveate.ops.block_table import EIGHT_BITS
from foveate.runtime import EngineSteps
from tests.problems import assert_close, causal_mask, naive

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 4


@dataclasses.dataclass
class Common:
    """The fields of vLLM's ``CommonAttentionMetadata`` that are read."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    is_prefilling: torch.Tensor | None
    seq_lens_cpu_upper_bound: torch.Tensor
    max_query_len: int = 0

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


def batch(tokens, lengths, prefilling):
    """A batch of rows with so many new tokens and so many in all; rows of padding have neither."""
    starts = torch.tensor([0, *tokens]).cumsum(0).int()
    blocks = torch.arange(1, len(tokens) * 10 + 1, dtype=torch.int32).view(-1, 10)
    rows = zip(blocks, tokens, lengths)
    slots = [int(row[p // BLOCK]) * BLOCK + p % BLOCK for row, n, length in rows for p in range(length - n, length)]
    prefilling = None if prefilling is None else torch.tensor(prefilling)
    many = (len(tokens), int(starts[-1]), max(lengths), blocks, torch.tensor(slots), prefilling, torch.tensor(lengths))
    return Common(starts, starts, torch.tensor(lengths, dtype=torch.int32), *many)


LENGTHS = [9, 5, 30, 7]
P, D = True, False


@pytest.mark.parametrize(
    ("tokens", "prefilling", "expected"),
    [
        ([1, 1, 1], [D, D, D], Decoding(3, 3, None, 30, [9, 5, 30])),
        ([1, 1, 5], [D, D, P], Decoding(2, 2, None, 9, [9, 5])),
        ([1, 1, 5], [D, P, P], Decoding(1, 1, None, 9, [9])),  # a prompt's last chunk of one token reads all keys
        ([7, 1], [P, D], Decoding(0, 0, None, 0, [])),
        ([1, 6, 0], [D, D, D], Decoding(1, 1, None, 9, [9])),  # several tokens of a request that was preempted
        # batches for which there is a graph
        ([1, 1, 0, 0], [D, D, D, D], Decoding(4, 2, None, 9, [9, 5])),  # rows of padding
        ([1, 1, 0, 0], [D, D], Decoding(4, 2, None, 9, [9, 5])),  # as model runner V2 tells
        ([1, 1, 1, 0], [D, P, D, D], Decoding(4, 3, [D, P, D, D], 30, [9, 30])),
        ([1, 1, 0], [D, P, P], Decoding(3, 2, [D, P, D], 9, [9])),
        ([1, 1], [P, P], Decoding(2, 2, [P, P], 9, [])),
    ],
)
def test_rows_that_decode(tokens, prefilling, expected):
    assert decoding_rows(batch(tokens, LENGTHS[: len(tokens)], prefilling)) == expected


@pytest.mark.parametrize(
    ("tokens", "prefilling", "dense", "expected"),
    [
        ([1, 1, 1], [D, D, D], [False, True, False], [False, True, False]),
        ([1, 1, 5], [D, D, P], [False, True, True], [False, True]),  # a prompt reads all keys as it is
        ([1, 1, 5], [D, P, P], [False, True, False], None),
        ([1, 1, 0, 0], [D, D, D, D], [True, False], [True, False, False, False]),
        ([1, 1, 1, 0], [D, P, D, D], [True, True, False, False], [True, False, False, False]),
        ([7, 1], [P, D], [False, True], None),
    ],
)
def test_rows_of_dense_requests_are_marked_where_they_decode(tokens, prefilling, dense, expected):
    common = batch(tokens, LENGTHS[: len(tokens)], prefilling)
    assert decoding_rows(common, dense) == dataclasses.replace(decoding_rows(common), dense=expected)


def test_a_runner_that_does_not_tell_is_refused():
    with pytest.raises(ValueError, match="does not tell decoded tokens from prompts"):
        decoding_rows(batch([1], [9], None))


def test_rows_after_the_decoding_ones_are_a_batch_of_their_own():
    common = batch([1, 1, 5, 3], [30, 9, 12, 3], [False, False, True, True])
    rest = rows_from(common, 2)
    assert rest.query_start_loc.tolist() == rest.query_start_loc_cpu.tolist() == [0, 5, 8]
    assert rest.seq_lens.tolist() == rest.seq_lens_cpu_upper_bound.tolist() == [12, 3]
    assert (rest.num_reqs, rest.num_actual_tokens, rest.max_seq_len) == (2, 8, 12)
    assert torch.equal(rest.block_table_tensor, common.block_table_tensor[2:])
    assert torch.equal(rest.slot_mapping, common.slot_mapping[2:])
    assert rest.is_prefilling.tolist() == [True, True]


def test_written_tokens_are_attended_to_as_one_prompt():
    """The second row comes in two chunks; a row of padding and tokens of padding change nothing."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.full((41, KV_HEADS, BLOCK, 2 * DIM), 1e4)
    tokens = [torch.randn(9, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    outs = torch.zeros(9, HEADS, DIM)
    for first, end in ((0, 6), (6, 9)):
        common = batch([0, end - first, 0], [0, end, 0], [False, True, False])
        padded = [torch.cat([x[first:end], torch.full((2, *x.shape[1:]), 7.0)]) for x in tokens]
        write_tokens(padded[1], padded[2], cache, torch.cat([common.slot_mapping, torch.tensor([-1])]))
        out = torch.full_like(padded[0], 5.0)
        for row in prompts_from(common, 0):
            attend_prompt(row, padded[0], cache[..., :DIM], cache[..., DIM:], out, Logits(0.3))
        assert out[end - first :].unique().tolist() == [5.0]
        outs[first:end] = out[: end - first]
    assert cache[[*range(11), *range(14, 41)]].unique().tolist() == [1e4]  # the row's blocks begin with 11
    q, k, v = (x.transpose(0, 1)[None] for x in tokens)
    assert_close(outs.transpose(0, 1)[None], naive(q, k, v, 0.3, causal_mask(9, 0)).out)


@pytest.mark.parametrize(
    ("name", "index"), [("model.layers.3.self_attn.attn", 3), ("language_model.model.layers.12.attn", 12)]
)
def test_the_layer_that_a_name_tells(name, index):
    assert layer_index(name) == index


@pytest.mark.parametrize("name", ["model.attn", "model.layers.3.sub.1", "h2o.attn"])
def test_names_that_tell_no_layer(name):
    with pytest.raises(ValueError, match="must hold one number"):
        layer_index(name)


@pytest.mark.parametrize("method", ["dense", "kascade_paper:top_k=4,anchors=[1],decode_only=true"])
def test_queries_keys_and_values_in_eight_bits_stand_for_their_scaled_numbers(method):
    """Attention in 8 bits is attention of the numbers that are stored, each times its scale."""
    generator, scales = torch.Generator().manual_seed(0), torch.tensor([0.02, 0.05, 0.1])
    common = batch([1, 1], [30, 9], [False, False])
    q = (torch.randn(2, HEADS, DIM, generator=generator) / scales[0]).to(EIGHT_BITS)
    memory = torch.randn(21, KV_HEADS, BLOCK, 2, DIM, generator=generator) / scales[1:, None]
    memory = memory.flatten(3).to(EIGHT_BITS)
    impl = SimpleNamespace(index=1, scale=0.3, num_kv_heads=KV_HEADS, head_size=DIM, sinks=None, logits_soft_cap=0)
    layer = SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))
    layer._q_scale_float, layer._k_scale_float, layer._v_scale_float = scales.tolist()

    def attended(queries, stored):
        steps = EngineSteps({1: methods.parse(method).for_layer(1, 3)}, torch.device("cpu"))
        steps.begin(common.seq_lens, common.block_table_tensor, 30, [30, 9])
        out = torch.empty(2, HEADS, DIM)
        builder.decode(impl, layer, queries, stored, builder.Step(steps, common.slot_mapping, 2, None), out)
        return out

    meant = memory.float() * scales[1:].repeat_interleave(DIM)
    torch.testing.assert_close(attended(q, memory.view(torch.uint8)), attended(q.float() * scales[0], meant))

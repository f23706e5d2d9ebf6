"""Entries for windows of tokens, against the sum written out and against Transformers' DeepSeek-V4."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foveate import csa
from tests.helpers import assert_close


def problem(length, ratio, dim, overlap, seed=0):
    generator = torch.Generator().manual_seed(seed)
    width = dim * (1 + overlap)
    shapes = (2, length, width), (2, length, width), (ratio, width)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def written_out(values, gates, bias, overlap):
    ratio, width = bias.shape
    dim = width // 2 if overlap else width
    entries = []
    for w in range(values.shape[1] // ratio):
        scores, what = [], []
        for place in range(ratio):
            if overlap and w:
                scores.append(gates[:, (w - 1) * ratio + place, :dim] + bias[place, :dim])
                what.append(values[:, (w - 1) * ratio + place, :dim])
            scores.append(gates[:, w * ratio + place, width - dim :] + bias[place, width - dim :])
            what.append(values[:, w * ratio + place, width - dim :])
        weights = torch.stack(scores).double().exp()
        entries.append((weights * torch.stack(what).double()).sum(0) / weights.sum(0))
    return torch.stack(entries, 1) if entries else values.new_zeros(2, 0, dim)


@given(st.integers(0, 30), st.sampled_from([1, 3, 4]), st.booleans(), st.lists(st.integers(1, 7), max_size=6))
@settings(max_examples=60, deadline=None)
def test_entries_are_the_gated_sums_whatever_the_pieces(length, ratio, overlap, pieces):
    values, gates, bias = problem(length, ratio, 5, overlap)
    expected = written_out(values, gates, bias, overlap)
    assert_close(csa.compress_tokens(values, gates, bias, overlap=overlap)[0], expected)
    found, carry, first = [], None, 0
    for size in [*pieces, length]:
        some = slice(first, first + size)
        entries, carry = csa.compress_tokens(values[:, some], gates[:, some], bias, overlap=overlap, carry=carry)
        found.append(entries)
        first += size
    assert_close(torch.cat(found, 1), expected)
    assert carry.values.shape[1] == length % ratio


@pytest.mark.parametrize("name", ["CSA", "HCA"])
def test_as_transformers_compresses(name):
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = modeling.DeepseekV4Config(
        hidden_size=24,
        head_dim=16,
        qk_rope_head_dim=4,
        num_attention_heads=2,
        q_lora_rank=8,
        index_n_heads=4,
        index_head_dim=8,
        index_topk=3,
    )
    module = getattr(modeling, f"DeepseekV4{name}Compressor")(config)
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    module.kv_norm, seen = torch.nn.Identity(), []
    module.kv_norm.register_forward_hook(lambda _, given, __: seen.append(given[0]))
    hidden, length = torch.randn(2, 3 * module.compress_rate + 1, 24), 3 * module.compress_rate + 1
    positions = torch.arange(length).expand(2, -1)
    with torch.no_grad():
        module(hidden, torch.randn(2, length, 8), positions, None, 0)
        entries, carry = csa.compress_tokens(
            module.kv_proj(hidden), module.gate_proj(hidden), module.position_bias, overlap=name == "CSA"
        )
    assert entries.shape == (2, 3, 16)
    assert carry.values.shape[1] == 1
    assert_close(entries, seen[0])


def test_shapes_that_do_not_fit():
    values, gates, bias = problem(9, 4, 5, True)
    for wrong in ((values, gates[:, :3], bias), (values[..., :4], gates[..., :4], bias)):
        with pytest.raises(ValueError, match="do not fit two series"):
            csa.compress_tokens(*wrong, overlap=True)
    with pytest.raises(ValueError, match=r"bias \[4, 5\] do not fit two series"):
        csa.compress_tokens(values[..., :5], gates[..., :5], bias[:, :5], overlap=True)
    with pytest.raises(ValueError, match=r"values \[2, 9, 10\], gates \[2, 9, 10\] and bias \[4, 5\] do not fit$"):
        csa.compress_tokens(values, gates, bias[:, :5], overlap=False)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [3, 9])
def test_a_carry_of_something_else_is_named(overlap, length):
    values, gates, bias = problem(length, 4, 6, overlap)
    _, carry = csa.compress_tokens(values, gates, bias, overlap=overlap)

    def refused(message, carry, overlap=overlap):
        with pytest.raises(ValueError, match=message):
            csa.compress_tokens(values, gates, bias, overlap=overlap, carry=carry)

    refused(f"carry must be of a call with overlap={not overlap}, as this one, not {overlap}", carry, not overlap)
    refused(r"carry must hold tokens \[2, n, \d+\], not \[1, ", carry._replace(values=carry.values[:1]))
    refused(r"carry must hold tokens \[2, n, \d+\], not", carry._replace(gates=carry.gates[..., 1:]))
    refused(r"carry must hold tokens \[2, n, \d+\], not", carry._replace(gates=carry.gates[:, 1:]))
    refused(r"carry must hold tokens \[2, n, \d+\], not", carry._replace(values=carry.values[0]))
    if overlap:
        wrong = [(x[:, 1:] for x in carry.before), (x[:1] for x in carry.before), (x[..., 1:] for x in carry.before)]
        for before in wrong:
            refused(r"carry must hold a window \[2, 4, 6\], not", carry._replace(before=tuple(before)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": torch.zeros(0, 5)}, r"bias must be \[ratio, W\] with both of at least 1, not \[0, 5\]"),
        ({"bias": torch.zeros(5)}, r"bias must be \[ratio, W\] with both of at least 1, not \[5\]"),
        ({"values": torch.ones(2, 9, 5).long()}, "values must be floating, not torch.int64"),
        ({"gates": torch.ones(2, 9, 5).int()}, "gates must be floating, not torch.int32"),
        ({"bias": torch.ones(4, 5) + 0j}, "bias must be floating, not torch.complex64"),
        ({"values": torch.zeros(9, 5), "gates": torch.zeros(9, 5)}, r"values \[9, 5\], gates \[9, 5\]"),
    ],
)
def test_bad_input_is_named(change, message):
    values, gates, bias = problem(9, 4, 5, False)
    with pytest.raises(ValueError, match=message):
        csa.compress_tokens(**({"values": values, "gates": gates, "bias": bias, "overlap": False} | change))

"""Attention under a mask that data decide: tiles and pairs of tokens alike, and what torch.compile makes of tiles."""

import pytest
import torch
import torch.nn.attention.flex_attention as flex_attention
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from foveate.hybrids.layers import masked


def attended(attend, q, k, v, retained, window, reach):
    group, at = q.shape[1] // k.shape[1], torch.arange(k.shape[2], dtype=torch.int32)
    last = torch.where(retained, k.shape[2], at + window)

    def sees(b, h, i, j):
        return i <= last[b, h // group, j]

    return attend(q, k, v, sees, 0.3, reach)


def problem(length, seed, retained=0.3):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, heads, length, 16, generator=generator) for heads in (4, 2, 2))
    return q, k, v, torch.rand(2, 2, length, generator=generator) < retained


@pytest.mark.parametrize(
    ("length", "window", "reach"), [(300, 40, None), (512, 40, 41), (640, 200, 201), (90, 8, None)]
)
def test_tiles_are_compiled_once(length, window, reach, monkeypatch):
    """A mask of new tensors every step is no new graph, and its tables of blocks need no sort."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # gradients on the CPU, through aot_eager
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    tiles = torch.compile(attended, backend=counter, fullgraph=True, dynamic=False)
    for seed in range(3):
        *given, retained = problem(length, seed, 0.0 if reach else 0.3)
        given = [x.requires_grad_() for x in given]
        found = tiles(masked._attend_tiles, *given, retained, window, reach)
        expected = attended(masked._attend_pairs, *given, retained, window, reach)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        along = torch.randn_like(found)
        wanted = torch.autograd.grad(expected, given, along)
        for a, b in zip(torch.autograd.grad(found, given, along), wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert counter.frame_count == 1
    called = {str(node.target) for node in counter.graphs[0].graph.nodes if node.op in ("call_function", "call_method")}
    assert "flex_attention" in called
    assert not {name for name in called if "sort" in name}, called


@pytest.mark.parametrize("length", [1, 128, 300, 1024])
@pytest.mark.parametrize("reach", [None, 1, 2, 41, 128, 129, 130, 257, 2000])
def test_tables(length, reach):
    """Both directions, of every block of pairs that the mask may allow."""
    with torch.inference_mode():
        tables = masked._kept_tables(length, reach, torch.device("cpu"))
    age = torch.arange(length)[:, None] - torch.arange(length)
    allowed = (age >= 0) & (age < (length if reach is None else reach))
    blocks = (
        F.pad(allowed, (0, -length % 128, 0, -length % 128))
        .unflatten(1, (-1, 128))
        .unflatten(0, (-1, 128))
        .any(3)
        .any(1)
    )
    for side, expected in (("kv", blocks), ("q", blocks.T)):
        numbers, indices = tables[f"{side}_num_blocks"], tables[f"{side}_indices"]
        assert not numbers.is_inference()
        assert numbers.dtype == indices.dtype == torch.int32
        assert numbers.shape == (1, 1, len(blocks))
        assert indices.shape == (1, 1, len(blocks), len(blocks))
        assert 0 <= indices.min() <= indices.max() < len(blocks)
        for number, row, read in zip(numbers[0, 0], indices[0, 0], expected, strict=True):
            assert row[:number].tolist() == read.nonzero()[:, 0].tolist()


@torch.no_grad()
def test_layers_that_are_not_compiled_compile_tiles_once(monkeypatch):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(flex_attention.flex_attention, backend=counter, fullgraph=True, dynamic=False)
    monkeypatch.setattr(masked, "_compiled", lambda: compiled)
    for seed in range(3):
        given = problem(300, seed)
        found = attended(masked._attend_tiles, *given, 40, None)
        torch.testing.assert_close(found, attended(masked._attend_pairs, *given, 40, None), atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 1

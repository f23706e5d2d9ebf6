"""Native sparse attention, written out query by query."""

import pytest
import torch

from foveate.hybrids.layers import NativeSparseAttention, nsa, rotate
from foveate.hybrids.state import BlockMemory
from tests.hybrids.layers.mixers import WIDTH, hidden, native_sparse, run


def written_out(layer: NativeSparseAttention, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Equation 2 for one query and KV head after another."""
    q, k, v = (
        proj(x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        for proj in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    angles = layer.rotary.angles(at)
    q, k = rotate(q, angles), rotate(k, angles)
    gates = layer.gates_proj(x).sigmoid().unflatten(-1, (3, layer.num_heads))
    out, group, size = torch.zeros_like(q), layer.num_heads // layer.num_kv_heads, layer.block

    def attend(query, keys, values):
        return (keys @ query * layer.scaling).softmax(0) @ values

    for b in range(x.shape[0]):
        for kv in range(layer.num_kv_heads):
            heads = range(kv * group, (kv + 1) * group)
            for i in range(x.shape[1]):
                blocks = [slice(m * size, (m + 1) * size) for m in range((i + 1) // size)]
                means = torch.stack([k[b, kv, one].mean(0) for one in blocks]) if blocks else None
                values = torch.stack([v[b, kv, one].mean(0) for one in blocks]) if blocks else None
                weight = [0.0] * (i // size + 1)
                for head in heads if blocks else ():
                    for m, share in enumerate((means @ q[b, head, i] * layer.scaling).softmax(0).tolist()):
                        weight[m] += share
                own = i // size
                order = sorted(range(own + 1), key=lambda m: (m not in (0, own, own - 1), -weight[m], m))
                tokens = sorted(t for m in order[: layer.blocks] for t in range(m * size, min((m + 1) * size, i + 1)))
                near = list(range(max(0, i + 1 - layer.window), i + 1))
                for head in heads:
                    query, gate = q[b, head, i], gates[b, i, :, head]
                    if blocks:
                        out[b, head, i] += gate[0] * attend(query, means, values)
                    out[b, head, i] += gate[1] * attend(query, k[b, kv, tokens], v[b, kv, tokens])
                    out[b, head, i] += gate[2] * attend(query, k[b, kv, near], v[b, kv, near])
    return layer.o_proj(out.transpose(1, 2).flatten(2))


@torch.no_grad()
def test_what_a_query_sees():
    layer = native_sparse()
    x, at = hidden(83)
    torch.testing.assert_close(run(layer, x, at), written_out(layer, x, at), atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("length", "words"), [(83, 1), (300, 2), (520, 3)])
def test_branches_of_whole_sequences(length, words):
    """Chosen blocks as bits, 64 in a word, are the chosen blocks."""
    layer = native_sparse(block=4)
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, heads, length, 16, generator=generator) for heads in (layer.num_heads, 2, 2))
    at = torch.arange(length).expand(2, -1)
    assert nsa._packed(layer._select(q, layer._compressed(k, v)[0], at)[1]).shape == (2, 2, length, words)
    pieces = layer._branches(q, k, v, torch.zeros(2, dtype=torch.int64), [0, 0])
    for found, expected in zip(layer._fused(q, k, v), pieces, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_piece_of_a_prompt_reads_its_own_keys(monkeypatch):
    """After rows of two lengths: none after its last query, and in the window none before what its first one sees."""
    layer, read, attend, lengths = native_sparse(), [], nsa._attend, [10, 40]
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, layer.num_heads, 600, 16, generator=generator)
    k, v = (torch.randn(2, 2, 640, 16, generator=generator) for _ in "kv")
    monkeypatch.setattr(nsa, "_attend", lambda q, k, *more: read.append(k.shape[2]) or attend(q, k, *more))
    pieces = layer._branches(q, k, v, torch.tensor(lengths), lengths)
    before = max(lengths) - min(lengths) + layer.window - 1
    assert read[1::3] == [296, 552, 640]
    assert read[2::3] == [296, 256 + before, 88 + before]
    monkeypatch.setattr(nsa, "_PIECE", 1000)
    for found, expected in zip(pieces, layer._branches(q, k, v, torch.tensor(lengths), lengths), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_group_of_three():
    torch.manual_seed(0)
    layer = NativeSparseAttention(WIDTH, 6, 2, 8, block=4, blocks=3, window=5)
    x, at = hidden(40)
    torch.testing.assert_close(run(layer, x, at), written_out(layer, x, at), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("compression", ["mean", "mlp"])
def test_gradients_are_finite_differences(compression):
    """In fp64, of all parameters along a random direction; the choice of blocks has no gradient."""
    layer = native_sparse(compression=compression).double().train()
    x, at = hidden(40)
    x = x.double().requires_grad_()
    target = torch.randn(2, 40, WIDTH, dtype=torch.float64)

    def loss() -> torch.Tensor:
        return (run(layer, x, at) * target).sum()

    loss().backward()
    leaves = [x, *layer.parameters()]
    assert all(bool(leaf.grad.isfinite().all()) for leaf in leaves)
    directions = [torch.randn_like(leaf) for leaf in leaves]
    slope = sum(float((leaf.grad * direction).sum()) for leaf, direction in zip(leaves, directions))
    step, found = 1e-7, []
    with torch.no_grad():
        for sign in (1, -1):
            for leaf, direction in zip(leaves, directions):
                leaf += sign * step * direction
            found.append(float(loss()))
            for leaf, direction in zip(leaves, directions):
                leaf -= sign * step * direction
    assert (found[0] - found[1]) / (2 * step) == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"), [({"blocks": 2}, "blocks at least 3"), ({"compression": "max"}, "compression must be")]
)
def test_settings_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        native_sparse(**changes)


@torch.no_grad()
@pytest.mark.parametrize("compression", ["mean", "mlp"])
def test_summaries_of_undone_blocks_are_made_anew(compression):
    """Steps complete a block, its last tokens are undone, and others complete it again; rows are reordered between."""
    layer = native_sparse(compression=compression)
    memory = BlockMemory(layer.block)
    x, at = hidden(90)
    whole = run(layer, x, at)
    run(layer, x[:, :50], at[:, :50], memory)
    for token in range(50, 60):
        run(layer, torch.randn(2, 1, WIDTH), at[:, token : token + 1], memory)
    memory.crop(10)
    memory.take_rows(torch.tensor([1, 0, 1]))
    x = x[[1, 0, 1]]
    steps = [run(layer, x[:, 50:60], at[:, 50:60], memory)]
    steps += [run(layer, x[:, token : token + 1], at[:, token : token + 1], memory) for token in range(60, 90)]
    torch.testing.assert_close(torch.cat(steps, 1), whole[[1, 0, 1], 50:], atol=2e-6, rtol=1e-4)


@torch.no_grad()
def test_summaries_are_made_once():
    """A step compresses the block that it completes, and no other."""
    layer = native_sparse()
    memory, asked, compress = BlockMemory(layer.block), [], layer._compressed
    layer._compressed = lambda k, v: asked.append(k.shape[2]) or compress(k, v)
    x, at = hidden(70)
    run(layer, x[:, :30], at[:, :30], memory)
    asked.clear()
    for token in range(30, 70):
        run(layer, x[:, token : token + 1], at[:, token : token + 1], memory)
    assert asked == [24] + [layer.block] * 5

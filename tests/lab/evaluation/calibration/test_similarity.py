"""What one prompt shows of its layers, against attention matrices that are written out."""

import itertools

import pytest
import torch

from foveate import ops
from foveate.lab.evaluation.calibration import similarity
from foveate.lab.evaluation.calibration.similarity import Similarity, least_tokens
from foveate.ops import Logits, _math
from tests.helpers import LargestTensor, causal_mask, naive

HEADS, KV_HEADS, DIM, SCALING, LAYERS = 6, 2, 8, 0.6, 3
GROUP = HEADS // KV_HEADS


def drawn(length, layers=LAYERS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randn(1, heads, length, DIM, generator=generator) for heads in (HEADS, KV_HEADS))
        for _ in range(layers)
    ]


def shown(prompt, k, tile):
    study = Similarity(k, tile)
    for layer, (q, keys) in enumerate(prompt):
        study.look(layer, q, keys, Logits(SCALING))
    return study.result()


def attention(q, k):
    """Every weight, fp64 ``[Hq, n, n]``."""
    return naive(q, k, k, SCALING, causal_mask(q.shape[2], 0)).weights[0]


def written_out(prompt, k, tile):
    """``[t, a, i, b, j]``, every tile of every head by itself."""
    span, length = max(1, tile // GROUP), prompt[0][0].shape[2]
    own = tile == 1  # a token by itself sees its own key, too
    tiles = [range(first, min(first + span, length)) for first in range(0, length, span) if first + own > k]
    matrices = [attention(q, keys) for q, keys in prompt]

    def pooled(layer, head, queries):
        rows = matrices[layer][head * GROUP : (head + 1) * GROUP, list(queries), : queries[0] + own]
        return rows.mean((0, 1))

    captured = torch.zeros(len(tiles), len(prompt), KV_HEADS, len(prompt), KV_HEADS, dtype=torch.float64)
    for t, queries in enumerate(tiles):
        for a, b in itertools.product(range(len(prompt)), repeat=2):
            for i, j in itertools.product(range(KV_HEADS), repeat=2):
                if a <= b:
                    chosen = pooled(a, i, queries).topk(k).indices
                    captured[t, a, i, b, j] = pooled(b, j, queries)[chosen].sum()
    return captured


def test_a_layer_chooses_by_the_mean_of_its_heads():
    """Section 3.2 of the paper, by attention matrices that are written out."""
    prompt, k = drawn(23), 4
    study = Similarity(k, tile=1, pools_layer=True)
    for layer, (q, keys) in enumerate(prompt):
        study.look(layer, q, keys, Logits(SCALING))
    found = study.result().captured
    matrices = [attention(q, keys).mean(0) for q, keys in prompt]
    for t, a, b in itertools.product(range(len(found)), range(LAYERS), range(LAYERS)):
        at = t + k  # the first query that sees more than k keys
        chosen = matrices[a][at, : at + 1].topk(k).indices
        expected = matrices[b][at, chosen].sum() if a <= b else torch.zeros(())
        assert found[t, a, :, b].flatten().tolist() == pytest.approx([float(expected)] * KV_HEADS**2, abs=1e-6)


@pytest.mark.parametrize(
    ("length", "k", "tile"),
    [(40, 5, 12), (37, 5, 12), (37, 8, 12), (29, 4, 1), (33, 3, 2), (50, 7, 100)],
    ids=["whole tiles", "a tile in part", "as many keys as a tile's start", "each token", "below a group", "one tile"],
)
def test_attention_on_what_others_choose(length, k, tile):
    prompt = drawn(length)
    measured = shown(prompt, k, tile)
    expected = written_out(prompt, k, tile)
    assert measured.captured.dtype == torch.float32
    torch.testing.assert_close(measured.captured.double(), expected, rtol=1e-4, atol=1e-6)


def test_similarity_by_tokens_is_equation_3_over_every_token():
    """With one KV head: of tokens that see no more than k keys it is 1."""
    k, length = 5, 60
    generator = torch.Generator().manual_seed(3)
    prompt = [tuple(torch.randn(1, heads, length, DIM, generator=generator) for heads in (1, 1)) for _ in range(2)]
    captured = shown(prompt, k, 1).captured[:, :, 0, :, 0]
    rows = [attention(*layer)[0] for layer in prompt]

    def similarity_of(token):
        seen = [row[token, : token + 1] for row in rows]
        first, second = (one.topk(min(k, token + 1)).indices for one in seen)
        return seen[1][first].sum() / seen[1][second].sum()

    expected = torch.stack([similarity_of(token) for token in range(length)])
    torch.testing.assert_close((captured[:, 0, 1] / captured[:, 1, 1]).double(), expected[k:], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(expected[:k], torch.ones(k).double())


def test_the_same_in_many_small_blocks(monkeypatch):
    prompt, blocks, tile_mass = drawn(320, layers=4, seed=1), [], ops.tile_mass

    def counting(*args, **more):
        for first, mass in tile_mass(*args, **more):
            blocks.append(mass.shape[2])
            yield first, mass

    monkeypatch.setattr(ops, "tile_mass", counting)
    whole = shown(prompt, 5, 12)
    assert blocks == [80] * 4
    blocks.clear()
    monkeypatch.setattr(_math, "SCRATCH_BYTES", 1 << 14)
    monkeypatch.setattr(similarity, "_BLOCK", 1)
    torch.testing.assert_close(shown(prompt, 5, 12), whole, rtol=1e-5, atol=1e-7)
    assert len(blocks) > 20
    assert max(blocks) > 1


def test_no_attention_matrix_exists(monkeypatch):
    prompt = drawn(2048, layers=1)
    monkeypatch.setattr(_math, "SCRATCH_BYTES", 1 << 20)
    monkeypatch.setattr(similarity, "_BLOCK", 1 << 18)
    with LargestTensor() as largest:
        shown(prompt, 5, 12)
    assert largest.bytes <= 1 << 20, largest.what


def test_attention_on_the_heaviest_keys():
    (q, k), length = drawn(400, layers=1)[0], 400
    queries = torch.linspace(256, length - 1, 64).long()
    expected = attention(q, k)[:, queries].topk(256, -1).values.sum(-1).mean(-1)
    (coverage,) = shown([(q, k)], 5, 12).coverage
    torch.testing.assert_close(coverage.double(), expected, rtol=1e-4, atol=1e-6)
    assert (coverage < 1).all()


def test_attention_on_the_heaviest_keys_of_hardly_more():
    (q, k) = drawn(258, layers=1)[0]
    (coverage,) = shown([(q, k)], 5, 12).coverage
    expected = attention(q, k)[:, 256:].topk(256, -1).values.sum(-1).mean(-1)
    torch.testing.assert_close(coverage.double(), expected, rtol=1e-4, atol=1e-6)


def test_no_more_keys_than_the_heaviest_are_no_number():
    assert shown(drawn(256), 5, 12).coverage.isnan().all()
    assert shown(drawn(257), 5, 12).coverage.isfinite().all()


@pytest.mark.parametrize(("k", "tile"), [(64, 128), (8, 12), (7, 12), (5, 1), (3, 4)])
def test_the_shortest_prompt(k, tile):
    least = least_tokens(k, tile, GROUP)
    assert len(shown(drawn(least), k, tile).captured) == 1
    with pytest.raises(ValueError, match=rf"a prompt of {least - 1} tokens is too short .* at least {least}"):
        shown(drawn(least - 1), k, tile)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("of", ["queries", "keys"])
def test_activations_that_are_not_finite_name_their_layer(value, of):
    prompt = drawn(40)
    prompt[1][of == "keys"][0, 1, 17, 3] = value
    with pytest.raises(ValueError, match="layer 1: the attention logits of a prompt are not finite"):
        shown(prompt, 5, 12)


def test_half_precision_shows_the_same():
    prompt = [(q.half(), k.half()) for q, k in drawn(300)]
    half, single = shown(prompt, 5, 12), shown([(q.float(), k.float()) for q, k in prompt], 5, 12)
    assert half.captured.dtype == torch.float32
    torch.testing.assert_close(half, single, rtol=2e-2, atol=2e-3)

"""The forward of a layer against one with a mask of queries by keys, written out."""

import pytest
import torch

from foveate import csa
from tests.helpers import assert_close

HEADS, DIM, INDEX_HEADS, INDEX_DIM = 4, 8, 6, 5


def problem(length, ratio, overlap, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    width = 1 + overlap
    tokens = csa.Tokens(draw(2, length, width * DIM), draw(2, length, width * DIM), draw(ratio, width * DIM), overlap)
    of_index = csa.Tokens(*(torch.cat([x] * 2, -1)[..., : width * INDEX_DIM] for x in tokens[:3]), overlap)
    of_index = of_index._replace(values=draw(2, length, width * INDEX_DIM))
    return {
        "q": draw(2, HEADS, length, DIM),
        "entries": tokens,
        "index_q": draw(2, length, INDEX_HEADS, INDEX_DIM),
        "index_entries": of_index,
        "index_weights": draw(2, length, INDEX_HEADS),
        "window": csa.Window(*[draw(2, 1, length, DIM)] * 2, 5),
        "sinks": draw(HEADS),
    }


def written_out(q, entries, index_q, index_entries, index_weights, window, sinks, top_k, ratio):
    """Attention over all compressed and raw tokens at once, in float64, with a mask."""
    kv, index_k = (csa.compress_tokens(*x[:3], overlap=x.overlap)[0].double() for x in (entries, index_entries))
    length, number = q.shape[2], kv.shape[1]
    scores = torch.einsum("bshd,btd->bsht", index_q.double(), index_k).relu()
    scores = (scores * index_weights.double()[..., None]).sum(2)
    t = torch.arange(length)[:, None]
    unseen = torch.arange(number) >= (t + 1) // ratio
    order = scores.masked_fill(unseen, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    selected = torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, order[..., :top_k], True) & ~unseen
    age = t - torch.arange(length)
    mask = torch.cat([selected, ((age >= 0) & (age < window.size)).expand(2, -1, -1)], -1)[:, None]
    keys = torch.cat([kv, window.k[:, 0].double()], 1)[:, None]
    logits = (q.double() @ keys.transpose(-1, -2) * 0.3).masked_fill(~mask, float("-inf"))
    logits = torch.cat([logits, sinks.double()[:, None, None].expand(2, -1, length, 1)], -1)
    return logits.softmax(-1)[..., :-1] @ keys, logits.logsumexp(-1)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("length", "ratio", "top_k"), [(3, 4, 2), (41, 4, 3), (41, 1, 7), (20, 4, 50)])
@pytest.mark.parametrize("path", ["auto", "chunked", "fused"])
def test_as_with_a_mask(overlap, length, ratio, top_k, path):
    given = problem(length, ratio, overlap)
    out, lse = written_out(**given, top_k=top_k, ratio=ratio)
    found = csa.forward(**given, top_k=top_k, ratio=ratio, scaling=0.3, path=path)
    assert_close(found.out, out)
    assert_close(found.lse, lse)


def test_queries_in_pieces_of_tokens_that_are_compressed_already():
    given = problem(41, 4, True)
    whole = csa.forward(**given, top_k=3, ratio=4, scaling=0.3)
    for name in ("entries", "index_entries"):
        tokens = given[name]
        given[name], _ = csa.compress_tokens(*tokens[:3], overlap=tokens.overlap)
    for some in (slice(0, 17), slice(17, 41)):
        piece = given | {"q": given["q"][:, :, some]}
        piece |= {name: given[name][:, some] for name in ("index_q", "index_weights")}
        found = csa.forward(**piece, top_k=3, ratio=4, scaling=0.3, offset=some.start)
        assert_close(found.out, whole.out[:, :, some])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entries": torch.zeros(2, 9, 8)}, r"of the same tokens, not \[2, 9, 8\] and \[2, 10, 5\]"),
        ({"entries": torch.zeros(2, 1, 10, 8)}, r"entries and index_entries must be \[B, T, ...\]"),
        ({"ratio": 5}, r"bias must be \[ratio, W\] with a ratio of 5, not \[4, 8\]"),
        ({"top_k": 0}, "top_k must be an integer of at least 1, not 0"),
        ({"offset": -1}, "offset must be an integer of at least 0, not -1"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        csa.forward(**(problem(41, 4, False) | {"top_k": 3, "ratio": 4, "scaling": 0.3} | change))

"""Keys of tiles as bits, and attention that reads them."""

import itertools

import pytest
import torch

from foveate import ops
from foveate.ops import KV, Logits, _math
from foveate.ops.attend import attend_tiles
from foveate.ops.attend import chosen as chosen_keys
from foveate.ops.select import WORD_KEYS, TileKeys, keys_of_bits, set_bits
from tests.problems import LargestTensor, Shape, assert_close, problem

BEFORE = [0, 1, 31, 32, 33, 64, 100, 250]
"""Keys before each tile."""


def drawn(counts, batch=2, heads=3, seed=0):
    """Keys before each tile of BEFORE, in any order, int32 ``[B, H, T, K]``, -1 at some places among them."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.full((batch, heads, len(BEFORE), max(counts) + 2), -1, dtype=torch.int32)
    for b in range(batch):
        for h in range(heads):
            for t, (before, count) in enumerate(zip(BEFORE, counts, strict=True)):
                some = torch.randperm(before, generator=generator)[:count].to(torch.int32)
                found[b, h, t, torch.randperm(found.shape[3], generator=generator)[: len(some)]] = some
    return found


def bounds(numbers):
    return torch.nn.functional.pad(torch.tensor(numbers).cumsum(0), (1, 0))


def packed(indices, counts):
    begins, starts = bounds([-(-before // WORD_KEYS) for before in BEFORE]), bounds(counts)
    words = torch.zeros(*indices.shape[:2], int(begins[-1]), dtype=torch.int32)
    return TileKeys(words, begins, starts, tuple(starts.tolist()))


def lists(indices, counts):
    """The keys of each tile, ascending, -1 after them, one tile after the other."""
    none = torch.iinfo(torch.int32).max
    ordered = indices.masked_fill(indices < 0, none).sort(-1).values
    ordered = ordered.masked_fill(ordered == none, -1)
    return torch.cat([ordered[:, :, t, :count] for t, count in enumerate(counts)], 2)


@pytest.mark.parametrize("counts", [[0, 1, 5, 32, 9, 64, 40, 25], [0, 0, 31, 1, 33, 0, 100, 250]], ids=str)
@pytest.mark.parametrize("pieces", [[0, 8], [0, 1, 2, 5, 8], [0, 3, 8]], ids=str)
def test_bits_hold_what_was_entered(counts, pieces):
    indices = drawn(counts)
    chosen = packed(indices, counts)
    for first, last in itertools.pairwise(pieces):
        set_bits(chosen.words, indices[:, :, first:last], chosen.begins[first : last + 1])
    expected = lists(indices, counts)
    found = keys_of_bits(*chosen[:3], chosen.places[-1])
    assert torch.equal(found.keys, expected)
    assert torch.equal(found.counts, (indices >= 0).sum(-1, dtype=torch.int32))
    for first, last in itertools.pairwise(pieces):
        since, until = chosen.places[first], chosen.places[last]
        some = keys_of_bits(
            chosen.words, chosen.begins[first : last + 1], chosen.starts[first : last + 1], until - since
        )
        assert torch.equal(some.keys, expected[:, :, since:until])
        assert torch.equal(some.counts, found.counts[:, :, first:last])


def test_fewer_keys_than_places():
    indices = drawn([min(before, 20) for before in BEFORE])
    indices[:, :, :, ::2] = -1
    places = [20] * len(BEFORE)
    chosen = packed(indices, places)
    set_bits(chosen.words, indices, chosen.begins)
    found = keys_of_bits(*chosen[:3], chosen.places[-1])
    assert torch.equal(found.keys, lists(torch.nn.functional.pad(indices, (0, 20), value=-1), places))
    assert torch.equal(found.counts, (indices >= 0).sum(-1, dtype=torch.int32))
    assert bool((found.keys == -1).any())


def test_what_does_not_fit_is_refused():
    chosen = packed(drawn([1] * 8), [1] * 8)
    for words, indices in (
        (chosen.words.long(), drawn([1] * 8)),
        (chosen.words[:, :2], drawn([1] * 8)),
        (chosen.words, drawn([1] * 8)[:, :, 1:]),
        (chosen.words, drawn([1] * 8)[..., 0]),
    ):
        with pytest.raises(ValueError, match="shapes do not fit: words"):
            set_bits(words, indices, chosen.begins)


SHAPE = Shape(batch=2, kv_heads=2, group=3, queries=77, offset=14, dim=16, value_dim=16)


def tiles_of(shape, tile, share, heads):
    """A share of the keys before each tile, as bits and as lists."""
    start, end = shape.offset // tile, -(-shape.keys // tile)
    places = [int(share * tile * t) for t in range(start, end)]
    begins, starts = bounds([-(-tile * t // WORD_KEYS) for t in range(start, end)]), bounds(places)
    words, generator = torch.zeros(shape.batch, heads, int(begins[-1]), dtype=torch.int32), torch.manual_seed(1)
    parts = []
    for t, count in zip(range(start, end), places, strict=True):
        keys = torch.rand(shape.batch, heads, tile * t, generator=generator).argsort(-1)[..., :count].sort(-1).values
        parts.append(keys.int())
        set_bits(words, keys[:, :, None], begins[t - start : t - start + 2])
    return TileKeys(words, begins, starts, tuple(starts.tolist())), torch.cat(parts, 2)


@pytest.mark.parametrize("room", [1, 500, 1 << 20])
@pytest.mark.parametrize(("heads", "mapped"), [(2, None), (2, [1, 1]), (1, None)])
def test_attention_over_bits_is_that_over_lists(monkeypatch, room, heads, mapped):
    q, k, v = problem(SHAPE, extra=3)
    chosen, indices = tiles_of(SHAPE, 8, 0.4, heads)
    mapped = None if mapped is None else torch.tensor(mapped)
    how = {"tile": 8, "logits": Logits(0.3), "offset": 14, "heads": mapped}
    counts = chosen.starts.diff().int().expand(2, 2, -1)
    expected = attend_tiles(q, KV(k, v), indices.expand(-1, 2, -1), starts=chosen.starts, counts=counts, **how).out
    monkeypatch.setattr(_math, "SCRATCH_BYTES", room)
    assert_close(ops.attend_tile_keys(q, KV(k, v), chosen, **how).out, expected)


def test_memory_of_attention_over_bits_is_bounded(monkeypatch):
    """Lists of keys are there of a few tiles at a time, however long the prompt."""
    room, largest, lists_of = 1 << 14, [], []

    def listed(*given):
        found = keys_of_bits(*given)
        lists_of.append(found.keys.nbytes)
        return found

    monkeypatch.setattr(_math, "SCRATCH_BYTES", room)
    monkeypatch.setattr(chosen_keys, "keys_of_bits", listed)
    for queries in (512, 1024):
        shape = SHAPE._replace(batch=1, group=1, queries=queries, offset=0)
        q, k, v = problem(shape)
        chosen, indices = tiles_of(shape, 8, 0.5, 2)
        assert indices.nbytes > 3 * room
        with LargestTensor() as gauge:
            out = ops.attend_tile_keys(q, KV(k, v), chosen, tile=8, logits=Logits(0.3)).out
        largest.append(gauge.bytes)
        assert gauge.bytes <= max(8 * room, out.nbytes), gauge.what
    assert largest[1] <= max(largest[0], out.nbytes)
    assert room / 2 < max(lists_of) <= room, "as much as there is room for"


def test_tiles_without_keys_are_refused():
    q, k, v = problem(SHAPE)
    chosen, _ = tiles_of(SHAPE, 8, 0.4, 2)
    with pytest.raises(ValueError, match="keys of 11 tiles do not fit 6 tiles of queries"):
        ops.attend_tile_keys(q, KV(k, v), chosen, tile=16, logits=Logits(0.3), offset=14)

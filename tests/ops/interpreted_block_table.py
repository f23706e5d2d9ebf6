"""The kernels of decoding on keys in blocks: the same bits as on keys in one piece, under Triton's interpreter."""

import pytest
import torch

from foveate.ops import KV, BlockTable, Logits
from foveate.ops.attend import attend_tiles, decode_kernel, tiles_kernel
from foveate.ops.compress import PageRecord, boxes, boxes_kernel, low_rank, low_rank_kernel
from foveate.ops.gpu.tiles import Tile
from foveate.ops.retain import reference, slots_kernel
from foveate.ops.score import pooled_kernel
from tests.combinations import every_pair
from tests.problems import BLOCK_LAYOUTS, Shape, in_blocks, listed, of_rows
from tests.problems import problem as prompt

pytestmark = pytest.mark.usefixtures("poisoned")

HALF = ("dtype", [torch.float32, torch.float16])
SIZES = ("block_size", [1, 3, 16, 40, 256])
"""Smaller and larger than what a program reads at once, and of no power of two."""
LAYOUTS = ("layout", BLOCK_LAYOUTS)
SPLITS = ("splits", [1, 100])
SCALING = {"logits": Logits(0.3)}
N = 86
"""Keys of a row: two blocks of 40 and 6 more."""


@pytest.fixture
def splits(request, monkeypatch):
    """Few programs, and so many multiprocessors that keys are split."""
    for kernel in (decode_kernel, pooled_kernel):
        monkeypatch.setattr(kernel, "multiprocessors", lambda device: request.param)


def problem(dtype, batch=2, heads=6, kv_heads=2, number=N, dim=16, value_dim=24):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, heads, 1, dim, generator=generator).to(dtype)
    k = torch.randn(batch, kv_heads, number, dim, generator=generator).to(dtype)
    v = torch.randn(batch, kv_heads, number, value_dim, generator=generator).to(dtype)
    return q, k, v


def same(found, expected):
    for mine, its in zip(found, expected):
        assert mine is its is None or (torch.equal(mine, its) and not mine.isnan().any())


@every_pair(
    SIZES,
    LAYOUTS,
    ("ragged", [None, "lengths", "mask"]),
    ("need_mass", [False, True]),
    HALF,
    SPLITS,
    indirect=["splits"],
)
def test_attention_of_all_keys(dtype, block_size, layout, ragged, need_mass, splits):
    """Keys that are not there are NaN."""
    q, k, v = problem(dtype)
    how = {**SCALING, "need_lse": True, "need_mass": need_mass}
    lengths, mask = torch.tensor([70, 17]), torch.rand(2, 1, 1, N, generator=torch.Generator().manual_seed(1)) < 0.5
    if ragged == "lengths":
        mask = torch.arange(N) < lengths[:, None, None, None]
    elif ragged == "mask":
        how["mask"] = mask
    if ragged:
        k, v = (x.masked_fill(~mask.transpose(2, 3), torch.nan) for x in (k, v))
    lengths = lengths if ragged == "lengths" else None
    *memory, table = in_blocks(k, v, block_size, layout)
    expected = decode_kernel.attend(q, KV(k, v, lengths=lengths), **how)
    same(decode_kernel.attend(q, KV(*memory, table, lengths), **how), expected)


@every_pair(
    SIZES,
    LAYOUTS,
    ("pooling", ["post_softmax", "max_logit"]),
    ("pool", ["kv_head", "layer"]),
    HALF,
    SPLITS,
    indirect=["splits"],
)
def test_pooled_mass(dtype, block_size, layout, pooling, pool, splits):
    q, k, v = problem(dtype)
    lengths = torch.tensor([N, 17])
    k[1, :, 17:], v[1, :, 17:] = torch.nan, torch.nan
    how, kv = {**SCALING, "pooling": pooling, "pool": pool}, KV(k, v, lengths=lengths)
    *memory, table = in_blocks(k, v, block_size, layout)
    blocks = KV(*memory, table, lengths)
    found = pooled_kernel.pooled_mass(q, blocks, **how)
    same([of_rows(found, lengths)], [of_rows(pooled_kernel.pooled_mass(q, kv, **how), lengths)])
    found = decode_kernel.attend_pooled(q, blocks, **how)
    expected = decode_kernel.attend_pooled(q, kv, **how)
    same(*(one._replace(mass=of_rows(one.mass, lengths)) for one in (found, expected)))


@every_pair(
    SIZES,
    LAYOUTS,
    ("integers", [torch.int32, torch.int64]),
    ("heads", [None, [1, 1]]),
    HALF,
    SPLITS,
    indirect=["splits"],
)
def test_attention_of_chosen_keys(dtype, block_size, layout, integers, heads, splits):
    """Keys that are not chosen are NaN."""
    q, k, v = problem(dtype)
    indices = torch.rand(2, 2, N, generator=torch.Generator().manual_seed(2)).argsort(-1)[..., :45].to(integers)
    indices[..., ::5] = -1
    heads = None if heads is None else torch.tensor(heads)
    read = indices if heads is None else indices.index_select(1, heads)
    chosen = torch.zeros(2, 2, N + 1, dtype=torch.bool).scatter_(2, read.long() % (N + 1), True)[..., :N, None]
    k, v = (x.masked_fill(~chosen, torch.nan) for x in (k, v))
    *memory, table = in_blocks(k, v, block_size, layout)
    how = {**SCALING, "need_lse": True, "heads": heads, "counts": torch.tensor([45, 20])}
    found = decode_kernel.attend_indices(q, KV(*memory, block_table=table), indices, **how)
    same(found, decode_kernel.attend_indices(q, KV(k, v), indices, **how))


@every_pair(SIZES, LAYOUTS, ("page_size", [1, 5, 16]), ("own", [False, True]), HALF, SPLITS, indirect=["splits"])
def test_attention_of_pages(dtype, block_size, layout, page_size, own, splits):
    q, k, v = problem(dtype)
    lengths, number = torch.tensor([N, 33]), -(-N // page_size)
    for row, length in enumerate(lengths.tolist()):
        k[row, :, length:], v[row, :, length:] = torch.nan, torch.nan
    draw = torch.rand(2, 6 if own else 2, number, generator=torch.Generator().manual_seed(3))
    pages = draw.argsort(-1).masked_fill(draw < 0.5, -1).to(torch.int32)
    *memory, table = in_blocks(k, v, block_size, layout)
    how = {**SCALING, "need_lse": True}
    found = decode_kernel.attend_pages(q, KV(*memory, table, lengths), pages, page_size, **how)
    same(found, decode_kernel.attend_pages(q, KV(k, v, lengths=lengths), pages, page_size, **how))


@every_pair(
    SIZES,
    LAYOUTS,
    ("page_size", [1, 5, 16]),
    (("pooling", "pool"), [("post_softmax", "kv_head"), ("sqrt", "layer"), ("max_logit", "kv_head")]),
    HALF,
    SPLITS,
    indirect=["splits"],
)
def test_pooled_mass_of_pages(dtype, block_size, layout, page_size, pooling, pool, splits):
    """Keys of no page, and those that are not there, are NaN."""
    q, k, v = problem(dtype)
    lengths, number = torch.tensor([N, 33]), -(-N // page_size)
    draw = torch.rand(2, 1 if pool == "layer" else 2, number, generator=torch.Generator().manual_seed(3))
    pages = draw.argsort(-1).masked_fill(draw < 0.5, -1).to(torch.int32)
    read = (torch.arange(N) // page_size == pages[..., None]).any(2) & (torch.arange(N) < lengths[:, None, None])
    k[~read.expand(-1, 2, -1)] = torch.nan
    keys, _, table = in_blocks(k, v, block_size, layout)
    how, blocks = {**SCALING, "pooling": pooling, "pool": pool}, KV(keys, block_table=table, lengths=lengths)
    found = pooled_kernel.pooled_mass_of_pages(q, blocks, pages, page_size, **how)
    expected = pooled_kernel.pooled_mass_of_pages(q, KV(k, lengths=lengths), pages, page_size, **how)
    assert torch.equal(found, expected)
    assert found.isfinite().any()
    assert not found.isnan().any()


@every_pair(SIZES, LAYOUTS, ("page_size", [2, 5, 16]), HALF)
def test_the_newest_summary(dtype, block_size, layout, page_size):
    """Of the row whose newest page is full."""
    _, k, v = problem(dtype)
    lengths, form = torch.tensor([N // page_size * page_size, page_size + 1]), PageRecord(16, page_size)
    k[1, :, page_size + 1 :] = torch.nan
    weights = torch.randint(-2, 3, (2, 2, 16), generator=torch.Generator().manual_seed(5)).float().exp2()
    mine, its, expected = (torch.zeros(2, 2, -(-N // page_size), form.bytes, dtype=torch.uint8) for _ in range(3))
    keys, _, table = in_blocks(k, v, block_size, layout)
    low_rank_kernel.compress_newest(KV(keys, block_table=table, lengths=lengths), mine, form, weights)
    low_rank_kernel.compress_newest(KV(k, lengths=lengths), its, form, weights)
    assert torch.equal(mine, its)
    low_rank.compress_newest(KV(keys, block_table=table, lengths=lengths), expected, form, weights)
    low_rank.compress_newest(KV(k, lengths=lengths), its.zero_(), form, weights)
    assert torch.equal(expected, its)
    for records in (mine, expected):
        assert records[0].any(-1).sum(-1).tolist() == [1, 1]
        assert not records[1].any()


@every_pair(SIZES, LAYOUTS, ("page_size", [1, 5, 16, 60]), HALF)
def test_the_newest_box(dtype, block_size, layout, page_size):
    _, k, v = problem(dtype)
    lengths = torch.tensor([N, 33])
    k[1, :, 33:] = torch.nan
    corners = torch.zeros(2, 2, 2, -(-N // page_size), 16, dtype=dtype)
    mine, its = corners.clone(), corners.clone()
    keys, _, table = in_blocks(k, v, block_size, layout)
    boxes_kernel.bound_newest(KV(keys, block_table=table, lengths=lengths), *mine, page_size)
    boxes_kernel.bound_newest(KV(k, lengths=lengths), *its, page_size)
    assert torch.equal(mine, its)
    assert mine.any()
    assert mine.isfinite().all()


@every_pair(SIZES, LAYOUTS)
def test_a_token_is_put(block_size, layout):
    """Every other slot stays as it is."""
    _, k, v = problem(torch.float16)
    keys, values, table = in_blocks(k, v, block_size, layout)
    new = torch.randn(2, 2, 1, 16).half(), torch.randn(2, 2, 1, 24).half()
    slots = torch.tensor([N - 1, 33])
    assert slots_kernel.put_token(KV(keys, values, table), *new, slots).tolist() == [[N - 1] * 2, [33] * 2]
    slots_kernel.put_token(KV(k, v), *new, slots)
    for mine, its in zip(table.gather(k, keys, values), (k, v)):
        assert torch.equal(mine, its)
    named = keys.isnan().all(-1).sum() + values.isnan().all(-1).sum()
    assert int(named) == 2 * 2 * (len(keys) * block_size - 2 * N)


# Prompts


@pytest.fixture
def small_tiles(monkeypatch):
    """Several blocks of queries and of keys in everything."""
    small = Tile(16, 16, num_warps=4, num_stages=1)
    monkeypatch.setattr(tiles_kernel, "tile_for", lambda dtype, dim, rows: small)


PROMPT = Shape(batch=2, kv_heads=2, group=3, queries=19, offset=20, dim=16, value_dim=24)


@every_pair(SIZES, LAYOUTS, ("tile", [1, 5, 16]), ("heads", [None, [1, 1]]), HALF)
def test_tiles_of_prompts(dtype, block_size, layout, tile, heads, small_tiles):
    q, k, v = prompt(PROMPT._replace(queries=7, offset=28), dtype=dtype, extra=9)
    tiles = -(-35 // tile) - 28 // tile
    draw = torch.rand(2, 2, tiles, 16, generator=torch.Generator().manual_seed(4)).argsort(-1)[..., :11]
    chosen = listed(draw.masked_fill(draw % 5 == 0, -1).to(torch.int32))  # keys before every tile
    heads = None if heads is None else torch.tensor(heads)
    *memory, table = in_blocks(k, v, block_size, layout)
    how = {**SCALING, "tile": tile, "offset": 28, "heads": heads}
    found = tiles_kernel.attend_tiles(q, KV(*memory, block_table=table), **chosen, **how)
    same(found, tiles_kernel.attend_tiles(q, KV(k, v), **chosen, **how))


def test_what_does_not_fit():
    """Wherever it is seen: where the operand is made, by the verb, or by the kernel alone."""
    q, k, v = problem(torch.float32)
    *memory, table = in_blocks(k, v, 16)
    chosen = listed(torch.zeros(2, 2, 1, 3, dtype=torch.int32))
    form = PageRecord(16, 16)
    records = torch.zeros(2, 2, 6, form.bytes, dtype=torch.uint8)
    corners, token = (k.clone(), k.clone()), (k[:, :, :1], v[:, :, :1], torch.tensor([1, 1]))

    def filled(table):
        return KV(*memory, table, torch.full((len(table.table),), 16))

    calls = [
        *(
            lambda table, one=one: one.compress_newest(filled(table), records, form)
            for one in (low_rank, low_rank_kernel)
        ),
        *(lambda table, one=one: one.bound_newest(filled(table), *corners, 1) for one in (boxes, boxes_kernel)),
        lambda table: attend_tiles(q, KV(*memory, table), **chosen, tile=1, **SCALING),
        lambda table: slots_kernel.put_token(KV(*memory, table), *token),
        lambda table: reference.put_token(KV(*memory, table), *token),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="a block table of 1 rows does not fit"):
            call(BlockTable(table.table[:1], N))
        with pytest.raises(ValueError, match="no room for 129 keys"):
            call(BlockTable(table.table, 129))
        with pytest.raises(ValueError, match="must be int32 or int64"):
            call(BlockTable(table.table.float(), N))

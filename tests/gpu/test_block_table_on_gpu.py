"""Keys in blocks on a GPU: kernels give the same bits as for keys in one piece, also in replayed steps."""

import pytest
import torch

from foveate import ops
from foveate.ops import KV, BlockTable, Logits, dispatch
from foveate.ops.attend import attend_tiles
from tests.combinations import every_pair
from tests.kernels import poisoned_memory
from tests.problems import BLOCK_LAYOUTS, in_blocks, listed, of_rows

pytestmark = pytest.mark.gpu

DTYPES = ("dtype", [torch.bfloat16, torch.float16, torch.float32])
GROUPS = (("heads", "kv_heads"), [(3, 3), (8, 2), (14, 2), (16, 1), (70, 1)])
DIMS = (("dim", "value_dim"), [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)])
SIZES = (("batch", "number"), [(1, 1), (3, 61), (64, 700), (1, 40_001), (5, 4096)])
BLOCK_SIZES = ("block_size", [1, 16, 24, 256])
LAYOUTS = ("layout", BLOCK_LAYOUTS)
SCALING = {"logits": Logits(0.1)}


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch):
    """A reference that is reached without being asked for fails the test."""
    pytest.importorskip("triton")
    monkeypatch.delenv("FOVEATE_KERNELS", raising=False)
    assert {"attend", "pooled_mass", "put_token"} <= set(dispatch.kernel_status().split(", "))
    monkeypatch.setattr(dispatch, "_say_once", lambda text: pytest.fail(text))


@pytest.fixture(autouse=True)
def one_tile(monkeypatch):
    """Keys in one piece take the tile of blocks, too: with others sums have another order."""
    from foveate.ops.attend import decode_kernel

    tile = decode_kernel.decode_tile
    monkeypatch.setattr(decode_kernel, "decode_tile", lambda *facts: tile(*facts[:-2], True, facts[-1]))


def problem(batch, heads, kv_heads, number, dim, value_dim, dtype):
    """``q, k, v, lengths``: one query a row; keys that are not there are NaN."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=generator, device="cuda").to(dtype)
        for shape in ((batch, heads, 1, dim), (batch, kv_heads, number, dim), (batch, kv_heads, number, value_dim))
    )
    lengths = (torch.rand(batch, generator=generator, device="cuda") * number).long() + 1
    absent = torch.arange(number, device="cuda") >= lengths[:, None, None]
    absent = absent.expand(-1, kv_heads, -1)
    k[absent], v[absent] = torch.nan, torch.inf
    return q, k, v, lengths


def same(found, expected):
    for mine, its in zip(found, expected, strict=True):
        assert mine is its is None or torch.equal(mine, its)
        assert mine is None or not mine.isnan().any()


@every_pair(DTYPES, GROUPS, DIMS, SIZES, BLOCK_SIZES, LAYOUTS)
def test_all_keys(dtype, heads, kv_heads, dim, value_dim, batch, number, block_size, layout):
    q, k, v, lengths = problem(batch, heads, kv_heads, number, dim, value_dim, dtype)
    *memory, table = in_blocks(k, v, block_size, layout)
    blocks, kv = KV(*memory, table, lengths), KV(k, v, lengths=lengths)
    for more in ({"need_lse": True}, {"need_lse": True, "need_mass": True}):
        with poisoned_memory("cuda"):
            found = ops.attend(q, blocks, **SCALING, **more)
        same(found, ops.attend(q, kv, **SCALING, **more))
    for pooling in ("post_softmax", "max_logit"):
        with poisoned_memory("cuda"):
            found = ops.pooled_mass(q, blocks, pooling=pooling, **SCALING)
        expected = ops.pooled_mass(q, kv, pooling=pooling, **SCALING)
        same(*([of_rows(mass, lengths)] for mass in (found, expected)))
        with poisoned_memory("cuda"):
            found = ops.attend_pooled(q, blocks, pooling=pooling, **SCALING)
        expected = ops.attend_pooled(q, kv, pooling=pooling, **SCALING)
        same(*(one._replace(mass=of_rows(one.mass, lengths)) for one in (found, expected)))


@every_pair(DTYPES, GROUPS, DIMS, SIZES, BLOCK_SIZES, LAYOUTS)
def test_chosen_keys_and_pages(dtype, heads, kv_heads, dim, value_dim, batch, number, block_size, layout):
    q, k, v, lengths = problem(batch, heads, kv_heads, number, dim, value_dim, dtype)
    *memory, table = in_blocks(k, v, block_size, layout)
    generator = torch.Generator("cuda").manual_seed(1)
    draw = torch.rand(batch, kv_heads, number, generator=generator, device="cuda")
    for integers in (torch.int32, torch.int64):
        indices = draw.argsort(-1)[..., : max(1, number // 3)]
        indices = indices.masked_fill(indices >= lengths[:, None, None], -1).to(integers)
        with poisoned_memory("cuda"):
            found = ops.attend_indices(q, KV(*memory, block_table=table), indices, need_lse=True, **SCALING)
        same(found, ops.attend_indices(q, KV(k, v), indices, need_lse=True, **SCALING))
    for page_size, choosing in ((16, kv_heads), (5, heads)):
        pages = -(-number // page_size)
        draw = torch.rand(batch, choosing, pages, generator=generator, device="cuda")
        chosen = draw.argsort(-1).masked_fill(draw < 0.5, -1).to(torch.int32)
        blocks, kv = KV(*memory, table, lengths), KV(k, v, lengths=lengths)
        with poisoned_memory("cuda"):
            found = ops.attend_pages(q, blocks, chosen, page_size, need_lse=True, **SCALING)
        same(found, ops.attend_pages(q, kv, chosen, page_size, need_lse=True, **SCALING))
        chosen = chosen[:, :kv_heads]
        with poisoned_memory("cuda"):
            found = ops.pooled_mass_of_pages(q, blocks, chosen, page_size, **SCALING)
        same([found], [ops.pooled_mass_of_pages(q, kv, chosen, page_size, **SCALING)])


@every_pair(DTYPES, GROUPS, DIMS, BLOCK_SIZES, LAYOUTS, (("queries", "offset"), [(1, 0), (300, 0), (129, 900)]))
def test_prompts(dtype, heads, kv_heads, dim, value_dim, block_size, layout, queries, offset):
    """Tiles: on Hopper keys in one piece have a kernel of their own."""
    end = queries + offset
    q, k, v, _ = problem(1, heads, kv_heads, end, dim, value_dim, dtype)
    q = q.expand(-1, -1, queries, -1) + torch.linspace(0, 1, queries, device="cuda")[:, None].to(dtype)
    k, v = (x.nan_to_num(0.5, 0.5) for x in (k, v))
    *memory, table = in_blocks(k, v, block_size, layout)
    how = {"offset": offset, **SCALING}
    tile = 32
    number = -(-end // tile) - offset // tile
    draw = torch.rand(1, kv_heads, number, 256, generator=torch.Generator("cuda").manual_seed(2), device="cuda")
    begins = (torch.arange(number, device="cuda") + offset // tile)[:, None] * tile
    chosen = listed((draw * begins).int().where(draw * begins >= 1, -1))
    with poisoned_memory("cuda"):
        found = attend_tiles(q, KV(*memory, table), **chosen, tile=tile, **how).out
    expected = attend_tiles(q, KV(k, v), **chosen, tile=tile, **how).out
    tolerance = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 2e-5}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    if torch.cuda.get_device_capability() != (9, 0):
        assert torch.equal(found, expected)


@every_pair(DTYPES, BLOCK_SIZES, LAYOUTS, ("page_size", [1, 16, 100]))
def test_boxes_summaries_and_writes(dtype, block_size, layout, page_size):
    _, k, v, lengths = problem(3, 4, 2, 700, 80, 64, dtype)
    keys, values, table = in_blocks(k, v, block_size, layout)
    corners = torch.zeros(2, 3, 2, -(-700 // page_size), 80, dtype=dtype, device="cuda")
    mine, its = corners.clone(), corners.clone()
    ops.bound_newest(KV(keys, block_table=table, lengths=lengths), *mine, page_size)
    ops.bound_newest(KV(k, lengths=lengths), *its, page_size)
    assert torch.equal(mine, its)
    assert mine.any()
    form = ops.PageRecord(80, min(max(page_size, 2), 64))
    full = (lengths // form.page_size * form.page_size).clamp_min(1)
    mine, its = (
        torch.zeros(3, 2, -(-700 // form.page_size), form.bytes, dtype=torch.uint8, device="cuda") for _ in "ab"
    )
    ops.compress_newest(KV(keys, block_table=table, lengths=full), mine, form)
    ops.compress_newest(KV(k, lengths=full), its, form)
    assert torch.equal(mine, its)
    assert mine.any()
    new = k[:, :, :1].clone() + 1, v[:, :, :1].clone() + 1
    ops.put_token(KV(keys, values, table), *new, lengths - 1)
    ops.put_token(KV(k, v), *new, lengths - 1)
    for found, expected in zip(table.gather(k, keys, values), (k, v)):
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def put_tokens(q, k, v, table, lengths):
    new = torch.linspace(-1, 1, k.shape[3], device="cuda").half().expand(len(q), k.shape[1], 1, -1).contiguous()
    slot = ops.put_token(KV(k, v, table), new, -new, lengths - 1)
    return [slot, *table.gather(q, k, v)]


def newest_box(q, k, v, table, lengths):
    corners = torch.zeros(2, len(q), k.shape[1], table.length // 16, k.shape[3], dtype=k.dtype, device="cuda")
    ops.bound_newest(KV(k, block_table=table, lengths=lengths), *corners, 16)
    return [corners]


def newest_summary(q, k, v, table, lengths):
    form = ops.PageRecord(k.shape[3], 16)
    records = torch.zeros(len(q), k.shape[1], table.length // 16, form.bytes, dtype=torch.uint8, device="cuda")
    ops.compress_newest(KV(k, block_table=table, lengths=lengths.clamp_min(16) // 16 * 16), records, form)
    return [records]


def ascending(step, end):
    """Every ``step``-th number below ``end``, for each of two rows and two KV heads."""
    return torch.arange(0, end, step, dtype=torch.int32, device="cuda").expand(2, 2, -1).contiguous()


def chosen_keys(q, k, v, table, lengths):
    indices = ascending(3, table.length)
    indices = indices.masked_fill(indices >= lengths[:, None, None], -1)
    return ops.attend_indices(q, KV(k, v, block_table=table), indices, need_lse=True, **SCALING)


def chosen_pages(q, k, v, table, lengths):
    pages, kv = ascending(2, table.length // 16), KV(k, v, table, lengths)
    attended = ops.attend_pages(q, kv, pages, 16, need_lse=True, **SCALING)
    return [*attended, ops.pooled_mass_of_pages(q, kv, pages, 16, **SCALING)]


def all_keys(q, k, v, table, lengths):
    kv, how = KV(k, v, table, lengths), {"need_lse": True, **SCALING}
    return [*ops.attend(q, kv, **how), *ops.attend(q, kv, need_mass=True, **how)]


def pooled_masses(q, k, v, table, lengths):
    kv = KV(k, v, table, lengths)
    out, lse, mass = ops.attend_pooled(q, kv, **SCALING)
    return [out, lse, *(of_rows(one, lengths) for one in (mass, ops.pooled_mass(q, kv, **SCALING)))]


def last_queries(q, number=129):
    return q.expand(-1, -1, number, -1) + torch.linspace(0, 1, number, device="cuda")[:, None].to(q.dtype)


def tiles_of_prompt(q, k, v, table, lengths):
    q, tile = last_queries(q), 32
    offset = table.length - q.shape[2]
    number = -(-table.length // tile) - offset // tile
    indices = ascending(7, offset // tile * tile)[:, :, None].expand(-1, -1, number, -1).contiguous()
    return attend_tiles(q, KV(k, v, block_table=table), **listed(indices), tile=tile, offset=offset, **SCALING)


FAR = [
    *(all_keys, pooled_masses, chosen_keys, chosen_pages, tiles_of_prompt),
    *(put_tokens, newest_box, newest_summary),
]


@pytest.mark.parametrize("operation", FAR, ids=[operation.__name__ for operation in FAR])
def test_blocks_beyond_32_bits(operation, much_memory):
    """Blocks whose first number is further from the memory's begin than 32 bits can say: as in memory of their own."""
    q, k, v, lengths = problem(2, 8, 2, 4000, 128, 128, torch.float16)
    *near, table = in_blocks(*(x.nan_to_num(0.5, 0.5) for x in (k, v)), 16)
    far = 2**31 // (16 * 2 * 128) + 5
    memory = []
    for blocks in near:
        whole = torch.empty(far + len(blocks), 16, 2, 128, dtype=torch.float16, device="cuda").transpose(1, 2)
        whole[far:] = blocks
        memory.append(whole)
    assert far * memory[0].stride(0) > 2**31
    found = operation(q, *memory, BlockTable(table.table + far, table.length), lengths)
    same(found, operation(q, *near, table, lengths))

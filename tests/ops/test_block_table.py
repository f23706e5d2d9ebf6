"""Keys in blocks: the references give what they give for the same keys in one piece, bit for bit."""

import pytest
import torch

from foveate import ops
from foveate.ops import KV, BlockTable, Logits
from foveate.ops.attend import attend_tiles
from tests.problems import BLOCK_LAYOUTS, in_blocks, listed

SCALING = {"logits": Logits(0.3)}
SIZES = pytest.mark.parametrize("block_size", [1, 3, 16, 64])
LAYOUTS = pytest.mark.parametrize("layout", BLOCK_LAYOUTS)


def problem(queries=1, number=50):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, queries, 16, generator=generator)
    k = torch.randn(2, 2, number, 16, generator=generator)
    v = torch.randn(2, 2, number, 24, generator=generator)
    return q, k, v


@SIZES
@LAYOUTS
def test_memory_in_one_piece(block_size, layout):
    q, k, v = problem()
    *memory, table = in_blocks(k, v, block_size, layout)
    assert memory[0].shape[1:] == (2, block_size, 16)
    for found, expected in zip(table.gather(q, *memory), (k, v)):
        assert torch.equal(found, expected)
    shorter = BlockTable(table.table, 20)
    assert torch.equal(shorter.gather(q, memory[0])[0], k[:, :, :20])


def test_rows_share_blocks():
    """The first block of both rows is one: a common prefix."""
    q, k, v = problem()
    k[1, :, :16], v[1, :, :16] = k[0, :, :16], v[0, :, :16]
    *memory, table = in_blocks(k, v, 16)
    table.table[1, 0] = table.table[0, 0]
    for found, expected in zip(table.gather(q, *memory), (k, v)):
        assert torch.equal(found, expected)


@SIZES
@LAYOUTS
def test_verbs(block_size, layout):
    """With keys that are not there, and several queries."""
    q, k, v = problem()
    lengths, several = torch.tensor([50, 17]), problem(3)[0]
    *memory, table = in_blocks(k, v, block_size, layout)
    indices = torch.randint(-1, 50, (2, 2, 9), generator=torch.Generator().manual_seed(0))
    pages = torch.tensor([[0, 3, -1], [2, 1, 0]]).expand(2, 2, 3)
    lse = {"need_lse": True, **SCALING}
    kv, shorter = KV(k, v), KV(k, v, lengths=lengths)
    blocks, shorter_blocks = KV(*memory, table), KV(*memory, table, lengths)
    in_one_piece = [
        ops.attend(q, shorter, need_mass=True, **lse),
        ops.attend(several, kv, **SCALING),
        ops.attend_pooled(q, shorter, **SCALING),
        ops.attend_indices(q, kv, indices, need_mass=True, **SCALING),
        ops.attend_pages(q, shorter, pages, 7, **lse),
        (ops.pooled_mass(q, shorter, pooling="sqrt", **SCALING),),
        (ops.pooled_mass_of_pages(q, shorter, pages, 7, **SCALING),),
    ]
    found = [
        ops.attend(q, shorter_blocks, need_mass=True, **lse),
        ops.attend(several, blocks, **SCALING),
        ops.attend_pooled(q, shorter_blocks, **SCALING),
        ops.attend_indices(q, blocks, indices, need_mass=True, **SCALING),
        ops.attend_pages(q, shorter_blocks, pages, 7, **lse),
        (ops.pooled_mass(q, shorter_blocks, pooling="sqrt", **SCALING),),
        (ops.pooled_mass_of_pages(q, shorter_blocks, pages, 7, **SCALING),),
    ]
    for mine, its in zip(found, in_one_piece):
        for x, y in zip(mine, its):
            assert x is y is None or torch.equal(x, y)


@SIZES
@LAYOUTS
def test_verbs_of_prompts(block_size, layout):
    """Queries 30 .. 49 of a prompt, whose earlier keys are in blocks, too."""
    q, k, v = problem(20)
    *memory, table = in_blocks(k, v, block_size, layout)
    indices = torch.randint(-1, 28, (2, 2, 6, 9), generator=torch.Generator().manual_seed(0))
    bits, begins = torch.zeros(2, 2, 6, dtype=torch.int32), torch.arange(7)
    ops.set_bits(bits, indices[:, :, :, :1], begins)
    starts = torch.arange(7)
    chosen = ops.TileKeys(bits, begins, starts, tuple(starts.tolist()))
    how = {"offset": 30, **SCALING}
    for verb, given, more in [
        (attend_tiles, (), {"tile": 4, **listed(indices)}),
        (ops.attend_tile_keys, (chosen,), {"tile": 4}),
    ]:
        found = verb(q, KV(*memory, table), *given, **how | more)
        expected = verb(q, KV(k, v), *given, **how | more)
        for x, y in zip(found, expected):
            assert x is y is None or torch.equal(x, y)


@SIZES
@LAYOUTS
def test_the_newest_box(block_size, layout):
    _, k, v = problem()
    keys, _, table = in_blocks(k, v, block_size, layout)
    mine, its = torch.zeros(2, 2, 2, 8, 16), torch.zeros(2, 2, 2, 8, 16)
    ops.bound_newest(KV(keys, block_table=table, lengths=torch.tensor([50, 17])), *mine, 7)
    ops.bound_newest(KV(k, lengths=torch.tensor([50, 17])), *its, 7)
    assert torch.equal(mine, its)
    assert mine.any()


@SIZES
@LAYOUTS
@pytest.mark.parametrize("freed", [None, [[-1, 3], [0, -1]]])
def test_a_token_is_put(block_size, layout, freed):
    """Every other slot stays as it is."""
    _, k, v = problem()
    keys, values, table = in_blocks(k, v, block_size, layout)
    before = int(keys.isnan().sum() + values.isnan().sum())
    new, slots = (torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 24)), torch.tensor([49, 17])
    freed = None if freed is None else torch.tensor(freed)
    found = ops.put_token(KV(keys, values, table), *new, slots, freed=freed)
    assert torch.equal(found, ops.put_token(KV(k, v), *new, slots, freed=freed))
    for mine, its in zip(table.gather(k, keys, values), (k, v)):
        assert torch.equal(mine, its)
    assert int(keys.isnan().sum() + values.isnan().sum()) == before


@pytest.mark.parametrize("beyond", [-7, -1, 0, 1, 1000])
def test_entries_after_a_rows_last_block_may_be_anything(beyond):
    """The number of blocks, and what is before the first one and after the last, too."""
    q, k, v = problem(number=48)
    *memory, table = in_blocks(k, v, 16)
    lengths, entries = torch.tensor([48, 17]), table.table.clone()
    entries[1, 2:] = beyond if beyond < 0 else len(memory[0]) + beyond
    for found, expected in zip(BlockTable(entries, 48).gather(q, *memory), (k, v)):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1, :, :17], expected[1, :, :17])
    blocks = KV(*memory, BlockTable(entries, 48), lengths)
    found, expected = (ops.attend(q, kv, need_lse=True, **SCALING) for kv in (blocks, KV(k, v, lengths=lengths)))
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)


def test_no_blocks():
    q, empty, table = problem()[0], torch.zeros(0, 2, 16, 16), torch.zeros(2, 0, dtype=torch.int32)
    assert BlockTable(table, 0).gather(q, empty)[0].shape == (2, 2, 0, 16)
    assert not ops.attend(q, KV(empty, empty, block_table=BlockTable(table, 0)), **SCALING).out.any()


def test_what_does_not_fit():
    (q, k, v), pages = problem(), torch.zeros(2, 2, 1, dtype=torch.int32)
    *memory, good = in_blocks(k, v, 16)
    for table, message in [
        (BlockTable(good.table[:1], 50), "a block table of 1 rows does not fit q"),
        (BlockTable(good.table, 97), "6 blocks of 16 slots have no room for 97 keys"),
        (BlockTable(good.table, -1), "no room for -1 keys"),
        (BlockTable(good.table[0], 50), r"must be \[B, M\] of contiguous rows"),
        (BlockTable(good.table.repeat_interleave(2, 1)[:, ::2], 50), "of contiguous rows"),
        (BlockTable(good.table.to("meta"), 50), r"on cpu must be \[N, Hkv, n, D\] on the block table's meta"),
    ]:
        for call in (
            lambda table: ops.attend(q, KV(*memory, table), **SCALING),
            lambda table: ops.pooled_mass(q, KV(memory[0], block_table=table), **SCALING),
            lambda table: ops.pooled_mass_of_pages(q, KV(memory[0], block_table=table), pages, 16, **SCALING),
        ):
            with pytest.raises(ValueError, match=message):
                call(table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16])
def test_a_table_that_is_not_of_integers_is_refused(dtype):
    with pytest.raises(ValueError, match=f"a block table must be int32 or int64 .B, M., not {dtype}"):
        BlockTable(torch.zeros(2, 3, dtype=dtype), 5)

"""The operand of keys and values: what it refuses when it is made, and what verbs refuse of it."""

import dataclasses

import pytest
import torch

from foveate import ops
from foveate.ops import KV, BlockTable, Logits, dispatch
from foveate.ops.attend import attend_prefix, attend_recent, attend_selected, attend_tiles
from tests.problems import in_blocks, listed

Q, K, V = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 16, 8), torch.randn(2, 2, 16, 5)
TABLE = BlockTable(torch.tensor([[0, 1], [2, 3], [4, 0]]), 30)
BLOCKS = torch.randn(5, 2, 16, 8)
LOGITS = {"logits": Logits(0.3)}
NONE = torch.full((2, 3, 1), -1)
TILES = listed(torch.full((2, 2, 1, 1), -1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"k": K[0]}, r"k must be a floating-point \[B, H, L, D\], not torch.float32 \[2, 16, 8\]"),
        ({"k": K.int()}, "k must be a floating-point"),
        ({"v": V[0]}, "v must be a floating-point"),
        ({"v": V.int()}, "v must be a floating-point"),
        ({"v": V[:, :, :15]}, r"shapes do not fit: k \(2, 2, 16, 8\), v \(2, 2, 15, 5\)"),
        ({"v": V[:, :1]}, "shapes do not fit"),
        ({"lengths": torch.tensor([3.0, 4.0])}, "lengths must be integers"),
        ({"lengths": torch.tensor([3])}, r"lengths must be integers \[2\] or \[2, 2\], not torch.int64 \[1\]"),
        ({"lengths": torch.zeros(2, 4, dtype=torch.int32)}, "lengths must be integers"),
        ({"block_table": BlockTable(TABLE.table, 33)}, "2 blocks of 16 slots have no room for 33 keys"),
        ({"block_table": BlockTable(TABLE.table[0], 30)}, "of contiguous rows"),
        ({"block_table": TABLE, "lengths": torch.tensor([3, 4])}, r"lengths must be integers \[3\] or \[3, 2\]"),
    ],
)
def test_shapes_are_checked_where_it_is_made(given, message):
    with pytest.raises(ValueError, match=message):
        KV(**{"k": K, "v": V} | given)


def test_how_many_keys_the_longest_row_has():
    assert KV(K).num_keys == KV(K, V, lengths=torch.tensor([3, 4])).num_keys == 16
    assert KV(BLOCKS, block_table=TABLE).num_keys == 30


def test_it_stays_as_it_was_made():
    kv = KV(K, V)
    with pytest.raises(dataclasses.FrozenInstanceError):
        kv.k = V
    assert kv.in_one_piece(Q) == (K, V)
    assert kv.keys_in_one_piece(Q) is K


def test_blocks_are_gathered():
    *memory, table = in_blocks(K, V, 5)
    blocks = KV(*memory, table)
    assert all(map(torch.equal, blocks.in_one_piece(Q), (K, V)))
    assert torch.equal(blocks.keys_in_one_piece(Q), K)


@pytest.mark.parametrize(
    ("q", "kv", "message"),
    [
        (Q[0], KV(K, V), "q must be a floating-point"),
        (Q.int(), KV(K, V), "q must be a floating-point"),
        (Q[:1], KV(K, V), r"shapes do not fit: q \(1, 4, 3, 8\), k \(2, 2, 16, 8\), v \(2, 2, 16, 5\)"),
        (Q[..., :7], KV(K, V), "shapes do not fit"),
        (Q[:, :3], KV(K, V), "q has 3 heads, which is not a multiple of the 2 KV heads of k"),
        (Q, KV(BLOCKS, BLOCKS, TABLE), r"a block table of 3 rows does not fit q \[2, 4, 3, 8\]"),
        (Q, KV(K), "attention needs values, and this KV has keys alone"),
    ],
)
def test_queries_that_do_not_fit(q, kv, message):
    counts, last = torch.ones(len(q), 3, dtype=torch.int64), {"offset": 2, **LOGITS}
    for call in (
        lambda: ops.attend(q, kv, **LOGITS),
        lambda: ops.attend_newest(q, kv, **LOGITS),
        lambda: ops.attend_pooled(q[:, :, :1], kv, **LOGITS),
        lambda: ops.attend_indices(q, kv, torch.zeros(2, 2, 1, dtype=torch.int32), **LOGITS),
        lambda: ops.attend_pages(q, kv, torch.zeros(2, 2, 1, dtype=torch.int32), 4, **LOGITS),
        lambda: attend_tiles(q, kv, **TILES, tile=4, **LOGITS),
        lambda: ops.attend_causal(q, kv, **last),
        lambda: ops.attend_window(q, kv, lower=torch.zeros(3, dtype=torch.int64), **last),
        lambda: attend_prefix(q, kv, counts, scaling=0.3),
        lambda: attend_recent(q, kv, counts, size=2, scaling=0.3),
        lambda: attend_selected(q, kv, NONE, scaling=0.3),
    ):
        with pytest.raises(ValueError, match=message.replace("3, 8", r"\d, 8") if "3, 8" in message else message):
            call()


@pytest.mark.parametrize("kv", [KV(K, V, lengths=torch.tensor([3, 4])), KV(K, V, BlockTable(TABLE.table[:2], 3))])
def test_verbs_of_prompts_read_keys_in_one_piece(kv):
    lse, counts = torch.zeros(2, 4, 3), torch.ones(2, 3, dtype=torch.int64)
    for call in (
        lambda: ops.attend_causal(Q, kv, **LOGITS),
        lambda: ops.attend_window(Q, kv, lower=torch.zeros(3, dtype=torch.int64), **LOGITS),
        lambda: attend_prefix(Q, kv, counts, scaling=0.3),
        lambda: attend_recent(Q, kv, counts, size=2, scaling=0.3),
        lambda: attend_selected(Q, kv, NONE, scaling=0.3),
        lambda: attend_selected(Q, KV(K, V), NONE, scaling=0.3, recent=kv, window=2),
        lambda: ops.column_mass(Q, kv, lse, **LOGITS),
        lambda: ops.query_mass(Q, kv, offset=0, **LOGITS),
        lambda: next(ops.tile_mass(Q, kv, lse, tile=4, **LOGITS)),
    ):
        with pytest.raises(ValueError, match="must be in one piece and all there"):
            call()


def test_tiles_know_no_lengths():
    with pytest.raises(ValueError, match="attend_tiles reads no lengths"):
        attend_tiles(Q, KV(K, V, lengths=torch.tensor([3, 4])), **TILES, tile=4, **LOGITS)


@pytest.mark.parametrize("lengths", [None, torch.tensor([[3, 4], [5, 6]])])
def test_verbs_that_read_the_newest_keys_need_the_length_of_each_row(lengths):
    kv, form = KV(K, lengths=lengths), ops.PageRecord(8, 4)
    corners, records = torch.zeros(2, 2, 2, 4, 8), torch.zeros(2, 2, 4, form.bytes, dtype=torch.uint8)
    for call in (lambda: ops.bound_newest(kv, *corners, 4), lambda: ops.compress_newest(kv, records, form)):
        with pytest.raises(ValueError, match=r"lengths \[B\] must say how many keys each row has"):
            call()


def test_whether_a_kernel_may_run_is_asked_of_its_tensors(monkeypatch):
    """On a stand-in for a GPU: of keys that learn, and of lengths that are on another device."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: not getattr(x, "on_host", False)))
    monkeypatch.setattr(torch.Tensor, "device", property(lambda x: torch.device("cpu") if vars(x) else device))
    monkeypatch.setattr(dispatch, "_unusable", lambda device: None)
    monkeypatch.setattr(dispatch, "kernels_wanted", lambda: True)
    lengths = torch.tensor([3, 4])
    assert dispatch.use_kernel(Q, KV(K, V, lengths=lengths))
    assert not dispatch.use_kernel(Q, KV(K, V.clone().requires_grad_()))
    lengths.on_host = True
    assert not dispatch.use_kernel(Q, KV(K, V, lengths=lengths))

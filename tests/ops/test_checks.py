"""What verbs refuse instead of reading what is not there."""

import pytest
import torch

from foveate import ops
from foveate.ops import KV, Logits

Q, K, V = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 16, 8), torch.randn(2, 2, 16, 8)
PAGES = torch.tensor([0, 2]).expand(2, 2, 2)
TOKENS = torch.arange(4, dtype=torch.int32).expand(2, 1, 4)


def attend(q=Q, k=K, v=V, lengths=None, verb=ops.attend, **how):
    return verb(q, KV(k, v, lengths=lengths), logits=Logits(0.3), **how)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"v": V[:, :, :13]}, "shapes do not fit"),
        ({"k": K[:1], "v": V[:1]}, "shapes do not fit"),
        ({"k": K[..., :7]}, "shapes do not fit"),
        ({"q": Q[0]}, "q must be a floating-point"),
        ({"q": Q.int()}, "q must be a floating-point"),
        ({"mask": torch.zeros(2, 1, 1, 16)}, "mask must be bool"),
        ({"mask": torch.ones(2, 1, 1, 15, dtype=torch.bool)}, "mask must be bool"),
        ({"lengths": torch.tensor([4])}, r"lengths must be integers \[2\] or \[2, 2\]"),
        ({"lengths": torch.tensor([4.5, 5.0])}, "lengths must be integers"),
    ],
)
def test_attend(given, message):
    for more in ({}, {"need_lse": True}):
        with pytest.raises(ValueError, match=message):
            attend(**given, **more)
    if "mask" not in given:
        with pytest.raises(ValueError, match=message):
            attend(verb=ops.attend_pooled, **given)


def test_memory_for_the_output():
    verbs = {
        "attend": lambda **how: attend(**how),
        "lse": lambda **how: attend(need_lse=True, **how),
        "pooled": lambda **how: ops.attend_pooled(Q, KV(K, V), logits=Logits(0.3), **how),
        "indices": lambda **how: ops.attend_indices(Q, KV(K, V), PAGES, logits=Logits(0.3), **how),
        "pages": lambda **how: ops.attend_pages(Q, KV(K, V), PAGES, 4, logits=Logits(0.3), **how),
    }
    for name, verb in verbs.items():
        out = torch.full((2, 4, 1, 8), torch.nan)
        found = verb(out=out)
        assert found.out.data_ptr() == out.data_ptr(), name
        assert torch.equal(out, verb().out), name
        for wrong in (out.double(), out[:1], out.transpose(1, 2), torch.empty(4, 2, 1, 8).transpose(0, 1)):
            with pytest.raises(ValueError, match=r"out must be a contiguous torch.float32 \[2, 4, 1, 8\], not"):
                verb(out=wrong)


def test_a_mask_and_lengths():
    mask, lengths = torch.rand(2, 1, 1, 16) < 0.5, torch.tensor([9, 12])
    both = mask & ops.first_keys(lengths, 16)[:, :, None]
    assert torch.equal(attend(mask=mask, lengths=lengths).out, attend(mask=both).out)


@pytest.mark.parametrize("offset", [-2, 1.0])
def test_offset(offset):
    q = torch.randn(2, 4, 4, 8)
    for verb, more in ((ops.attend_causal, {}), (ops.attend_window, {"lower": torch.zeros(4, dtype=torch.long)})):
        with pytest.raises(ValueError, match="offset must be an integer of at least 0"):
            verb(q, KV(K, V), logits=Logits(0.3), offset=offset, **more)


def test_sinks_of_a_window():
    with pytest.raises(ValueError, match="sinks must be an integer of at least 0, not -2"):
        ops.attend_window(Q, KV(K, V), logits=Logits(0.3), lower=torch.zeros(1, dtype=torch.long), sinks=-2)


@pytest.mark.parametrize(
    ("pages", "size", "message"),
    [
        (PAGES + 2, 4, "pages must be below 4, or -1 for none, not 4"),
        (PAGES - 2, 4, "not -2"),
        (PAGES.float(), 4, "pages must be integers"),
        (PAGES, 0, "page_size must be an integer of at least 1, not 0"),
    ],
)
def test_pages(pages, size, message):
    with pytest.raises(ValueError, match=message):
        ops.attend_pages(Q, KV(K, V), pages, size, logits=Logits(0.3))
    with pytest.raises(ValueError, match=message):
        ops.pooled_mass_of_pages(Q, KV(K), pages, size, logits=Logits(0.3))


def test_indices():
    with pytest.raises(ValueError, match="indices must be below 16, or -1 for none, not 17"):
        ops.attend_indices(Q, KV(K, V), PAGES + 15, logits=Logits(0.3))


@pytest.mark.parametrize("block", [-1, 5])
def test_a_block_that_is_not_there(block):
    """It is refused where a key is read, and may be anything elsewhere."""
    memory = torch.randn(2, 5, 2, 8, 8)
    table = ops.BlockTable(torch.tensor([[0, 1], [2, block]]), 16)
    how, short, mask = {"logits": Logits(0.3)}, torch.tensor([16, 8]), torch.arange(16) < 8
    kv, shorter = KV(*memory, table), KV(*memory, table, short)
    indices = PAGES.expand(2, 2, 2)
    for call in (
        lambda: ops.attend(Q, kv, **how),
        lambda: ops.attend(Q, KV(*memory, table, short + 1), **how),
        lambda: ops.attend_pooled(Q, kv, **how),
        lambda: ops.pooled_mass(Q, kv, **how),
        lambda: ops.attend_indices(Q, kv, indices + 6, **how),
        lambda: ops.attend_pages(Q, kv, PAGES, 4, **how),
        lambda: ops.pooled_mass_of_pages(Q, kv, PAGES, 4, **how),
    ):
        with pytest.raises(ValueError, match=f"name one of 5 blocks for every key, not {block}"):
            call()
    ops.attend(Q, shorter, **how)
    ops.attend(Q, kv, mask=mask[None, None, None], **how)
    ops.pooled_mass(Q, shorter, **how)
    ops.attend_indices(Q, kv, indices, **how)
    ops.attend_pages(Q, shorter, PAGES, 4, **how)
    ops.pooled_mass_of_pages(Q, shorter, PAGES, 4, **how)


@pytest.mark.parametrize(
    ("slot", "message"),
    [(16, "keys must be among the 16 of"), (-1, "keys must be among the 16 of"), (8, "name one of 5 blocks")],
)
def test_a_slot_that_is_not_there(slot, message):
    """Nothing is written, least of all to another row."""
    memory = torch.zeros(2, 5, 2, 8, 8)
    table = ops.BlockTable(torch.tensor([[0, 1], [2, -1]]), 16)
    with pytest.raises(ValueError, match=message):
        ops.put_token(KV(*memory, table), Q[:, :2], Q[:, :2], torch.tensor([3, slot]))
    assert not memory.any()


@pytest.mark.parametrize(("given", "message"), [({"k": 2.0}, "k must be"), ({"k": 2, "chunk": 0}, "chunk must be")])
def test_numbers_of_a_selection(given, message):
    with pytest.raises(ValueError, match=f"{message} an integer of at least 1"):
        ops.topk(torch.randn(1, 1, 4), **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ratio": 0}, "ratio must be an integer of at least 1, not 0"),
        ({"k": torch.randn(1, 4, 7)}, "shapes or dtypes do not fit"),
        ({"weights": torch.rand(1, 2, 4).half()}, "shapes or dtypes do not fit"),
    ],
)
def test_scores_of_an_indexer(given, message):
    problem = {"q": torch.randn(1, 2, 4, 8), "k": torch.randn(1, 4, 8), "weights": torch.rand(1, 2, 4)}
    with pytest.raises(ValueError, match=message):
        ops.score.indexer_scores(**problem | given)


def test_slots_to_keep():
    with pytest.raises(ValueError, match="number must be an integer of at least 0, not -3"):
        ops.keep_best(torch.randn(1, 1, 4), -3, torch.zeros(4, dtype=torch.bool))
    with pytest.raises(ValueError, match="scores hold NaN: there is no best of them"):
        ops.keep_best(torch.tensor([[[0.0, torch.nan]]]), 1, torch.zeros(2, dtype=torch.bool))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "either scores or at"),
        ({"scores": torch.rand(2, 1, 4), "at": torch.tensor([1, 1])}, "either scores or at"),
        ({"scores": torch.rand(2, 1, 3)}, "do not fit scores"),
        ({"at": torch.tensor([1])}, r"at must be \[2\]"),
        ({"at": torch.tensor([1, 77])}, "row 1 gives up a slot and has no token at the given position"),
        ({"scores": torch.rand(2, 1, 4), "before": torch.tensor([3, 0])}, "row 1 .* no token that can leave"),
    ],
)
def test_a_slot_to_give_up(given, message):
    positions = TOKENS.clone()
    with pytest.raises(ValueError, match=message):
        ops.retain.give_up(positions, **given)
    assert torch.equal(positions, TOKENS)


def test_a_row_that_gives_up_none_needs_no_such_token():
    found = ops.retain.give_up(TOKENS.clone(), at=torch.tensor([1, 77]), rows=torch.tensor([True, False]))
    assert found.tolist() == [[1], [-1]]


def test_parts_to_merge():
    for parts in ([], [attend(), attend()]):
        with pytest.raises(ValueError, match="at least one part, each with its log-sum-exp"):
            ops.merge(parts)


def test_records_of_pages():
    for wrong in (8.5, "8"):
        with pytest.raises(ValueError, match=f"head_dim must be at least 1, not {wrong!r}"):
            ops.PageRecord(wrong, 4)
    with pytest.raises(ValueError, match="must be whole pages of 4 keys"):
        ops.compress_pages(K[0], ops.PageRecord(8, 4))

"""Attention over pages against its reference, in numbers that Triton's interpreter gets right."""

import pytest
import torch

from foveate.ops._dispatch import UnsupportedError
from foveate.ops.attend import decode, decode_kernel, gather
from tests.problems import in_buffer

pytestmark = pytest.mark.usefixtures("poisoned")


def problem(batch=2, kv_heads=2, group=3, number=150, dim=16, value_dim=None, dtype=torch.float32, seed=0):
    """``q, k, v``: one query a row."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, kv_heads * group, 1, dim, generator=generator).to(dtype)
    k = torch.randn(batch, kv_heads, number, dim, generator=generator).to(dtype)
    v = torch.randn(batch, kv_heads, number, value_dim or dim, generator=generator).to(dtype)
    return q, k, v


def selection(batch, heads, number, page_size, share=0.4, seed=0):
    """Pages in any order ``[B, heads, P]``, unused places among them; the last one of all is always among them."""
    pages = -(-number // page_size)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(batch, heads, pages, generator=generator)
    drawn[..., -1] = -1.0
    drawn = drawn.argsort(-1)[..., : max(1, round(share * pages))]
    unused = torch.rand(drawn.shape, generator=generator) < 0.2
    return drawn.masked_fill(unused & (drawn < pages - 1), -1).to(torch.int32)


def forget_unread(k, v, pages, page_size, lengths):
    """What is of no page, or not there, becomes NaN and inf."""
    slots = gather.page_slots(pages, page_size).flatten(2).unflatten(1, (k.shape[1], -1)).flatten(2)
    read = (slots[..., None] == torch.arange(k.shape[2])).any(2)
    if lengths is not None:
        read &= torch.arange(k.shape[2]) < lengths.view(len(k), -1, 1)
    k[~read], v[~read] = torch.nan, torch.inf


def check(q, k, v, pages, page_size, lengths=None):
    more = {"scaling": 0.3, "lengths": lengths, "need_lse": True}
    forget_unread(k, v, pages, page_size, lengths)
    expected = decode.attend_pages(q, k, v, pages, page_size, **more)
    tolerance = 1e-5 if q.dtype == torch.float32 else 2e-3
    found = decode_kernel.attend_pages(q, k, v, pages, page_size, **more)
    torch.testing.assert_close(found.out, expected.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-4, atol=1e-4)
    return found


@pytest.fixture(params=[1, 100], ids=["one program", "many programs"])
def splits(request, monkeypatch):
    """Few programs, and so many multiprocessors that keys are split."""
    monkeypatch.setattr(decode_kernel, "multiprocessors", lambda device: request.param)


HALF = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
OWN = pytest.mark.parametrize("own", [False, True], ids=["of KV heads", "of query heads"])


@HALF
@OWN
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_pages_of_any_size_for_any_group(dtype, own, page_size, group, splits):
    q, k, v = problem(group=group, dtype=dtype)
    check(q, k, v, selection(2, q.shape[1] if own else 2, 150, page_size), page_size)


LENGTHS = {
    "rows": torch.tensor([149, 33]),
    "rows, the second without any": torch.tensor([70, 0], dtype=torch.int32),
    "heads": torch.tensor([[1, 500], [64, 5]], dtype=torch.int32),
}


@HALF
@OWN
@pytest.mark.parametrize("page_size", [3, 16])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_keys_that_are_not_there_yet(dtype, own, page_size, lengths, splits):
    q, k, v = problem(dtype=dtype)
    found = check(q, k, v, selection(2, 6 if own else 2, 150, page_size, 0.9), page_size, lengths)
    if lengths[1].sum() == 0:
        assert not found.out[1].any()
        assert found.lse[1].isneginf().all()


@OWN
def test_rows_without_pages(own, splits):
    q, k, v = problem()
    pages = selection(2, 6 if own else 2, 150, 16)
    pages[1] = -1
    found = check(q, k, v, pages.long(), 16, torch.tensor([150, 150]))
    assert not found.out[1].any()
    assert found.lse[1].isneginf().all()
    assert not decode_kernel.attend_pages(q, k, v, pages[:, :, :0], 16, scaling=0.3).out.any()


def test_heads_of_a_group_read_pages_of_their_own(splits):
    q, k, v = problem(1, 1, 4, 64)
    pages = torch.arange(4, dtype=torch.int32).view(1, 4, 1)
    found = decode_kernel.attend_pages(q, k, v, pages, 16, scaling=0.3)
    for head in range(4):
        some = slice(16 * head, 16 * head + 16)
        alone = decode.attend(q[:, head : head + 1], k[:, :, some], v[:, :, some], scaling=0.3)
        torch.testing.assert_close(found.out[:, head : head + 1], alone.out)


@OWN
@pytest.mark.parametrize(("dim", "value_dim"), [(5, 5), (64, 80), (80, 64), (128, 128), (192, 128), (256, 256)])
def test_head_dims(own, dim, value_dim):
    q, k, v = problem(1, 1, 3, 40, dim, value_dim)
    check(q, k, v, selection(1, 3 if own else 1, 40, 3), 3, torch.tensor([38]))


@OWN
@pytest.mark.parametrize("layout", ["slots", "tokens_first", "padded_rows"])
def test_strides(own, layout, splits):
    q, k, v = (in_buffer(x, layout) for x in problem(value_dim=24))
    pages = selection(2, 6 if own else 2, 150, 16)
    apart = torch.stack([pages, torch.full_like(pages, 5)], -1)[..., 0]
    check(q, k, v, apart, 16, torch.tensor([149, 140]))
    same = pages[:, :1].expand(-1, pages.shape[1], -1)
    check(*(in_buffer(x, layout) for x in problem(value_dim=24)), same, 16)


def test_what_attention_over_pages_refuses():
    q, k, v = problem()
    pages = selection(2, 2, 150, 16)
    with pytest.raises(UnsupportedError, match="the mass of the keys"):
        decode_kernel.attend_pages(q, k, v, pages, 16, scaling=1.0, need_mass=True)
    with pytest.raises(UnsupportedError, match="more than one query"):
        decode_kernel.attend_pages(q.expand(-1, -1, 2, -1), k, v, pages, 16, scaling=1.0)
    with pytest.raises(UnsupportedError, match="float64"):
        decode_kernel.attend_pages(q.double(), k.double(), v.double(), pages, 16, scaling=1.0)
    for function in (decode.attend_pages, decode_kernel.attend_pages):
        for wrong in (pages[:1], pages[:, :1], pages.repeat(1, 2, 1)):
            with pytest.raises(ValueError, match="do not fit q"):
                function(q, k, v, wrong, 16, scaling=1.0)

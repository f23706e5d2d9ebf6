"""Attention over pages, and its mass, against their references, in numbers that Triton's interpreter gets right."""

import pytest
import torch

from foveate import ops
from foveate.ops import KV, Logits
from foveate.ops.attend import decode, decode_kernel, gather
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.score import pooled, pooled_kernel
from foveate.ops.select import pages as of_pages
from foveate.ops.select import pages_kernel
from tests.combinations import every_pair
from tests.problems import in_buffer, of_rows

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
    kv, more = KV(k, v, lengths=lengths), {"logits": Logits(0.3), "need_lse": True}
    forget_unread(k, v, pages, page_size, lengths)
    expected = decode.attend_pages(q, kv, pages, page_size, **more)
    tolerance = 1e-5 if q.dtype == torch.float32 else 2e-3
    found = decode_kernel.attend_pages(q, kv, pages, page_size, **more)
    torch.testing.assert_close(found.out, expected.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-4, atol=1e-4)
    return found


@pytest.fixture(params=[1, 100], ids=["one program", "many programs"])
def splits(request, monkeypatch):
    """Few programs, and so many multiprocessors that keys are split."""
    for kernel in (decode_kernel, pooled_kernel):
        monkeypatch.setattr(kernel, "multiprocessors", lambda device: request.param)


HALVES = ("dtype", [torch.float32, torch.float16])
SPLITS = ("splits", [1, 100])
OF_HEADS = ("own", [False, True])
OWN = pytest.mark.parametrize("own", [False, True], ids=["of KV heads", "of query heads"])


SIZES = ("page_size", [1, 3, 16, 64])


@every_pair(SIZES, ("group", [1, 4, 7]), OF_HEADS, HALVES, SPLITS, indirect=["splits"], strength=3)
def test_pages_of_any_size_for_any_group(dtype, own, page_size, group, splits):
    q, k, v = problem(group=group, dtype=dtype)
    check(q, k, v, selection(2, q.shape[1] if own else 2, 150, page_size), page_size)


LENGTHS = {
    "rows": torch.tensor([149, 33]),
    "rows, the second without any": torch.tensor([70, 0], dtype=torch.int32),
    "heads": torch.tensor([[1, 500], [64, 5]], dtype=torch.int32),
}


@every_pair(("page_size", [3, 16]), ("lengths", LENGTHS), OF_HEADS, HALVES, SPLITS, indirect=["splits"], strength=3)
def test_keys_that_are_not_there_yet(dtype, own, page_size, lengths, splits):
    (q, k, v), lengths = problem(dtype=dtype), LENGTHS[lengths]
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
    assert not decode_kernel.attend_pages(q, KV(k, v), pages[:, :, :0], 16, logits=Logits(0.3)).out.any()


def test_heads_of_a_group_read_pages_of_their_own(splits):
    q, k, v = problem(1, 1, 4, 64)
    pages = torch.arange(4, dtype=torch.int32).view(1, 4, 1)
    found = decode_kernel.attend_pages(q, KV(k, v), pages, 16, logits=Logits(0.3))
    for head in range(4):
        some = slice(16 * head, 16 * head + 16)
        alone = decode.attend(q[:, head : head + 1], KV(k[:, :, some], v[:, :, some]), logits=Logits(0.3))
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
    with pytest.raises(UnsupportedError, match="more than one query"):
        decode_kernel.attend_pages(q.expand(-1, -1, 2, -1), KV(k, v), pages, 16, logits=Logits(1.0))
    with pytest.raises(UnsupportedError, match="float64"):
        decode_kernel.attend_pages(q.double(), KV(k.double(), v.double()), pages, 16, logits=Logits(1.0))
    for wrong in (pages[:1], pages[:, :1], pages.repeat(1, 2, 1)):
        with pytest.raises(ValueError, match=r"do not fit \d+ rows of"):
            ops.attend_pages(q, KV(k, v), wrong, 16, logits=Logits(1.0))


# Mass


POOLING = ("pooling", ["post_softmax", "sqrt", "max", "max_logit"])
POOL = ("pool", ["kv_head", "layer"])
RAGGED = {"all": None, **LENGTHS}


def check_mass(q, k, pages, page_size, lengths=None, **how):
    """Against the reference, of which pages are read and keys that are not hold NaN; repeats are equal bit for bit."""
    how = {"logits": Logits(0.3), **how}
    forget_unread(k, k.clone(), pages.expand(-1, k.shape[1], -1), page_size, lengths)
    exact, logit = q.dtype == torch.float32, how.get("pooling") == "max_logit"
    more_q, more_k = (q.double(), k.double()) if exact else (q, k)  # sums in fp32 differ by processor
    expected = pooled.pooled_mass_of_pages(more_q, KV(more_k, lengths=lengths), pages, page_size, **how).float()
    kv = KV(k, lengths=lengths)
    found = pooled_kernel.pooled_mass_of_pages(q, kv, pages, page_size, **how)
    atol = (1e-5 if exact else 1e-3) if logit else 1e-9
    torch.testing.assert_close(found, expected, rtol=1e-5 if exact else 3e-4, atol=atol)
    assert torch.equal(found, pooled_kernel.pooled_mass_of_pages(q, kv, pages.long(), page_size, **how))
    return found


@every_pair(SIZES, POOLING, POOL, HALVES, ("lengths", RAGGED), SPLITS, indirect=["splits"], strength=3)
def test_the_mass_of_keys_of_pages(page_size, pooling, pool, dtype, lengths, splits):
    q, k, _ = problem(dtype=dtype)
    lengths, share = RAGGED[lengths], 0.4 if page_size < 64 else 1.0
    pages = selection(2, 1 if pool == "layer" else 2, 150, page_size, share)
    found = check_mass(q * 3, k, pages, page_size, lengths, pooling=pooling, pool=pool)
    ends = torch.full((2, 1), 150) if lengths is None else lengths.view(2, -1)
    slots = gather.page_slots(pages, page_size).flatten(2)
    slots = slots.masked_fill(slots >= (ends.amin(1, keepdim=True) if pool == "layer" else ends)[..., None], -1)
    assert torch.equal(found.isneginf(), (slots < 0) | (slots >= 150))


@every_pair(POOL, ("beside", [False, True]), ("softcap", [None, 0.7, 50.0]), POOLING, HALVES)
def test_the_mass_of_keys_of_pages_capped_and_beside_sinks(pool, beside, softcap, pooling, dtype):
    q, k, _ = problem(dtype=dtype)
    sinks = 5 + 2 * torch.randn(6, generator=torch.manual_seed(0)) if beside else None
    pages = selection(2, 1 if pool == "layer" else 2, 150, 16, 0.9)
    how, lengths = {"pooling": pooling, "pool": pool}, torch.tensor([150, 77])
    found = check_mass(q, k, pages, 16, lengths, **how, logits=Logits(0.3, sinks, softcap))
    others = (
        (Logits(0.3, sinks), softcap is not None),
        (Logits(0.3, None, softcap), beside and pooling != "max_logit"),
    )
    for logits, changed in others:
        without = pooled_kernel.pooled_mass_of_pages(q, KV(k, lengths=lengths), pages, 16, **how, logits=logits)
        assert torch.equal(found, without) != changed


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 7), (6, 1), (2, 20), (1, 130)])
def test_the_mass_of_keys_of_pages_of_any_group(kv_heads, group, splits):
    q, k, _ = problem(1, kv_heads, group, 60)
    check_mass(q, k, selection(1, kv_heads, 60, 5), 5, torch.tensor([58]))


@pytest.mark.parametrize("layout", ["slots", "tokens_first", "padded_rows"])
@pytest.mark.parametrize("dim", [5, 24, 80, 256])
def test_the_mass_of_keys_of_pages_of_any_head_dim_and_strides(layout, dim, splits):
    q, k, _ = (in_buffer(x, layout) for x in problem(dim=dim))
    pages = selection(2, 2, 150, 16)
    check_mass(q, k, torch.stack([pages, torch.full_like(pages, 5)], -1)[..., 0], 16, torch.tensor([149, 140]))
    q, k, _ = (in_buffer(x, layout) for x in problem(dim=dim))
    check_mass(q, k, pages[:, :1].clone(), 16)  # the same of all KV heads


def test_the_mass_of_keys_of_all_pages_in_order_is_that_of_all_keys(splits):
    q, k, _ = problem(number=160)
    pages = torch.arange(10, dtype=torch.int32).expand(2, 2, -1)
    found = pooled_kernel.pooled_mass_of_pages(q, KV(k, lengths=torch.tensor([160, 99])), pages, 16, logits=Logits(0.3))
    assert torch.equal(found, pooled_kernel.pooled_mass(q, KV(k, lengths=torch.tensor([160, 99])), logits=Logits(0.3)))


def test_the_mass_of_rows_without_pages(splits):
    q, k, _ = problem()
    pages = selection(2, 2, 150, 16)
    pages[1] = -1
    assert check_mass(q, k, pages, 16)[1].isneginf().all()
    assert pooled_kernel.pooled_mass_of_pages(q, KV(k), pages[:, :, :0], 16, logits=Logits(0.3)).shape == (2, 2, 0)


def test_what_the_mass_of_keys_of_pages_refuses():
    q, k, _ = problem()
    pages = selection(2, 2, 150, 16)
    with pytest.raises(UnsupportedError, match="float64"):
        pooled_kernel.pooled_mass_of_pages(q.double(), KV(k.double()), pages, 16, logits=Logits(1.0))
    for module in (pooled, pooled_kernel):
        with pytest.raises(ValueError, match="pooling must be"):
            module.pooled_mass_of_pages(q, KV(k), pages, 16, logits=Logits(1.0), pooling="pre_softmax")


@every_pair(
    ("number", [1, 9, 1500]),
    ("page_size", [1, 3, 16]),
    ("stored", [torch.int32, torch.int64]),
    ("layout", ["own", "apart", "shared"]),
)
def test_keys_at_places_within_pages(number, page_size, stored, layout):
    generator = torch.Generator().manual_seed(0)
    pages = torch.rand(2, 3, 2000, generator=generator).argsort(-1)[..., :500].sort(-1).values.to(torch.int32)
    places = torch.randint(-1, 500 * page_size, (2, 3, number), generator=generator).to(stored)
    if layout == "apart":
        pages, places = (torch.stack([x, torch.full_like(x, 1 << 30)], -1)[..., 0] for x in (pages, places))
    elif layout == "shared":
        pages, places = (x[:, :1].expand(-1, 3, -1) for x in (pages, places))
    found, expected = (one.keys_at_places(places, pages, page_size) for one in (pages_kernel, of_pages))
    assert found.dtype == expected.dtype == stored
    assert torch.equal(found, expected)
    slots = gather.page_slots(pages, page_size).flatten(2)
    wanted = [[[slots[b, h, at] if at >= 0 else -1 for at in places[b, h, :9]] for h in range(3)] for b in range(2)]
    assert found[..., :9].tolist() == wanted


def test_keys_at_places_of_other_heads_are_refused():
    places, pages = torch.zeros(2, 3, 4, dtype=torch.int32), torch.zeros(2, 1, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="do not fit places"):
        pages_kernel.keys_at_places(places, pages, 16)
    assert pages_kernel.keys_at_places(places[..., :0], pages.expand(-1, 3, -1), 16).shape == (2, 3, 0)


@pytest.mark.parametrize("number", [1, 9, 1500])
@pytest.mark.parametrize("layout", ["own", "apart", "shared"])
def test_the_mass_that_pages_hold(number, layout):
    """A row whose pages have no mass misses nothing, and pages without any add nothing."""
    generator = torch.Generator().manual_seed(0)
    mass = torch.rand(3, 2, 2000, generator=generator)
    mass[0, :, 1990:] = mass[1] = -torch.inf
    pages = torch.rand(3, 2, 2000, generator=generator).argsort(-1)[..., :number].to(torch.int32)
    pages[..., number // 2 :: 3] = -1
    if layout == "apart":
        pages, mass = (torch.stack([x, torch.full_like(x, 1 << 30)], -1)[..., 0] for x in (pages, mass))
    elif layout == "shared":
        pages, mass = (x[:, :1].expand(-1, 2, -1) for x in (pages, mass))
    found, expected = (one.mass_of_pages(mass, pages) for one in (pages_kernel, of_pages))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    of_first = [float(mass[0, 1, page]) for page in pages[0, 1].tolist() if page >= 0]
    assert float(found[0, 1]) == pytest.approx(sum(max(0.0, x) for x in of_first), rel=1e-5)
    assert found[1].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="do not fit mass"):
        pages_kernel.mass_of_pages(mass[:, :1], pages)
    with pytest.raises(ValueError, match="do not fit mass"):
        pages_kernel.mass_of_pages(mass[..., :0], pages)


@pytest.mark.parametrize("first", [0, 1, 5])
@pytest.mark.parametrize("heads", [1, 2])
def test_pages_that_are_always_read(first, heads):
    """A row's first and newest pages, as far as it has them, come before all others."""
    scores = torch.rand(3, 2, 2500, generator=torch.Generator().manual_seed(0))[:, :heads, :2300]
    newest, ends = torch.tensor([2200, 40, 0]), torch.tensor([2300, 41, 3])
    found, expected = (one.with_always_read(scores, first, newest, ends) for one in (pages_kernel, of_pages))
    found, expected = of_rows(found, ends), of_rows(expected, ends)
    assert torch.equal(found, expected)
    for row in range(3):
        always = {*range(min(first, int(ends[row]))), *range(int(newest[row]), int(ends[row]))}
        assert set(found[row, 0].isposinf().nonzero()[:, 0].tolist()) == always
        others = [page for page in range(int(ends[row])) if page not in always]
        assert torch.equal(found[row, -1, others], scores[row, -1, others])

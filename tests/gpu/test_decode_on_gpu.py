"""The kernels of decoding on a GPU against references in fp64: odd sizes, dtypes, holes, poison, repeats, graphs."""

import pytest
import torch
from matrix import Driver, Tokens

from foveate import methods, ops
from foveate.ops import KV, Logits, dispatch
from foveate.ops.attend import decode, decode_kernel, gather
from foveate.ops.compress import boxes, boxes_kernel, low_rank_kernel
from foveate.ops.retain import reference as retain
from foveate.ops.retain import slots_kernel
from foveate.ops.score import bounds_kernel, nodes, pooled, pooled_kernel
from foveate.ops.score import low_rank_kernel as page_lse_kernel
from foveate.ops.select import pages as of_pages
from foveate.ops.select import pages_kernel, rows_kernel
from foveate.ops.select import reference as select
from tests.combinations import every_pair
from tests.helpers import in_buffer
from tests.kernels import noted, poisoned_memory
from tests.problems import of_rows

pytestmark = pytest.mark.gpu

DTYPES = ("dtype", [torch.bfloat16, torch.float16, torch.float32])
GROUPS = (("heads", "kv_heads"), [(3, 3), (8, 2), (6, 1), (14, 2), (32, 4), (16, 1), (70, 1)])
DIMS = (("dim", "value_dim"), [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)])
SIZES = (("batch", "number"), [(1, 1), (3, 61), (64, 700), (1, 40_001), (5, 4096)])
POOLED_GROUPS = (
    ("heads", "kv_heads", "pool"),
    [(*group, "head") for group in GROUPS[1]] + [(*group, "kv_head") for group in GROUPS[1] if group != (70, 1)],
)
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 2e-5}


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch):
    """A reference that is reached without being asked for fails the test."""
    pytest.importorskip("triton")
    monkeypatch.delenv("FOVEATE_KERNELS", raising=False)
    needed = {
        "attend",
        "attend_indices",
        "attend_pages",
        "bound_newest",
        "give_up",
        "keys_at_places",
        "keys_of_pages",
        "largest_logit",
        "mass_of_pages",
        "pooled_mass",
        "pooled_mass_of_pages",
        "put_token",
        "topk_rows",
        "with_always_read",
    }
    assert needed <= set(dispatch.kernel_status().split(", "))
    monkeypatch.setattr(dispatch, "_say_once", lambda text: pytest.fail(text))


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def uniform(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def problem(batch, heads, kv_heads, number, dim, value_dim, dtype, seed=0):
    """``q, k, v``: one query a row."""
    return (
        draw(batch, heads, 1, dim, dtype=dtype, seed=seed),
        draw(batch, kv_heads, number, dim, dtype=dtype, seed=seed + 1),
        draw(batch, kv_heads, number, value_dim, dtype=dtype, seed=seed + 2),
    )


def holes(batch, number, heads=1):
    """bool ``[B, heads, 1, N]``: rows of several lengths, with holes among their keys; the last has none."""
    mask = uniform(batch, heads, 1, number, seed=5) < 0.7
    lengths = torch.linspace(number, 0, batch, device="cuda").long()
    return mask & (torch.arange(number, device="cuda") < lengths[:, None, None, None])


def selection(batch, heads, number, places, seed=0):
    """Keys in any order ``[B, heads, K]``, unused places among and after them; the last row has none."""
    drawn = uniform(batch, heads, max(number, places), seed=seed).argsort(-1)[..., :places]
    unused = (drawn >= number) | (uniform(*drawn.shape, seed=seed + 1) < 0.1)
    unused[..., places - places // 5 :] = True
    if batch > 1:
        unused[-1] = True
    return drawn.masked_fill(unused, -1).to(torch.int32)


def exact(q, k, v, **more):
    run = decode.attend_indices if "indices" in more else decode.attend
    kv = KV(k.nan_to_num(0.0).double(), v.nan_to_num(0.0, 0.0).double())
    return run(q.double(), kv, need_lse=True, **more)


def check_attended(found, expected, dtype):
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.out.double(), expected.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        found.lse.double(), expected.lse.double(), rtol=1e-4, atol=1e-3 if tolerance > 1e-3 else 1e-4
    )


@every_pair(DTYPES, GROUPS, SIZES)
def test_attention_of_all_keys_of_any_group(dtype, heads, kv_heads, batch, number):
    q, k, v = problem(batch, heads, kv_heads, number, 128, 128, dtype)
    mask = holes(batch, number)
    for more in ({}, {"mask": mask}, {"mask": holes(batch, number, kv_heads)}):
        with poisoned_memory("cuda"):
            found = ops.attend(q, KV(k, v), logits=Logits(0.1), need_lse=True, **more)
        check_attended(found, exact(q, k, v, logits=Logits(0.1), **more), dtype)


@every_pair(DTYPES, GROUPS, SIZES, ("of_heads", [False, True]))
def test_the_first_keys_alone_among_nan(dtype, heads, kv_heads, batch, number, of_heads):
    q, k, v = problem(batch, heads, kv_heads, number, 128, 128, dtype)
    lengths = (uniform(batch, kv_heads, seed=3) * number).long() + 1
    lengths = lengths.to(torch.int32) if of_heads else lengths[:, 0]
    there = (torch.arange(number, device="cuda") < lengths.view(batch, -1, 1)).expand(-1, kv_heads, -1)
    k[~there], v[~there] = torch.nan, torch.inf
    with poisoned_memory("cuda"):
        found = ops.attend(q, KV(k, v, lengths=lengths), logits=Logits(0.1), need_lse=True)
        mass = of_rows(ops.pooled_mass(q, KV(k, lengths=lengths), logits=Logits(0.1)), lengths)
        every = torch.arange(number, device="cuda").expand(there.shape)
        chosen = ops.attend_indices(q, KV(k, v), every, logits=Logits(0.1), counts=lengths, need_lse=True)
    expected = exact(q, k, v, logits=Logits(0.1), mask=there[:, :, None])
    check_attended(found, expected, dtype)
    check_attended(chosen, expected, dtype)
    clean = KV(k.nan_to_num(0.0).double(), lengths=lengths)
    expected = pooled.pooled_mass(q.double(), clean, logits=Logits(0.1)).float()
    torch.testing.assert_close(mass, expected, rtol=1e-3, atol=1e-7)


@every_pair(DTYPES, DIMS, SIZES)
def test_attention_of_any_head_dim(dtype, dim, value_dim, batch, number):
    q, k, v = problem(batch, 8, 2, number, dim, value_dim, dtype)
    with poisoned_memory("cuda"):
        found = ops.attend(q, KV(k, v), logits=Logits(0.1), need_lse=True)
        chosen = ops.attend_indices(q, KV(k, v), selection(batch, 2, number, 333), logits=Logits(0.1), need_lse=True)
    check_attended(found, exact(q, k, v, logits=Logits(0.1)), dtype)
    check_attended(chosen, exact(q, k, v, indices=selection(batch, 2, number, 333), logits=Logits(0.1)), dtype)


@every_pair(DTYPES, GROUPS, ("places", [1, 65, 1500]))
def test_attention_of_chosen_keys_among_nan(dtype, heads, kv_heads, places):
    q, k, v = problem(3, heads, kv_heads, 2000, 128, 128, dtype)
    indices = selection(3, kv_heads, 2000, places)
    unread = torch.ones(3, kv_heads, 2001, dtype=torch.bool, device="cuda")
    unread = unread.scatter(2, indices.where(indices >= 0, 2000).long(), False)[..., :2000]
    k[unread], v[unread] = torch.nan, torch.inf
    with poisoned_memory("cuda"):
        found = ops.attend_indices(q, KV(k, v), indices, logits=Logits(0.1), need_lse=True)
    check_attended(found, exact(q, k, v, indices=indices, logits=Logits(0.1)), dtype)
    assert not found.out[-1].any()
    assert torch.equal(ops.attend_indices(q, KV(k, v), indices.long(), logits=Logits(0.1)).out, found.out)
    heads = torch.arange(kv_heads, device="cuda").flip(0)
    assert torch.equal(ops.attend_indices(q, KV(k, v), indices.flip(1), logits=Logits(0.1), heads=heads).out, found.out)


def unread(number, pages, page_size, kv_heads, lengths):
    """bool ``[B, Hkv, number]``: the keys of no page ``[B, H, P]`` that is read, and those that are not there."""
    slots = gather.page_slots(pages, page_size).flatten(2).unflatten(1, (kv_heads, -1)).flatten(2)
    where = slots.masked_fill((slots < 0) | (slots >= number), number)
    none = torch.ones(*where.shape[:2], number + 1, dtype=torch.bool, device="cuda").scatter(2, where, False)
    return none[..., :number] | (torch.arange(number, device="cuda") >= lengths.view(len(lengths), -1, 1))


def check_pages(q, k, v, pages, page_size, lengths):
    """Against the reference in fp64, among NaN; returns what was found."""
    beyond = unread(k.shape[2], pages, page_size, k.shape[1], lengths)
    k[beyond], v[beyond] = torch.nan, torch.inf
    kv, how = KV(k, v, lengths=lengths), {"logits": Logits(0.1), "need_lse": True}
    with poisoned_memory("cuda"):
        found = ops.attend_pages(q, kv, pages, page_size, **how)
    wide = KV(k.nan_to_num(0.0).double(), v.nan_to_num(0.0, 0.0).double(), lengths=lengths)
    check_attended(found, decode.attend_pages(q.double(), wide, pages, page_size, **how), q.dtype)
    assert torch.equal(ops.attend_pages(q, kv, pages.long(), page_size, **how).out, found.out)
    return found


@every_pair(DTYPES, GROUPS, ("own", [False, True]), (("page_size", "places"), [(1, 333), (3, 200), (16, 40), (64, 20)]))
def test_attention_of_pages_among_nan(dtype, heads, kv_heads, own, page_size, places):
    q, k, v = problem(3, heads, kv_heads, 2001, 128, 128, dtype)
    pages = selection(3, heads if own else kv_heads, -(-2001 // page_size), places)
    found = check_pages(q, k, v, pages, page_size, torch.tensor([2001, 1234, 700], device="cuda"))
    assert not found.out[-1].any()
    lengths = torch.full((3, kv_heads), 600, dtype=torch.int32, device="cuda")
    lengths[0, 0] = 5
    check_pages(q, k, v, pages, page_size, lengths)


@every_pair(DTYPES, DIMS, ("own", [False, True]))
def test_attention_of_pages_of_any_head_dim(dtype, dim, value_dim, own):
    for batch, number in ((1, 40_001), (64, 700)):
        q, k, v = problem(batch, 8, 2, number, dim, value_dim, dtype)
        pages = selection(batch, 8 if own else 2, -(-number // 16), number // 50)
        check_pages(q, k, v, pages, 16, torch.full((batch,), number - 3, device="cuda"))


@every_pair(DTYPES, GROUPS, SIZES)
def test_bounds_of_boxes_among_nan(dtype, heads, kv_heads, batch, number):
    ragged = (uniform(batch, kv_heads, seed=3) * (number + 1)).long()
    for dim in (64, 80, 128, 256):
        q, a, b = problem(batch, heads, kv_heads, number, dim, dim, dtype)
        rows, boxes = ops.fold_group(q, kv_heads), (torch.minimum(a, b), torch.maximum(a, b))
        for lengths in (None, ragged, ragged[:, 0].to(torch.int32)):
            low, high = (x.clone() for x in boxes)
            if lengths is not None:
                beyond = torch.arange(number, device="cuda") >= lengths.view(batch, -1, 1)
                beyond = beyond.expand(-1, kv_heads, -1)
                low[beyond], high[beyond] = torch.nan, torch.inf
            how = {"scaling": 0.1, "lengths": lengths}
            with poisoned_memory("cuda"):
                found = of_rows(ops.largest_logit(rows, low, high, **how), lengths)
            expected = nodes.largest_logit(rows.double(), low.double(), high.double(), **how).float()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["slots", "tokens_first", "padded_rows"])
def test_strides_among_nan(layout):
    q, k, v = (in_buffer(x, layout) for x in problem(3, 12, 2, 777, 96, 64, torch.bfloat16))
    mask, indices = holes(3, 777), selection(3, 2, 777, 100)
    k[~mask.expand(3, 2, 1, 777)[:, :, 0]] = torch.nan
    check_attended(
        ops.attend(q, KV(k, v), logits=Logits(0.1), mask=mask, need_lse=True),
        exact(q, k, v, logits=Logits(0.1), mask=mask),
        q.dtype,
    )
    k.nan_to_num_(0.0)
    found = ops.attend_indices(q, KV(k, v), indices, logits=Logits(0.1), need_lse=True)
    check_attended(found, exact(q, k, v, indices=indices, logits=Logits(0.1)), q.dtype)
    mass = ops.pooled_mass(q, KV(k), logits=Logits(0.1))
    torch.testing.assert_close(
        mass, pooled.pooled_mass(q.double(), KV(k.double()), logits=Logits(0.1)).float(), rtol=1e-3, atol=1e-9
    )


@every_pair(
    DTYPES,
    GROUPS,
    (("batch", "number"), [(3, 61), (64, 700), (1, 40_001)]),
    (("pooling", "pool"), [("post_softmax", "kv_head"), ("sqrt", "layer"), ("max", "layer"), ("max_logit", "layer")]),
)
def test_pooled_mass(dtype, heads, kv_heads, batch, number, pooling, pool):
    q, k, _ = problem(batch, heads, kv_heads, number, 128, 16, dtype)
    for lengths in (None, torch.linspace(number, 0, batch, device="cuda").long()):
        if lengths is not None:
            beyond = torch.arange(number, device="cuda") >= lengths[:, None, None]
            k[beyond.expand(-1, kv_heads, -1)] = torch.nan
        how = {"logits": Logits(0.25), "pooling": pooling, "pool": pool}
        with poisoned_memory("cuda"):
            found = of_rows(ops.pooled_mass(q, KV(k, lengths=lengths), **how), lengths)
        clean = KV(k.nan_to_num(0.0).double(), lengths=lengths)
        expected = pooled.pooled_mass(q.double(), clean, **how).float()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 if pooling == "max_logit" else 1e-7)


def check_mass_of_pages(q, k, pages, page_size, lengths, **how):
    """Against the reference in fp64, among NaN; repeats are equal bit for bit."""
    of_heads = pages.expand(-1, k.shape[1], -1)
    k[unread(k.shape[2], of_heads, page_size, k.shape[1], lengths)] = torch.nan
    kv = KV(k, lengths=lengths)
    with poisoned_memory("cuda"):
        found, again = (ops.pooled_mass_of_pages(q, kv, x, page_size, **how) for x in (pages, pages.long()))
    assert torch.equal(found, again)
    wide = KV(k.nan_to_num(0.0).double(), lengths=lengths)
    expected = pooled.pooled_mass_of_pages(q.double(), wide, pages, page_size, **how).float()
    atol = 1e-3 if how.get("pooling") == "max_logit" else 1e-7
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=atol)
    return found


@every_pair(
    DTYPES,
    GROUPS,
    (("page_size", "places"), [(1, 333), (3, 200), (16, 40), (64, 20)]),
    (("pooling", "pool"), [("post_softmax", "kv_head"), ("sqrt", "layer"), ("max", "layer"), ("max_logit", "kv_head")]),
)
def test_pooled_mass_of_pages_among_nan(dtype, heads, kv_heads, page_size, places, pooling, pool):
    q, k, _ = problem(3, heads, kv_heads, 2001, 128, 16, dtype)
    pages = selection(3, 1 if pool == "layer" else kv_heads, -(-2001 // page_size), places)
    how = {"pooling": pooling, "pool": pool}
    lengths = torch.tensor([2001, 1234, 700], device="cuda")
    found = check_mass_of_pages(q, k, pages, page_size, lengths, logits=Logits(0.25), **how)
    assert found[-1].isneginf().all()
    lengths = torch.full((3, kv_heads), 600, dtype=torch.int32, device="cuda")
    lengths[0, 0] = 5
    logits = Logits(0.25, draw(heads, seed=9), 20.0)
    check_mass_of_pages(q, k, pages, page_size, lengths, logits=logits, **how)


@every_pair(DTYPES, DIMS)
def test_pooled_mass_of_pages_of_any_head_dim(dtype, dim, value_dim):
    for batch, number in ((1, 40_001), (64, 700)):
        q, k, _ = problem(batch, 8, 2, number, dim, value_dim, dtype)
        pages = selection(batch, 2, -(-number // 16), -(-number // 48))
        check_mass_of_pages(q, k, pages, 16, torch.full((batch,), number - 3, device="cuda"), logits=Logits(dim**-0.5))


@pytest.mark.parametrize("number", [1, 130, 5000, 70_000])
@pytest.mark.parametrize("stored", [torch.int32, torch.int64])
def test_keys_at_places_within_pages(number, stored):
    pages = uniform(3, 2, 8192).argsort(-1)[..., :4400].to(torch.int32)
    places = (uniform(3, 2, number, seed=1) * (4400 * 16 + 1)).to(stored) - 1
    found = ops.keys_at_places(places, pages, 16)
    assert found.dtype == stored
    assert torch.equal(found, of_pages.keys_at_places(places, pages, 16))
    shared = pages[:, :1].expand(-1, 2, -1)
    assert torch.equal(ops.keys_at_places(places, shared, 16), of_pages.keys_at_places(places, shared, 16))


@pytest.mark.parametrize("number", [1, 130, 5000])
@pytest.mark.parametrize("heads", [1, 2])
def test_pages_that_are_always_read_and_the_mass_that_pages_hold(number, heads):
    """Of rows of several lengths; the last has no full page, and what its mass says of others is not read."""
    mass = uniform(3, 2, 8192)[:, :heads, :number]
    mass[-1] = -torch.inf
    newest = torch.tensor([number - 1, number // 2, 0], device="cuda")
    with poisoned_memory("cuda"):
        found = ops.with_always_read(mass, 2, newest, newest + 1)
    expected = of_pages.with_always_read(mass, 2, newest, newest + 1)
    assert torch.equal(*(of_rows(scores, newest + 1) for scores in (found, expected)))
    pages = uniform(3, heads, number, seed=1).argsort(-1)[..., : -(-number // 3)].to(torch.int32)
    pages[..., ::5] = -1
    with poisoned_memory("cuda"):
        found, again = (ops.mass_of_pages(mass, pages) for _ in range(2))
    assert torch.equal(found, again)
    torch.testing.assert_close(found, of_pages.mass_of_pages(mass, pages), rtol=1e-5, atol=1e-6)


@every_pair(DIMS)
def test_pooled_mass_of_any_head_dim(dim, value_dim):
    q, k, _ = problem(2, 8, 2, 3000, dim, value_dim, torch.bfloat16)
    expected = pooled.pooled_mass(q.double(), KV(k.double()), logits=Logits(dim**-0.5)).float()
    torch.testing.assert_close(ops.pooled_mass(q, KV(k), logits=Logits(dim**-0.5)), expected, rtol=1e-3, atol=1e-9)


def test_masses_add_up():
    q, k, _ = problem(4, 32, 8, 100_003, 128, 16, torch.float16)
    mass = ops.pooled_mass(q, KV(k), logits=Logits(128**-0.5))
    torch.testing.assert_close(mass.sum(-1), torch.ones(4, 8, device="cuda"), rtol=3e-4, atol=0)


INF = float("inf")
SCORES = {
    "random": lambda n: uniform(3, 2, n),
    "masses": lambda n: (draw(3, 2, n) * 4).softmax(-1),
    "signed": lambda n: draw(3, 2, n) * 1e3,
    "tied": lambda n: torch.zeros(3, 2, n, device="cuda"),
    "few values": lambda n: (4 * uniform(3, 2, n)).floor(),
    "rising": lambda n: torch.arange(n, device="cuda").float().expand(3, 2, n),
    "falling": lambda n: -torch.arange(n, device="cuda").float().expand(3, 2, n),
    "none": lambda n: torch.full((3, 2, n), -INF, device="cuda"),
    "few": lambda n: torch.where(torch.arange(n, device="cuda") % 977 == 7, 1.0, -INF).expand(3, 2, n),
    "one fp16 bin": lambda n: 1 + uniform(3, 2, n) * 2.0**-11,
}


@every_pair(("scores", SCORES), ("number", [1, 300, 4097, 70_001, 524_288]), ("share", [0.001, 0.1, 1.0]))
def test_topk_of_rows(scores, number, share):
    scores, most = SCORES[scores](number), max(1, int(share * number))
    counts = torch.tensor([most, most // 2, 0], device="cuda")
    with poisoned_memory("cuda"):
        found = ops.topk_rows(scores, counts, most, dtype=torch.int32)
    assert torch.equal(found, select.topk_rows(scores, counts, most, dtype=torch.int32))
    assert torch.equal(found, ops.topk_rows(scores, counts, most, dtype=torch.int32))


@pytest.mark.parametrize(
    ("number", "share"), [(1 << 20, 0.1), (1 << 20, 0.5), (1 << 21, 0.05), (1 << 21, 0.5), (1 << 21, 0.9)]
)
@pytest.mark.parametrize("scores", [SCORES["random"], SCORES["signed"]], ids=["random", "signed"])
def test_long_rows_are_read_twice(scores, number, share, monkeypatch):
    """The scores kept between two bounds fit their room, so that none is read a third time."""
    settled = noted(monkeypatch, rows_kernel)
    scores, most = scores(number), int(share * number)
    counts = torch.tensor([most, most // 2, most // 100], device="cuda")
    with poisoned_memory("cuda"):
        found = ops.topk_rows(scores, counts, most, dtype=torch.int32)
    assert torch.equal(found, select.topk_rows(scores, counts, most, dtype=torch.int32))
    assert bool((settled[0][2] == rows_kernel._KEPT.value).all())


@pytest.mark.parametrize("number", [3000, 1 << 20])
def test_topk_of_rows_of_nan_and_of_negative_counts(number):
    scores = draw(4, 2, number)
    for first, bits in ((3, 0x7FC00000), (4, -0x400000), (5, -1)):
        scores.view(torch.int32)[:, :, first::50] = bits
    counts = torch.tensor([20, -1, number // 2, -(2**40)], device="cuda")
    found = ops.topk_rows(scores, counts, number // 2)
    assert torch.equal(found, select.topk_rows(scores, counts, number // 2))
    assert bool((found[1::2] == -1).all())


def steps(q, k, v, mask, indices, counts, most):
    """One of each: what a step of decoding calls."""
    dense = ops.attend(q, KV(k, v), logits=Logits(0.1), mask=mask, need_lse=True)
    mass = ops.pooled_mass(q, KV(k, lengths=counts), logits=Logits(0.1))
    chosen = ops.topk_rows(mass, counts, most, lengths=counts, dtype=torch.int32)
    sparse = ops.attend_indices(q, KV(k, v), chosen, logits=Logits(0.1), counts=counts, need_lse=True)
    given = ops.attend_indices(q, KV(k, v), indices, logits=Logits(0.1), need_lse=True)
    boxes, rows = k.shape[2] // 16, ops.fold_group(q, k.shape[1])
    low, high = (of(k, v)[:, :, :boxes] for of in (torch.minimum, torch.maximum))
    bounds = ops.largest_logit(rows, low, high, 0.1, lengths=counts // 2)
    how = {"lengths": counts // 2, "dtype": torch.int32}
    pages = ops.topk_rows(bounds.flatten(1, 2), counts // 20, most // 20, **how)
    paged = ops.attend_pages(q, KV(k, v, lengths=8 * counts - 5), pages, 16, logits=Logits(0.1), need_lse=True)
    best = pages[:, :: pages.shape[1] // k.shape[1]]
    of_best = ops.pooled_mass_of_pages(q, KV(k, lengths=8 * counts - 5), best, 16, logits=Logits(0.1))
    best = ops.keys_at_places(ops.topk_rows(of_best, counts // 2, most // 2, dtype=torch.int32), best, 16)
    mass, bounds = of_rows(mass, counts), of_rows(bounds, counts // 2)
    return *dense[:2], mass, chosen, *sparse[:2], *given[:2], bounds, pages, *paged[:2], of_best, best


@pytest.mark.parametrize(("batch", "number"), [(1, 30_000), (16, 5000)])
def test_repeats_graphs_and_no_wait(batch, number):
    """Equal to the last bit, also when a captured graph is replayed over other contents; and nothing waits."""

    def contents(seed):
        q, k, v = problem(batch, 32, 8, number, 128, 128, torch.float16, seed)
        counts = torch.full((batch,), number // 10, device="cuda")
        return [q, k, v, uniform(batch, 1, 1, number, seed=seed) < 0.8, selection(batch, 8, number, 500, seed), counts]

    first, second = contents(0), contents(100)
    expected = [steps(*some, number // 10) for some in (first, second)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = steps(*first, number // 10)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = steps(*first, number // 10)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(*pair) for pair in zip(again, expected[0], strict=True))
    for some, wanted in ((first, expected[0]), (second, expected[1])):
        for old, new in zip(first, some, strict=True):
            old.copy_(new.clone())
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.usefixtures("much_memory")
def test_keys_beyond_the_reach_of_32_bits():
    """A cache of 2.7 billion elements, of which only the last row's last keys matter."""
    q, near, values = problem(1, 8, 2, 3000, 128, 128, torch.bfloat16)
    k = torch.zeros(3, 2, 3_500_000, 128, dtype=torch.bfloat16, device="cuda")
    k[2, :, -3000:] = near[0]
    mask = torch.zeros(3, 1, 1, 3_500_000, dtype=torch.bool, device="cuda")
    mask[2, :, :, -3000:] = True
    v = k.clone()
    v[2, :, -3000:] = values[0]
    q = q.expand(3, -1, -1, -1)
    expected = exact(q[2:], near, values, logits=Logits(0.1))
    found = ops.attend(q, KV(k, v), logits=Logits(0.1), mask=mask, need_lse=True)
    check_attended(ops.Attended(found.out[2:], found.lse[2:]), expected, q.dtype)
    indices = torch.arange(3_497_000, 3_500_000, dtype=torch.int32, device="cuda").expand(3, 2, -1)
    found = ops.attend_indices(q, KV(k, v), indices, logits=Logits(0.1), need_lse=True)
    check_attended(ops.Attended(found.out[2:], found.lse[2:]), expected, q.dtype)
    pages = torch.arange(3_497_000 // 8, 3_500_000 // 8, dtype=torch.int32, device="cuda")
    for chosen in (pages.expand(3, 2, -1), pages.expand(3, 8, -1)):
        found = ops.attend_pages(q, KV(k, v), chosen, 8, logits=Logits(0.1), need_lse=True)
        check_attended(ops.Attended(found.out[2:], found.lse[2:]), expected, q.dtype)
    bounds = ops.largest_logit(ops.fold_group(q, 2), k, k, 0.1)[2:, :, :, -3000:]
    logits = nodes.key_logits(ops.fold_group(q[2:], 2).double(), near.double(), Logits(0.1)).float()
    torch.testing.assert_close(bounds, logits, rtol=1e-4, atol=1e-4)
    expected = pooled.pooled_mass(q[2:].double(), KV(near.double()), logits=Logits(0.1)).float()
    mass = ops.pooled_mass_of_pages(q, KV(k), pages.expand(3, 2, -1), 8, logits=Logits(0.1))[2:]
    torch.testing.assert_close(mass, expected, rtol=1e-3, atol=1e-9)


def test_methods_run_on_the_kernels(monkeypatch):
    ran = []
    kernels = (
        (decode_kernel, ("attend", "attend_indices", "attend_pages")),
        (bounds_kernel, ("largest_logit",)),
        (boxes_kernel, ("bound_newest",)),
        (low_rank_kernel, ("compress_pages", "compress_newest")),
        (page_lse_kernel, ("pooled_mass_of_records",)),
        (pages_kernel, ("keys_at_places", "keys_of_pages", "mass_of_pages", "with_always_read")),
        (pooled_kernel, ("pooled_mass", "pooled_mass_of_pages")),
        (rows_kernel, ("topk_rows",)),
        (slots_kernel, ("give_up", "put_token")),
    )
    for module, names in kernels:
        for name in names:
            real = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *a, real=real, name=name, **k: ran.append(name) or real(*a, **k))
    tokens = Tokens.random(2, 300)
    tokens = Tokens(*(x.to("cuda", torch.float16) for x in (tokens.q, tokens.k, tokens.v)))
    specs = [
        "dense",
        "oracle_topk:top_k=64,dense_layers=0",
        "quest:top_k=64,dense_layers=0",
        "pages:top_k=64",
        "locks:top_k=64",
        "kascade_pages:top_k=64,pool=kv_head,pooling=post_softmax",
        "h2o:top_k=64",
    ]
    for spec in specs:
        driver = Driver(methods.parse(spec), 290)
        driver.feed(tokens[:290])
        driver.feed_steps(tokens[290:])
    assert set(ran) == {name for _, names in kernels for name in names}


@every_pair(DTYPES)
@pytest.mark.parametrize("page_size", [1, 16, 100])
def test_boxes_of_newest_pages(dtype, page_size):
    """Around the keys that there are; every other box stays as it is."""
    lengths = torch.tensor([1, 700, 577], device="cuda")
    keys, corners = draw(3, 2, 700, 80, dtype=dtype), draw(2, 3, 2, -(-700 // page_size), 80, dtype=dtype)
    for row, length in enumerate(lengths.tolist()):
        keys[row, :, length:] = torch.nan
    mine, its = corners.clone(), corners.clone()
    ops.bound_newest(KV(keys, lengths=lengths), *mine, page_size)
    boxes.bound_newest(KV(keys, lengths=lengths), *its, page_size)
    assert torch.equal(mine, its)
    assert not torch.equal(mine, corners)


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("number", [1, 500, 1300])
def test_keys_of_pages(group, number):
    lengths = torch.tensor([1, 32_000, 31_985], device="cuda")
    there = -(-lengths // 16)[:, None, None]
    drawn = (uniform(3, 2 * group, number, seed=group) * there).long().sort(-1).values
    again = torch.zeros_like(drawn, dtype=torch.bool)
    again[..., 1:] = drawn[..., 1:] == drawn[..., :-1]
    lists = drawn.masked_fill(again, 1 << 20).sort(-1).values
    lists = lists.masked_fill(lists == 1 << 20, -1).int()
    assert torch.equal(ops.keys_of_pages(lists, 2, 16, lengths), of_pages.keys_of_pages(lists, 2, 16, lengths))


@pytest.mark.parametrize("number", [1, 130, 5000, 70_000])
@pytest.mark.parametrize("rows", [None, [True, False, True]])
def test_slots_that_are_given_up(number, rows):
    """Equal to the reference, in the slots of a larger buffer; ties, NaN and holes among the scores."""
    generator = torch.Generator("cuda").manual_seed(number)
    order = torch.rand(3, 2, number, generator=generator, device="cuda").argsort(-1)
    holes = torch.rand(order.shape, generator=generator, device="cuda") < 0.2
    positions = (3 * order + 1).masked_fill(holes, -1).to(torch.int32)
    positions[..., 0] = 0
    scores = torch.randn(order.shape, generator=generator, device="cuda").round()
    scores[0, :, number // 2] = torch.nan
    rows = None if rows is None else torch.tensor(rows, device="cuda")
    before = torch.tensor([1, 40, 10_000], device="cuda")
    at = positions[:, 0].amax(-1).long()
    positions[:, 1] = positions[:, 0].flip(-1)
    for by in ({"scores": scores}, {"scores": scores[:, :1].expand(-1, 2, -1), "before": before}, {"at": at}):
        buffer = torch.full((3, 2, number + 33), -9, dtype=torch.int32, device="cuda")
        buffer[..., :number], expected = positions, positions.clone()
        found = ops.retain.give_up(buffer[..., :number], rows=rows, **by)
        assert torch.equal(found, retain.give_up(expected, rows=rows, **by))
        assert torch.equal(buffer[..., :number], expected)
        assert bool((buffer[..., number:] == -9).all())


@every_pair(DTYPES)
@pytest.mark.parametrize("evicts", [False, True])
def test_tokens_that_are_put(dtype, evicts):
    made = []
    for run in (ops.put_token, retain.put_token):
        keys, values, k, v = (draw(3, 2, n, 80, dtype=dtype, seed=seed) for seed, n in enumerate((700, 700, 1, 1)))
        own = {}
        if evicts:
            positions = torch.full((3, 2, 700), -1, dtype=torch.int32, device="cuda")
            freed = torch.tensor([[3, -1], [-1, 0], [9, 9]], device="cuda")
            newest = torch.tensor([100, 200, 300], dtype=torch.int32, device="cuda")
            numbers = torch.rand(3, 2, 700, generator=torch.Generator().manual_seed(0)).cuda()
            own = {"positions": positions, "newest": newest, "freed": freed, "take": True, "emptied": numbers}
        slots = run(keys, values, k, v, torch.tensor([11, 20, 699], device="cuda"), **own)
        made.append([slots, keys, values, *(own.get(name) for name in ("positions", "freed", "emptied"))])
    for mine, its in zip(*made, strict=True):
        assert mine is its is None or torch.equal(mine, its)

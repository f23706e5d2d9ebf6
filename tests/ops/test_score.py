"""Attention mass against the columns of the written-out attention matrix."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foveate import ops
from foveate.ops import KV, Logits, _math
from tests.helpers import LAYOUTS, LargestTensor, Shape, assert_close, causal_mask, in_buffer, naive, problem, shapes

SEEDS = st.integers(0, 1000)
SOME = Shape(batch=2, kv_heads=2, group=3, queries=9, offset=14, dim=16, value_dim=16)
LONG = Shape(batch=1, kv_heads=2, group=3, queries=3072, offset=1024, dim=16, value_dim=16)
SCRATCH = 4 << 20


def causal(shape, seed=0, **more):
    """A problem with its true causal attention: ``q, k, naive``; the values are those that queries may see."""
    q, k, v = problem(shape, seed, **more)
    visible = slice(None, shape.keys)
    return q, k, naive(q, k[:, :, visible], v[:, :, visible], 0.3, causal_mask(shape.queries, shape.offset))


# column_mass


@given(shapes(), SEEDS, st.sampled_from(LAYOUTS), st.sampled_from([0, 4]), st.sampled_from([1 << 9, 1 << 26]))
@settings(max_examples=70)
def test_column_mass_is_the_column_sum(shape, seed, layout, extra, scratch):
    q, k, expected = causal(shape, seed, layout=layout, extra=extra)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_math, "SCRATCH_BYTES", scratch)
        mass = ops.column_mass(q, KV(k), expected.lse.float(), logits=Logits(0.3), offset=shape.offset)
    assert mass.shape == k.shape[:3]
    assert mass.dtype == torch.float32
    assert_close(mass[:, :, : shape.keys], expected.mass)
    assert (mass[:, :, shape.keys :] == 0).all()
    assert_close(mass.sum(-1), torch.full(mass.shape[:2], float(shape.group * shape.queries)))


@pytest.mark.parametrize("offset", [0, 41])
def test_column_mass_over_several_blocks_of_queries(offset):
    shape = SOME._replace(queries=700, offset=offset, batch=1)
    q, k, expected = causal(shape, layout="slots")
    assert_close(
        ops.column_mass(q, KV(k), expected.lse.float(), logits=Logits(0.3), offset=offset) / 100, expected.mass / 100
    )


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_column_mass_adds_up_over_chunks_of_queries(cut):
    q, k, expected = causal(SOME)
    lse = expected.lse.float()
    mass = torch.zeros(k.shape[:3])
    first = ops.column_mass(q[:, :, :cut], KV(k), lse[:, :, :cut], logits=Logits(0.3), offset=14, out=mass)
    assert first is mass
    ops.column_mass(q[:, :, cut:], KV(k), lse[:, :, cut:], logits=Logits(0.3), offset=14 + cut, out=mass)
    assert_close(mass, expected.mass)


def test_column_mass_adds_to_a_view_of_a_larger_buffer():
    q, k, expected = causal(SOME)
    buffer = torch.ones(2, 2, 40)
    ops.column_mass(q, KV(k), expected.lse.float(), logits=Logits(0.3), offset=14, out=buffer[:, :, : SOME.keys])
    assert_close(buffer[:, :, : SOME.keys], 1 + expected.mass)
    assert (buffer[:, :, SOME.keys :] == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_column_mass_in_half_precision(dtype):
    q, k, expected = causal(SOME, dtype=dtype)
    mass = ops.column_mass(q, KV(k), expected.lse.float(), logits=Logits(0.3), offset=14)
    assert mass.dtype == torch.float32
    assert_close(mass, expected.mass, dtype)


@given(shapes(max_queries=40), SEEDS, st.sampled_from([1e4, float("nan"), float("inf")]), st.data())
@settings(max_examples=40)
def test_mass_of_earlier_queries_never_depends_on_later_keys(shape, seed, poison, data):
    q, k, expected = causal(shape, seed)
    count = data.draw(st.integers(1, shape.queries), label="queries before the change")
    queries, lse = q[:, :, :count], expected.lse[:, :, :count].float()
    visible = shape.offset + count
    changed = k.clone()
    changed[:, :, visible:] = poison
    before, after = (
        ops.column_mass(queries, KV(x), lse, logits=Logits(0.3), offset=shape.offset) for x in (k, changed)
    )
    assert torch.equal(before, after)
    assert (after[:, :, visible:] == 0).all()
    before, after = (ops.query_mass(queries, KV(x), logits=Logits(0.3), offset=shape.offset) for x in (k, changed))
    assert torch.equal(before, after)
    before, after = (
        [mass for _, mass in ops.tile_mass(queries, KV(x), lse, tile=4, logits=Logits(0.3), offset=shape.offset)]
        for x in (k, changed)
    )
    assert all(torch.equal(one, other) for one, other in zip(before, after))


@pytest.mark.parametrize("later", [3, 8])
def test_the_causal_bound_holds_inside_a_block_of_queries(later):
    """A key in the midst of the block gives mass only to the queries at and after it, whatever it holds."""
    q, k, expected = causal(SOME)
    lse = expected.lse.float()
    k = k.clone()
    k[:, :, 14 + later :] = 1e4  # exp overflows for the queries that must not look
    mass = ops.column_mass(q[:, :, : later + 1], KV(k), lse[:, :, : later + 1], logits=Logits(0.3), offset=14)
    own = ops.column_mass(
        q[:, :, later : later + 1], KV(k), lse[:, :, later : later + 1], logits=Logits(0.3), offset=14 + later
    )
    assert torch.equal(mass[:, :, 14 + later], own[:, :, 14 + later])
    assert_close(
        mass[:, :, : 14 + later], expected.weights[:, :, : later + 1, : 14 + later].sum(2).unflatten(1, (2, 3)).sum(2)
    )


@pytest.mark.parametrize("group", [1, 3])
def test_queries_that_saw_nothing_add_nothing(group):
    """A whole head, a single query, and some of another row, whose log-sum-exp is -inf."""
    q, k, expected = causal(SOME._replace(group=group))
    saw = torch.ones(expected.lse.shape, dtype=torch.bool)
    saw[0, 0], saw[0, -1, 2], saw[1, :group, 2:6] = False, False, False
    lse = expected.lse.float().masked_fill(~saw, float("-inf"))
    mass = ops.column_mass(q, KV(k), lse, logits=Logits(0.3), offset=14)
    assert_close(mass, (expected.weights * saw[..., None]).unflatten(1, (2, group)).sum((2, 3)))


# tile_mass


@given(shapes(), SEEDS, st.sampled_from(LAYOUTS), st.integers(1, 8), st.sampled_from([0, 4]))
@settings(max_examples=50)
def test_tile_mass_is_the_mean_over_a_tile_and_its_group(shape, seed, layout, tile, extra):
    q, k, expected = causal(shape, seed, layout=layout, extra=extra)
    how = {"tile": tile, "logits": Logits(0.3), "offset": shape.offset}
    blocks = list(ops.tile_mass(q, KV(k), expected.lse.float(), **how))
    tiles = [(first + t, mass[:, :, t]) for first, mass in blocks for t in range(mass.shape[2])]
    assert [index for index, _ in tiles] == list(
        range(shape.offset // tile, -(-(shape.offset + shape.queries) // tile))
    )
    for index, mass in tiles:
        begin = index * tile
        first, last = max(begin - shape.offset, 0), min(begin + tile - shape.offset, shape.queries)
        weights = expected.weights[:, :, first:last, :begin].unflatten(1, (shape.kv_heads, shape.group))
        assert_close(mass[..., :begin], weights.mean((2, 3)))
        assert (mass[..., begin:] == -float("inf")).all()


# query_mass


@given(shapes(), SEEDS, st.sampled_from(LAYOUTS), st.sampled_from([0, 4]))
@settings(max_examples=50)
def test_query_mass_keeps_heads_apart(shape, seed, layout, extra):
    q, k, expected = causal(shape, seed, layout=layout, extra=extra)
    mass = ops.query_mass(q, KV(k), logits=Logits(0.3), offset=shape.offset)
    assert mass.dtype == torch.float32
    assert_close(mass, expected.weights.sum(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_query_mass_in_half_precision(dtype):
    q, k, expected = causal(SOME, dtype=dtype)
    mass = ops.query_mass(q, KV(k), logits=Logits(0.3), offset=14)
    assert mass.dtype == torch.float32
    assert_close(mass, expected.weights.sum(2), dtype)


# Memory


def test_many_small_tiles_come_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(_math, "SCRATCH_BYTES", SCRATCH)
    q, k, _ = problem(Shape(batch=1, kv_heads=1, group=1, queries=4096, offset=0, dim=8, value_dim=8))
    lse = torch.zeros(1, 1, 4096)
    with LargestTensor() as largest:
        tiles = sum(block.shape[2] for _, block in ops.tile_mass(q, KV(k), lse, tile=2, logits=Logits(0.3)))
    assert tiles == 2048
    assert largest.bytes <= SCRATCH, largest.what


@pytest.mark.parametrize("function", ["column_mass", "tile_mass", "query_mass"])
def test_mass_makes_no_square_matrix(function):
    q, k, _v = problem(LONG, layout="slots")
    lse = torch.full(q.shape[:3], 9.0)
    with pytest.MonkeyPatch.context() as patch, LargestTensor() as largest:
        patch.setattr(_math, "SCRATCH_BYTES", SCRATCH)
        if function == "column_mass":
            ops.column_mass(q, KV(k), lse, logits=Logits(0.3), offset=1024)
        elif function == "tile_mass":
            list(ops.tile_mass(q, KV(k), lse, tile=128, logits=Logits(0.3), offset=1024))
        else:
            ops.query_mass(q[:, :, -32:], KV(k), logits=Logits(0.3), offset=4096 - 32)
    assert largest.bytes <= SCRATCH, largest.what


# pooled_mass


@given(shapes(max_queries=1), SEEDS, st.sampled_from(LAYOUTS))
@settings(max_examples=40)
def test_pooled_mass_is_the_mean_or_the_most_of_the_heads_that_share_a_key(shape, seed, layout):
    q, k, expected = causal(shape, seed, layout=layout)
    weights = expected.weights[:, :, 0]
    groups = weights.unflatten(1, (shape.kv_heads, -1))
    assert_close(ops.pooled_mass(q, KV(k), logits=Logits(0.3)), groups.mean(2))
    assert_close(ops.pooled_mass(q, KV(k), logits=Logits(0.3), pooling="sqrt"), groups.sqrt().mean(2))
    assert_close(ops.pooled_mass(q, KV(k), logits=Logits(0.3), pool="layer"), weights.mean(1, keepdim=True))
    assert_close(
        ops.pooled_mass(q, KV(k), logits=Logits(0.3), pool="layer", pooling="max"), weights.amax(1, keepdim=True)
    )
    rows = q.double().unflatten(1, (shape.kv_heads, -1))[:, :, :, 0]
    logits = 0.3 * rows @ k.double().transpose(-1, -2)
    assert_close(ops.pooled_mass(q, KV(k), logits=Logits(0.3), pooling="max_logit"), logits.amax(2))
    layer = ops.pooled_mass(q, KV(k), logits=Logits(0.3), pool="layer", pooling="max_logit")
    assert_close(layer, logits.amax((1, 2))[:, None])
    found = ops.pooled_mass(q, KV(k, lengths=torch.full((len(q),), k.shape[2] - 1)), logits=Logits(0.3))
    assert found[..., -1].isneginf().all()
    assert_close(found[..., :-1], ops.pooled_mass(q, KV(k[:, :, :-1]), logits=Logits(0.3)))


@pytest.mark.parametrize("lengths", [None, torch.tensor([23, 9]), torch.tensor([[5, 40], [23, 0]])], ids=str)
@pytest.mark.parametrize("pool", ["kv_head", "layer"])
@pytest.mark.parametrize("pooling", ["post_softmax", "sqrt", "max", "max_logit"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pooled_mass_of_pages_is_that_of_their_keys_alone(page_size, pooling, pool, lengths):
    """Written out: the keys of a row's pages side by side; the others are NaN. The last page is not full."""
    q, k, _ = problem(SOME._replace(queries=1, offset=22))
    pages, sinks = torch.tensor([[[1, -1, 0], [0, 1, -1]], [[0, -1, -1], [1, 0, -1]]]), torch.linspace(-1, 1, 6)
    pages = pages[:, :1] if pool == "layer" else pages
    ends = torch.full((2, 2), 23) if lengths is None else lengths.view(2, -1).expand(-1, 2).clamp_max(23)
    wanted = torch.full((2, 6, 3, page_size), float("nan"), dtype=torch.float64)
    read = torch.zeros(2, 2, 23, dtype=torch.bool)
    for row in range(2):
        for head in range(6):
            own, of = head // 3, pages[row, 0 if pool == "layer" else head // 3].tolist()
            keys = [page * page_size + i if page >= 0 else -1 for page in of for i in range(page_size)]
            there = [0 <= key < ends[row, own] for key in keys]
            logits = torch.full((len(keys) + 1,), -torch.inf, dtype=torch.float64)
            logits[-1] = sinks[head]
            for place, key in enumerate(keys):
                if there[place]:
                    logits[place] = 0.3 * q[row, head, 0].double() @ k[row, own, key].double()
                    read[row, own, key] = True
            found = logits[:-1] if pooling == "max_logit" else logits.softmax(0)[:-1]
            wanted[row, head] = (found.sqrt() if pooling == "sqrt" else found).view(3, -1)
            wanted[row, head].view(-1)[~torch.tensor(there)] = torch.nan  # of a key that is not there, in any head
    wanted = wanted.flatten(2).unflatten(1, (1 if pool == "layer" else 2, -1))
    wanted = (wanted.amax(2) if pooling.startswith("max") else wanted.mean(2)).nan_to_num(-torch.inf, neginf=-torch.inf)
    k[~read] = torch.nan
    kv, how = KV(k, lengths=lengths), {"logits": Logits(0.3, sinks), "pooling": pooling, "pool": pool}
    found = ops.pooled_mass_of_pages(q, kv, pages, page_size, **how)
    assert found.shape == (2, 1 if pool == "layer" else 2, 3 * page_size)
    assert_close(found, wanted)
    assert torch.equal(ops.pooled_mass_of_pages(q, kv, pages.int(), page_size, **how), found)


def test_pages_that_do_not_fit_have_no_mass():
    q, k, _ = problem(SOME._replace(queries=1))
    pages = torch.zeros(2, 2, 3, dtype=torch.int32)
    for wrong, pool in (
        (pages[:1], "kv_head"),
        (pages.repeat(1, 3, 1), "kv_head"),
        (pages, "layer"),
        (pages[0], "layer"),
    ):
        with pytest.raises(ValueError, match=r"pages .* do not fit 2 rows of 1"):
            ops.pooled_mass_of_pages(q, KV(k), wrong, 4, logits=Logits(0.3), pool=pool)


# largest_logit


def draw_boxes(batch, kv_heads, group, boxes, size, dim, seed, layout="own"):
    """Queries ``[B, Hkv, G, D]``, keys ``[B, Hkv, N, S, D]`` and the corners of the boxes around each S of them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(batch, kv_heads, group, dim, generator=generator)
    keys = torch.randn(batch, kv_heads, boxes, size, dim, generator=generator) + 1.5  # boxes off the origin
    return rows, keys, in_buffer(keys.amin(3), layout), in_buffer(keys.amax(3), layout)


BOXES = {
    "batch": st.integers(1, 2),
    "kv_heads": st.integers(1, 3),
    "group": st.sampled_from([1, 3, 4]),
    "boxes": st.integers(1, 5),
    "size": st.sampled_from([1, 2, 7]),
    "dim": st.sampled_from([1, 5, 16]),
    "seed": SEEDS,
    "layout": st.sampled_from(LAYOUTS),
}


@given(st.fixed_dictionaries(BOXES), st.data())
@settings(max_examples=60)
def test_largest_logit_is_that_of_the_best_corner(size, data):
    rows, keys, low, high = draw_boxes(**size)
    number = st.lists(st.integers(0, size["boxes"]), min_size=size["batch"], max_size=size["batch"])
    lengths = torch.tensor(data.draw(number))
    for scaling in (0.3, 2.0):
        found = ops.largest_logit(rows, low, high, scaling)
        wanted = torch.zeros(found.shape, dtype=torch.float64)
        for b, h, g, n in torch.cartesian_prod(*(torch.arange(size) for size in found.shape)).view(-1, 4).tolist():
            for x, least, most in zip(rows[b, h, g].tolist(), low[b, h, n].tolist(), high[b, h, n].tolist()):
                wanted[b, h, g, n] += scaling * (x * most if x > 0 else x * least)
        assert found.dtype == torch.float32
        assert_close(found, wanted)
        logits = torch.einsum("bhgd,bhnsd->bhgns", rows.double(), keys.double()) * scaling
        assert (found >= logits.amax(-1) - 1e-4).all()  # no key in a box has more
        there = torch.arange(size["boxes"]) < lengths[:, None]
        short = ops.largest_logit(rows, low, high, scaling, lengths=lengths)
        assert_close(short, wanted.masked_fill(~there[:, None, None], float("-inf")))


def test_largest_logit_of_boxes_that_are_not_there_may_be_anything():
    rows, _, low, high = draw_boxes(2, 2, 3, 4, 3, 5, seed=0)
    lengths = torch.tensor([[1, 4], [3, 0]])
    expected = ops.largest_logit(rows, low, high, 0.3, lengths=lengths)
    for b, h in ((0, 0), (0, 1), (1, 0), (1, 1)):
        for corner in (low, high):
            corner[b, h, lengths[b, h] :] = float("nan")
    assert torch.equal(ops.largest_logit(rows, low, high, 0.3, lengths=lengths), expected)
    assert ((expected > float("-inf")).sum(-1) == lengths[..., None]).all()

"""attend and its relatives against textbook attention in fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foveate import ops
from foveate.ops import KV, Logits, _math
from foveate.ops.attend import attend_tiles, gather_pages, page_slots
from tests.combinations import every_pair
from tests.helpers import LAYOUTS, LargestTensor, Shape, assert_close, causal_mask, in_buffer, naive, problem, shapes
from tests.problems import listed

SEEDS = st.integers(0, 1000)
LOW_PRECISION = [torch.bfloat16, torch.float16]
SOME = Shape(batch=2, kv_heads=2, group=3, queries=9, offset=14, dim=16, value_dim=16)
NAN = float("nan")


def random_mask(shape: Shape, heads: int, seed: int, blind: bool) -> torch.Tensor:
    """Half of the pairs; with ``blind`` the first query of the last sequence sees nothing."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape.batch, heads, shape.queries, shape.keys, generator=generator) < 0.5
    mask[..., 0] = True
    if blind:
        mask[-1, :, 0] = False
    return mask


# attend


@given(shapes(), SEEDS, st.sampled_from(LAYOUTS))
@settings(max_examples=40)
def test_attend_without_mask(shape, seed, layout):
    q, k, v = problem(shape, seed, layout=layout)
    expected = naive(q, k, v, 0.3)
    assert_close(ops.attend(q, KV(k, v), logits=Logits(0.3)).out, expected.out)
    attended = ops.attend(q, KV(k, v), logits=Logits(0.3), need_lse=True, need_mass=True)
    assert_close(attended.out, expected.out)
    assert_close(attended.lse, expected.lse)
    assert_close(attended.mass, expected.mass)


@given(shapes(), SEEDS, st.sampled_from(LAYOUTS), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_attend_with_mask(shape, seed, layout, per_head, blind):
    q, k, v = problem(shape, seed, layout=layout)
    mask = random_mask(shape, shape.kv_heads if per_head else 1, seed, blind)
    expected = naive(q, k, v, 0.3, mask)
    assert_close(ops.attend(q, KV(k, v), logits=Logits(0.3), mask=mask).out, expected.out)
    attended = ops.attend(q, KV(k, v), logits=Logits(0.3), mask=mask, need_lse=True, need_mass=True)
    assert_close(attended.out, expected.out)
    assert_close(attended.lse, expected.lse)
    assert_close(attended.mass, expected.mass)


@pytest.mark.parametrize("lengths", [None, [14, 5]])
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"sinks": torch.linspace(-1, 2, 6)}])
def test_the_newest_tokens_read_the_keys_up_to_their_own(lengths, extra):
    q, k, v = problem(SOME, 3)
    number, n, how = k.shape[2], 4, {"logits": Logits(0.3, **extra)}
    given = None if lengths is None else torch.tensor(lengths)
    found = ops.attend_newest(q[:, :, :n], KV(k, v, lengths=given), **how).out
    for i in range(n):
        ends = torch.tensor([length - n + i + 1 for length in lengths or [number] * len(q)])
        one = ops.attend(q[:, :, i : i + 1], KV(k, v, lengths=ends), **how)
        assert_close(found[:, :, i : i + 1], one.out)


@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("masked", [False, True])
def test_attend_in_half_precision(dtype, masked):
    q, k, v = problem(SOME, dtype=dtype, layout="slots")
    mask = random_mask(SOME, 2, 0, blind=True) if masked else None
    expected = naive(q, k, v, 0.3, mask)
    plain = ops.attend(q, KV(k, v), logits=Logits(0.3), mask=mask)
    full = ops.attend(q, KV(k, v), logits=Logits(0.3), mask=mask, need_lse=True, need_mass=True)
    assert plain.out.dtype == full.out.dtype == dtype
    assert full.lse.dtype == full.mass.dtype == torch.float32
    for out in (plain.out, full.out):
        assert_close(out, expected.out, dtype)
    assert_close(full.lse, expected.lse, dtype)
    assert_close(full.mass, expected.mass, dtype)


@pytest.mark.parametrize("wants", [{}, {"need_lse": True}, {"need_mass": True}])
def test_attend_returns_only_what_is_asked_for(wants):
    q, k, v = problem(SOME)
    attended = ops.attend(q, KV(k, v), logits=Logits(0.3), **wants)
    assert (attended.lse is not None) == ("need_lse" in wants)
    assert (attended.mass is not None) == ("need_mass" in wants)


@pytest.mark.parametrize("need_lse", [False, True])
def test_what_sees_nothing_gives_zero(need_lse):
    q, k, v = problem(SOME)
    attended = ops.attend(
        q, KV(k, v), logits=Logits(0.3), mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool), need_lse=need_lse
    )
    assert torch.equal(attended.out, torch.zeros_like(attended.out))
    if need_lse:
        assert attended.lse.isneginf().all()


@pytest.mark.parametrize("need_lse", [False, True])
def test_attend_survives_large_logits(need_lse):
    q, k, v = problem(SOME)
    assert_close(
        ops.attend(100 * q, KV(100 * k, v), logits=Logits(1.0), need_lse=need_lse).out,
        naive(100 * q, 100 * k, v, 1.0).out,
    )


def test_query_heads_must_be_a_multiple_of_kv_heads():
    q, k, v = problem(SOME)
    with pytest.raises(ValueError, match="5 heads, which is not a multiple of the 2 KV heads"):
        ops.attend(q[:, :5], KV(k, v), logits=Logits(0.3))


@pytest.mark.parametrize("function", ["attend", "attend_causal", "attend_indices"])
@pytest.mark.parametrize("need_lse", [False, True])
def test_gradients_equal_those_of_naive_attention(function, need_lse):
    q, k, v = (x.requires_grad_() for x in problem(SOME))
    indices = torch.tensor([3, 8, 1, -1]).expand(2, 2, 4)
    mask = None
    if function == "attend":
        out = ops.attend(q, KV(k, v), logits=Logits(0.3), need_lse=need_lse).out
    elif function == "attend_causal":
        out = ops.attend_causal(q, KV(k, v), logits=Logits(0.3), offset=SOME.offset, need_lse=need_lse).out
        mask = causal_mask(SOME.queries, SOME.offset)
    else:
        out = ops.attend_indices(q, KV(k, v), indices, logits=Logits(0.3), need_lse=need_lse).out
        mask = chosen_mask(indices, SOME.keys)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    actual = torch.autograd.grad((out * weights).sum(), (q, k, v))
    expected = torch.autograd.grad((naive(q, k, v, 0.3, mask).out * weights).sum(), (q, k, v))
    for one, other in zip(actual, expected):
        assert_close(one, other)


# attend_causal


@given(shapes(), SEEDS, st.sampled_from(LAYOUTS), st.booleans(), st.sampled_from([0, 5]))
@settings(max_examples=80)
def test_causal(shape, seed, layout, need_lse, extra):
    q, k, v = problem(shape, seed, layout=layout, extra=extra)
    attended = ops.attend_causal(q, KV(k, v), logits=Logits(0.3), offset=shape.offset, need_lse=need_lse)
    visible = slice(None, shape.keys)
    expected = naive(q, k[:, :, visible], v[:, :, visible], 0.3, causal_mask(shape.queries, shape.offset))
    assert_close(attended.out, expected.out)
    if need_lse:
        assert_close(attended.lse, expected.lse)


@pytest.mark.parametrize("dtype", [torch.float32, *LOW_PRECISION])
@pytest.mark.parametrize("dim", [5, 16, 20, 80])
@pytest.mark.parametrize(("queries", "offset"), [(1, 0), (61, 0), (333, 0), (61, 14)])
def test_causal_output_is_the_same_to_the_last_bit_with_the_log_sum_exp(dtype, dim, queries, offset):
    q, k, v = problem(Shape(2, 2, 3, queries, offset, dim, dim), dtype=dtype, layout="slots")
    with_lse = ops.attend_causal(q, KV(k, v), logits=Logits(0.3), offset=offset, need_lse=True)
    assert torch.equal(ops.attend_causal(q, KV(k, v), logits=Logits(0.3), offset=offset).out, with_lse.out)


@given(shapes(), SEEDS, st.sampled_from([1 << 8, 1 << 12]))
@settings(max_examples=25)
def test_causal_in_blocks_does_not_depend_on_the_block(shape, seed, scratch):
    q, k, v = (x.requires_grad_() for x in problem(shape, seed))  # gradients need the blockwise path
    expected = naive(q, k, v, 0.3, causal_mask(shape.queries, shape.offset))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_math, "SCRATCH_BYTES", scratch)
        attended = ops.attend_causal(q, KV(k, v), logits=Logits(0.3), offset=shape.offset, need_lse=True)
    assert_close(attended.out, expected.out)
    assert_close(attended.lse, expected.lse)


@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("offset", [0, 14])
@pytest.mark.parametrize("value_dim", [16, 24])
def test_causal_in_half_precision(dtype, offset, value_dim):
    shape = SOME._replace(offset=offset, value_dim=value_dim)
    q, k, v = problem(shape, dtype=dtype, layout="slots")
    expected = naive(q, k, v, 0.3, causal_mask(9, offset))
    attended = ops.attend_causal(q, KV(k, v), logits=Logits(0.3), offset=offset, need_lse=True)
    assert attended.out.dtype == dtype
    assert attended.lse.dtype == torch.float32
    assert_close(attended.out, expected.out, dtype)
    assert_close(attended.lse, expected.lse, dtype)
    assert_close(ops.attend_causal(q, KV(k, v), logits=Logits(0.3), offset=offset).out, expected.out, dtype)


@pytest.mark.parametrize("offset", [0, 14])
@pytest.mark.parametrize("value_dim", [16, 24])
@pytest.mark.parametrize("need_lse", [False, True])
def test_causal_output_ignores_the_future(offset, value_dim, need_lse):
    q, k, v = problem(SOME._replace(offset=offset, value_dim=value_dim))
    before = ops.attend_causal(q, KV(k, v), logits=Logits(0.3), offset=offset, need_lse=need_lse).out
    k, v = k.clone(), v.clone()
    k[:, :, offset + 6 :], v[:, :, offset + 6 :] = 50.0, -7.0
    after = ops.attend_causal(q, KV(k, v), logits=Logits(0.3), offset=offset, need_lse=need_lse).out
    assert torch.equal(before[:, :, :6], after[:, :, :6])
    assert not torch.equal(before[:, :, 6:], after[:, :, 6:])


def test_causal_attention_checks_its_keys_once(monkeypatch):
    q, k, v = problem(SOME)
    checked, check = [], KV.check_unpaged
    monkeypatch.setattr(KV, "check_unpaged", lambda kv: checked.append(kv) or check(kv))
    ops.attend_causal(q, KV(k, v), logits=Logits(0.3, softcap=5.0))  # which no library on a CPU takes
    assert len(checked) == 1


def test_causal_needs_enough_keys():
    q, k, v = problem(SOME)
    with pytest.raises(ValueError, match="k has 23 keys; offset 15 and 9 queries need 24"):
        ops.attend_causal(q, KV(k, v), logits=Logits(0.3), offset=15)


def test_products_of_double_precision_stay_in_it():
    a, b = torch.randn(2, 3, 5, 7, dtype=torch.float64), torch.randn(2, 3, 7, 4, dtype=torch.float64)
    assert torch.equal(_math.matmul_fp32(a, b), a @ b)


# attend_tiles


@given(shapes(), SEEDS, st.sampled_from(LAYOUTS), st.integers(1, 8), st.integers(0, 5))
@settings(max_examples=60)
def test_tiles_share_their_keys_and_see_their_own_causally(shape, seed, layout, tile, chosen):
    q, k, v = problem(shape, seed, layout=layout)
    tiles = range(shape.offset // tile, -(-(shape.offset + shape.queries) // tile))
    generator = torch.Generator().manual_seed(seed)
    indices = torch.full((shape.batch, shape.kv_heads, len(tiles), chosen), -1)
    mask = torch.zeros(shape.batch, shape.kv_heads, shape.queries, k.shape[2], dtype=torch.bool)
    for b in range(shape.batch):
        for h in range(shape.kv_heads):
            for t, index in enumerate(tiles):
                begin = index * tile
                picked = torch.randperm(begin, generator=generator)[: max(0, chosen - t % 2)]
                indices[b, h, t, : len(picked)] = picked
                for i in range(max(begin - shape.offset, 0), min(begin + tile - shape.offset, shape.queries)):
                    mask[b, h, i, picked] = True
                    mask[b, h, i, begin : shape.offset + i + 1] = True
    out = attend_tiles(q, KV(k, v), **listed(indices), tile=tile, logits=Logits(0.3), offset=shape.offset).out
    assert_close(out, naive(q, k, v, 0.3, mask).out)
    unread = ~mask.any(2)
    k, v = (x.masked_fill(unread[..., None], NAN) for x in (k, v))
    arguments = {"tile": tile, "logits": Logits(0.3), "offset": shape.offset}
    assert torch.equal(attend_tiles(q, KV(k, v), **listed(indices), **arguments).out, out)
    heads = torch.randint(shape.kv_heads, (shape.kv_heads,), generator=generator)
    keys, values = (x.nan_to_num(1.0) for x in (k, v))
    mapped = attend_tiles(q, KV(keys, values), **listed(indices), heads=heads, **arguments).out
    assert torch.equal(mapped, attend_tiles(q, KV(keys, values), **listed(indices[:, heads]), **arguments).out)


def test_tiles_in_blocks_and_selections_that_do_not_fit(monkeypatch):
    q, k, v = problem(SOME)
    indices = torch.arange(5).expand(2, 2, 2, 5) - 1
    out = attend_tiles(q, KV(k, v), **listed(indices), tile=6, logits=Logits(0.3), offset=14).out
    monkeypatch.setattr(_math, "SCRATCH_BYTES", 1)
    assert_close(attend_tiles(q, KV(k, v), **listed(indices), tile=6, logits=Logits(0.3), offset=14).out, out)
    with pytest.raises(ValueError, match=r"counts must be \(2, 2, 1\) in torch.int32"):
        attend_tiles(q, KV(k, v), **listed(indices), tile=12, logits=Logits(0.3), offset=14)


# attend_window


def window_mask(lower: torch.Tensor, sinks: int, queries: int, offset: int) -> torch.Tensor:
    keys = torch.arange(offset + queries)
    return causal_mask(queries, offset) & ((keys >= lower[:, None]) | (keys < sinks))


@st.composite
def windows(draw):
    shape = draw(shapes())
    steps = draw(st.lists(st.integers(0, 2), min_size=shape.queries, max_size=shape.queries))
    lower = torch.tensor(steps).cumsum(0) + draw(st.integers(-4, shape.offset))
    return shape, lower.minimum(torch.arange(shape.offset, shape.keys)), draw(st.integers(0, 6))


@given(windows(), SEEDS, st.sampled_from(LAYOUTS), st.sampled_from([0, 5]))
@settings(max_examples=80)
def test_window_equals_its_dense_mask(window, seed, layout, extra):
    shape, lower, sinks = window
    q, k, v = problem(shape, seed, layout=layout, extra=extra)
    out = ops.attend_window(q, KV(k, v), logits=Logits(0.3), lower=lower, sinks=sinks, offset=shape.offset).out
    visible = slice(None, shape.keys)
    mask = window_mask(lower, sinks, shape.queries, shape.offset)
    assert_close(out, naive(q, k[:, :, visible], v[:, :, visible], 0.3, mask).out)


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("offset", [0, 37])
@pytest.mark.parametrize("pace", [1.0, 0.5])
def test_window_over_several_blocks(sinks, offset, pace):
    shape = SOME._replace(queries=1100, offset=offset, batch=1)
    q, k, v = problem(shape, layout="slots")
    lower = ((torch.arange(offset, shape.keys) - 29) * pace).floor().long()
    out = ops.attend_window(q, KV(k, v), logits=Logits(0.3), lower=lower, sinks=sinks, offset=offset).out
    assert_close(out, naive(q, k, v, 0.3, window_mask(lower, sinks, 1100, offset)).out)


def test_window_reads_nothing_between_sinks_and_window():
    q, k, v = problem(SOME)
    lower = torch.arange(SOME.offset, SOME.keys) - 3
    before = ops.attend_window(q, KV(k, v), logits=Logits(0.3), lower=lower, sinks=2, offset=SOME.offset).out
    k, v = k.clone(), v.clone()
    k[:, :, 2 : SOME.offset - 3], v[:, :, 2 : SOME.offset - 3] = NAN, NAN
    assert torch.equal(
        before, ops.attend_window(q, KV(k, v), logits=Logits(0.3), lower=lower, sinks=2, offset=SOME.offset).out
    )


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_window_in_half_precision(dtype):
    q, k, v = problem(SOME, dtype=dtype)
    lower = torch.arange(SOME.offset, SOME.keys) - 3
    out = ops.attend_window(q, KV(k, v), logits=Logits(0.3), lower=lower, sinks=2, offset=SOME.offset).out
    assert out.dtype == dtype
    assert_close(out, naive(q, k, v, 0.3, window_mask(lower, 2, 9, SOME.offset)).out, dtype)


# attend_indices, attend_pages


def chosen_mask(indices: torch.Tensor, keys: int) -> torch.Tensor:
    """bool ``[B, Hkv, 1, keys]`` of the slots that ``indices [B, Hkv, K]`` name."""
    return (indices[..., None] == torch.arange(keys)).any(2)[:, :, None]


@st.composite
def selections(draw):
    """A problem and for every KV head its own slots in any order, with unused places among them."""
    shape = draw(shapes(max_queries=3, max_offset=30))
    places = draw(st.integers(1, shape.keys + 2))
    generator = torch.Generator().manual_seed(draw(SEEDS))
    order = torch.rand(shape.batch, shape.kv_heads, shape.keys + 2, generator=generator).argsort(-1)[..., :places]
    return shape, order.masked_fill(order >= shape.keys, -1)


@pytest.mark.parametrize("counts", [torch.tensor([2, 0]), torch.tensor([[1, 3], [0, 2]], dtype=torch.int32)])
def test_places_beyond_the_counts_are_not_looked_at(counts):
    q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 5)
    indices = torch.tensor([[[4, 0, 7], [8, 1, 2]], [[3, 3, 3], [6, 5, 0]]])
    ends = counts if counts.dim() == 2 else counts[:, None].expand(-1, 2)
    how = {"logits": Logits(0.3), "need_lse": True, "need_mass": True}
    found = ops.attend_indices(q, KV(k, v), indices, counts=counts, **how)
    expected = ops.attend_indices(q, KV(k, v), indices.where(torch.arange(3) < ends[..., None], -1), **how)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    assert not torch.allclose(found.out, ops.attend_indices(q, KV(k, v), indices, **how).out)


@given(selections(), SEEDS, st.sampled_from(LAYOUTS), st.sampled_from([torch.int64, torch.int32]))
@settings(max_examples=60)
def test_gathered_attention_equals_its_dense_mask(selection, seed, layout, dtype):
    shape, indices = selection
    q, k, v = problem(shape, seed, layout=layout)
    expected = naive(q, k, v, 0.3, chosen_mask(indices, shape.keys))
    assert_close(ops.attend_indices(q, KV(k, v), indices.to(dtype), logits=Logits(0.3)).out, expected.out)
    attended = ops.attend_indices(q, KV(k, v), indices.to(dtype), logits=Logits(0.3), need_lse=True, need_mass=True)
    assert_close(attended.out, expected.out)
    assert_close(attended.lse, expected.lse)
    mass = torch.zeros(*indices.shape[:2], shape.keys + 1).scatter_(2, indices % (shape.keys + 1), attended.mass)
    assert_close(mass[..., :-1], expected.mass)


@pytest.mark.parametrize("need_lse", [False, True])
@pytest.mark.parametrize("indices", [[1, 5, 9, 13], [13, -1, 1, -1], [-1, -1, -1, -1]], ids=["full", "holes", "none"])
def test_gathered_attention_reads_only_what_is_selected(indices, need_lse):
    q, k, v = problem(SOME._replace(queries=1))
    chosen = torch.tensor(indices).expand(2, 2, 4)
    before = ops.attend_indices(q, KV(k, v), chosen, logits=Logits(0.3), need_lse=need_lse).out
    others = [slot for slot in range(k.shape[2]) if slot not in indices]
    k, v = k.clone(), v.clone()
    k[:, :, others], v[:, :, others] = NAN, NAN
    assert torch.equal(before, ops.attend_indices(q, KV(k, v), chosen, logits=Logits(0.3), need_lse=need_lse).out)


def test_a_head_without_any_selected_key_gives_zero():
    q, k, v = problem(SOME._replace(queries=1))
    indices = torch.tensor([[[0, 2], [-1, -1]], [[-1, 3], [4, 5]]])
    attended = ops.attend_indices(q, KV(k, v), indices, logits=Logits(0.3), need_lse=True)
    plain = ops.attend_indices(q, KV(k, v), indices, logits=Logits(0.3))
    for out in (attended.out, plain.out):
        assert torch.equal(out[0, 3:], torch.zeros_like(out[0, 3:]))
        assert (out[0, :3] != 0).any()
    assert attended.lse[0, 3:].isneginf().all()
    assert attended.lse[0, :3].isfinite().all()


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_gathered_attention_in_half_precision(dtype):
    q, k, v = problem(SOME, dtype=dtype)
    indices = torch.tensor([7, -1, 0, 20]).expand(2, 2, 4)
    expected = naive(q, k, v, 0.3, chosen_mask(indices, SOME.keys)).out
    assert_close(ops.attend_indices(q, KV(k, v), indices, logits=Logits(0.3)).out, expected, dtype)
    assert_close(ops.attend_indices(q, KV(k, v), indices, logits=Logits(0.3), need_mass=True).out, expected, dtype)


@pytest.mark.parametrize("keys", [30, 31])
@pytest.mark.parametrize("page_size", [1, 3, 5])
def test_pages_are_their_slots(page_size, keys):
    q, k, v = problem(SOME._replace(queries=1, offset=keys - 1))
    pages = torch.tensor([[[0, 4], [5, -1]], [[-1, -1], [2, 3]]])
    seen = (pages[..., None] == torch.arange(keys) // page_size).any(2)[:, :, None]
    expected = naive(q, k, v, 0.3, seen)
    attended = ops.attend_pages(q, KV(k, v), pages, page_size, logits=Logits(0.3), need_lse=True)
    assert_close(attended.out, expected.out)
    assert_close(attended.lse, expected.lse)
    assert_close(ops.attend_pages(q, KV(k, v), pages, page_size, logits=Logits(0.3)).out, expected.out)


@given(
    st.sampled_from(LAYOUTS), st.sampled_from([1, 2, 4, 5]), st.sampled_from([40, 41]), st.sampled_from([3, 16]), SEEDS
)
@settings(max_examples=60)
def test_gathered_slots_and_pages_are_those_of_a_loop(layout, page_size, length, dim, seed):
    """Whatever the buffer: whole rows, whole pages and single numbers are gathered in different ways."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, length, dim, generator=generator)
    buffered = in_buffer(x, layout)
    if layout == "slots":
        buffered = x.new_full((2, 3, 80, dim), NAN)[:, :, 20 : 20 + length].copy_(x)  # a capacity of whole pages
    for view, plain in ((buffered, x), (buffered[1:], x[1:])):
        slots = torch.randint(length, (len(plain), 3, 7), generator=generator)
        rows = [[plain[b, h, slots[b, h]] for h in range(3)] for b in range(len(plain))]
        assert torch.equal(ops.gather_slots(view, slots), torch.stack([torch.stack(row) for row in rows]))
        pages = torch.randint(length // page_size, (len(plain), 3, 4), generator=generator)
        slots = (pages[..., None] * page_size + torch.arange(page_size)).flatten(2)
        rows = [[plain[b, h, slots[b, h]] for h in range(3)] for b in range(len(plain))]
        assert torch.equal(gather_pages(view, pages, page_size), torch.stack([torch.stack(row) for row in rows]))


def test_page_slots_and_gather_slots():
    slots = page_slots(torch.tensor([[2, -1, 0]], dtype=torch.int32), 3)
    assert slots.tolist() == [[[6, 7, 8], [-1, -1, -1], [0, 1, 2]]]
    x = torch.arange(24.0).reshape(1, 2, 6, 2)
    indices = torch.tensor([[[5, 0], [2, -1]]])
    assert ops.gather_slots(x, indices).tolist() == [[[[10, 11], [0, 1]], [[16, 17], [12, 13]]]]
    assert ops.gather_slots(x[..., 0], indices).tolist() == [[[10, 0], [16, 12]]]


# merge


@given(shapes(), SEEDS, st.integers(1, 5), st.booleans())
@settings(max_examples=50)
def test_partitions_merge_to_the_whole(shape, seed, parts, blind):
    q, k, v = problem(shape, seed)
    mask = random_mask(shape, shape.kv_heads, seed, blind)
    owner = torch.randint(parts, (shape.batch, shape.kv_heads, 1, shape.keys), generator=torch.manual_seed(seed))
    pieces = [
        ops.attend(q, KV(k, v), logits=Logits(0.3), mask=mask & (owner == part), need_lse=True, need_mass=True)
        for part in range(parts)
    ]
    merged, expected = ops.merge(pieces), naive(q, k, v, 0.3, mask)
    assert_close(merged.out, expected.out)
    assert_close(merged.lse, expected.lse)


@pytest.mark.parametrize("shift", [-200.0, -5.0, 5.0, 200.0])
def test_parts_may_differ_by_any_factor(shift):
    ours, theirs = torch.randn(2, 1, 2, 3, 4, generator=torch.manual_seed(0))
    lse = torch.zeros(1, 2, 3)
    merged = ops.merge([ops.Attended(ours, lse), ops.Attended(theirs, lse + shift)])
    share = torch.tensor(shift).sigmoid()
    assert_close(merged.out, (1 - share) * ours + share * theirs)
    assert_close(merged.lse, torch.logaddexp(lse, lse + shift))


def test_merging_nothing_but_blind_parts_gives_zero():
    nothing = ops.Attended(torch.zeros(1, 2, 3, 4), torch.full((1, 2, 3), float("-inf")))
    merged = ops.merge([nothing, nothing])
    assert torch.equal(merged.out, nothing.out)
    assert merged.lse.isneginf().all()


def test_merging_keeps_the_dtype():
    q, k, v = problem(SOME, dtype=torch.bfloat16)
    parts = [
        ops.attend(q, KV(k[:, :, s], v[:, :, s]), logits=Logits(0.3), need_lse=True)
        for s in (slice(10), slice(10, None))
    ]
    merged = ops.merge(parts)
    assert merged.out.dtype == torch.bfloat16
    assert merged.lse.dtype == torch.float32
    assert_close(merged.out, naive(q, k, v, 0.3).out, torch.bfloat16)


# Memory

LONG = Shape(batch=1, kv_heads=2, group=3, queries=4096, offset=0, dim=16, value_dim=16)


@every_pair(("grad", [False, True]), ("need_lse", [False, True]), ("offset", [0, 1024]), ("value_dim", [16, 24]))
def test_causal_attention_makes_no_square_matrix(grad, need_lse, offset, value_dim):
    scratch = 4 << 20
    q, k, v = problem(LONG._replace(queries=4096 - offset, offset=offset, value_dim=value_dim), layout="slots")
    q.requires_grad_(grad)
    with pytest.MonkeyPatch.context() as patch, LargestTensor() as largest:
        patch.setattr(_math, "SCRATCH_BYTES", scratch)
        ops.attend_causal(q, KV(k, v), logits=Logits(0.3), offset=offset, need_lse=need_lse)
    assert largest.bytes <= scratch, largest.what


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_merging_and_sinks_make_no_output_in_fp32(parts, grad, monkeypatch):
    """What is computed in fp32 is there of a block of queries at a time; blocks change nothing, gradients included."""
    generator = torch.Generator().manual_seed(0)
    outs = torch.randn(parts, 2, 6, 500, 24, generator=generator).half().requires_grad_(grad)
    lses = (3 * torch.randn(parts, 2, 6, 500, generator=generator)).requires_grad_(grad)
    lses.data[1:, 0, 1, 7] = float("-inf")
    sinks, out_bytes = torch.randn(6, generator=generator), outs[0].nbytes

    def run():
        with LargestTensor() as gauge:
            parted = [ops.Attended(out, lse) for out, lse in zip(outs.unbind(), lses.unbind())]
            merged = ops.with_sinks(ops.merge(parted), sinks)
        found = torch.autograd.grad(merged.out.double().square().sum(), [outs, lses]) if grad else []
        return gauge.bytes, [merged.out, merged.lse, *found]

    largest, whole = run()
    assert largest == 2 * out_bytes
    monkeypatch.setattr(_math, "SCRATCH_BYTES", 1 << 14)
    largest, in_blocks = run()
    assert largest == out_bytes
    for found, expected in zip(in_blocks, whole, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("window", [64, 4096])
def test_window_attention_makes_no_square_matrix(window):
    scratch = 4 << 20
    q, k, v = problem(LONG, layout="slots")
    lower = torch.arange(4096) - window
    with pytest.MonkeyPatch.context() as patch, LargestTensor() as largest:
        patch.setattr(_math, "SCRATCH_BYTES", scratch)
        ops.attend_window(q, KV(k, v), logits=Logits(0.3), lower=lower, sinks=4)
    assert largest.bytes <= scratch, largest.what


@pytest.mark.parametrize("need_lse", [False, True])
def test_a_decode_step_copies_no_cache(need_lse):
    q, k, v = problem(LONG._replace(queries=1, offset=4095, batch=2), layout="slots")
    indices = torch.arange(0, 4096, 64).expand(2, 2, 64)
    with LargestTensor() as largest:
        ops.attend(q, KV(k, v), logits=Logits(0.3), need_lse=need_lse, need_mass=need_lse)
        ops.attend_indices(q, KV(k, v), indices, logits=Logits(0.3), need_lse=need_lse)
        ops.attend_pages(q, KV(k, v), indices // 64, 4, logits=Logits(0.3), need_lse=need_lse)
    assert largest.bytes < k.nbytes / 2, largest.what


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("number", [0, 5])
def test_a_query_that_reads_no_key_gets_zeros(softcap, has_sinks, number):
    """Because there is none, or none is chosen: the log-sum-exp is -inf, or that of the sinks."""
    q, k, v = torch.randn(2, 6, 1, 8), torch.randn(2, 2, number, 8), torch.randn(2, 2, number, 4)
    sinks = torch.randn(6) if has_sinks else None
    how = {"logits": Logits(0.3, sinks=sinks, softcap=softcap)}
    none = torch.zeros(2, 2, 0, dtype=torch.long)
    unused = torch.full((2, 2, 3), -1)
    length, nothing = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 1, 1, number, dtype=torch.bool)
    for need_lse in (False, True):
        more = how | {"need_lse": need_lse}
        found = [
            ops.attend(q, KV(k, v, lengths=length), **more),
            ops.attend(q, KV(k, v), mask=nothing, **more),
            *(ops.attend_indices(q, KV(k, v), places, **more) for places in (none, unused)),
            *(ops.attend_pages(q, KV(k, v), places, 2, **more) for places in (none, unused)),
        ]
        if not number:
            found.append(ops.attend(q, KV(k, v), **more))
        for one in found:
            assert torch.equal(one.out, torch.zeros(2, 6, 1, 4))
            if need_lse:
                expected = torch.full((2, 6, 1), float("-inf")) if sinks is None else sinks[:, None].expand(2, 6, 1)
                assert_close(one.lse, expected)


@pytest.mark.parametrize("seen", [float("-inf"), -3.0, 2.0])
@pytest.mark.parametrize("sink", [float("-inf"), -1.0, 40.0])
def test_sinks_take_their_share_of_whatever_was_seen(seen, sink):
    """Also of nothing, and by sinks that take none; in every head, whatever the others see."""
    out = torch.randn(2, 4, 3, 5)
    lse = torch.full((2, 4, 3), seen)
    lse[1, 2] = 1.5
    out[lse.isneginf()] = 0.0
    sinks = torch.tensor([sink, 0.5, float("-inf"), sink])
    found = ops.with_sinks(ops.Attended(out, lse), sinks)
    weight, taken = lse.double().exp(), sinks.double().exp()[:, None]
    total = weight + taken
    share = torch.where(total > 0, weight / total.clamp_min(1e-300), 0.0)
    assert_close(found.out, (out.double() * share[..., None]).float())
    assert_close(found.lse, total.log().float())


@pytest.mark.parametrize("group", [1, 3, 5, 7])
@pytest.mark.parametrize("by_query_head", [False, True])
@pytest.mark.parametrize("by_kv_head", [False, True])
def test_pages_of_rows_and_heads_of_any_length(group, by_query_head, by_kv_head):
    """Attention over pages is dense attention to the keys that they have, of every head and row, in ragged batches."""
    batch, kv_heads, number, size, dim = 3, 2, 23, 4, 8
    generator = torch.Generator().manual_seed(group)
    q = torch.randn(batch, kv_heads * group, 1, dim, generator=generator)
    k, v = (torch.randn(batch, kv_heads, number, dim, generator=generator) for _ in range(2))
    heads = kv_heads * group if by_query_head else kv_heads
    order = torch.rand(batch, heads, 6, generator=generator).argsort(-1)[..., :4]
    lengths = torch.tensor([[23, 9], [1, 17], [0, 23]]) if by_kv_head else torch.tensor([23, 9, 0])
    found = ops.attend_pages(q, KV(k, v, lengths=lengths), order, size, logits=Logits(0.4), need_lse=True)
    ends = (lengths if by_kv_head else lengths[:, None].expand(-1, kv_heads)).repeat_interleave(group, 1)
    chosen = order if by_query_head else order.repeat_interleave(group, 1)
    places = torch.arange(number)
    mask = (places[:, None] // size == chosen[..., None, :]).any(-1) & (places < ends[..., None])
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    expected = ops.attend(q, KV(keys, values), logits=Logits(0.4), mask=mask[:, :, None], need_lse=True)
    assert_close(found.out, expected.out)
    assert_close(found.lse, expected.lse)

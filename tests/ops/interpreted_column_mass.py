"""The kernel of column_mass against its reference, in numbers that Triton's interpreter gets right: fp32 and fp16."""

import pytest
import torch

from foveate import ops
from foveate.ops import KV, Logits, dispatch
from foveate.ops.attend import window
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.score import column_mass_kernel as kernel
from foveate.ops.score import reference
from tests.combinations import every_pair
from tests.problems import LAYOUTS, Shape, assert_close, causal_mask, in_buffer, naive, problem

SOME = Shape(batch=1, kv_heads=2, group=3, queries=41, offset=14, dim=16, value_dim=16)
SMALL = kernel.Tile(16, 16, num_warps=4, num_stages=1)


pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(kernel, "tile_for", lambda dtype, dim: SMALL)


def causal(shape, **more):
    q, k, _v = problem(shape, **more)
    return q, k, log_sum_exp(q, k[:, :, : shape.keys], shape)


def log_sum_exp(q, k, shape):
    return naive(q, k, k, 0.3, causal_mask(shape.queries, shape.offset)).lse.float()


def check(q, k, lse, offset):
    mass = kernel.column_mass(q, KV(k), lse, logits=Logits(0.3), offset=offset)
    assert mass.dtype == torch.float32
    assert_close(mass, reference.column_mass(q, KV(k), lse, logits=Logits(0.3), offset=offset))
    return mass


# Sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("queries", "offset"), [(1, 0), (1, 200), (33, 0), (129, 0), (150, 77), (70, 128), (64, 1)])
def test_lengths(dtype, queries, offset):
    shape = SOME._replace(batch=3, kv_heads=1, group=2, queries=queries, offset=offset, dim=64)
    mass = check(*causal(shape, dtype=dtype), offset)
    assert_close(mass.sum(-1), torch.full((3, 1), 2.0 * queries), torch.float16)


@pytest.mark.parametrize(("queries", "offset"), [(1, 0), (15, 1), (16, 0), (17, 15), (48, 16), (70, 33), (300, 0)])
def test_many_blocks(queries, offset, small_tiles):
    check(*causal(SOME._replace(group=1, queries=queries, offset=offset)), offset)


@pytest.mark.parametrize("group", [1, 4, 7, 8, 16])
def test_groups(group):
    check(*causal(SOME._replace(batch=2, group=group, queries=5)), 14)


@pytest.mark.parametrize("dim", [5, 16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_head_dims(dim, dtype):
    check(*causal(SOME._replace(group=1, dim=dim), dtype=dtype), 14)


@every_pair(("dtype", [torch.float32, torch.float16]), ("softcap", [0.7, 5.0, 50.0]), ("offset", [0, 14]))
def test_capped_logits(dtype, softcap, offset, small_tiles):
    """Some far beyond the cap."""
    shape = SOME._replace(batch=2, offset=offset)
    q, k, v = problem(shape, dtype=dtype)
    how = {"logits": Logits(3.0, softcap=softcap), "offset": offset}
    lse = window.attend_capped(q, KV(k, v), **how).lse
    mass = kernel.column_mass(q, KV(k), lse, **how)
    assert_close(mass, reference.column_mass(q, KV(k), lse, **how))
    assert_close(mass.sum(-1), torch.full((2, 2), 3.0 * shape.queries), torch.float16)


# Memory


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("extra", [0, 20])
def test_strided_inputs_among_nan(layout, extra):
    q, k, lse = causal(SOME, layout=layout, extra=extra)
    lse = in_buffer(lse[..., None], "tokens_first")[..., 0]
    expected = check(q, k, lse, 14)
    assert expected.isfinite().all()
    assert torch.equal(kernel.column_mass(in_buffer(q, layout), KV(k), lse, logits=Logits(0.3), offset=14), expected)
    assert (expected[:, :, SOME.keys :] == 0).all()


def test_adds_to_a_view_of_a_poisoned_buffer(small_tiles):
    q, k, lse = causal(SOME, extra=9)
    buffer = torch.full((1, 3, 90), float("nan"))
    out = buffer[:, 1:, 7 : 7 + k.shape[2]].fill_(1.0)
    untouched = buffer.isnan()
    assert kernel.column_mass(q, KV(k), lse, logits=Logits(0.3), offset=14, out=out) is out
    assert_close(out, 1 + reference.column_mass(q, KV(k), lse, logits=Logits(0.3), offset=14))
    assert torch.equal(buffer.isnan(), untouched)


@pytest.mark.parametrize("cut", [1, 16, 40])
def test_adds_up_over_chunks_of_queries(cut, small_tiles):
    q, k, lse = causal(SOME)
    mass = kernel.column_mass(q[:, :, :cut], KV(k), lse[:, :, :cut], logits=Logits(0.3), offset=14)
    kernel.column_mass(q[:, :, cut:], KV(k), lse[:, :, cut:], logits=Logits(0.3), offset=14 + cut, out=mass)
    assert_close(mass, reference.column_mass(q, KV(k), lse, logits=Logits(0.3), offset=14))


# Values


@pytest.mark.parametrize("poison", [1e4, float("nan"), float("inf")])
@pytest.mark.parametrize("count", [1, 16, 23])
def test_later_keys_and_queries_leave_no_trace(poison, count, small_tiles):
    q, k, lse = causal(SOME)
    visible = 14 + count
    before = kernel.column_mass(
        q[:, :, :count], KV(k[:, :, :visible]), lse[:, :, :count], logits=Logits(0.3), offset=14
    )
    for x, end in ((q, count), (k, visible), (lse, count)):
        x[:, :, end:] = poison
    after = kernel.column_mass(q[:, :, :count], KV(k), lse[:, :, :count], logits=Logits(0.3), offset=14)
    assert torch.equal(after[:, :, :visible], before)
    assert (after[:, :, visible:] == 0).all()


@pytest.mark.parametrize("poison", [1e4, float("nan"), float("inf")])
def test_the_causal_bound_holds_inside_a_block(poison, small_tiles):
    """A key that only the last query sees gives the earlier ones nothing, whatever it holds."""
    q, k, lse = causal(SOME)
    clean = kernel.column_mass(q, KV(k), lse, logits=Logits(0.3), offset=14)
    k[:, :, -1] = poison
    mass = kernel.column_mass(q, KV(k), lse, logits=Logits(0.3), offset=14)
    own = kernel.column_mass(q[:, :, -1:], KV(k), lse[:, :, -1:], logits=Logits(0.3), offset=SOME.keys - 1)
    assert torch.equal(mass[:, :, :-1], clean[:, :, :-1])
    assert torch.equal(mass[:, :, -1].nan_to_num(), own[:, :, -1].nan_to_num())


def test_queries_that_saw_nothing_add_nothing(small_tiles):
    q, k, lse = causal(SOME)
    lse[0, 2, 3:29] = float("-inf")
    lse[0, 0] = float("-inf")
    assert check(q, k, lse, 14).isfinite().all()


def test_repeats_are_equal(small_tiles):
    q, k, lse = causal(SOME)
    first, second = (kernel.column_mass(q, KV(k), lse, logits=Logits(0.3), offset=14) for _ in range(2))
    assert torch.equal(first, second)


# The way there


def test_the_verb_runs_the_kernel_or_says_why_not(monkeypatch):
    monkeypatch.setattr(dispatch, "use_kernel", lambda *tensors: True)
    q, k, lse = causal(SOME)
    arguments = {"lse": lse, "logits": Logits(0.3), "offset": 14}
    assert torch.equal(ops.column_mass(q, KV(k), **arguments), kernel.column_mass(q, KV(k), **arguments))
    with pytest.warns(UserWarning, match="float64"):
        assert_close(ops.column_mass(q.double(), KV(k.double()), **arguments), ops.column_mass(q, KV(k), **arguments))


def test_what_is_unsupported():
    lse = torch.zeros(1, 2, 4)
    for q, k in (
        (torch.zeros(1, 2, 4, 272), torch.zeros(1, 2, 4, 272)),
        (torch.zeros(1, 2, 4, 16).double(), torch.zeros(1, 2, 4, 16).double()),
        (torch.zeros(1, 2, 4, 16), torch.zeros(1, 2, 4, 16).half()),
    ):
        with pytest.raises(UnsupportedError):
            kernel.column_mass(q, KV(k), lse, logits=Logits(0.3))


@pytest.mark.parametrize(
    "change",
    [
        {"kv": KV(torch.zeros(1, 2, 6, 16))},
        {"kv": KV(torch.zeros(1, 3, 7, 16))},
        {"lse": torch.zeros(1, 1, 4)},
        {"out": torch.zeros(1, 1, 7)},
        {"out": torch.zeros(1, 2, 6)},
    ],
)
def test_shapes_that_do_not_fit_are_refused(change):
    fitting = {"q": torch.zeros(1, 4, 4, 16), "kv": KV(torch.zeros(1, 2, 7, 16)), "lse": torch.zeros(1, 4, 4)}
    kernel.column_mass(**fitting, logits=Logits(0.3), offset=3)
    with pytest.raises(ValueError, match=r"keys|shapes"):
        kernel.column_mass(**fitting | change, logits=Logits(0.3), offset=3)

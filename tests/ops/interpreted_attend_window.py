"""The kernel of attend_window against its reference, in numbers that Triton's interpreter gets right: fp32 and fp16."""

import pytest
import torch

from foveate import ops
from foveate.ops import KV, Logits, dispatch
from foveate.ops.attend import window
from foveate.ops.attend import window_kernel as kernel
from foveate.ops.dispatch import UnsupportedError
from tests.combinations import every_pair
from tests.problems import LAYOUTS, Shape, assert_close, in_buffer, problem

SOME = Shape(batch=1, kv_heads=1, group=1, queries=41, offset=14, dim=16, value_dim=16)
SMALL = kernel.Tile(16, 16, num_warps=4, num_stages=1)
LOWER = {  # of each position
    "dense": torch.zeros_like,
    "far_below": lambda position: torch.full_like(position, -(1 << 40)),
    "own_only": lambda position: position,
    "window_of_20": lambda position: position - 19,
    "window_of_64": lambda position: position - 63,
    "share": lambda position: position + 1 - (0.3 * (position + 1)).long().clamp_min(1),
    "same_for_nine": lambda position: position // 9 * 9 - 3,
    "jump": lambda position: torch.where(position < 30, 2, 27),
}
POISON = pytest.mark.parametrize("poison", [1e4, float("nan"), float("inf")])


pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(kernel, "tile_for", lambda dtype, dim: SMALL)


def lower_of(kind, shape):
    return LOWER[kind](torch.arange(shape.offset, shape.keys))


def run(q, k, v, lower, sinks, offset):
    return kernel.attend_window(q, KV(k, v), logits=Logits(0.3), lower=lower, sinks=sinks, offset=offset).out


def check(q, k, v, lower, sinks, offset):
    out = run(q, k, v, lower, sinks, offset)
    assert out.dtype == q.dtype
    expected = window.attend_window(q, KV(k, v), logits=Logits(0.3), lower=lower, sinks=sinks, offset=offset).out
    assert_close(out, expected, q.dtype)
    return out


# Windows


@pytest.mark.parametrize("sinks", [0, 1, 4, 5, 16, 40])
@pytest.mark.parametrize("offset", [0, 14])
@pytest.mark.parametrize("kind", LOWER)
def test_windows(kind, offset, sinks, small_tiles):
    shape = SOME._replace(queries=70, offset=offset)
    check(*problem(shape, extra=5), lower_of(kind, shape), sinks, offset)


@pytest.mark.parametrize("seed", range(12))
def test_any_window(seed, small_tiles):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    shape = SOME._replace(queries=draw(1, 90), offset=draw(0, 60))
    steps = torch.randint(draw(1, 5), (shape.queries,), generator=generator)
    lower = steps.cumsum(0) + draw(-40, shape.offset + 1)  # may overtake the queries, which then see the sinks only
    check(*problem(shape, seed), lower, draw(0, 30), shape.offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("queries", "offset"), [(1, 0), (1, 200), (33, 0), (129, 0), (150, 277), (64, 1)])
def test_lengths(dtype, queries, offset):
    shape = SOME._replace(batch=2, queries=queries, offset=offset, dim=64)
    check(*problem(shape, dtype=dtype), lower_of("window_of_64", shape), 4, offset)


@pytest.mark.parametrize("kind", ["window_of_20", "share"])
def test_a_window_in_blocks_of_the_real_size(kind):
    shape = SOME._replace(queries=300, offset=77)
    check(*problem(shape, dtype=torch.float16), lower_of(kind, shape), 4, 77)


# Heads


@pytest.mark.parametrize("group", [1, 4, 7])
def test_groups(group):
    shape = SOME._replace(batch=2, kv_heads=2, group=group, queries=5)
    check(*problem(shape), lower_of("window_of_20", shape), 2, 14)


@pytest.mark.parametrize(
    ("dim", "value_dim"),
    [(5, 5), (32, 32), (40, 40), (64, 64), (80, 80), (128, 128), (256, 256), (192, 128), (24, 72), (72, 24)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_head_dims(dim, value_dim, dtype):
    shape = SOME._replace(dim=dim, value_dim=value_dim, queries=20)
    check(*problem(shape, dtype=dtype), lower_of("window_of_20", shape), 2, 14)


# Memory


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_strided_inputs_among_nan(layout, dtype):
    shape = SOME._replace(batch=2, kv_heads=2, group=2, queries=20, value_dim=24)
    lower = torch.stack([lower_of("share", shape), torch.full((20,), 99)], 1)[:, 0]
    q, k, v = problem(shape, dtype=dtype)
    expected = check(q, k, v, lower.clone(), 4, 14)
    q, k, v = (in_buffer(x, layout) for x in (q, k, v))
    assert torch.equal(run(q, k, v, lower, 4, 14), expected)


@POISON
@pytest.mark.parametrize("sinks", [0, 3, 20])
def test_keys_that_no_query_sees_leave_no_trace(poison, sinks, small_tiles):
    shape = SOME._replace(offset=50)
    lower = lower_of("window_of_20", shape)
    q, k, v = problem(shape, extra=30)
    clean = check(q, k, v, lower, sinks, 50)
    for x in (k, v):
        x[:, :, sinks : lower[0]] = poison
        x[:, :, shape.keys :] = poison
    assert torch.equal(run(q, k, v, lower, sinks, 50), clean)


@pytest.mark.parametrize("kind", ["dense", "window_of_20", "own_only"])
def test_the_bounds_hold_inside_a_block(kind):
    """What a key holds, however large, changes the outputs of those queries alone that see it."""
    shape = SOME._replace(offset=30)
    lower = lower_of(kind, shape)
    q, k, v = problem(shape)
    clean = run(q, k, v, lower, 2, 30)
    for key in (1, 2, 12, 30, 45, 70):
        dear, changed = k.clone(), v.clone()
        dear[:, :, key], changed[:, :, key] = 30 * q[:, :, -1], 1e6
        out = run(q, dear, changed, lower, 2, 30)
        position = torch.arange(30, 71)
        sees = (key <= position) & ((key >= lower) | (key < 2))
        assert torch.equal((out != clean).any(-1).flatten(), sees)


def test_queries_that_see_nothing_get_zero(small_tiles):
    q, k, v = problem(SOME)
    lower = lower_of("window_of_20", SOME)
    lower[5:] += 40
    out = check(q, k, v, lower, 0, 14)
    assert (out[:, :, 5:] == 0).all()
    assert (out[:, :, :5] != 0).all()
    assert (check(q, k, v, torch.full_like(lower, 1 << 40), 0, 14) == 0).all()
    check(q, k, v, torch.full_like(lower, 1 << 40), 5, 14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("level", [-20.0, 0.0, 20.0, float("-inf")])
def test_learned_sinks(dtype, level, small_tiles):
    """They take their share, of queries that see nothing all."""
    shape = SOME._replace(batch=2, kv_heads=2, group=3)
    q, k, v = problem(shape, dtype=dtype)
    lower = lower_of("window_of_20", shape)
    lower[30:] += 40
    how = {"lower": lower, "sinks": 0, "offset": 14}
    learned = torch.stack([torch.randn(6, generator=torch.manual_seed(0)) + level, torch.zeros(6)], 1).to(dtype)[:, 0]
    out = kernel.attend_window(q, KV(k, v), logits=Logits(0.3, learned), **how).out
    assert_close(out, window.attend_window(q, KV(k, v), logits=Logits(0.3, learned), **how).out, dtype)
    without = kernel.attend_window(q, KV(k, v), logits=Logits(0.3), **how).out
    assert torch.equal(out, without) == (level < 0)
    assert (out[:, :, 30:] == 0).all()
    with pytest.raises(ValueError, match="one logit for each of 6 heads"):
        ops.attend_window(q, KV(k, v), logits=Logits(0.3, learned[:5]), **how)


@every_pair(
    ("dtype", [torch.float32, torch.float16]),
    ("softcap", [0.7, 5.0, 50.0]),
    ("beside", [False, True]),
    ("offset", [0, 14]),
)
def test_capped_logits(dtype, softcap, beside, offset, small_tiles):
    """Some far beyond the cap. Learned sinks are not capped."""
    shape = SOME._replace(batch=2, kv_heads=2, group=3, offset=offset)
    q, k, v = problem(shape, dtype=dtype, extra=3)
    lower = lower_of("window_of_20", shape)
    lower[30:] += 40  # these see the first keys alone
    how = {"lower": lower, "sinks": 3, "offset": offset}
    learned = torch.randn(6, generator=torch.manual_seed(0)).to(dtype) if beside else None
    logits, without = Logits(3.0, learned, softcap), Logits(3.0, learned)
    out = kernel.attend_window(q, KV(k, v), logits=logits, **how).out
    assert_close(out, window.attend_window(q, KV(k, v), logits=logits, **how).out, dtype)
    assert not torch.allclose(out, kernel.attend_window(q, KV(k, v), logits=without, **how).out, rtol=0.01, atol=0.01)


@every_pair(
    ("dtype", [torch.float32, torch.float16]), ("softcap", [0.7, 50.0]), ("offset", [0, 14]), ("queries", [1, 41, 70])
)
def test_capped_prompts(dtype, softcap, offset, queries, small_tiles):
    """All keys up to each query's own, with the log-sum-exp."""
    shape = SOME._replace(batch=2, kv_heads=2, group=3, offset=offset, queries=queries, value_dim=24)
    q, k, v = problem(shape, dtype=dtype, extra=3)
    how = {"logits": Logits(3.0, softcap=softcap), "offset": offset}
    found, expected = (one.attend_capped(q, KV(k, v), **how) for one in (kernel, window))
    assert_close(found.out, expected.out, dtype)
    assert_close(found.lse, expected.lse, dtype)


def test_large_logits(small_tiles):
    q, k, v = problem(SOME)
    check(100 * q, 100 * k, v, lower_of("share", SOME), 4, 14)
    check(q, 0 * k, v, lower_of("share", SOME), 4, 14)


def test_repeats_are_equal(small_tiles):
    q, k, v = problem(SOME)
    first, second = (run(q, k, v, lower_of("share", SOME), 4, 14) for _ in range(2))
    assert torch.equal(first, second)


# The way there


def test_the_verb_runs_the_kernel_or_says_why_not(monkeypatch):
    monkeypatch.setattr(dispatch, "use_kernel", lambda *tensors: True)
    q, k, v = problem(SOME)
    arguments = {"lower": lower_of("window_of_20", SOME), "logits": Logits(0.3), "offset": 14}
    out = ops.attend_window(q, KV(k, v), **arguments).out
    assert torch.equal(out, kernel.attend_window(q, KV(k, v), **arguments).out)
    with pytest.warns(UserWarning, match="float64"):
        assert_close(ops.attend_window(q.double(), KV(k.double(), v.double()), **arguments).out, out)


def test_what_is_unsupported():
    lower, fitting = torch.zeros(4, dtype=torch.int64), torch.zeros(1, 2, 4, 16)
    wide = torch.zeros(1, 2, 4, 272)
    for q, k, v in (
        (wide, wide, fitting),
        (fitting, fitting, wide),
        (fitting.double(), fitting.double(), fitting.double()),
        (fitting, fitting.half(), fitting),
        (fitting, fitting, fitting.half()),
    ):
        with pytest.raises(UnsupportedError):
            kernel.attend_window(q, KV(k, v), logits=Logits(0.3), lower=lower)


@pytest.mark.parametrize(
    "change",
    [
        {"k": torch.zeros(1, 2, 6, 16), "v": torch.zeros(1, 2, 6, 24)},
        {"k": torch.zeros(1, 3, 7, 16), "v": torch.zeros(1, 3, 7, 24)},
        {"k": torch.zeros(1, 2, 7, 17)},
        {"v": torch.zeros(1, 1, 7, 24)},
        {"v": torch.zeros(1, 2, 8, 24)},
        {"lower": torch.zeros(5, dtype=torch.int64)},
        {"lower": torch.zeros(1, 4, dtype=torch.int64)},
    ],
)
def test_shapes_that_do_not_fit_are_refused(change):
    fitting = {
        "k": torch.zeros(1, 2, 7, 16),
        "v": torch.zeros(1, 2, 7, 24),
        "lower": torch.zeros(4, dtype=torch.int64),
    }

    def call(k, v, lower):
        ops.attend_window(torch.zeros(1, 4, 4, 16), KV(k, v), logits=Logits(0.3), lower=lower, offset=3)

    call(**fitting)
    with pytest.raises(ValueError, match=r"keys|KV heads|shapes|lower"):
        call(**fitting | change)

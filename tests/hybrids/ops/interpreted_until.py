"""The kernels of attend_until against their reference, in numbers that Triton's interpreter gets right."""

import pytest
import torch

from foveate.hybrids.ops import attend_until, until, until_kernel
from foveate.ops.dispatch import UnsupportedError
from foveate.ops.gpu.tiles import Tile
from tests.problems import LAYOUTS, Shape, assert_close, in_buffer, naive, problem

SOME = Shape(batch=2, kv_heads=2, group=2, queries=70, offset=25, dim=16, value_dim=16)
SMALL = Tile(16, 16, num_warps=4, num_stages=1)

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Tiles, spans and scans so small that there are many of each."""
    monkeypatch.setattr(until_kernel, "tile_for", lambda dtype, dim: SMALL)
    monkeypatch.setattr(until_kernel, "_SPAN", 32)
    monkeypatch.setattr(until_kernel, "_SCAN", 32)


def ends(shape, window, share=0.3, longest=60, seed=0, absent=0):
    """When keys go: with their window, some later, some never; the first ``absent`` of every row are never seen."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.batch, shape.kv_heads, shape.keys)
    own = torch.arange(shape.keys) - shape.offset
    retained = torch.rand(size, generator=generator) < share
    longer = torch.randint(1, longest, size, generator=generator)
    longer[..., ::11] = shape.queries
    gone = (own + window + 1 + longer * retained).clamp(0, shape.queries)
    gone[..., :absent] = 0
    return gone


def check(q, k, v, gone, window, retained):
    found = until_kernel.attend_until(q, k, v, gone, scaling=0.3, window=window, retained=retained).out
    expected = until.attend_until(q, k, v, gone, scaling=0.3, window=window, retained=retained).out
    assert found.dtype == q.dtype
    assert_close(found, expected, q.dtype)
    return found


@pytest.mark.parametrize("window", [0, 1, 15, 16, 40, 200])
@pytest.mark.parametrize("retained", [0, 20, 500])
def test_a_window_and_what_is_retained(window, retained):
    shape = SOME._replace(batch=1, queries=50)
    gone = ends(shape, window)
    q, k, v = problem(shape)
    found = check(q, k, v, gone, window, retained)
    at = torch.arange(shape.queries)[:, None]
    mask = (torch.arange(shape.keys) - shape.offset <= at) & (at < gone[:, :, None])
    assert_close(found, naive(q, k, v, 0.3, mask).out.float())


@pytest.mark.parametrize("seed", range(12))
def test_any_ends(seed):
    """Ends that fit no window, which is for speed alone; lists that overflow among them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    shape = SOME._replace(queries=draw(1, 90), offset=draw(0, 60), group=draw(1, 6), batch=1)
    gone = torch.randint(-5, shape.queries + 5, (1, 2, shape.keys), generator=generator)
    check(*problem(shape, seed), gone, draw(0, 80), draw(0, 40))


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("end", [22, 23, 24])
def test_keys_that_go_at_the_edge_of_a_tile(window, end):
    """All keys at once, so that whole blocks go with a tile's last query, which is the only one not to see them."""
    shape = SOME._replace(offset=64)
    check(*problem(shape), torch.full((2, 2, shape.keys), end), window, 200)


def test_a_list_without_room_is_not_used(monkeypatch):
    """All keys are retained by all heads, and room is asked for none."""
    shape = SOME._replace(queries=200, offset=0, batch=1)
    gone = torch.full((1, 2, 200), 200)
    lists = until_kernel.list_retained(gone.int(), 200, 10, 0, 16)
    assert bool((lists.counts > lists.slots.shape[3]).any())
    assert bool((lists.counts <= lists.slots.shape[3]).any())
    check(*problem(shape), gone, 10, 0)


def test_lists_hold_what_is_seen_after_its_window():
    shape = SOME._replace(queries=90, offset=40)
    window, gone = 20, ends(SOME._replace(queries=90, offset=40), 20)
    lists = until_kernel.list_retained(gone.int(), 90, window, 100, 16)
    for span, first in enumerate(range(0, 90, 32)):
        last = min(first + 32, 90) - 1
        run = max(0, 40 + last - window) // 16 * 16
        for b in range(2):
            for h in range(2):
                expected = [j for j in range(run) if gone[b, h, j] > max(first, j - 40 + window + 1)]
                count = int(lists.counts[b, h, span])
                assert lists.slots[b, h, span, :count].tolist() == expected
                assert lists.until[b, h, span, :count].tolist() == gone[b, h, expected].tolist()
    padded = torch.nn.functional.pad(gone, (0, -shape.keys % 16))
    assert torch.equal(lists.least, padded.unflatten(2, (-1, 16)).amin(3).int())


@pytest.mark.parametrize("group", [1, 3, 4, 7, 16])
@pytest.mark.parametrize(("dim", "value_dim"), [(5, 16), (64, 64), (80, 24)])
def test_groups_and_head_dims(group, dim, value_dim):
    shape = SOME._replace(batch=1, group=group, dim=dim, value_dim=value_dim, queries=41)
    check(*problem(shape, dtype=torch.float16 if group == 4 else torch.float32), ends(shape, 12), 12, 30)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_among_nan(layout):
    q, k, v = problem(SOME, layout=layout)
    check(in_buffer(q, layout), k, v, in_buffer(ends(SOME, 12)[..., None].float(), layout)[..., 0].long(), 12, 30)


def test_rows_with_padding():
    """Keys from before the sequence, and padding after a row's tokens, are never seen; the whole row may be padding."""
    gone = ends(SOME, 12, absent=20)
    gone[1, :, 60:] = 0
    gone[0, 1] = 0
    out = check(*problem(SOME), gone, 12, 30)
    assert not out[0, 2:].any()


def test_keys_that_have_gone_leave_no_trace():
    q, k, v = problem(SOME)
    gone = ends(SOME, 12)
    gone[:, :, 3:9] = 0
    clean = check(q, k, v, gone, 12, 30)
    k[:, :, 3:9], v[:, :, 3:9] = 1e4, -1e4
    assert torch.equal(check(q, k, v, gone, 12, 30), clean)


def test_no_queries():
    shape = SOME._replace(queries=1)
    q, k, v = problem(shape)
    gone = ends(shape, 12)
    assert until_kernel.attend_until(q[:, :, :0], k, v, gone, scaling=1.0).out.shape == (2, 4, 0, 16)


def test_what_is_refused():
    q, k, v = problem(SOME)
    gone = ends(SOME, 12)
    for run in (until_kernel.attend_until, attend_until):
        with pytest.raises(ValueError, match=r"until \(2, 2, 94\)"):
            run(q, k, v, gone[..., 1:], scaling=1.0)
        with pytest.raises(ValueError, match=r"v \(2, 2, 94, 16\)"):
            run(q, k, v[:, :, 1:], gone, scaling=1.0)
        with pytest.raises(ValueError, match="at least 0, not -1 and 0"):
            run(q, k, v, gone, scaling=1.0, window=-1)
    with pytest.raises(UnsupportedError, match="keys in"):
        until_kernel.attend_until(q, k.half(), v, gone, scaling=1.0)
    with pytest.raises(UnsupportedError, match=r"a scaling of -1\.0"):
        until_kernel.attend_until(q, k, v, gone, scaling=-1.0)
    wide = torch.zeros(1, 17, 3, 16)
    with pytest.raises(UnsupportedError, match="more than 16 query heads"):
        until_kernel.attend_until(wide, wide[:, :1], wide[:, :1], gone[:1, :1, :3], scaling=1.0)

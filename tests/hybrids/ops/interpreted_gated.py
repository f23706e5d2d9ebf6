"""The kernels of attend_gated against their reference, in numbers that Triton's interpreter gets right."""

import pytest
import torch

from foveate.hybrids.ops import attend_gated, gated, gated_kernel
from foveate.ops.dispatch import UnsupportedError
from tests.problems import LAYOUTS, assert_close, in_buffer

SIZES = {"block": 8, "blocks": 4, "window": 20}

pytestmark = pytest.mark.usefixtures("poisoned")


def problem(number=150, batch=2, kv_heads=2, group=3, dim=16, value_dim=16, block=8, dtype=torch.float32, seed=0):
    """What follows the keys and the summaries of complete blocks is large."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(size, generator=generator).to(dtype)

    k, v = (draw(batch, kv_heads, number, d) for d in (dim, value_dim))
    count = number // block
    summaries = [x[:, :, : count * block].unflatten(2, (count, block)).float().mean(3).to(dtype) for x in (k, v)]
    spare = [torch.cat([x, x.new_full((batch, kv_heads, 2, x.shape[3]), 1e4)], 2) for x in summaries]
    q = 2 * draw(batch, kv_heads * group, 1, dim)
    gates = torch.rand(3, batch, kv_heads * group, 1, generator=generator).to(dtype)
    return [q, k, v, *spare, gates]


def check(given, lengths, **sizes):
    lengths = torch.tensor(lengths)
    found = gated_kernel.attend_gated(*given, lengths, scaling=0.3, **SIZES | sizes).out
    expected = gated.attend_gated(*given, lengths, scaling=0.3, **SIZES | sizes).out
    assert found.dtype == given[0].dtype
    assert_close(found, expected, given[0].dtype)
    return found


@pytest.mark.parametrize("lengths", [[150, 150], [150, 1], [7, 8], [9, 16], [143, 144], [24, 33]])
def test_rows_of_any_length(lengths):
    given = problem()
    clean = check(given, lengths)
    for b, length in enumerate(lengths):  # what is not there yet may hold anything finite
        for x in given[1:3]:
            x[b, :, length:] = -1e4
        for x in given[3:5]:
            x[b, :, length // 8 :] = 1e4
    assert torch.equal(check(given, lengths), clean)


@pytest.mark.parametrize(("block", "blocks", "window"), [(8, 3, 1), (16, 16, 64), (5, 4, 33), (64, 3, 200), (1, 40, 7)])
def test_sizes_of_blocks_and_windows(block, blocks, window):
    check(problem(block=block), [150, 97], block=block, blocks=blocks, window=window)


@pytest.mark.parametrize("group", [1, 4, 16, 20])
@pytest.mark.parametrize(("dim", "value_dim"), [(5, 24), (64, 64), (80, 16)])
def test_groups_and_head_dims(group, dim, value_dim):
    dtype = torch.float16 if group == 4 else torch.float32
    check(problem(group=group, dim=dim, value_dim=value_dim, dtype=dtype), [150, 60])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_among_nan(layout):
    q, k, v, *summaries, gates = problem()
    wide = [in_buffer(x, layout) for x in (q, k, v, *summaries)]
    check([*wide, gates.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)], [150, 60])


def test_of_equal_weights_the_earlier_block_is_selected():
    given = problem(seed=1)
    given[3][:, :, 3:9] = given[3][:, :, 2:3]
    given[0][:, 3:] = 0  # all blocks alike for the second KV head
    check(given, [150, 150], blocks=5)


def test_more_programs_share_a_row(monkeypatch):
    given = problem(number=600)
    one = check(given, [600, 333], blocks=30, window=200)
    monkeypatch.setattr(gated_kernel, "_LONGEST", 1)
    assert_close(check(given, [600, 333], blocks=30, window=200), one)


def test_what_is_refused():
    given, lengths = problem(), torch.tensor([150, 150])
    for run in (gated_kernel.attend_gated, attend_gated):
        with pytest.raises(ValueError, match=r"lengths \(1,\)"):
            run(*given, lengths[:1], scaling=1.0, **SIZES)
        with pytest.raises(ValueError, match=r"block_keys \(2, 2, 17, 16\)"):
            run(*given[:3], given[3][:, :, :17], given[4][:, :, :17], given[5], lengths, scaling=1.0, **SIZES)
    mixed = [given[0].half(), *given[1:]]
    with pytest.raises(UnsupportedError, match="keys in"):
        gated_kernel.attend_gated(*mixed, lengths, scaling=1.0, **SIZES)
    with pytest.raises(UnsupportedError, match="head dims above"):
        gated_kernel.attend_gated(*problem(dim=136), lengths, scaling=1.0, **SIZES)
    with pytest.raises(UnsupportedError, match="more than 64 query heads"):
        gated_kernel.attend_gated(*problem(group=65), lengths, scaling=1.0, **SIZES)

"""Hopper's kernels of tiles as their source says, without a GPU: lists of keys, barriers and their phases, masks."""

import itertools
import random
from pathlib import Path

import pytest
import torch

from foveate.ops import KV, Logits
from foveate.ops.attend import tiles
from foveate.ops.score import reference
from tests import gluon_on_cpu

ATTENTION, MASS = (Path(one.__file__).with_name("tiles_hopper_kernel.py") for one in (tiles, reference))


@pytest.fixture(autouse=True)
def triton_is_there():
    pytest.importorskip("triton")


def attend(seed, changed=()):
    """The largest error of a problem that ``seed`` draws."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).half()

    dim, group, tile = draw.choice([40, 64, 80, 128]), draw.choice([1, 2, 4, 7]), draw.choice([18, 32, 65, 100, 128])
    while group * tile <= 64:
        group += 1
    batch, kv_heads = draw.choice([1, 2]), draw.choice([1, 2])
    length, offset, most = (
        draw.choice([1, 33, 150, 260]),
        draw.choice([0, 5, 64, 300]),
        draw.choice([0, 1, 127, 128, 300]),
    )
    q = normal(batch, length, kv_heads * group, dim).transpose(1, 2)
    k, v = normal(batch, kv_heads, offset + length + 9, dim), normal(batch, kv_heads, offset + length + 9, dim) + 2
    k[:, :, offset + length :], v[:, :, offset + length :] = float("nan"), float("nan")

    lead = offset % tile
    count = -(-(lead + length) // tile)
    indices = torch.full((batch, kv_heads, count, most), -1, dtype=torch.int32)
    for b, h, t in itertools.product(range(batch), range(kv_heads), range(count)):
        before = offset - lead + t * tile
        some = torch.randperm(before, generator=generator)[: max(0, most - draw.choice([0, 0, 5, 70]))].sort().values
        indices[b, h, t, : len(some)] = some.int()
    numbers = torch.randint(0, most + 1, (count,), generator=generator) if draw.random() < 0.5 else [most] * count
    starts = torch.nn.functional.pad(torch.as_tensor(numbers).cumsum(0), (1, 0))
    lists = [indices[:, :, t, : numbers[t]] for t in range(count)]
    given = (torch.cat(lists, 2), starts, torch.stack([(x >= 0).sum(-1, dtype=torch.int32) for x in lists], 2))
    how = {"tile": tile, "offset": offset}
    how["heads"] = torch.randint(0, kv_heads, (kv_heads,), generator=generator) if draw.random() < 0.5 else None
    sinks = torch.randn(kv_heads * group, generator=generator) if draw.random() < 0.5 else None
    how["logits"] = Logits(dim**-0.5, sinks)
    kernel = gluon_on_cpu.load_kernel(ATTENTION, changed)
    out = torch.full_like(q, float("nan"))
    lse = torch.full(q.shape[:3], float("nan")) if draw.random() < 0.5 else None
    found = kernel.attend_tiles(q, k, v, *given, out, lse, **how).out
    how |= dict(zip(("indices", "starts", "counts"), given, strict=True))
    exact = tiles.attend_tiles(q.double(), KV(k.double(), v.double()), need_lse=True, **how)
    error = (found.double() - exact.out).abs().max()
    return float(error if lse is None else error.maximum((lse.double() - exact.lse).abs().max()))


SEEDS, CLOSE = range(24), 6e-3


@pytest.mark.parametrize("seed", SEEDS)
def test_attention(seed):
    assert attend(seed) < CLOSE


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("mbarrier.wait(q_empty, (lap & 1) ^ 1)", "mbarrier.wait(q_empty, 1)"),
        ("place[None, :] <= limits[:, None]", "place[None, :] < limits[:, None]"),
        ("whole = used // KEYS", "whole = gl.cdiv(used, KEYS)"),
        ("blocks - 2 - step", "blocks - 1 - step"),
    ],
)
def test_what_is_wrong_is_seen(right, wrong, monkeypatch):
    monkeypatch.setattr(gluon_on_cpu, "PATIENCE", 0.5)

    def is_right(seed):
        try:
            return attend(seed, [(right, wrong)]) < CLOSE
        except RuntimeError:  # a deadlock
            return False

    assert not all(is_right(seed) for seed in SEEDS)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("seed", range(16))
def test_mass(seed):
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, heads, rows, dim = (
        draw.choice([1, 2]),
        draw.choice([1, 3]),
        draw.choice([65, 126, 128]),
        draw.choice([64, 128]),
    )
    count, number = draw.choice([1, 3, 4, 5, 9]), draw.choice([1, 64, 65, 500, 900])
    queries = torch.randn(batch, heads, count, rows, dim, generator=generator).half()
    k = torch.randn(batch, number, heads, dim, generator=generator).half().transpose(1, 2)
    lse = torch.randn(batch, heads, count, rows, generator=generator) + 5
    lse[:, :, 0, rows // 2 :] = float("inf")
    begins = torch.randint(0, number + 100, (count,), generator=generator)
    kernel = gluon_on_cpu.load_kernel(MASS)
    kernel._SPAN = draw.choice([1, 2, 128])
    found = kernel.tile_block_mass(queries, k, lse, begins, scaling=0.09)
    exact = reference.tile_block_mass(queries.double(), k.double(), lse.double(), begins, logits=Logits(0.09))
    torch.testing.assert_close(found, exact.float(), rtol=1e-4, atol=1e-7)

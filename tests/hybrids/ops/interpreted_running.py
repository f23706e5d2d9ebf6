"""The kernels of a buffer of the best tokens against their references, under Triton's interpreter."""

import pytest
import torch

from foveate.hybrids.ops import running, running_kernel
from foveate.ops.dispatch import UnsupportedError
from tests.combinations import every_pair

pytestmark = pytest.mark.usefixtures("poisoned")

INF, NAN = float("inf"), float("nan")


def drawn(*shape, seed=0, kind="few"):
    """Margins: many equal ones with sinks, padding's NaN and tokens that are not let in; or all different."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "all":
        return torch.rand(shape, generator=generator) + 0.01
    if kind == "rising":
        return torch.arange(1, shape[-1] + 1).expand(shape) / 8
    values = torch.tensor([-1.0, 0.0, -0.0, 0.25, 0.5, 0.5, 0.75, 1e-40, INF, NAN])
    return values[torch.randint(len(values), shape, generator=generator)]


def buffer(batch, heads, size, filled, seed=0):
    """A buffer in any order, each KV head with its number of tokens, holes among them."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(batch, heads, size, generator=generator).argsort(-1)
    positions = (2 * order + 3).masked_fill(order >= torch.tensor(filled).view(1, -1, 1), -1)
    margins = torch.tensor([0.25, 0.5, 0.75, INF])[torch.randint(4, order.shape, generator=generator)]
    return margins, positions


def check_best(kept, places, margins, positions):
    found = running_kernel.running_best(kept, places, margins, positions)
    expected = running.running_best(kept, places, margins, positions)
    for mine, its in zip(found, expected, strict=True):
        assert mine.dtype == its.dtype
        assert torch.equal(mine, its)
    return found


@every_pair(
    ("kind", ["few", "all", "rising"]),
    (("size", "filled"), [(1, (0, 1)), (7, (3, 7)), (32, (0, 32)), (40, (40, 11))]),
    ("count", [1, 30, 300]),
    ("first", [32, 512]),
    strength=3,
)
def test_when_tokens_leave(kind, size, filled, count, first, monkeypatch):
    """With one floor, and with several, each from blocks of tokens."""
    monkeypatch.setattr(running_kernel, "_FIRST", first)
    monkeypatch.setattr(running_kernel, "_SCAN", first)
    kept, places = buffer(2, 2, size, filled)
    positions = 1000 + torch.arange(count).expand(2, -1).clone()
    positions[1, count // 2 :] = -1
    check_best(kept, places, drawn(2, 2, count, kind=kind), positions)


@pytest.mark.parametrize("seed", range(8))
def test_any_buffer(seed, monkeypatch):
    monkeypatch.setattr(running_kernel, "_FIRST", 32)
    monkeypatch.setattr(running_kernel, "_OTHERS", 16)
    generator = torch.Generator().manual_seed(seed)
    size, count = (int(torch.randint(1, high, (), generator=generator)) for high in (60, 90))
    filled = torch.randint(0, size + 1, (3,), generator=generator).tolist()
    kept, places = buffer(2, 3, size, filled, seed)
    positions = 500 + torch.arange(count).expand(2, -1).clone()
    positions[torch.rand(2, count, generator=generator) < 0.1] = -1
    check_best(kept, places, drawn(2, 3, count, seed=seed), positions)


def test_tokens_leave_on_the_way():
    """The numbers are those of the policy, and not only those of the reference."""
    margins = torch.tensor([[[0.5, 0.9, 0.9, 0.2, 0.95]]])
    found = check_best(torch.tensor([[[0.4, 0.5]]]), torch.tensor([[[7, 3]]]), margins, torch.arange(10, 15)[None])
    assert found.kept.tolist() == [[[0, 2]]]
    assert found.new.tolist() == [[[1, 5, 4, 3, 5]]]


def test_views_of_a_memory():
    """Margins and positions among others, as the layers hand them over."""
    kept, places = buffer(2, 2, 9, (9, 4))
    wide = torch.full((2, 2, 30), NAN)
    wide[:, :, 21:] = kept
    late = torch.full((2, 2, 50), NAN)
    late[:, :, 3:43] = drawn(2, 2, 40)
    check_best(wide[:, :, 21:], places, late[:, :, 3:43], torch.arange(100, 180).view(40, 2).t())


def test_few_tokens_are_compared():
    """Of a long prompt the list holds little more than the buffer for every doubling, whatever the scale of margins."""
    size, count, found = 16, 2048, []
    kernel = running_kernel._list_best

    class Noted:
        def __getitem__(self, grid):
            return lambda *given, **options: (kernel[grid](*given, **options), found.append(given[3].clone()))

    empty = torch.zeros(1, 2, size), torch.full((1, 2, size), -1)
    margins = drawn(1, 2, count, kind="all") * torch.tensor([1e-20, 1e20])[:, None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running_kernel, "_FIRST", 32)
        patch.setattr(running_kernel, "_list_best", Noted())
        check_best(*empty, margins, torch.arange(count)[None])
    assert found[0].shape == (2, 7)
    assert found[0][:, 0].tolist() == [32, 32]
    assert int(found[0][:, 1:].max()) < 40


def test_without_a_buffer_nothing_stays():
    found = check_best(torch.zeros(1, 2, 0), torch.zeros(1, 2, 0).long(), drawn(1, 2, 20), torch.arange(20)[None])
    assert found.new[0, 1].tolist() == list(range(20))
    empty = check_best(*buffer(1, 2, 5, (5, 0)), drawn(1, 2, 0), torch.zeros(1, 0).long())
    assert empty.kept.tolist() == [[[0] * 5] * 2]


def memory(batch, heads, ring, size, filled, dim, value_dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    kept, places = buffer(batch, heads, size, filled, seed)
    order = (places < 0).to(torch.uint8).argsort(dim=-1, stable=True)  # in the first slots, as a step leaves them
    places = places.gather(2, order)
    number = ring + size
    margins = torch.cat([drawn(batch, heads, ring, seed=seed), kept.gather(2, order)], 2)
    values = torch.randn(batch, number, heads, value_dim, generator=generator).half().transpose(1, 2)
    return {
        "keys": torch.randn(batch, heads, number, dim, generator=generator).half(),
        "values": values,
        "margins": margins,
        "positions": places,
        "kept": (places >= 0).sum(2),
    }


@pytest.mark.parametrize(("dim", "value_dim"), [(5, 5), (64, 64), (80, 128)])
@pytest.mark.parametrize(("size", "filled"), [(1, (0, 1)), (12, (12, 5)), (300, (300, 299))])
def test_one_token_after_another(dim, value_dim, size, filled):
    ring = 6
    mine, its = (memory(3, 2, ring, size, filled, dim, value_dim) for _ in range(2))
    for step in range(ring):
        slots, tokens = torch.tensor([step, (step + 2) % ring, 0]), torch.tensor([900 + step, 800 + step, -1])
        for run, held in ((running_kernel.replace_weakest, mine), (running.replace_weakest, its)):
            run(**held, slots=slots, tokens=tokens, ring=ring)
        for name in mine:
            torch.testing.assert_close(mine[name], its[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", range(6))
def test_any_token(seed):
    """Rows of which each has its own slot, through strides of a larger memory."""
    ring, size = 5, 9
    held = memory(4, 3, ring, size, (9, 4, 0), 16, 16, seed)
    mine, its = {}, {name: x.clone() for name, x in held.items()}
    for name, x in held.items():
        wide = torch.zeros(*x.shape[:1], x.shape[1] + 2, *x.shape[2:], dtype=x.dtype)
        mine[name] = wide[:, 1:-1].copy_(x)
    both = torch.stack([torch.tensor([0, 4, 2, seed % ring]), torch.tensor([100, 101, -1, 103])], 1)
    for run, given in ((running_kernel.replace_weakest, mine), (running.replace_weakest, its)):
        run(**given, slots=both[:, 0], tokens=both[:, 1], ring=ring)
    for name in mine:
        torch.testing.assert_close(mine[name], its[name], rtol=0, atol=0, equal_nan=True)
    assert any(not torch.equal(its[name], held[name]) for name in ("positions", "kept"))


def test_what_is_refused():
    held = memory(1, 2, 4, 3, (3, 1), 8, 8)
    slots = torch.tensor([0])
    with pytest.raises(ValueError, match="do not fit a ring of 5 slots"):
        running_kernel.replace_weakest(**held, slots=slots, tokens=slots, ring=5)
    with pytest.raises(ValueError, match="do not fit a ring"):
        running_kernel.replace_weakest(**held | {"kept": held["kept"][:, :1]}, slots=slots, tokens=slots, ring=4)
    doubles = held | {"margins": held["margins"].double()}
    with pytest.raises(UnsupportedError, match="float64"):
        running_kernel.replace_weakest(**doubles, slots=slots, tokens=slots, ring=4)
    kept, places = buffer(1, 2, 1100, (5, 5))
    with pytest.raises(UnsupportedError, match="buffers above 1024"):
        running_kernel.running_best(kept, places, drawn(1, 2, 4), torch.arange(4)[None])
    with pytest.raises(ValueError, match=r"positions \(1, 3\)"):
        running_kernel.running_best(kept[..., :9], places[..., :9], drawn(1, 2, 4), torch.arange(3)[None])

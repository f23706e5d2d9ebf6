"""Quest, written out."""

import pytest
import torch

from foveate import methods, ops
from foveate.ops import Logits
from foveate.runtime import Layer, Phase, handover
from foveate.runtime.decode import decode
from foveate.state import Counters, Geometry, SlotCache
from tests.helpers import assert_close

HEADS, KV_HEADS, DIM, SCALING = 6, 2, 16, 0.3


def boxes(k, length, size):
    """Corners of the pages of ``k [n, D]``."""
    pages = [k[first : min(first + size, length)] for first in range(0, length, size)]
    return torch.stack([page.amin(0) for page in pages]), torch.stack([page.amax(0) for page in pages])


@pytest.mark.parametrize("top_k", [16, 0.4, 5])
def test_each_head_reads_the_pages_of_the_largest_possible_logits(top_k, monkeypatch):
    size, prompt, total = 4, 37, 54
    monkeypatch.setattr("foveate.methods.pages.LEAST_KEYS", 4)
    method = methods.make("quest", top_k=top_k, page_size=size, dense_layers=1)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, total, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
    layer = Layer(method.for_layer(1, 2), Counters(), Phase(prompt_end=prompt))

    def feed(first, last):
        handover.begin("driver", layer.phase)
        new = [x[:, :, first:last] for x in (q, k, v)]
        handover.post(layer, new[1])
        return layer.attend(*new, None, Logits(SCALING))

    feed(0, prompt)
    for i in range(prompt, total):
        out, length = feed(i, i + 1), i + 1
        tokens = int(top_k * length) if isinstance(top_k, float) else top_k
        number = max(max(tokens, 4 if isinstance(top_k, float) else 0) // size, 3)
        bounds = torch.stack(
            [
                torch.maximum(q[0, h, i] * low, q[0, h, i] * high).sum(-1)
                for h in range(HEADS)
                for low, high in [boxes(k[0, h // 3], length, size)]
            ]
        )
        for h in range(HEADS):
            pages = bounds[h].topk(number).indices.tolist()
            slots = torch.tensor(
                [slot for page in pages for slot in range(page * size, min((page + 1) * size, length))]
            )
            logits = k[0, h // 3, slots] @ q[0, h, i] * SCALING
            assert_close(out[0, h, 0], logits.softmax(0) @ v[0, h // 3, slots])


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("top_k", [7, 0.3, 1.0])
def test_keys_that_several_heads_read_count_once(size, top_k, monkeypatch):
    """Those of the pages that are read, one by one, of rows of several lengths; and the corners of all pages."""
    lengths, geometry = [54, 37, 1, 48], Geometry(HEADS, KV_HEADS, DIM, 2 * DIM)
    monkeypatch.setattr("foveate.methods.pages.LEAST_KEYS", 4)
    method = methods.make("quest", top_k=top_k, page_size=size, dense_layers=0)
    cache = SlotCache(geometry, 4, torch.float32, torch.device("cpu"), method.channels(geometry))
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(4, KV_HEADS, 54, dim, generator=generator) for dim in (DIM, 2 * DIM))
    cache.append(k, v)
    method.summaries.write(cache, 0, 54 // size)
    for name in ("lengths", "counts", "live"):
        cache.rows[name] = list(lengths)
    seen, real = [], ops.attend_pages
    monkeypatch.setattr(ops, "attend_pages", lambda *args, **how: seen.append(args[2]) or real(*args, **how))
    decode(method, cache, torch.randn(4, HEADS, 1, DIM, generator=generator), SCALING)
    assert seen[0].shape[1] == HEADS
    expected = 0.0
    for row, length in enumerate(lengths):
        for head in range(KV_HEADS):
            pages = {int(page) for page in seen[0][row].unflatten(0, (KV_HEADS, -1))[head].flatten() if page >= 0}
            slots = {slot for page in pages for slot in range(page * size, min((page + 1) * size, length))}
            expected += (len(slots) + (2 * (length // size) + length % size) / 3) / KV_HEADS
    assert float(cache.counters.keys_read) == pytest.approx(expected, rel=1e-12)
    if top_k == 1.0:
        assert float(cache.counters.keys_read) >= sum(lengths)


def test_first_layers_are_dense_and_keep_no_boxes():
    method = methods.make("quest")
    roles = [method.for_layer(n, 4).role.name for n in range(4)]
    assert roles == ["dense", "dense", "quest", "quest"]
    assert not method.for_layer(0, 4).channels(Geometry(HEADS, KV_HEADS, DIM, DIM))


def test_settings_stand_in_one_order():
    """By which specs of rows are written, and arguments without names are taken."""
    assert (
        methods.make("quest", dense_layers=0, page_size=4, top_k=0.2).spec
        == "quest:top_k=0.2,page_size=4,dense_layers=0"
    )
    assert next(iter(methods.settings_of(methods.make("pages")))) == "top_k"

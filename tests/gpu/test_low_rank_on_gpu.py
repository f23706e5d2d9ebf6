"""Low-rank summaries of pages on a GPU: building and scoring against the references, in every dtype."""

import pytest
import torch

from foveate import ops
from foveate.ops import KV, Logits, dispatch
from foveate.ops.attend import page_slots
from foveate.ops.compress import low_rank as summaries
from foveate.ops.score import low_rank
from tests.combinations import every_pair
from tests.helpers import in_buffer
from tests.kernels import poisoned_memory
from tests.problems import of_rows

pytestmark = pytest.mark.gpu

DTYPES = ("dtype", [torch.bfloat16, torch.float16, torch.float32])
SIZES = (
    "sizes",
    [(128, 16), (64, 16), (80, 7, 1), (128, 32, 4), (256, 64, 3), (64, 8, 4), (128, 16, 8, 8), (80, 7, 3, 8)],
)
TOLERANCE = {torch.bfloat16: 2e-3, torch.float16: 2e-3, torch.float32: 1e-4}


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch):
    """A reference that is reached without being asked for fails the test."""
    pytest.importorskip("triton")
    assert {"compress_pages", "compress_newest", "page_lse", "pooled_mass_of_records"} <= set(
        dispatch.kernel_status().split(", ")
    )
    monkeypatch.setattr(dispatch, "_say_once", lambda text: pytest.fail(text))


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def check_records(found, expected, keys, form, weights):
    """Sums in another order may round a number here and there to its neighbour, and must not make a summary worse."""
    assert (found != expected).float().mean() < 0.02
    pages = (keys.float() * weights[:, :, None]).unflatten(2, (-1, form.page_size))
    left, least = ((summaries.factors(x, form).keys() - pages).square().sum((-2, -1)) for x in (found, expected))
    torch.testing.assert_close(left, least, rtol=5e-2, atol=1e-3)


@every_pair(DTYPES, SIZES, ("layout", ["slots", "tokens_first", "padded_rows"]), ("pages", [1, 40, 777]))
def test_pages(dtype, sizes, layout, pages):
    dim, size = sizes[:2]
    form, weights = ops.PageRecord(*sizes), ops.channel_weights(draw(2, 6, 16, dim), 3)
    keys = in_buffer(draw(2, 3, pages * size, dim, dtype=dtype), layout)
    with poisoned_memory("cuda"):
        found, again = (ops.compress_pages(keys, form, weights) for _ in range(2))
    assert torch.equal(found, again)
    check_records(found, summaries.compress_pages(keys, form, weights), keys, form, weights)


@every_pair(DTYPES, SIZES)
def test_the_page_that_the_newest_key_fills(dtype, sizes):
    """Of rows whose newest page is open nothing is written; a step is captured and replayed."""
    dim, size = sizes[:2]
    form, weights = ops.PageRecord(*sizes), ops.channel_weights(draw(3, 6, 16, dim), 3)
    keys, lengths = draw(3, 3, 4 * size, dim, dtype=dtype), torch.tensor([3 * size, size, 2 * size - 1], device="cuda")
    for row, length in enumerate(lengths.tolist()):
        keys[row, :, length:] = torch.nan
    before = torch.full((3, 3, 4, form.bytes), 7, dtype=torch.uint8, device="cuda")
    found = before.clone()
    ops.compress_newest(KV(keys, lengths=lengths), found, form, weights)
    graph, replayed = torch.cuda.CUDAGraph(), before.clone()
    with torch.cuda.graph(graph):
        ops.compress_newest(KV(keys, lengths=lengths), replayed, form, weights)
    graph.replay()
    assert torch.equal(found, replayed)
    written = torch.zeros(3, 3, 4, dtype=torch.bool, device="cuda")
    written[0, :, 2] = written[1, :, 0] = True
    assert torch.equal(found[~written], before[~written])
    for row, page in ((0, 2), (1, 0)):
        of_page = keys[row : row + 1, :, page * size : (page + 1) * size]
        expected = summaries.compress_pages(of_page, form, weights[row : row + 1])
        check_records(found[row : row + 1, :, page : page + 1], expected, of_page, form, weights[row : row + 1])


@every_pair(
    DTYPES,
    SIZES,
    (("heads", "kv_heads"), [(3, 3), (8, 2), (14, 2), (32, 4), (40, 1)]),
    (("batch", "pages"), [(1, 1), (3, 61), (64, 300), (1, 8192)]),
    ("softcap", [None, 30.0]),
    ("bounded", [True, False]),
)
def test_masses(dtype, sizes, heads, kv_heads, batch, pages, softcap, bounded):
    dim, size = sizes[:2]
    form, q = ops.PageRecord(*sizes), draw(batch, heads, 1, dim, dtype=dtype)
    weights = ops.channel_weights(draw(batch, heads, 16, dim, seed=1), kv_heads)
    records = ops.compress_pages(draw(batch, kv_heads, pages * size, dim, dtype=dtype), form, weights)
    lengths = torch.linspace(pages, 0, batch * kv_heads, device="cuda").int().view(batch, kv_heads) if bounded else None
    if bounded:
        records[torch.arange(pages, device="cuda") >= lengths[..., None]] = 255  # scales are NaN
    rows, how = ops.fold_group(q, kv_heads), {"logits": Logits(dim**-0.5, softcap=softcap)}
    records = ops.Records(records, form, weights, lengths=lengths)
    with poisoned_memory("cuda"):
        found, again = (of_rows(ops.score.page_lse(rows, records, **how), lengths) for _ in range(2))
    expected = low_rank.page_lse(rows, records, **how)
    assert torch.equal(found, again)
    assert torch.equal(found.isneginf(), expected.isneginf())
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for pooling, pool in (("post_softmax", "kv_head"), ("sqrt", "layer"), ("max", "kv_head"), ("of_largest", "layer")):
        how |= {"pooling": pooling, "pool": pool}
        with poisoned_memory("cuda"):
            found, again = (of_rows(ops.pooled_mass_of_records(q, records, **how), lengths) for _ in range(2))
        expected = low_rank.pooled_mass_of_records(q, records, **how)
        assert torch.equal(found, again)
        assert torch.equal(found.isneginf(), expected.isneginf())
        torch.testing.assert_close(found, expected, rtol=8 * TOLERANCE[dtype], atol=1e-6)


@every_pair(
    DTYPES,
    (("heads", "kv_heads"), [(3, 3), (8, 2), (14, 2), (40, 1)]),
    ("branch", [1, 5, 8]),
    ("of_layer", [True, False]),
)
def test_masses_of_given_pages(dtype, heads, kv_heads, branch, of_layer):
    """Bit for bit as of the records side by side."""
    form = ops.PageRecord(64, 16)
    records = ops.compress_pages(draw(3, kv_heads, 800 * 16, 64, dtype=dtype), form)
    rows = ops.fold_group(draw(3, heads, 1, 64, dtype=dtype), kv_heads)
    sets = 1 if of_layer else kv_heads
    pages = torch.rand(3, sets, 800 // branch, device="cuda").argsort(-1)[..., :90].sort(-1).values
    lengths = torch.tensor([90 * branch, 17, 0], device="cuda")
    given = ops.Records(records, form, lengths=lengths)
    found = ops.score.page_lse(rows, given, logits=Logits(0.3), pages=pages.int(), branch=branch)
    slots = page_slots(pages, branch).flatten(2).expand(-1, kv_heads, -1)
    given = ops.Records(ops.gather_slots(records, slots), form, lengths=lengths)
    expected = ops.score.page_lse(rows, given, logits=Logits(0.3))
    assert torch.equal(*(of_rows(masses, lengths) for masses in (found, expected)))


@every_pair(DTYPES, SIZES, ("pages", [1, 2, 8]), ("layout", ["slots", "tokens_first"]))
def test_records_in_blocks(dtype, sizes, pages, layout):
    """Made of the pages that new tokens fill, also when that is replayed, and read as if they were in one piece."""
    dim, size = sizes[:2]
    form, room = ops.PageRecord(*sizes), 40 // pages
    keys = in_buffer(draw(3 * room + 1, 2, pages * size, dim, dtype=dtype), layout)
    table = torch.randperm(3 * room, device="cuda").view(3, room).int() + 1
    slots = torch.arange(pages * size, len(keys) * pages * size, device="cuda")
    slots = torch.cat([torch.full((5,), -1, device="cuda"), slots])
    records = torch.full((len(keys), 2, pages, form.bytes), 7, dtype=torch.uint8, device="cuda")
    replayed, graph = records.clone(), torch.cuda.CUDAGraph()
    ops.compress_written(keys, records, slots, form)
    with torch.cuda.graph(graph):
        ops.compress_written(keys, replayed, slots, form)
    graph.replay()
    assert torch.equal(records, replayed)
    assert (records[0] == 7).all()
    assert torch.equal(records[1:], ops.compress_pages(keys, form)[1:])
    in_blocks = ops.BlockTable(table, room * pages)
    alone = in_blocks.gather(records[:3], records)[0]
    q, lengths = draw(3, 8, 1, dim, dtype=dtype, seed=1), torch.tensor([room * pages, 1, 0], device="cuda")
    for pooling in ("post_softmax", "of_largest"):
        how = {"logits": Logits(dim**-0.5), "pooling": pooling}
        given = [
            ops.Records(memory, form, None, table, lengths) for memory, table in ((records, in_blocks), (alone, None))
        ]
        assert torch.equal(*(of_rows(ops.pooled_mass_of_records(q, one, **how), lengths) for one in given))

"""Keys and values in pinned host memory, which kernels read and write by its addresses."""

import pytest
import torch

import foveate
from foveate.ops import fetch
from foveate.ops.fetch import HotPages, reference
from foveate.ops.fetch.types import NEVER
from foveate.runtime import offload
from foveate.state.host_memory import HostMemory
from tests.helpers import left_padded, prepare, returned_cache, tiny_model

pytestmark = pytest.mark.gpu
SPECS = [
    "pages:top_k=40,page_size=4",
    "luka:page_size=4,sinks=2,tail=9,top_k=2",
    "kascade_pages:top_k=12,pool=kv_head,pooling=post_softmax,anchors=[1],page_size=4",
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("size", "dims"), [(8, (128, 128)), (4, (64, 64)), (3, (20, 12))])
def test_steps_over_pinned_memory(dtype, size, dims, monkeypatch):
    monkeypatch.setattr("foveate.state.host_memory.SEGMENT_BYTES", 1 << 16)
    rows, pages, slots = 6, 300, 90
    memory = HostMemory(2, 3, dims, size, dtype, torch.device("cuda"))
    memory.reserve(pages * size)
    host = memory.pages
    assert len(host.keys) > 1
    assert all(x.is_pinned() for x in (*host.keys, *host.values))
    for x in (*host.keys, *host.values):
        x.copy_(torch.randn(x.shape))

    def hot(device):
        blocks = [torch.zeros(rows * slots + 1, 1, size, dim, dtype=dtype, device=device) for dim in dims]
        tables = ((rows, pages), -1), ((rows, slots), -1), ((rows, slots), NEVER), ((rows,), 0)
        return HotPages(*blocks, *(torch.full(shape, x, dtype=torch.int32, device=device) for shape, x in tables))

    mine, its = hot("cuda"), hot("cpu")
    opened = [[torch.zeros(2, 3, size, dim, dtype=dtype, device=one) for dim in dims] for one in ("cuda", "cpu")]
    for step in range(40):
        chosen = torch.stack([torch.randperm(pages)[:60].sort().values for _ in range(rows)]).int()
        chosen[:, 50 + step % 10 :] = -1
        placed, expected = fetch.place_pages(chosen.cuda(), mine), reference.place_pages(chosen, its)
        for a, b in zip(placed, expected, strict=True):
            assert torch.equal(a.cpu(), b)
        fetch.fetch_pages(chosen.cuda(), placed.blocks, host, mine)
        torch.cuda.synchronize()
        reference.fetch_pages(chosen, expected.blocks, host, its)
        k, v = (torch.randn(2, 3, 1, dim).to(dtype) for dim in dims)
        token = torch.tensor([step * 7, step * 5 + 1])
        fetch.put_both(k.cuda(), v.cuda(), token.cuda(), host, mine, *opened[0])
        torch.cuda.synchronize()
        for b, slot in enumerate(token.tolist()):
            segment, inside = divmod(slot, host.slots)
            assert torch.equal(host.keys[segment][b, :, inside], k[b, :, 0])
            assert torch.equal(host.values[segment][b, :, inside], v[b, :, 0])
        reference.put_both(k, v, token, host, its, *opened[1])
        for a, b in zip((*mine[2:], *opened[0]), (*its[2:], *opened[1]), strict=True):
            assert torch.equal(a.cpu(), b)
        for a, b in zip(mine[:2], its[:2], strict=True):
            assert torch.equal(a[:-1].cpu(), b[:-1])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("cuda_graph", [False, "auto"])
def test_few_hot_pages_or_all_give_the_same_bits(spec, cuda_graph):
    """In chunks, of a padded batch; and close to a cache on the GPU, which adds in another order."""
    model, found = prepare(tiny_model()).cuda(), []
    batch = {name: x.cuda() for name, x in left_padded([300, 123]).items()}
    how = {"max_new_tokens": 40, "do_sample": False, "prefill_chunk_size": 64}
    how |= {"return_dict_in_generate": True, "output_logits": True}
    for options in ({"offload": True, "gpu_budget": 0.6}, {"offload": True, "gpu_budget": 1.0}, {"dense_below": 0}):
        with foveate.attached(model, spec, cuda_graph=cuda_graph, **options):
            out = model.generate(**batch, **how)
            found.append(torch.stack(out.logits))
            stats = foveate.stats(model)
            if "offload" in options:
                assert stats.summary()["pages_hot_share"] < 1
                assert (stats.graphs.replayed > 0) == (cuda_graph == "auto")
                store = returned_cache(out).layers[-1].cache
                assert store.store.host.pages.keys[0].is_pinned()
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0][:2], found[2][:2], atol=2e-2, rtol=2e-2)


def test_memory_of_the_gpu_that_is_free():
    device = torch.device("cuda", torch.cuda.current_device())
    before = offload.free_memory(device)
    kept = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    assert before - offload.free_memory(device) >= kept.nbytes
    torch.cuda.set_per_process_memory_fraction(0.5)
    try:
        assert offload.free_memory(device) < before - kept.nbytes
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

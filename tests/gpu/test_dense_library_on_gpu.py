"""The libraries of dense prompts that are present on a GPU, against the reference in fp32."""

import pytest
import torch

from foveate import ops
from foveate.ops import KV, Logits, dispatch
from foveate.ops.attend import dense, dense_obstacles, library, prompt_path
from tests.combinations import every_pair
from tests.kernels import poisoned_memory
from tests.problems import in_buffer

pytestmark = pytest.mark.gpu

DTYPES = ("dtype", [torch.bfloat16, torch.float16])
HEADS = ("heads", [(64, 8), (32, 8), (12, 2), (7, 1), (6, 6), (9, 3)])
DIMS = ("dim", [64, 80, 96, 128, 256])
SIZES = (("queries", "offset"), [(333, 0), (1, 777), (129, 1000), (77, 1), (1024, 0), (2051, 4099)])
NAMES = ("name", [one.name for one in library.LIBRARIES])
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def no_warning(monkeypatch):
    """A library that is present and fails its proof fails the test."""
    monkeypatch.delenv("FOVEATE_KERNELS", raising=False)
    monkeypatch.setattr(library, "_say_once", lambda text: pytest.fail(text))
    monkeypatch.setattr(dispatch, "_say_once", lambda text: pytest.fail(text))


def present(name):
    """A library; one that does not run here skips the test."""
    one = next(one for one in library.LIBRARIES if one.name == name)
    if reason := one.missing(torch.device("cuda", 0)):
        pytest.skip(f"{name}: {reason}")
    return one


def draw(heads, queries, offset, dim, dtype, batch=2):
    """Keys and values are in a buffer with room for more, which is NaN."""
    generator = torch.Generator("cuda").manual_seed(queries)
    sizes = ((heads[0], queries), (heads[1], offset + queries), (heads[1], offset + queries))
    q, k, v = (torch.randn(batch, h, n, dim, generator=generator, device="cuda").to(dtype) for h, n in sizes)
    return 2 * q, in_buffer(k, "slots"), in_buffer(v, "slots")


def close(found, expected, dtype):
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.out.float(), expected.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-4, atol=1e-3)


@every_pair(NAMES, DTYPES, HEADS, DIMS, SIZES)
def test_output_and_log_sum_exp(name, dtype, heads, dim, queries, offset):
    one = present(name)
    q, k, v = draw(heads, queries, offset, dim, dtype)
    if reason := one.limit(q, k, v, offset, None):
        assert (name, "PyTorch does not offer it" in reason) == ("cuDNN", True), reason
        assert dim > 128 or 1 in (queries, offset), reason
        return
    assert library.obstacle(one, q, k, v, offset) == ""
    given = (q, k, v, Logits(dim**-0.5), offset)
    found = one.attend(*given, True)
    full = KV(k.float(), v.float())
    close(found, dense.attend_causal(q.float(), full, logits=Logits(dim**-0.5), offset=offset, need_lse=True), dtype)
    again = one.attend(*given, True)
    assert torch.equal(again.out, found.out)
    assert torch.equal(again.lse, found.lse)
    assert torch.equal(one.attend(*given, False).out, found.out)
    with poisoned_memory("cuda"):
        poisoned = one.attend(*given, True)
    assert torch.equal(poisoned.out, found.out)
    assert torch.equal(poisoned.lse, found.lse)


@every_pair(DTYPES, HEADS, DIMS)
def test_capped_logits(dtype, heads, dim):
    one = present("FlashAttention-3")
    q, k, v = draw(heads, 300, 211, dim, dtype)
    if one.limit(q, k, v, 211, 5.0):
        pytest.skip("FlashAttention-3 is built without caps of logits")
    full, logits = KV(k.float(), v.float()), Logits(dim**-0.5, softcap=5.0)
    found = one.attend(q, k, v, logits, 211, True)
    expected = dense.attend_causal(q.float(), full, logits=logits, offset=211, need_lse=True)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(found.out.float(), expected.out, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", NAMES[1])
@pytest.mark.parametrize("dtype", DTYPES[1])
def test_layouts_of_models(name, dtype):
    """Queries as a projection leaves them, tokens first; keys of one KV head for all queries."""
    one = present(name)
    q, k, v = draw((8, 1), 1030, 0, 128, dtype)
    wanted = one.attend(q, k, v, Logits(0.1), 0, True)
    tokens_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    found = one.attend(*tokens_first, Logits(0.1), 0, True)
    torch.testing.assert_close(found.out, wanted.out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found.lse, wanted.lse, rtol=1e-4, atol=1e-3)


def calls_of(one, monkeypatch):
    """The queries and the offset of every call from now on."""
    calls, attend = [], type(one).attend

    def counted(self, q, k, v, logits, offset, need_lse):
        calls.append((q.shape[2], offset))
        return attend(self, q, k, v, logits, offset, need_lse)

    monkeypatch.setattr(type(one), "attend", counted)
    return calls


@pytest.mark.parametrize("name", NAMES[1])
@pytest.mark.parametrize("dtype", DTYPES[1])
def test_chunks_equal_the_whole(name, dtype, monkeypatch):
    one = present(name)
    monkeypatch.setattr(library, "LIBRARIES", (one,))
    monkeypatch.setattr(type(one), "least_work", 0)
    q, k, v = draw((32, 8), 3001, 0, 128, dtype, batch=1)
    whole = ops.attend_causal(q, KV(k, v), logits=Logits(0.09), need_lse=True)
    calls, outs, lses = calls_of(one, monkeypatch), [], []
    for first, end in ((0, 1000), (1000, 1777), (1777, 3001)):
        some = ops.attend_causal(q[:, :, first:end], KV(k, v), logits=Logits(0.09), offset=first, need_lse=True)
        outs.append(some.out)
        lses.append(some.lse)
    assert calls == [(1000, 0), (777, 1000), (1224, 1777)]
    torch.testing.assert_close(torch.cat(outs, 2), whole.out, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(torch.cat(lses, 2), whole.lse, rtol=1e-5, atol=1e-4)


def test_the_fastest_one_is_used(monkeypatch):
    """Of those that are here, the first for a long prompt; of a short one cuDNN makes no plan."""
    here = [one for one in library.LIBRARIES if not one.missing(torch.device("cuda", 0))]
    heads = ops.PromptHeads(torch.device("cuda", 0), torch.bfloat16, 128, 128, 4)
    calls = {one.name: calls_of(one, monkeypatch) for one in here}
    for length in (8192, 500):
        q, k, v = draw((32, 8), length, 0, 128, torch.bfloat16, batch=1)
        ops.attend_causal(q, KV(k, v), logits=Logits(0.09))
        for of in calls.values():
            of.clear()
        ops.attend_causal(q, KV(k, v), logits=Logits(0.09))
        first = next(one for one in here if length**2 >= one.least_work)
        assert {name: of for name, of in calls.items() if of} == {first.name: [(length, 0)]}
    assert prompt_path(heads).split(" (")[0] == here[0].name
    assert {name for name, reason in dense_obstacles(heads).items() if not reason} == {one.name for one in here}


@pytest.mark.parametrize("name", NAMES[1])
def test_a_long_prompt_takes_its_output_and_no_more(name, much_memory):
    one = present(name)
    q, k, v = draw((32, 8), 32_768, 0, 128, torch.bfloat16, batch=1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = one.attend(q, k, v, Logits(0.09), 0, True)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < found.out.nbytes + found.lse.nbytes + (64 << 20)

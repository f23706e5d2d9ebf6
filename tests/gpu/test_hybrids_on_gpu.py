"""Layers of hybrids and their verbs on a GPU: against references, among poison, in pieces, in a replayed graph."""

import pytest
import torch

from foveate.calibration.retention_scores import RetentionScores
from foveate.hybrids.layers import LearnedEviction, NativeSparseAttention, SlidingWindowAttention
from foveate.hybrids.ops import attend_gated, attend_until, gated, until
from foveate.hybrids.state import BlockMemory, Packing, RetainedMemory
from foveate.ops import dispatch
from tests.combinations import every_pair
from tests.kernels import poisoned_memory
from tests.problems import LAYOUTS, in_buffer

pytestmark = pytest.mark.gpu

DTYPES = ("dtype", [torch.bfloat16, torch.float16, torch.float32])
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 2e-5}
WIDTH = 256


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch):
    """A reference that is reached without being asked for fails the test; convolutions are not rounded to TF32."""
    pytest.importorskip("triton")
    needed = {"attend", "attend_gated", "attend_until", "put_token", "replace_weakest", "running_best"}
    assert needed <= set(dispatch.kernel_status().split(", "))
    monkeypatch.setattr(dispatch, "_say_once", lambda text: pytest.fail(text))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def problem(batch, heads, kv_heads, length, earlier, dim, dtype, value_dim=None):
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*size):
        return torch.randn(size, generator=generator, device="cuda").to(dtype)

    q, keys = draw(batch, heads, length, dim), earlier + length
    return q, draw(batch, kv_heads, keys, dim), draw(batch, kv_heads, keys, value_dim or dim)


def ends(batch, kv_heads, length, earlier, window, share=0.1, absent=0):
    """When keys go: most with their window, some later, some never, the first ``absent`` before the start."""
    generator = torch.Generator("cuda").manual_seed(1)
    size = (batch, kv_heads, earlier + length)
    retained = torch.rand(size, generator=generator, device="cuda") < share
    longer = torch.randint(1, 3000, size, generator=generator, device="cuda")
    longer[..., ::97] = length
    gone = torch.arange(-earlier, length, device="cuda") + window + 1 + longer * retained
    gone[..., :absent] = 0
    return gone.clamp(0, length)


def check(q, k, v, gone, window, retained):
    how = {"scaling": q.shape[-1] ** -0.5, "window": window, "retained": retained}
    with poisoned_memory("cuda"):
        out = attend_until(q, k, v, gone, **how).out
        assert torch.equal(out, attend_until(q, k, v, gone, **how).out), "repeats are equal bit for bit"
    assert out.dtype == q.dtype
    exact = until.attend_until(*(x.double() for x in (q, k, v)), gone, **how).out
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    return out


@every_pair(
    DTYPES,
    ("window", [0, 63, 768, 5000]),
    ("retained", [0, 512, 4000]),
    (("length", "earlier"), [(1, 0), (1, 1281), (63, 65), (300, 1281), (1025, 0), (3001, 700)]),
)
def test_windows_and_what_is_retained(dtype, window, retained, length, earlier):
    check(*problem(2, 8, 2, length, earlier, 64, dtype), ends(2, 2, length, earlier, window), window, retained)


@every_pair(
    DTYPES,
    (("heads", "kv_heads"), [(1, 1), (8, 8), (9, 3), (14, 2), (32, 8), (16, 1)]),
    (("dim", "value_dim"), [(16, 16), (20, 20), (64, 64), (80, 80), (96, 96), (128, 128), (24, 72)]),
    ("batch", [1, 3]),
)
def test_heads_and_their_dims(dtype, heads, kv_heads, dim, value_dim, batch):
    gone = ends(batch, kv_heads, 517, 131, 100, absent=40)
    check(*problem(batch, heads, kv_heads, 517, 131, dim, dtype, value_dim), gone, 100, 64)


@pytest.mark.parametrize("retained", [0, 300])
def test_ends_that_fit_no_window(retained):
    """Lists of keys overflow, and the output is the same."""
    generator = torch.Generator("cuda").manual_seed(2)
    gone = torch.randint(-9, 2100, (1, 2, 2100), generator=generator, device="cuda")
    check(*problem(1, 8, 2, 2000, 100, 64, torch.bfloat16), gone, 60, retained)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_among_nan(layout):
    q, k, v = (in_buffer(x, layout) for x in problem(2, 6, 2, 300, 77, 80, torch.float16))
    check(q, k, v, ends(2, 2, 300, 77, 50), 50, 40)


def test_keys_that_have_gone_leave_no_trace():
    q, k, v = problem(1, 8, 2, 1500, 300, 64, torch.bfloat16)
    gone = ends(1, 2, 1500, 300, 200)
    gone[..., 20:300:3] = 0
    clean = check(q, k, v, gone, 200, 128)
    k[:, :, 20:300:3], v[:, :, 20:300:3] = 3e4, -3e4
    assert torch.equal(attend_until(q, k, v, gone, scaling=64**-0.5, window=200, retained=128).out, clean)


def test_nothing_waits_for_the_device():
    q, k, v = problem(1, 8, 2, 1500, 300, 64, torch.bfloat16)
    gone = ends(1, 2, 1500, 300, 200)
    attend_until(q, k, v, gone, scaling=0.125, window=200, retained=128)  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend_until(q, k, v, gone, scaling=0.125, window=200, retained=128)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def layer_of(kind, heads=8, kv_heads=2, dtype=torch.float32):
    """Retains about a third of the tokens, more than its buffer holds."""
    torch.manual_seed(0)
    if kind == "swa":
        layer = SlidingWindowAttention(WIDTH, heads, kv_heads, 64, window=100)
    else:
        layer = LearnedEviction(WIDTH, heads, kv_heads, 64, window=100, buffer=64)
        torch.nn.init.constant_(layer.scores.head.bias, -0.2)
    return layer.to("cuda", dtype).eval()


def memory_of(layer):
    return RetainedMemory(layer.window, layer.buffer)


def hidden(batch, length, dtype=torch.float32):
    x = torch.randn(batch, length, WIDTH, generator=torch.Generator("cuda").manual_seed(3), device="cuda")
    return x.to(dtype), torch.arange(length, device="cuda")[None]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["swa", "lte"])
@pytest.mark.parametrize("pieces", [[900], [256, 644], [500, 1, 1, 398], [700] + [1] * 200], ids=str)
def test_layers_on_kernels_are_layers_on_references(kind, pieces):
    layer, (x, at) = layer_of(kind), hidden(2, 900)
    memory, outs, first = memory_of(layer), [], 0
    for count in pieces:
        outs.append(layer(x[:, first : first + count], at[:, first : first + count], memory)[0])
        first += count
    with dispatch.reference_only():
        kept = memory_of(layer)
        expected = layer(x, at, kept)[0]
    torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(memory.tensors["kept"], kept.tensors["kept"])
    assert torch.equal(*(m.tensors["positions"].sort(2).values for m in (memory, kept)))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["swa", "lte"])
def test_padded_rows_are_what_they_are_alone(kind, monkeypatch):
    monkeypatch.setattr("foveate.hybrids.layers.window.LONG_PIECE", 768)
    layer, (x, at) = layer_of(kind), hidden(2, 800)
    mask = torch.ones(2, 800, dtype=torch.bool, device="cuda")
    mask[1, :300] = False
    packing = Packing(mask)
    positions = (mask.long().cumsum(1) - 1).clamp_min(0)
    memory = memory_of(layer)
    out = packing.unpack(layer(packing.pack(x), packing.pack(positions), memory, packing)[0])
    torch.testing.assert_close(out[:1], layer(x[:1], at)[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out[1:, 300:], layer(x[1:, 300:], at[:, :500])[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["swa", "lte"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_replayed(kind, dtype):
    """A step between scores, captured once: its numbers are on the device."""
    layer, (x, at) = layer_of(kind, dtype=dtype), hidden(2, 420, dtype)
    memory, other = memory_of(layer), memory_of(layer)
    for held in (memory, other):
        layer(x[:, :300], at[:, :300], held)
        layer(x[:, 300:301], at[:, 300:301], held)
    one, position = x[:, :1].clone(), at[:, :1].clone()
    before = {name: tensor.clone() for name, tensor in memory.tensors.items()}
    lengths, noted = list(memory.lengths), list(memory._on_device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer(one, position, memory)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(one, position, memory)[0]
    for name, tensor in memory.tensors.items():
        tensor.copy_(before[name])
    memory.lengths, memory._on_device = lengths, noted
    replayed = 0
    for token in range(301, 420):
        some = x[:, token : token + 1], at[:, token : token + 1]
        if kind == "lte" and layer._scores_due(memory):
            found = layer(*some, memory)[0]
        else:
            one.copy_(some[0])
            position.copy_(some[1])
            graph.replay()
            memory.lengths, memory._on_device = ([number + 1 for number in x] for x in (memory.lengths,) * 2)
            found, replayed = captured, replayed + 1
        assert torch.equal(found, layer(*some, other)[0])
    assert replayed > 100
    for name in memory.tensors:
        assert torch.equal(memory.tensors[name], other.tensors[name]), name


@torch.no_grad()
def test_a_step_waits_for_nothing():
    layer, (x, at) = layer_of("lte"), hidden(2, 310)
    memory = memory_of(layer)
    layer(x[:, :300], at[:, :300], memory)
    for token in range(300, 305):
        layer(x[:, token : token + 1], at[:, token : token + 1], memory)
    assert not layer._scores_due(memory)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x[:, 305:306], at[:, 305:306], memory)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["conv", "mlp"])
def test_scores(dtype, kind):
    """Matrix products in place of convolutions are as near fp64 as the dtype lets them be."""
    torch.manual_seed(0)
    scores = RetentionScores(8, 128, kind=kind).to("cuda", dtype).eval()
    k, v = problem(3, 8, 8, 1000, 0, 64, dtype)[1:]
    real = torch.arange(1000, device="cuda") >= torch.tensor([[0], [7], [400]], device="cuda")
    found = scores(k, v, real)
    with torch.enable_grad():
        exact = scores.double()(k, v, real)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), exact.detach().double(), rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_scores_of_a_step_need_little_memory():
    """Of 64 rows with a window of 768, in pieces."""
    layer = LearnedEviction(WIDTH, 32, 8, 64, window=768, buffer=512).to("cuda", torch.bfloat16).eval()
    memory, (x, at) = memory_of(layer), hidden(64, 800, torch.bfloat16)
    layer(x, at, memory)
    layer._score_late(memory)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer._score_late(memory)
    assert torch.cuda.max_memory_allocated() - before < 128 << 20


def of_blocks(batch, heads, kv_heads, number, block, dim, value_dim, dtype):
    """What attend_gated is given; the heads' queries are large, so that weights differ."""
    q, k, v = problem(batch, heads, kv_heads, 1, number - 1, dim, dtype, value_dim)
    count = number // block
    summaries = (x[:, :, : count * block].unflatten(2, (count, block)).float().mean(3).to(dtype) for x in (k, v))
    gates = torch.rand(3, batch, heads, 1, generator=torch.Generator("cuda").manual_seed(4), device="cuda")
    return [4 * q, k, v, *summaries, gates.to(dtype)]


@every_pair(
    DTYPES,
    (("heads", "kv_heads"), [(32, 2), (8, 8), (9, 3), (14, 2), (64, 1)]),
    (("dim", "value_dim"), [(64, 64), (80, 80), (128, 128), (24, 72)]),
    (
        ("number", "block", "blocks", "window"),
        [(9000, 64, 16, 512), (700, 32, 8, 128), (130, 16, 16, 300), (33, 64, 3, 1)],
    ),
    ("batch", [1, 5]),
)
def test_gated_attention_of_blocks(dtype, heads, kv_heads, dim, value_dim, number, block, blocks, window, batch):
    given = of_blocks(batch, heads, kv_heads, number, block, dim, value_dim, dtype)
    lengths = torch.linspace(number, 1, batch, device="cuda").long()
    for b, length in enumerate(lengths.tolist()):
        for x in given[1:3]:
            x[b, :, length:] = 1e4
    sizes = {"scaling": dim**-0.5, "block": block, "blocks": blocks, "window": window}
    with poisoned_memory("cuda"):
        out = attend_gated(*given, lengths, **sizes).out
        assert torch.equal(out, attend_gated(*given, lengths, **sizes).out), "repeats are equal bit for bit"
    exact = gated.attend_gated(*(x.double() for x in given), lengths, **sizes).out
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


def test_gated_attention_is_replayed():
    given = of_blocks(2, 32, 2, 5000, 64, 64, 64, torch.bfloat16)
    lengths = torch.tensor([4000, 100], device="cuda")
    sizes = {"scaling": 0.125, "block": 64, "blocks": 16, "window": 512}
    attend_gated(*given, lengths, **sizes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend_gated(*given, lengths, **sizes).out
    for step in (0, 1, 63, 500):
        lengths += step
        graph.replay()
        assert torch.equal(out, attend_gated(*given, lengths, **sizes).out)


@torch.no_grad()
@pytest.mark.parametrize("compression", ["mean", "mlp"])
def test_steps_of_native_sparse_attention_are_its_prompt(compression):
    torch.manual_seed(0)
    layer = NativeSparseAttention(WIDTH, 8, 2, 64, block=16, blocks=6, window=64, compression=compression).cuda().eval()
    x, at = hidden(2, 400)
    memory = BlockMemory(layer.block)
    outs = [layer(x[:, :250], at[:, :250], memory)]
    outs += [layer(x[:, token : token + 1], at[:, token : token + 1], memory) for token in range(250, 400)]
    with dispatch.reference_only():
        expected = layer(x, at, BlockMemory(layer.block))
    torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=1e-4, atol=1e-5)

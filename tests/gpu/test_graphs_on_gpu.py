"""Decode steps that are captured as CUDA graphs and replayed, against the same steps run one by one on the GPU."""

import gc

import pytest
import torch
from matrix import LENGTHS, PROMPT, VARIANTS, Driver, Tokens, assert_same_state, close, padded

import foveate
from foveate import methods
from foveate.ops import dispatch
from foveate.runtime import CudaRecorder, replay
from foveate.state import Geometry
from tests.helpers import FAMILIES, SLIDING, generate, left_padded, tiny_model, tokens
from tests.recorded import Replayed

pytestmark = pytest.mark.gpu

CAPTURED = [(name, method) for name, method in VARIANTS if not methods.replay_obstacle(method)]
each_captured = pytest.mark.parametrize("method", [m for _, m in CAPTURED], ids=[name for name, _ in CAPTURED])
ROWS = pytest.mark.parametrize("lengths", [LENGTHS[:1], LENGTHS], ids=["one", "ragged"])
SPECS = [
    *(
        methods.make(name, **methods.get(name).about.small_budget).spec
        for name in methods.names()
        if methods.get(name).replay is not None
    ),
    methods.make("mixed", **methods.get("mixed").about.small_budget).spec,
    'kascade_paper:anchors=[0],heads={"1":[1,0],"2":[1,1]},top_k=0.2,min_k=4',
    "kascade_pages:top_k=9,pool=kv_head,pooling=post_softmax,decode_only=false,anchors=[0],first_layer=pages",
]


@pytest.fixture(params=["references", "kernels"], autouse=True)
def kernels(request, monkeypatch):
    """Without kernels, and with them."""
    monkeypatch.setenv("FOVEATE_KERNELS", "1" if request.param == "kernels" else "0")
    if request.param == "kernels":
        pytest.importorskip("triton")
        assert "attend" in dispatch.kernel_status().split(", ")
    return request.param == "kernels"


def on_gpu(some, dtype=torch.float32):
    return Tokens(*(x.to("cuda", dtype) for x in (some.q, some.k, some.v)))


def drivers(method, lengths, dtype=torch.float32):
    """Two layers that have read the same prompt, and what they are fed next; the steps of the second are captured."""
    batch, mask = padded([Tokens.random(1, length, seed=length) for length in lengths], PROMPT)
    plain, driver = Driver(method), Driver(method)
    for one in (plain, driver):
        one.feed(on_gpu(batch, dtype), mask.cuda())
    return (
        plain,
        Replayed(driver, CudaRecorder(torch.device("cuda"))),
        on_gpu(Tokens.random(len(lengths), 90, seed=1), dtype),
    )


@each_captured
@ROWS
def test_replays_equal_ordinary_steps(method, lengths, monkeypatch):
    monkeypatch.setattr(replay, "ROOM", 1)
    plain, replayed, some = drivers(method, lengths)
    close(replayed.feed_steps(some), plain.feed_steps(some), 1e-4)
    assert replayed.use.replayed > 80
    assert_same_state(plain.store, replayed.driver.store)
    counters, expected = replayed.driver.layer.counters, plain.layer.counters
    assert float(counters.keys_read) == pytest.approx(float(expected.keys_read))
    assert int(counters.tokens_evicted) == int(expected.tokens_evicted)


@each_captured
def test_half_precision(method):
    """One step replayed, before small differences make methods choose otherwise."""
    plain, replayed, some = drivers(method, LENGTHS, torch.bfloat16)
    close(replayed.feed_steps(some[:2]).float(), plain.feed_steps(some[:2]).float(), 3e-2)


@each_captured
@ROWS
def test_a_replay_waits_for_nothing_and_allocates_nothing(method, lengths):
    """Neither does what is done between steps, here every sixteenth step or more often; the second time captures it."""
    _, replayed, some = drivers(method, lengths)
    replayed.feed_steps(some[:40])
    following = [some[n : n + 1] for n in range(40, 57)]
    captured = replayed.use.captured
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for one in following:
            replayed.steps(replayed.layers, replayed.run, vars(one), {})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert replayed.use.captured == captured


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("ragged", [False, True])
def test_generated_tokens_are_those_of_ordinary_steps(spec, ragged):
    batch = {name: x.cuda() for name, x in left_padded([60, 41, 3] if ragged else [60, 60]).items()}
    outs = []
    for cuda_graph in (False, True):
        model = tiny_model().cuda()
        foveate.attach(model, spec, cuda_graph=cuda_graph, dense_below=0)
        outs.append(generate(model, **batch, new=70))
    assert torch.equal(*outs)
    used = foveate.stats(model).graphs
    assert used.replayed >= 30
    assert used.reason == ""


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SLIDING])
def test_families_sampling_and_ends_of_sequences(family):
    batch = {name: x.cuda() for name, x in left_padded([33, 50]).items()}
    outs = []
    for cuda_graph in (False, True):
        model = tiny_model(family).cuda()
        foveate.attach(model, "dense", cuda_graph=cuda_graph)
        model.generation_config.eos_token_id = int(generate(model, **batch, new=14)[0, 10])
        torch.manual_seed(3)
        outs.append(model.generate(**batch, do_sample=True, top_k=4, max_new_tokens=30))
        outs.append(model.generate(**batch, do_sample=False, max_new_tokens=30))
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])
    assert foveate.stats(model).graphs.replayed > 10


def test_graphs_go_with_their_cache_and_share_memory():
    model = tiny_model().cuda()
    foveate.attach(model, "kascade_paper:anchors=1,top_k=9", cuda_graph=True, dense_below=0)
    ids = tokens(60, 2).cuda()
    sizes = []
    for _ in range(6):
        generate(model, ids, new=20)
        gc.collect()
        torch.cuda.synchronize()
        sizes.append(torch.cuda.memory_allocated())
    assert sizes[-1] == sizes[1]
    assert foveate.stats(model).graphs.captured == 6


def test_graphs_are_the_default_where_the_kernels_run(kernels):
    model = tiny_model().cuda()
    foveate.attach(model, "dense")
    generate(model, tokens(30).cuda())
    used = foveate.stats(model).graphs
    assert used.replayed == (9 if kernels else 0)
    assert ("kernels of decoding" in used.reason) != kernels


def test_models_that_cannot_be_captured_say_so():
    model = tiny_model("gemma3").cuda()
    foveate.attach(model, "dense")
    generate(model, tokens(30).cuda())
    assert "layers 0, 2 stay as they are" in foveate.stats(model).graphs.reason


@pytest.mark.parametrize(
    "method",
    [m for _, m in CAPTURED if m.sparse_from_tokens is not None],
    ids=[name for name, m in CAPTURED if m.sparse_from_tokens is not None],
)
def test_short_contexts_are_read_whole(method):
    """Replayed, and then sparse ones after them."""
    plain, replayed, some = drivers(method, LENGTHS)
    whole, _, _ = drivers(methods.make("dense"), LENGTHS)
    for one in (plain, replayed.driver):
        one.layer.dense_below = len(LENGTHS) * (PROMPT + 41)
    found = replayed.feed_steps(some)
    close(found[:, :, :40], whole.feed_steps(some)[:, :, :40], 1e-4)
    close(found, plain.feed_steps(some), 1e-4)
    assert replayed.driver.layer.counters.dense_steps == plain.layer.counters.dense_steps == 40


@pytest.mark.parametrize(("sparse_from", "short"), [(2 * 70, 0), (1, 70)], ids=["together", "each"])
def test_steps_are_dense_by_themselves_until_a_method_pays(sparse_from, short, kernels, monkeypatch):
    monkeypatch.setattr(methods.get("quest"), "sparse_from_tokens", sparse_from)
    monkeypatch.setattr(Geometry, "at_least", lambda self, tokens: tokens)  # as if of eight KV heads of 128
    monkeypatch.setattr("foveate.runtime.policy.SHORT_SEQUENCE", short)
    model = tiny_model().cuda()
    foveate.attach(model, "quest:top_k=16,page_size=4,dense_layers=0")
    generate(model, tokens(60, 2).cuda(), new=30)
    stats = foveate.stats(model)
    assert {layer.dense_steps for layer in stats.layers} == {9 if kernels else 0}
    assert stats.graphs.replayed > (20 if kernels else -1)

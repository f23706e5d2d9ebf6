"""Keys and values in host memory: `generate` gives the tokens and logits of a cache on the device, bit for bit."""

import copy
import pickle
import weakref
from unittest import mock

import pytest
import torch
import transformers

import foveate
from foveate import methods
from foveate.integrations.transformers import offloading
from foveate.integrations.transformers.layers import CacheLayer
from foveate.lab.recorded import record
from foveate.runtime import offload, replay
from foveate.state import host_memory, host_pages
from foveate.state.host_pages import HostPages
from foveate.state.transfers import Transfers
from tests.combinations import in_turn
from tests.families import RECURRENT, family
from tests.helpers import FAMILIES, cached, left_padded, repetitive, returned_cache, tiny_model

SPECS = {
    "pages": "pages:top_k=24,page_size=4",
    "unweighted": "pages:top_k=0.4,page_size=3,weighted=false",
}
READERS = [
    "kascade_pages:top_k=12,pool=kv_head,pooling=post_softmax,anchors=[1],page_size=4",
    "kascade_pages:top_k=9,anchors=[0],first_layer=pages,page_size=4",
    "luka:page_size=4,sinks=2,tail=9,top_k=2",
    "luka:page_size=[4, 8],sinks=4,tail=9,top_k=2,expand=2",
]
MODES = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 20},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}

pytestmark = pytest.mark.usefixtures("little_room", "small_segments")


@pytest.fixture
def small_segments(monkeypatch):
    """Several segments of host memory, and of few pages."""
    monkeypatch.setattr(host_memory, "SEGMENT_BYTES", 1 << 12)
    for module in (offload, replay):
        monkeypatch.setattr(module, "ROOM", 1)


def run(model, mode="greedy", **options):
    alone = mode == "prompt_lookup"
    inputs = {"input_ids": repetitive(61)} if alone else left_padded([61, 23, 40])
    how = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**inputs, **how, **MODES[mode], **options)


def stores(out):
    return [one.cache for one in returned_cache(out).layers if isinstance(one, CacheLayer)]


def equal(mine, its):
    assert torch.equal(mine.sequences, its.sequences)
    for a, b in zip(mine.logits, its.logits, strict=True):
        assert torch.equal(a, b)


@in_turn(("mode", MODES), ("spec", SPECS), ("budget", [0.75, 1.0, "1GB", None]), ("family", ["llama", "gemma3"]))
def test_host_memory_gives_the_same_tokens_and_logits(spec, mode, budget, family):
    model, found = tiny_model(family), []
    for how in ({}, {"offload": True, "gpu_budget": budget}):
        with foveate.attached(model, SPECS[spec], dense_below=0, **how):
            found.append(run(model, mode))
            kept, stats = stores(found[-1]), foveate.stats(model)
            if how:
                assert {type(store.store) for store in kept} == {HostPages}
                assert all(len(store.store.host.pages.keys) > 1 for store in kept)
                assert stats.host_bytes == sum(store.store.host.nbytes for store in kept)
                share = stats.summary()["pages_hot_share"]
                assert share == 0 if mode == "beams" else 0 < share < 1  # rows of beams change places at every step
                assert "in host memory" in str(stats)
            else:
                assert stats.host_bytes == 0
                assert "host_bytes" not in stats.summary()
    equal(found[1], found[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_host_memory(family):
    model, found = tiny_model(family), []
    for how in ({}, {"offload": True, "gpu_budget": 0.5}):
        with foveate.attached(model, SPECS["pages"], **how):
            found.append(run(model))
    assert torch.equal(found[0].sequences, found[1].sequences)


@pytest.mark.parametrize("name", ["gpt-oss", *RECURRENT][:6])
def test_families_with_sinks_and_with_recurrent_layers(name):
    """Learned sinks take their share afterwards, in another order of rounding."""
    model, found = family(name), []
    for how in ({}, {"offload": True, "gpu_budget": 0.75}):
        with foveate.attached(model, SPECS["pages"], **how):
            found.append(turn(model, foveate.Cache(model), repetitive(61) % 40))
    if name != "gpt-oss":
        equal(*found)
    assert torch.equal(found[0].sequences, found[1].sequences)
    for a, b in zip(found[0].logits, found[1].logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", READERS)
def test_layers_that_read_what_others_chose(spec):
    """And dense ones, which stay on the device."""
    model, found = tiny_model(), []
    for how in ({}, {"offload": True, "gpu_budget": 1.0}):
        with foveate.attached(model, spec, **how):
            found.append(run(model))
            kinds = [isinstance(store.store, HostPages) for store in stores(found[-1])]
    equal(found[1], found[0])
    assert kinds == [not spec.startswith("kascade") or "first_layer" in spec, *[True] * (len(kinds) - 1)]


def turn(model, cache, ids):
    how = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **how, **cached(cache))


@pytest.mark.parametrize("spec", [SPECS["pages"], *READERS[::3]])
def test_turns_copies_crops_and_files(spec, tmp_path):
    model, found, path = tiny_model(), [], tmp_path / "cache.safetensors"
    more = torch.randint(3, 90, (1, 9))
    for how in ({}, {"offload": True, "gpu_budget": 1.0}):
        with foveate.attached(model, spec, **how):
            first = turn(model, foveate.Cache(model), repetitive(61))
            cache, outs = returned_cache(first), [first]
            foveate.save_cache(model, cache, path)
            both = torch.cat([first.sequences, more], 1)
            outs += [turn(model, copy.deepcopy(cache), both), turn(model, foveate.load_cache(model, path), both)]
            outs.append(turn(model, pickle.loads(pickle.dumps(cache)), both))
            outs.append(turn(model, cache, both))
            if "luka" not in spec:
                cache.crop(-4)
                outs.append(turn(model, cache, torch.cat([outs[-1].sequences[:, :-4], more], 1)))
            found.append(outs)
    for its, mine in zip(*found, strict=True):
        equal(mine, its)


def test_a_file_is_of_any_storage(tmp_path):
    """What was saved on the device goes on in host memory, and the other way round."""
    model, path, found = tiny_model(), tmp_path / "cache.safetensors", []
    for how, other in (({}, {"offload": True}), ({"offload": True}, {})):
        with foveate.attached(model, SPECS["pages"], **how):
            first = turn(model, foveate.Cache(model), repetitive(61))
            foveate.save_cache(model, returned_cache(first), path)
        with foveate.attached(model, SPECS["pages"], **other):
            ids = torch.cat([first.sequences, first.sequences[:, :9]], 1)
            found.append(turn(model, foveate.load_cache(model, path), ids))
    equal(*found)


@pytest.mark.parametrize("spec", [SPECS["pages"], READERS[1], READERS[2]])
def test_steps_are_replayed(spec):
    """Over growth, and in another turn."""
    model, found = tiny_model(), []
    more = {"max_new_tokens": 14, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    for replays in (False, True):
        attachment = foveate.attach(model, spec, offload=True, cuda_graph=replays and "auto")
        attachment.graphs.recorder = record
        out = model.generate(**left_padded([40, 3]), **more)
        ids, mask = out.sequences, left_padded([40, 3])["attention_mask"]
        ids = torch.cat([ids, torch.arange(3, 12).expand(2, -1)], 1)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        found.append([out, model.generate(ids, attention_mask=mask, **more, **cached(returned_cache(out)))])
    assert foveate.stats(model).graphs.replayed > 17
    for mine, its in zip(*found, strict=True):
        assert torch.equal(mine.sequences, its.sequences)
        for a, b in zip(mine.logits, its.logits, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("copied", [False, True])
def test_a_turn_takes_the_place_of_hot_pages(copied):
    """The two buffers of a prompt and the hot pages are never there together; what was counted is what there is."""
    model, most = tiny_model(), []
    foveate.attach(model, SPECS["pages"], offload=True)
    cache = returned_cache(first := turn(model, foveate.Cache(model), repetitive(61)))
    cache = copy.deepcopy(cache) if copied else cache
    real = Transfers.open

    def opens(transfers, reader, slots):
        found = real(transfers, reader, slots)
        kept = [layer.cache for layer in cache.layers]
        assert all(store.store._decoding is None for store in kept)
        buffers = sum(one.nbytes for one in transfers._buffers)
        assert len(transfers._buffers) <= 2
        most.append(buffers + sum(store.resident_bytes for store in kept))
        assert cache.phase.held.bytes == most[-1]
        return found

    second = turn(model, cache, torch.cat([first.sequences, repetitive(9)], 1))
    with mock.patch.object(Transfers, "open", opens):
        turn(model, cache, torch.cat([second.sequences, repetitive(9)], 1))
    assert len(most) == len(cache.layers)
    assert cache.phase.held.bytes == sum(layer.cache.resident_bytes for layer in cache.layers)
    assert cache.phase.held.peak >= max(most)


# Memory


def held_in(cache):
    return sum(layer.cache.resident_bytes for layer in cache.layers)


def test_what_is_held_is_counted_after_a_reset_and_in_a_copy():
    """Without the buffers of a prompt that was read before."""
    model = tiny_model()
    foveate.attach(model, SPECS["pages"], offload=True)
    cache = foveate.Cache(model, prompt_length=61)
    model(repetitive(61), **cached(cache))
    twin = copy.deepcopy(cache)
    assert twin.phase.held.bytes == held_in(twin)
    cache.reset()
    assert cache.phase.held.bytes == 0
    for one in (cache, twin):
        model(repetitive(61), **cached(one))
        model(repetitive(61)[:, :1], **cached(one))
        assert one.phase.held.bytes == held_in(one)
    again = copy.deepcopy(cache)
    assert again.phase.held.bytes == held_in(again)


def test_after_a_reset_memory_is_that_of_the_new_tokens():
    """Before the reset the cache held two rows of 400 tokens, and after it one row of 30."""
    model, held = tiny_model(), []
    foveate.attach(model, SPECS["pages"], offload=True)
    cache, fresh = foveate.Cache(model), foveate.Cache(model)
    model(repetitive(400).repeat(2, 1), **cached(cache))
    cache.reset()
    for one in (cache, fresh):
        model(repetitive(30), **cached(one))
        buffers = one.phase.held.bytes
        model(repetitive(30)[:, :1], **cached(one))
        held.append((buffers, one.phase.held.bytes, one.host_bytes))
    assert held[0] == held[1]


def test_copies_and_more_rows_and_files_that_do_not_fit_are_refused(monkeypatch, tmp_path):
    model, path = tiny_model(), tmp_path / "cache.safetensors"
    foveate.attach(model, SPECS["pages"], offload=True)
    cache = returned_cache(first := turn(model, foveate.Cache(model), repetitive(61)))
    foveate.save_cache(model, cache, path)
    monkeypatch.setattr(offload, "_free_host_memory", lambda: 1000)
    for grows in (
        lambda: copy.deepcopy(cache),
        lambda: cache.batch_repeat_interleave(3),
        lambda: foveate.load_cache(model, path),
    ):
        with pytest.raises(ValueError, match=r"offload=True: keys and values of .* of host memory, and 0\.0 MB is"):
            grows()
    cache.reorder_cache(torch.tensor([0]))
    monkeypatch.undo()
    turn(model, cache, torch.cat([first.sequences, repetitive(9)], 1))


def test_a_cache_counts_as_its_own_what_it_has_in_host_memory(monkeypatch):
    """And not what another cache of the model has."""
    model = tiny_model()
    foveate.attach(model, SPECS["pages"], offload=True)
    large, small = foveate.Cache(model), foveate.Cache(model)
    model(repetitive(30), **cached(small))
    model(repetitive(600), **cached(large))
    assert large.host_bytes > 2 * small.host_bytes > 0
    monkeypatch.setattr(offload, "_free_host_memory", lambda: 0)
    with pytest.raises(ValueError, match="host memory"):
        small.reserve_memory(1, 500)


def test_a_branch_is_refused():
    model = tiny_model()
    foveate.attach(model, methods.SharedPrompt((methods.parse(SPECS["pages"]),)))
    cache = foveate.Cache(model)
    model(repetitive(61), **cached(cache))
    foveate.attach(model, SPECS["pages"], offload=True)
    with pytest.raises(ValueError, match="offload=True: a branch keeps its keys and values on the device"):
        cache.branch(model)


# Faults


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("dense", {}, "dense reads every key in each step; take pages, luka, or kascade_pages"),
        ("kascade:anchors=[1]", {}, "reads or weighs all keys that it keeps; take pages"),
        ("h2o", {}, "reads or weighs all keys"),
        ("quest", {}, "reads or weighs all keys"),
        ("pages", {"dense_below": 100}, "leave dense_below=100 out"),
        ("pages", {"offload": 1}, "offload must be True or False, not 1"),
        ("pages", {"offload": False, "gpu_budget": "1GB"}, "gpu_budget='1GB' needs offload=True"),
        *(
            ("pages", {"gpu_budget": budget}, "gpu_budget must be a size")
            for budget in (0, 0.0, 1.5, -1, "8XB", "", True)
        ),
        (None, {"gpu_budget": "lots"}, "gpu_budget must be a size such as '8GB'.*not 'lots'"),
    ],
)
def test_what_cannot_be_is_refused_and_the_model_stays_as_it_was(method, options, message):
    model = tiny_model()
    foveate.attach(model, "streaming")
    before = model.foveate
    with pytest.raises(ValueError, match=message):
        foveate.attach(model, method, **{"offload": True} | options)
    assert model.foveate is before


def test_a_model_on_several_devices_is_refused():
    model = tiny_model()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "disk"}
    with pytest.raises(ValueError, match="the model is spread over cpu, disk"):
        foveate.attach(model, "pages", offload=True)


@pytest.mark.parametrize("device", [0, "cuda", "cuda:0", torch.device("cuda", 0)])
def test_a_device_map_may_name_one_gpu_in_any_way(device):
    parameters = [mock.Mock(device=torch.device("cuda", 0))]
    offloading.check_model(mock.Mock(hf_device_map={"": device}, parameters=lambda: parameters, _tp_size=None))


@pytest.mark.filterwarnings("ignore:auto")
def test_auto_is_pages():
    model = tiny_model()
    assert foveate.attach(model, offload=True).method.name == "pages"
    assert "host memory" in foveate.stats(model).chosen


@pytest.mark.parametrize("given", ["8GB", "8 gb", "8000MB", 8 * 10**9])
def test_sizes(given):
    assert offload.parse_budget(given) == 8 * 10**9


def test_too_little_is_said_before_anything_is_read(monkeypatch):
    model = tiny_model()
    for budget, message in (
        ("10KB", r"gpu_budget is 0\.0 MB, and 105 tokens.* need 0\.\d MB on the GPU: .* give more"),
        (0.05, r"gpu_budget is 0\.05 of the pages, and a step over .* may choose .* give a share of at least 0\.\d"),
    ):
        foveate.attach(model, "pages:top_k=50,page_size=4", offload=True, gpu_budget=budget)
        cache = foveate.Cache(model, prompt_length=105)
        with pytest.raises(ValueError, match=message):
            model(repetitive(61)[:, :50], **cached(cache))
        assert cache.get_seq_length() == 0
        cache.phase.check_whole()
        with pytest.raises(ValueError, match="gpu_budget is"):
            run(model, "prompt_lookup")
    foveate.attach(model, "pages", offload=True)
    monkeypatch.setattr(offload, "_free_host_memory", lambda: 1000)
    cache = foveate.Cache(model)
    with pytest.raises(ValueError, match=r"keys and values of 61 tokens take .* of host memory, and 0\.0 MB is free"):
        model(repetitive(61), **cached(cache))
    assert cache.get_seq_length() == 0
    cache.phase.check_whole()


def test_tokens_beyond_the_budget_are_refused_and_the_cache_stays(monkeypatch):
    """What fitted goes on to be read."""
    model = tiny_model()
    foveate.attach(model, "pages:top_k=0.5,page_size=4", offload=True)
    cache = returned_cache(turn(model, foveate.Cache(model), repetitive(61)))
    cache.phase.offload.budget = 0.3
    seen = cache.get_seq_length()
    with pytest.raises(ValueError, match="gpu_budget"):
        model(repetitive(120), **cached(cache))
    assert cache.get_seq_length() == seen
    cache.phase.check_whole()
    cache.phase.offload.budget = None
    model(repetitive(120), **cached(cache))


@pytest.mark.parametrize("where", ["fetch_pages", "place_pages", "put_both"])
def test_an_interrupted_fetch_leaves_no_wrong_token(where, monkeypatch):
    model, spec = tiny_model(), SPECS["pages"]
    with foveate.attached(model, spec):
        expected = turn(model, foveate.Cache(model), repetitive(61))
    foveate.attach(model, spec, offload=True)
    cache, real, calls = foveate.Cache(model), getattr(host_pages, where), []

    def stops(*given):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(host_pages, where, stops)
    with pytest.raises(KeyboardInterrupt):
        turn(model, cache, repetitive(61))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="was interrupted"):
        model(repetitive(61)[:, :1], **cached(cache))
    equal(turn(model, foveate.Cache(model), repetitive(61)), expected)


def test_host_memory_goes_with_its_cache_and_with_the_method():
    model = tiny_model()
    foveate.attach(model, SPECS["pages"], offload=True)
    caches = [returned_cache(turn(model, foveate.Cache(model), repetitive(61))) for _ in range(2)]
    caches.append(copy.deepcopy(caches[1]))
    segments = [
        weakref.ref(one) for cache in caches for layer in cache.layers for one in layer.cache.store.host._segments
    ]
    first = len(segments) // 3
    del caches[0]  # nothing refers to itself: no collection is needed
    assert [one() for one in segments[:first]] == [None] * first
    assert all(one() is not None for one in segments[first:])
    foveate.detach(model)
    assert [one() for one in segments] == [None] * len(segments)
    with foveate.attached(model, "dense"), pytest.raises(ValueError, match="start a new cache"):
        model(repetitive(61)[:, :1], **cached(caches[0]))


def test_what_was_attached_before_goes_on_with_its_caches():
    model = tiny_model()
    foveate.attach(model, SPECS["pages"], offload=True)
    cache = returned_cache(first := turn(model, foveate.Cache(model), repetitive(61)))
    other = copy.deepcopy(cache)
    with foveate.attached(model, "dense"):
        pass
    ids = torch.cat([first.sequences, repetitive(9)], 1)
    equal(turn(model, cache, ids), turn(model, other, ids))


def test_several_questions(tiny_folder, tokenizer):
    model, found = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder), []
    document = "It was a bright cold day in April, and the clocks were striking thirteen. " * 8
    for how in ({}, {"offload": True}):
        with foveate.attached(model, "pages:top_k=40", **how):
            found.append(
                foveate.ask(model, tokenizer, document, ["When?", "What did the clocks do?"], max_new_tokens=9)
            )
    assert found[0] == found[1]


@pytest.mark.parametrize("held", [0, 700])
@pytest.mark.parametrize("free", [0, 1, 300, 10**12])
def test_host_memory_is_refused_from_the_first_byte_that_is_not_free(monkeypatch, held, free):
    model = tiny_model()
    foveate.attach(model, SPECS["pages"], offload=True)
    share = foveate.Cache(model).phase.offload
    monkeypatch.setattr(offload, "_free_host_memory", lambda: free)
    share.check_host("a row", held + free, held)
    with pytest.raises(ValueError, match=r"keys and values of a row take .* of host memory"):
        share.check_host("a row", held + free + 1, held)

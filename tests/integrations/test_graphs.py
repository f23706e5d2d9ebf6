"""`generate` with replayed decode steps: the tokens, the cache and the statistics of ordinary ones."""

import copy
import gc
import weakref

import pytest
import torch

import foveate
from foveate import methods
from foveate.integrations.transformers.decode_calls import DecodeCall
from foveate.lab.recorded import record
from foveate.runtime import ReplayedSteps
from tests.combinations import in_turn
from tests.helpers import (
    FAMILIES,
    ONE_OF_EACH,
    SLIDING,
    assistant,
    cached,
    generate,
    left_padded,
    of_release,
    tiny_model,
    tokens,
)

BY_PAGES = "kascade_pages:top_k=9,pool=kv_head,pooling=post_softmax,decode_only=false,dense_anchor_prefill=false"
SPECS = [
    methods.make(name, **methods.get(name).about.small_budget).spec
    for name in methods.names()
    if methods.get(name).replay is not None and name in ONE_OF_EACH
] + [
    methods.make("mixed", **methods.get("mixed").about.small_budget).spec,
    'per_layer:layers={"0": "quest:dense_layers=0,page_size=4,top_k=9", "1-2": "tova:top_k=9"}',
    "h2o:top_k=0.2,window=6",
    'kascade_paper:anchors=[0],heads={"1":[1,0],"2":[1,1]},top_k=0.2,min_k=4',
    f"{BY_PAGES},anchors=[0, 1]",
    f"{BY_PAGES},anchors=[0],first_layer=pages",
    f"{BY_PAGES},anchors=[1],first_layer=pages",
]


def attached(spec, family="llama", **settings):
    """A model whose steps are recorded on the CPU."""
    model = tiny_model(family)
    attachment = foveate.attach(model, spec, **settings)
    attachment.graphs.recorder = record
    return model


def assert_same_stats(a, b):
    a, b = (foveate.stats(model).to_dict() for model in (a, b))
    for one in (a, b):
        del one["cuda_graphs"], one["resident_bytes"]
    for one, other in zip(a["layers"], b["layers"], strict=True):
        assert one == {key: pytest.approx(value) if isinstance(value, float) else value for key, value in other.items()}


@in_turn(("spec", of_release(SPECS)), ("ragged", [False, True]))
def test_tokens_and_logits_are_those_of_ordinary_steps(spec, ragged):
    """tests/runtime/test_replay.py has each method with both kinds of rows, layer by layer."""
    batch = left_padded([60, 41, 3]) if ragged else {"input_ids": tokens(60, 2), "attention_mask": None}
    if not ragged:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    plain, model = attached(spec, cuda_graph=False), attached(spec)
    more = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 20, "min_new_tokens": 20}
    expected, found = (one.generate(**batch, do_sample=False, **more) for one in (plain, model))
    assert torch.equal(found.sequences, expected.sequences)
    for step, wanted in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(step, wanted, rtol=1e-4, atol=1e-4)
    assert_same_stats(model, plain)
    used = foveate.stats(model).graphs
    assert used.reason == ""
    # the prompt gives the first token; then come a step in which methods settle and one that makes ready
    assert used.replayed >= 15
    assert used.captured <= 2
    assert foveate.stats(plain).graphs.replayed == 0


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SLIDING])
@pytest.mark.parametrize("spec", ["dense", "kascade_paper:anchors=1,top_k=9"])
def test_every_family_sampled_and_with_ends(family, spec):
    batch, outs = left_padded([33, 50]), []
    for settings in ({"cuda_graph": False}, {}):
        model = attached(spec, family, **settings)
        model.generation_config.eos_token_id = int(generate(model, **batch, new=14)[0, 10])
        torch.manual_seed(3)
        outs.append(model.generate(**batch, do_sample=True, top_k=4, max_new_tokens=30))
        outs.append(model.generate(**batch, do_sample=False, max_new_tokens=30))
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])
    assert foveate.stats(model).graphs.replayed > 10


@pytest.mark.parametrize(
    "spec",
    [
        "dense",
        "h2o:top_k=9,window=8",
        "quest:dense_layers=0,page_size=4,top_k=9",
        f"{BY_PAGES},anchors=[0, 1]",
        f"{BY_PAGES},anchors=[0],first_layer=pages",
        "pages:page_size=4,top_k=32",
    ],
)
def test_turns_chunks_copies_and_forward_passes_go_on_from_replayed_steps(spec):
    plain, model = attached(spec, cuda_graph=False), attached(spec)
    found = []
    for one in (plain, model):
        cache = foveate.Cache(one)
        first = one.generate(tokens(40, 2), max_new_tokens=9, do_sample=False, **cached(cache))
        twin = copy.deepcopy(cache)
        second = torch.cat([first, tokens(12, 2, seed=4)], 1)
        outs = [
            one.generate(
                second, max_new_tokens=8, do_sample=False, **cached(kept), attention_mask=torch.ones_like(second)
            )
            for kept in (cache, twin)
        ]
        outs.append(one(outs[0][:, -1:], **cached(cache)).logits.argmax(-1))
        cache.reorder_cache(torch.tensor([1, 0]))
        outs.append(one(outs[0][:, -1:], **cached(cache)).logits.argmax(-1))
        cache.batch_repeat_interleave(2)
        third = torch.cat([outs[0].flip(0), outs[0][:, -1:]], 1).repeat_interleave(2, 0)  # what the cache has read
        third = torch.cat([third, tokens(8, 4, seed=5)], 1)
        more = {**cached(cache), "attention_mask": torch.ones_like(third)}
        outs.append(one.generate(third, max_new_tokens=8, do_sample=False, **more))
        outs.append(one.generate(tokens(40, 2), max_new_tokens=9, do_sample=False, prefill_chunk_size=13))
        found.append(outs)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert foveate.stats(model).graphs.replayed >= 20


@pytest.mark.parametrize("spec", ["h2o:top_k=9,window=8", "luka:page_size=4,tail=9,top_k=2"])
def test_a_padded_batch_has_another_turn_after_replayed_steps(spec):
    """Layers whose rows had the same numbers on the device have numbers of their own on the host."""
    plain, model = attached(spec, cuda_graph=False), attached(spec)
    batch, new, found = left_padded([40, 30]), tokens(12, 2, seed=4), []
    for one in (plain, model):
        cache = foveate.Cache(one)
        first = one.generate(**batch, max_new_tokens=9, do_sample=False, **cached(cache))
        ids = torch.cat([first, new], 1)
        mask = torch.nn.functional.pad(batch["attention_mask"], (0, 21), value=1)
        found.append(one.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, **cached(cache)))
    assert torch.equal(*found)
    assert_same_stats(model, plain)
    assert foveate.stats(model).graphs.replayed >= 10


def test_steps_end_where_the_fullest_layer_has_no_room(little_room, monkeypatch):
    monkeypatch.setattr("foveate.runtime.replay.ROOM", 1)
    spec = 'per_layer:layers={"0": "dense", "1-2": "snapkv:top_k=24,window=8"}'
    plain, model = attached(spec, cuda_graph=False), attached(spec)
    expected, found = (generate(one, tokens(60, 2), new=60) for one in (plain, model))
    assert torch.equal(found, expected)
    assert_same_stats(model, plain)
    assert foveate.stats(model).graphs.captured > 2


def test_what_was_recorded_goes_with_its_cache():
    model = attached("kascade_paper:anchors=1,top_k=9")
    kept = []
    real = ReplayedSteps.__init__

    def noted(self, *args):
        kept.append(weakref.ref(self))
        real(self, *args)

    ReplayedSteps.__init__ = noted
    gc.disable()
    try:
        generate(model, tokens(40))
        assert len(kept) == 1
        assert kept[0]() is None
    finally:
        gc.enable()
        ReplayedSteps.__init__ = real


def test_other_decoding_takes_ordinary_steps_and_says_why():
    model = attached("dense")
    plain = attached("dense", cuda_graph=False)
    for options, reason in (
        ({"num_beams": 2}, "beam_search"),
        ({"use_cache": False}, "use_cache=False"),
        ({"prompt_lookup_num_tokens": 3}, "assisted"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    ):
        outs = [generate_with(one, **options) for one in (model, plain)]
        assert torch.equal(*outs)
        assert reason in foveate.stats(model).graphs.reason
    assert foveate.stats(model).graphs.replayed == 0
    helper = assistant()
    outs = [generate(one, tokens(30), assistant_model=helper) for one in (model, plain)]
    assert torch.equal(*outs)
    generate(model, tokens(30))
    used = foveate.stats(model, reset=True).graphs
    assert used.replayed == 9
    assert used.reason == ""
    assert foveate.stats(model).graphs.replayed == 0


def test_a_hook_is_called_at_every_step():
    model, calls = attached("dense"), []
    hook = model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    generate(model, tokens(30))
    assert len(calls) == 12
    assert "model.layers.1 has a forward hook" in foveate.stats(model).graphs.reason
    model.foveate.graphs.mode = True
    with pytest.raises(ValueError, match=r"model\.layers\.1 has a forward hook"):
        generate(model, tokens(30))
    hook.remove()
    generate(model, tokens(30))
    assert foveate.stats(model).graphs.replayed == 9


def test_weights_may_be_replaced_between_turns():
    outs = []
    for settings in ({"cuda_graph": False}, {}):
        model = attached("dense", **settings)
        cache = foveate.Cache(model)
        first = model.generate(tokens(40, 2), max_new_tokens=9, do_sample=False, **cached(cache))
        torch.manual_seed(5)
        for weight in model.parameters():  # others at other addresses, and what was there is gone
            old, weight.data = weight.data, torch.randn_like(weight) * 0.2
            old.fill_(torch.nan)
        second = torch.cat([first, tokens(12, 2, seed=4)], 1)
        more = {**cached(cache), "attention_mask": torch.ones_like(second)}
        outs.append(model.generate(second, max_new_tokens=9, do_sample=False, **more))
    assert torch.equal(*outs)
    assert foveate.stats(model).graphs.captured == 2


@pytest.mark.parametrize("spec", ["quest:dense_layers=0,page_size=4,top_k=", "luka:page_size=4,tail=8,top_k="])
def test_one_key_is_not_a_share_of_one(spec):
    spec = f'per_layer:layers={{"0": "{spec}1", "1-2": "{spec}1.0"}}'
    plain, model = attached(spec, cuda_graph=False), attached(spec)
    assert torch.equal(*(generate(one, tokens(90, 2)) for one in (plain, model)))
    assert_same_stats(model, plain)


def generate_with(model, **options):
    out = model.generate(tokens(30), max_new_tokens=12, do_sample=False, **options)
    return getattr(out, "sequences", out)


def test_insisting_is_refused_with_the_reason_and_leaves_the_model_as_it_was():
    model = tiny_model()
    with pytest.raises(ValueError, match="on the CPU, and CUDA graphs need a GPU"):
        foveate.attach(model, "dense", cuda_graph=True)
    assert not hasattr(model, "foveate")
    with pytest.raises(ValueError, match="cuda_graph must be True, False or 'auto', not 'yes'"):
        foveate.attach(model, "dense", cuda_graph="yes")
    with pytest.raises(ValueError, match="layers 0, 2 stay as they are"):
        foveate.attach(tiny_model("gemma3"), "dense", cuda_graph=True)
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match="dynamic rotary embeddings"):
        foveate.attach(model, "dense", cuda_graph=True)


def test_insisting_is_refused_when_a_call_cannot_be_replayed():
    model = attached("dense")
    model.foveate.graphs.mode = True
    with pytest.raises(ValueError, match="cuda_graph=True is not possible: beam_search"):
        model.generate(tokens(30), num_beams=2, max_new_tokens=5)
    with pytest.raises(ValueError, match="output_hidden_states=True returns more"):
        model.generate(tokens(30), output_hidden_states=True, return_dict_in_generate=True, max_new_tokens=5)
    assert generate(model, tokens(30)).shape == (1, 12)
    assert foveate.stats(model).graphs.replayed == 9


def test_a_step_that_cannot_be_recorded_is_run():
    def fails(run):
        run()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    plain, model = (
        attached("kascade_paper:anchors=1,top_k=9", cuda_graph=False),
        attached("kascade_paper:anchors=1,top_k=9"),
    )
    model.foveate.graphs.recorder = lambda run: record(lambda: fails(run))
    with pytest.warns(UserWarning, match="could not be captured .operation not permitted"):
        found = generate(model, tokens(40, 2))
    assert torch.equal(found, generate(plain, tokens(40, 2)))
    assert "could not be captured" in foveate.stats(model).graphs.reason
    model.foveate.graphs.mode, model.foveate.graphs._broken = True, ""
    with pytest.raises(ValueError, match="could not be captured"):
        generate(model, tokens(40, 2))


def test_detached_models_and_copies():
    model = attached("dense")
    twin = copy.deepcopy(model)
    assert isinstance(model.get_compiled_call(None), DecodeCall)
    assert twin.get_compiled_call(None).model is twin
    assert twin.get_compiled_call(None).attachment is twin.foveate
    assert twin.foveate.graphs is not model.foveate.graphs
    foveate.detach(model)
    assert "get_compiled_call" not in model.__dict__
    assert torch.equal(generate(model, tokens(30)), generate(twin, tokens(30)))
    assert foveate.stats(twin).graphs.reason.startswith("the model is on the CPU")

"""Kascade's anchors from the first long prompt of an attached model."""

import concurrent.futures
import copy
import functools
import logging
import pickle

import pytest
import torch
import transformers

import foveate
from foveate import methods
from foveate.calibration import choose
from foveate.integrations.transformers import auto
from foveate.integrations.transformers.study import Study
from tests.helpers import CONFIGS, cached, cut_rows, fingerprint, generate, left_padded, prepare, tiny_model, tokens

AUTO = "kascade:calibration=auto,anchors=3,top_k=9,tile=24"
LEAST = 73  # tokens: tiles of 12 positions, the first behind more than 64 keys begins at 72
LAYERS = 6


@functools.cache
def _built():
    torch.manual_seed(3)
    config = CONFIGS["llama"](num_hidden_layers=LAYERS, num_key_value_heads=3)
    config._attn_implementation = "sdpa"
    return prepare(transformers.AutoModelForCausalLM.from_config(config))


@pytest.fixture
def model():
    return copy.deepcopy(_built())


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def found(model):
    """Anchors and heads in use, the same in all layers that had to find them."""
    used = {(policy.method.anchors, str(policy.method.heads)) for policy in model.foveate.policies.values()}
    (choice,) = used
    return choice


def after(model, ids, method=AUTO, **more):
    """What is found on a prompt, by itself."""
    with foveate.attached(model, method):
        model(ids, **more)
        model(tokens(3))
        return found(model)


def explicit(model):
    """The method in use, with nothing to find."""
    method = next(policy.method for policy in model.foveate.policies.values())
    assert method.calibration == ""
    return methods.make(method.spec)


def hooks(model):
    kinds = ("_forward_hooks", "_forward_hooks_always_called", "_forward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def dense_at_first(model, cache):
    """Reads densely what comes next on a cache; returns a function that ends it."""
    dense = methods.make("dense")
    own = [layer.method for layer in cache.layers]
    for layer in cache.layers:
        layer.method = dense

    def end():
        for layer, method in zip(cache.layers, own):
            layer.method = method

    return end


class TestTheFirstLongPrompt:
    def test_is_dense(self, model):
        ids = tokens(120)
        with foveate.attached(model, "dense"):
            expected = model(ids).logits
        with foveate.attached(model, AUTO):
            assert torch.equal(model(ids).logits, expected)

    def test_gives_the_anchors_that_are_best_for_it(self, model):
        ids = tokens(150)
        with foveate.attached(model, "dense") as attachment:
            study = Study(model, attachment.policies, auto.KEYS, 24)
            model(ids)
            measured, importance = study.result()
        choice = choose(lambda: [measured.captured], importance, 3)
        heads = {str(layer): heads for layer, heads in choice.heads.items()}
        assert after(model, ids) == (tuple(choice.anchors), str(heads))

    @pytest.mark.parametrize("how", ["turns", "chunks", "chunks and a mask of all"])
    def test_is_followed_by_what_these_anchors_give(self, model, how):
        ids, first, second = tokens(190), 100, 170
        chunks = how != "turns"
        mask = {"attention_mask": torch.ones_like(ids)} if how.endswith("all") else {}

        def outputs(cache, end=lambda: None):
            out = [model(ids[:, :first], **cached(cache), **mask).logits]
            end()
            if not chunks:
                out += [model(ids[:, i : i + 1], **cached(cache)).logits for i in range(first, first + 4)]
                cache.begin(second, assistant=False)
            out.append(model(ids[:, cache.get_seq_length() : second], **cached(cache), **mask).logits)
            out += [model(ids[:, i : i + 1], **cached(cache)).logits for i in range(second, 190)]
            return torch.cat(out, 1)

        told = {"prompt_length": second} if chunks else {}
        with foveate.attached(model, AUTO):
            ours = outputs(foveate.Cache(model, **told))
            method = explicit(model)
        with foveate.attached(model, method):
            cache = foveate.Cache(model, **told)
            theirs = outputs(cache, dense_at_first(model, cache))
            sparse = outputs(foveate.Cache(model, **told))
        with foveate.attached(model, "dense"):
            dense = outputs(foveate.Cache(model, **told))
        assert torch.equal(ours, theirs)
        assert not torch.allclose(ours[:, first:], dense[:, first:], atol=1e-3)
        assert not torch.allclose(ours[:, first:], sparse[:, first:], atol=1e-3)

    @pytest.mark.parametrize("use_cache", [True, False])
    def test_is_followed_by_sparse_prompts(self, model, use_cache):
        with foveate.attached(model, AUTO):
            model(tokens(120), use_cache=use_cache)
            ours = model(tokens(90, seed=1), use_cache=use_cache).logits
            method = explicit(model)
        with foveate.attached(model, method):
            assert torch.equal(ours, model(tokens(90, seed=1), use_cache=use_cache).logits)
        with foveate.attached(model, "dense"):
            assert not torch.allclose(ours, model(tokens(90, seed=1)).logits, atol=1e-3)

    def test_decides_for_caches_that_are_older(self, model):
        with foveate.attached(model, AUTO):
            cache = foveate.Cache(model)
            model(tokens(60), **cached(cache))
            model(tokens(120))
            ours = model(tokens(1), **cached(cache)).logits
            method = explicit(model)
        with foveate.attached(model, method):
            cache = foveate.Cache(model)
            end = dense_at_first(model, cache)
            model(tokens(60), **cached(cache))
            end()
            assert torch.equal(ours, model(tokens(1), **cached(cache)).logits)

    def test_decides_once(self, model, caplog):
        with foveate.attached(model, AUTO):
            model(tokens(150))
            model(tokens(150, seed=1))
            first = found(model)
            model(tokens(150, seed=2))
            assert found(model) == first
        assert first != after(model, tokens(150, seed=1))
        told = [record.message for record in caplog.records]
        assert len(told) == 2
        assert f"found the anchors {list(first[0])} on 150 tokens of the first prompt" in told[0]

    def test_of_a_padded_batch_is_its_longest_row(self, model):
        batch = left_padded([110, 180, 130])
        with foveate.attached(model, AUTO):
            generate(model, **batch, new=2)
            ours = found(model)
        alone = [after(model, row) for row in cut_rows(batch)]
        assert ours == alone[1]
        assert ours not in (alone[0], alone[2])

    def test_in_chunks_is_the_longest_row_of_the_first(self, model):
        ids, mask = tokens(200, batch=2), torch.ones(2, 200, dtype=torch.int64)
        mask[0, :20] = 0  # the first row has less of the first chunk, the other less of all
        mask[1, 110:190] = 0
        with foveate.attached(model, AUTO):
            cache = foveate.Cache(model, prompt_length=200)
            model(ids[:, :100], attention_mask=mask, **cached(cache))
            model(ids[:, 100:], attention_mask=mask, **cached(cache))
            ours = found(model)
        assert ours == after(model, ids[1:, :100])
        assert ours != after(model, ids[:1, 20:100])

    def test_is_looked_at_up_to_a_bound(self, model, monkeypatch):
        ids = tokens(200)
        whole = after(model, ids)
        monkeypatch.setattr(auto, "TOKENS", 110)
        assert after(model, ids) == after(model, ids[:, :110]) != whole

    def test_may_be_embedded(self, model):
        ids = tokens(120)
        with foveate.attached(model, AUTO):
            model(inputs_embeds=model.get_input_embeddings()(ids))
            model(tokens(3))
            ours = found(model)
        assert ours == after(model, ids)

    def test_is_told_by_what_the_layers_do(self, model):
        with foveate.attached(model, AUTO):
            generate(model, tokens(120), new=3)
            anchors, _ = found(model)
            stats = foveate.stats(model)
        assert all(f"anchors={list(anchors)}" in layer.method for layer in stats.layers)
        assert [layer.indices_reused for layer in stats.layers] == [
            2 * (layer not in anchors) for layer in range(LAYERS)
        ]


def test_short_prompts_stay_dense_and_are_told_once(model, caplog):
    def outputs(cache):
        return torch.cat([model(tokens(n), **cached(cache)).logits for n in (LEAST - 1, 1, 1)], 1)

    with foveate.attached(model, "dense"):
        expected = outputs(foveate.Cache(model))
    with foveate.attached(model, AUTO):
        for _ in range(2):
            assert torch.equal(outputs(foveate.Cache(model)), expected)
        (record,) = caplog.records
        assert f"a first forward pass of at least {LEAST} tokens; until then it is dense" in record.message
        assert (record.name, record.levelno) == ("foveate", logging.WARNING)
        generate(model, tokens(LEAST), new=3)
        assert f"on {LEAST} tokens" in caplog.records[1].message
        assert found(model)[0][0] == 0


class TestNothingIsLeft:
    def test_of_the_watch_once_the_prompt_is_read(self, model):
        foveate.attach(model, "dense")
        usual = hooks(model)
        foveate.attach(model, AUTO)
        model(tokens(120))
        assert hooks(model) == usual
        assert all(policy.look is None for policy in model.foveate.policies.values())

    @pytest.mark.parametrize("moment", ["attached", "watched", "found", "interrupted"])
    def test_when_it_is_detached(self, model, moment):
        before = fingerprint(model)
        foveate.attach(model, AUTO)
        if moment == "interrupted":
            interrupted(model)
        elif moment != "attached":
            model(tokens(120))
        if moment == "found":
            model(tokens(3))
        foveate.detach(model)
        assert fingerprint(model) == before


def interrupted(model, layer=3):
    """A first prompt that ends in the middle of a layer."""

    def stop(*args):
        raise InterruptedError

    handle = model.model.layers[layer].mlp.register_forward_pre_hook(stop)
    with pytest.raises(InterruptedError):
        model(tokens(140, seed=7))
    handle.remove()


@pytest.mark.parametrize("layer", [0, 3])
def test_a_first_prompt_that_was_interrupted_is_forgotten(model, layer):
    with foveate.attached(model, AUTO):
        interrupted(model, layer)
        model(tokens(120))
        model(tokens(3))
        ours = found(model)
    assert ours == after(model, tokens(120)) != after(model, tokens(140, seed=7))


def test_masks_of_pairs_are_not_looked_at_and_told_once(caplog):
    model = tiny_model("qwen2")
    with foveate.attached(model, AUTO):
        for _ in range(2):
            pairs = torch.ones(120, 120, dtype=torch.bool).tril()[None, None]
            model(tokens(120), attention_mask={"full_attention": pairs}, use_cache=False)
        model(tokens(3))
        assert {policy.method.calibration for policy in model.foveate.policies.values()} == {"auto"}
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == "kascade finds its anchors in a prompt whose mask has two dimensions; until then it is dense"


@pytest.mark.parametrize("layer", [0, 3])
def test_a_prompt_that_was_interrupted_in_another_thread_is_forgotten(model, layer):
    with foveate.attached(model, AUTO), concurrent.futures.ThreadPoolExecutor(1) as other:
        other.submit(torch.no_grad()(interrupted), model, layer).result()  # and the thread lives on
        model(tokens(120))
        model(tokens(3))
        ours = found(model)
    assert ours == after(model, tokens(120))


def test_a_pass_in_another_thread_is_not_mixed_in(model):
    """It reads a prompt of its own while the first one is in the middle of a layer."""
    ours = after(copy.deepcopy(model), tokens(140, seed=7))
    told = []

    def meanwhile(*args):
        handle.remove()
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            told.append(other.submit(torch.no_grad()(model), tokens(200, seed=1)).result())

    with foveate.attached(model, AUTO):
        handle = model.model.layers[3].mlp.register_forward_pre_hook(meanwhile)
        model(tokens(140, seed=7))
        model(tokens(3))
        assert len(told) == 1
        assert found(model) == ours


def test_a_model_in_training_is_not_watched(model):
    with foveate.attached(model, AUTO):
        usual = hooks(model)
        interrupted(model)
        assert hooks(model) > usual
        model.train()(tokens(60), use_cache=False)  # too short to be watched
        assert hooks(model) == usual
        model(tokens(120), use_cache=False)
        model.eval()(tokens(3))
        assert model.foveate.policies[0].method.calibration == "auto"


def test_drafts_that_leave_layers_out_show_nothing(model):
    foveate.attach(model, AUTO)
    generate(model, tokens(150), assistant_early_exit=2)
    assert found(model) == after(copy.deepcopy(_built()), tokens(150))


class TestACopy:
    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_of_an_interrupted_model_is_clean_once_detached(self, model, copied):
        usual = hooks(model)
        foveate.attach(model, AUTO)
        interrupted(model)
        twin = copied(model)
        assert torch.equal(twin(tokens(20)).logits, copy.deepcopy(_built())(tokens(20)).logits)
        assert hooks(twin) > usual
        foveate.detach(twin)
        assert hooks(twin) == usual

    def test_finds_its_own_anchors(self, model):
        foveate.attach(model, AUTO)
        model(tokens(150))
        twin = copy.deepcopy(model)
        twin(tokens(150, seed=1))
        for one, seed in ((twin, 1), (model, 0)):
            one(tokens(3))
            ours = found(one)
            assert ours == after(copy.deepcopy(_built()), tokens(150, seed=seed))
        assert found(twin) != found(model)

    def test_keeps_what_was_found(self, model):
        foveate.attach(model, AUTO)
        model(tokens(150))
        model(tokens(3))
        twin = copy.deepcopy(model)
        assert twin.foveate.auto is None
        assert torch.equal(twin(tokens(100)).logits, model(tokens(100)).logits)


class TestInSomeLayers:
    def test_the_first_of_them_is_an_anchor(self, model):
        with foveate.attached(model, "per_layer", layers={"0": "dense", "4": "streaming", "rest": AUTO}):
            model(tokens(120))
            model(tokens(3))
            used = {layer: policy.method for layer, policy in model.foveate.policies.items()}
            assert [used[layer].name for layer in (0, 4)] == ["dense", "streaming"]
            for layer in (1, 2, 3, 5):
                assert used[layer].anchors[0] == 1
                assert len(used[layer].anchors) == 3
                assert set(used[layer].anchors) | set(map(int, used[layer].heads)) == {1, 2, 3, 5}
            assert not used[1].place.dense

    def test_each_group_of_them_finds_its_own(self, model):
        spec = AUTO.replace("anchors=3", "anchors=1")
        with foveate.attached(model, "per_layer", layers={"0-2": spec, "3-5": spec}):
            model(tokens(120))
            model(tokens(3))
            places = [policy.method.place.anchor for policy in model.foveate.policies.values()]
        assert places == [0, 0, 0, 3, 3, 3]

    def test_they_are_those_without_a_sliding_window(self):
        model = tiny_model("gemma3")
        with foveate.attached(model, AUTO, anchors=1):
            model(tokens(120))
            model(tokens(3))
            assert found(model) == ((1,), str({"3": model.foveate.policies[3].method.heads["3"]}))

    @pytest.mark.parametrize(
        ("method", "most"), [(AUTO, LAYERS), ({"0-3": "dense", "rest": AUTO.replace("anchors=3", "anchors=7")}, 2)]
    )
    def test_more_anchors_than_layers_are_refused(self, model, method, most):
        before = fingerprint(model)
        settings = {"layers": method} if isinstance(method, dict) else {"anchors": 7}
        with pytest.raises(ValueError, match=f"anchors must be at most {most}, .* not 7"):
            foveate.attach(model, "per_layer" if isinstance(method, dict) else method, **settings)
        assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("weights", "layer", "message"),
    [
        ("q_proj", 2, "layer 2: the attention logits of a prompt are not finite"),
        ("v_proj", 2, "layer 3: the attention logits of a prompt are not finite"),
        ("v_proj", LAYERS - 1, rf"layer {LAYERS - 1} \(kascade.*\): its attention to the prompt is not finite"),
    ],
)
def test_values_that_are_not_finite_are_told_and_forgotten(model, weights, layer, message):
    whole = copy.deepcopy(model)
    with foveate.attached(model, AUTO):
        getattr(model.model.layers[layer].self_attn, weights).weight[0, 0] = float("nan")
        with pytest.raises(ValueError, match=message):
            generate(model, tokens(120))
        model.load_state_dict(whole.state_dict())
        generate(model, tokens(120), new=2)
        ours = found(model)
    assert ours == after(whole, tokens(120))

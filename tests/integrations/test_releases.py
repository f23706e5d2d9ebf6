"""What a release of Transformers might rename or stop doing: an error that says what to do, and never wrong tokens."""

import contextlib
import copy
import re
import threading
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from transformers.generation import GenerationMixin

import foveate
from foveate import methods
from foveate.integrations.transformers import hooks, releases
from foveate.runtime import handover
from tests.helpers import CACHE, cached, fingerprint, generate, returned_cache, tiny_model, tokens


@pytest.fixture
def model():
    return tiny_model()


@contextlib.contextmanager
def release_error(what: str):
    """An error that says what happened, which release is installed, which are tested, and what to do."""
    with pytest.raises(releases.ReleaseError, match=what) as caught:
        yield
    for part in (transformers.__version__, releases.OLDEST, releases.NEWEST):
        assert part in str(caught.value)
    assert re.search(r"install one of these releases|please report it", str(caught.value))


def as_kind(module, **methods):
    """The module as one of a class of its own, in which these methods take the place of its class's."""
    module.__class__ = type(type(module).__name__, (type(module),), methods)
    return module


class TestNames:
    def test_a_decoder_that_calls_its_cache_otherwise(self, model):
        def forward(self, input_ids=None, attention_mask=None, memory=None, use_cache=None):
            raise AssertionError

        as_kind(model.model, forward=forward)
        before = fingerprint(model)
        with release_error("LlamaModel.forward takes a cache under a name"):
            foveate.attach(model, "h2o")
        assert fingerprint(model) == before

    def test_a_model_that_hands_its_cache_on_under_another_name(self, model):
        """The decoder takes any further argument, and would ignore this one."""

        def forward(self, input_ids=None, attention_mask=None, logits_to_keep=0, **given):
            given["memory"] = given.pop(CACHE, None)
            out = self.model(input_ids, attention_mask=attention_mask, **given)
            logits = self.lm_head(out.last_hidden_state[:, -1:])
            return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits, **cached(returned_cache(out)))

        foveate.attach(as_kind(model, forward=forward), "dense")
        with release_error("handed its cache as 'memory'"):
            generate(model, tokens(20))

    def test_a_model_that_leaves_its_cache_out(self, model):
        def forward(self, input_ids=None, attention_mask=None, logits_to_keep=0, **given):
            given.pop(CACHE, None)
            out = self.model(input_ids, attention_mask=attention_mask, **given)
            logits = self.lm_head(out.last_hidden_state[:, -1:])
            return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits)

        foveate.attach(as_kind(model, forward=forward), "dense")
        with release_error("prepared a foveate cache, but calls the model without one"):
            generate(model, tokens(20))

    @pytest.mark.parametrize("name", ["_prepare_cache_for_generation", "_valid_auto_compile_criteria"])
    def test_generate_calls_another_method(self, model, monkeypatch, name):
        monkeypatch.delattr(GenerationMixin, name)
        before = fingerprint(model)
        with release_error(f"LlamaForCausalLM has no {name}"):
            foveate.attach(model, "h2o")
        assert fingerprint(model) == before

    def test_generate_gives_a_method_other_arguments(self, model, monkeypatch):
        monkeypatch.setattr(GenerationMixin, "_prepare_cache_for_generation", lambda self, generation_config: None)
        with release_error("_prepare_cache_for_generation is not given batch_size, generation_mode, model_kwargs"):
            foveate.attach(model, "h2o")

    def test_masks_are_made_of_other_arguments(self, model, monkeypatch):
        monkeypatch.setattr(releases, "sdpa_mask", lambda *args, padding=None, **more: None)
        with release_error("mask functions are not given allow_is_causal_skip, attention_mask, local_size"):
            foveate.attach(model, "h2o")

    def test_models_return_their_cache_under_another_name(self, monkeypatch):
        monkeypatch.setattr(releases, "CACHE_NAMES", ("memory",))
        with release_error("models return their cache under a name that is none of memory"):
            releases._name_of_cache()

    @pytest.mark.parametrize("name", releases.CACHE_NAMES)
    @pytest.mark.parametrize("whose", ["model", "decoder"])
    @torch.no_grad()
    def test_older_names_and_positions_mean_the_same(self, model, name, whose):
        """As long as a release takes a name, so does foveate; of positional arguments it looks at all."""
        foveate.attach(model, "h2o", top_k=4, window=4)
        callee = model if whose == "model" else model.model
        first, second = tokens(20), tokens(1, seed=1)
        caches = [foveate.Cache(model) for _ in range(3)]
        for cache in caches:
            callee(first, **cached(cache))
        expected = callee(second, **cached(caches[0]))[0]
        positional = callee(second, None, None, caches[1])[0]
        assert torch.equal(positional, expected)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            if releases.CACHE_NAMES.index(name) >= releases.CACHE_NAMES.index(CACHE):
                assert torch.equal(callee(second, **{name: caches[2]})[0], expected)
        assert caches[1].get_seq_length() == 21

    def test_two_caches(self, model):
        foveate.attach(model, "dense")
        both = {name: foveate.Cache(model) for name in releases.CACHE_NAMES}
        with pytest.raises(ValueError, match="one cache, not both cache and past_key_values"):
            releases.with_newest_names(both)


class TestProof:
    """A forward pass proves that each layer is reached, with the cache and the prompt that were prepared."""

    def test_a_layer_that_is_not_reached(self, model):
        foveate.attach(model, "dense")
        module = model.model.layers[1].self_attn
        module.config = copy.deepcopy(module.config)
        module.config._attn_implementation_internal = "sdpa"
        with release_error("LlamaModel computed the attention of layers 1 without foveate, which was to apply dense"):
            generate(model, tokens(20))
        with torch.no_grad(), release_error("attention of layers 1 without foveate"):
            model(tokens(20), use_cache=False)

    @pytest.mark.filterwarnings("error")
    def test_an_error_of_the_model_is_not_hidden_by_the_proof(self, model):
        foveate.attach(model, "dense")
        model.model.layers[1].mlp.forward = lambda x: 1 / 0
        with torch.no_grad(), pytest.raises(ZeroDivisionError):
            model(tokens(20))

    def test_a_prompt_that_is_longer_than_prepared(self, model, monkeypatch):
        foveate.attach(model, "dense")
        monkeypatch.setattr(hooks, "_prompt_end", lambda *given: 12)
        with release_error("feeds a prompt of 20 tokens, and prepared one of 12"):
            generate(model, tokens(20))

    def test_a_prompt_without_a_length(self, model):
        foveate.attach(model, "dense")
        config = types.SimpleNamespace(output_attentions=None, cache_implementation=None, use_cache=True)
        with release_error("without the length of its prompt"):
            hooks._prompt_end(config, {})

    @torch.no_grad()
    def test_what_failed_before_its_first_forward_is_forgotten(self, model):
        """`generate` prepares a cache and stops; what follows is another matter, also on that cache."""
        foveate.attach(model, "dense")
        cache = foveate.Cache(model)
        with pytest.raises(Exception, match="bias") as kept:
            generate(model, tokens(20), sequence_bias=[[[2], "x"]], **cached(cache))
        assert kept.value is not None  # and with it what its frames hold
        model(tokens(20), use_cache=True)
        model(tokens(40), **cached(cache))

    def test_loops_of_the_users_own(self, model):
        """They may feed what they like: `custom_generate` prepares a cache and leaves the rest to them."""
        foveate.attach(model, "dense")

        def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
            kwargs.pop("synced_gpus", None)
            more = torch.cat([input_ids, input_ids[:, :1]], 1)
            return model(more, **{CACHE: kwargs.get(CACHE)}, use_cache=True).logits.argmax(-1)

        assert model.generate(tokens(20), custom_generate=loop, max_new_tokens=4).shape == (1, 21)

    def test_passes_of_several_threads_without_a_cache(self, model, monkeypatch):
        """Each reads what its own earlier layers have chosen: every thread waits in every layer for the others."""
        foveate.attach(model, "kascade", **methods.get("kascade").about.small_budget)
        prompts, barrier = [tokens(60, seed=n) for n in range(3)], threading.Barrier(3)

        def read(ids):
            with torch.no_grad():
                return model(ids, use_cache=False).logits

        alone, reach = [read(ids) for ids in prompts], handover.mark_attended
        monkeypatch.setattr(handover, "mark_attended", lambda *given: (reach(*given), barrier.wait(30))[0])
        with ThreadPoolExecutor(3) as pool:
            for found, expected in zip(pool.map(read, prompts), alone, strict=True):
                torch.testing.assert_close(found, expected)

    @torch.no_grad()
    @pytest.mark.parametrize("use_cache", [True, False])
    def test_a_pass_within_a_pass(self, model, use_cache):
        """As a hook may run another attached model."""
        other, found = tiny_model(seed=1), []
        foveate.attach(model, "quest", **methods.get("quest").about.small_budget)
        foveate.attach(other, "h2o", **methods.get("h2o").about.small_budget)
        alone = [one(tokens(40), use_cache=use_cache).logits for one in (model, other)]
        hook = model.model.layers[0].register_forward_hook(
            lambda *args: found.append(other(tokens(40), use_cache=use_cache).logits)
        )
        assert torch.equal(model(tokens(40), use_cache=use_cache).logits, alone[0])
        assert torch.equal(found[0], alone[1])
        hook.remove()

    @pytest.mark.parametrize("insist", [True, "auto"])
    def test_steps_that_are_not_asked_for(self, model, insist):
        """Without them no step would be replayed, and nobody would know."""
        attachment = foveate.attach(model, "dense")
        attachment.graphs.mode = insist
        model._valid_auto_compile_criteria = lambda model_kwargs, generation_config: False
        if insist is True:
            with pytest.raises(ValueError, match="does not ask the model for what runs a decode step"):
                generate(model, tokens(20))
        else:
            generate(model, tokens(20), 1)
            assert "does not ask the model" in attachment.graphs.use.reason


class TestVersions:
    def test_a_newer_release_is_told_of_once(self, model, monkeypatch):
        monkeypatch.setattr(releases, "NEWEST", "5.16.0")
        releases._tell_of_newer.cache_clear()
        with pytest.warns(UserWarning, match=rf"{transformers.__version__} is newer than 5\.16\.0"):
            foveate.attach(model, "dense")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            foveate.attach(model, "dense")
        releases._tell_of_newer.cache_clear()

    def test_advice_depends_on_the_release(self, monkeypatch):
        monkeypatch.setattr(releases.transformers, "__version__", "5.99.0")
        assert "install one of these releases, or a newer foveate" in str(releases.unknown("something"))
        monkeypatch.setattr(releases.transformers, "__version__", "5.20.1")
        assert "please report it" in str(releases.unknown("something"))

    def test_tested_releases_are_those_that_are_allowed(self):
        pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
        assert f'"transformers>={releases.OLDEST.removesuffix(".0")},<6"' in pyproject

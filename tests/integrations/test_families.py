"""The families in docs/guide/models.md: each decodes to Transformers' own tokens where a method leaves nothing out."""

import copy
import functools
import itertools
from pathlib import Path

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicSlidingWindowLayer

import foveate
from foveate import methods
from foveate.integrations.transformers import hooks
from foveate.integrations.transformers.releases import ReleaseError
from foveate.integrations.transformers.support import forgets
from foveate.lab.evaluation.calibration.similarity import Similarity
from foveate.lab.recorded import record
from foveate.methods import SharedPrompt
from tests.families import FAMILIES, KINDS, RECURRENT, family
from tests.helpers import cached, generate, left_padded, prepare, returned_cache, tokens
from tests.selection import in_full
from tests.state_machine import error_of

METHODS = ["luka", "kascade", "h2o", "quest"]
STATES = ["Qwen3-Next", "OLMo hybrid", "Falcon-H1", "Nemotron-H"]
"""Families of which every way to decode is tried: gated delta rule, alone and beside full attention, and Mamba 2."""

every_family = pytest.mark.parametrize("name", in_full(FAMILIES, KINDS))


@functools.cache
def own(name):
    """Transformers' own tokens of a padded batch."""
    return generate(family(name), **left_padded([40, 23]), new=10)


@every_family
def test_tokens_are_those_of_transformers(name):
    model = family(name)
    for method in METHODS:
        with foveate.attached(model, method, **methods.get(method).about.full_budget):
            assert torch.equal(generate(model, **left_padded([40, 23]), new=10), own(name)), method
            assert foveate.stats(model).summary()["keys_read_share"] >= 0.99
    assert len(own(name).unique()) > 5  # a model that repeats a token would show nothing


@every_family
def test_a_small_budget_is_applied(name):
    model = family(name)
    with foveate.attached(model, "h2o", top_k=8, window=4):
        generate(model, tokens(60), new=10)
        stats = foveate.stats(model)
        assert stats.summary()["keys_read_share"] < 0.3
        unchanged = [layer.note for layer in stats.layers if layer.method == "unchanged"]
        assert any("recurrent" in note for note in unchanged) == (name in RECURRENT and name != "Falcon-H1")


def row(name):
    """The family's line in docs/guide/models.md."""
    with foveate.attached(family(name), "dense") as attachment:
        unchanged = set(attachment.unchanged.values()) - {"attention-free"}  # which 5.17 does not tell apart
        return f"| {name} | `{type(family(name)).__name__}` | {', '.join(sorted(unchanged))} |"


def test_the_documented_table():
    page = (Path(__file__).parents[2] / "docs" / "guide" / "models.md").read_text()
    assert [line for line in page.splitlines() if "ForCausalLM` |" in line] == [row(name) for name in FAMILIES]


@torch.no_grad()
def test_a_convolution_is_not_cropped_in_part():
    model = family("LFM2")
    with foveate.attached(model, "dense"):
        cache = returned_cache(model(tokens(40)))
        with pytest.raises(ValueError, match=r"crop\(-2\): layer \d keeps the last tokens .*activate_past_recording"):
            cache.crop(-2)
        assert cache.get_seq_length() == 40
        model(tokens(1), **cached(cache))


@every_family
@torch.no_grad()
def test_a_second_turn_is_as_a_fresh_read_or_refused(name):
    """By a pass and by `generate`."""
    model, ids = family(name), tokens(37, 2)
    with foveate.attached(model, "dense"):
        how = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        fresh = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        cache = foveate.Cache(model)
        model(ids[:, :30], **cached(cache))
        twin = copy.deepcopy(cache)
        if forgets(model):
            with pytest.raises(ValueError, match=r"cannot take 7 tokens on a cache of 30: .*with a new cache"):
                model(ids[:, 30:], **cached(cache))
            with pytest.raises(ValueError, match=r"cannot take 7 tokens on a cache of 30: .*with a new cache"):
                model.generate(ids, attention_mask=torch.ones_like(ids), **cached(twin), **how)
            whole = model(ids[:, :31]).logits[:, -1]
            for one in (cache, twin):  # neither is changed, and one token is no pass of several
                out = model(ids[:, 30:31], **cached(one)).logits[:, -1]
                torch.testing.assert_close(out, whole, rtol=1e-3, atol=1e-3)
            return
        again = model.generate(ids, attention_mask=torch.ones_like(ids), **cached(twin), **how)
        torch.testing.assert_close(again.logits, fresh.logits, rtol=1e-3, atol=1e-3)
        out = model(ids[:, 30:], **cached(cache)).logits
        torch.testing.assert_close(out, model(ids).logits[:, 30:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["Gemma 2", "LFM2"])
@torch.no_grad()
def test_a_crop_is_as_a_fresh_read_or_refused(name):
    """Of windows and convolutions, recorded from the first token, from the last of the prompt, or not at all."""
    model, ids, cropped, refused = family(name), tokens(40), 0, 0
    window = DynamicSlidingWindowLayer(4)
    window.activate_past_recording()
    for _ in range(6):
        window.update(*torch.zeros(2, 1, 1, 1, 8))
    # in older releases the mask of a window that records knows one pass alone
    passes = 2 if window.get_mask_sizes(1)[0] > window.keys.shape[2] else 1

    def read(first, end, cache):
        for at in range(first, end):
            out = model(ids[:, at : at + 1], **cached(cache)).logits
        return out

    with foveate.attached(model, "dense"):
        for prompt, records, steps, n in itertools.product((5, 20), (None, "prompt", "steps"), (0, 6), (0, 1, 4, 9)):
            end = prompt + steps
            if n >= end or (records and steps and passes == 1):
                continue
            cache = foveate.Cache(model, prompt)
            if records == "prompt":
                cache.activate_past_recording()
            model(ids[:, :prompt], **cached(cache))
            if records == "steps":
                cache.activate_past_recording()
            if steps:
                read(prompt, end, cache)
            if said := error_of(lambda cache=cache, n=n: cache.crop(-n)):
                assert "activate_past_recording()" in said
                refused += 1
            else:
                end, cropped = end - n, cropped + 1
            assert cache.get_seq_length() == end
            fresh = foveate.Cache(model, end)
            model(ids[:, :end], **cached(fresh))
            torch.testing.assert_close(
                read(end, end + passes, cache), read(end, end + passes, fresh), rtol=1e-3, atol=1e-3
            )
        empty = foveate.Cache(model)
        empty.activate_past_recording()
        empty.crop(0)
    assert cropped > 10 * passes
    assert refused > 8


def matters(model):
    """What the learned sinks or the cap of logits of a model change the gradients of."""
    return [weight for name, weight in model.named_parameters() if name.endswith(("sinks", "q_proj.weight"))]


@pytest.mark.parametrize("name", ["gpt-oss", "Gemma 2"])
class TestSinksAndCaps:
    """Learned sinks (gpt-oss) and capped logits (Gemma 2), in layers that take a method and in those that do not."""

    @torch.no_grad()
    @pytest.mark.parametrize("method", ["dense", "kascade_paper", "streaming"])
    @pytest.mark.parametrize("how", ["no_cache", "cache", "padded", "padded, no cache"])
    def test_logits_are_those_of_transformers(self, name, method, how):
        model, batch = family(name), left_padded([40, 31]) if "padded" in how else {"input_ids": tokens(40, 2)}
        expected = model(**batch, use_cache=False).logits
        with foveate.attached(model, method, **methods.get(method).about.full_budget):
            found = model(**batch, use_cache=how in ("cache", "padded")).logits
        real = batch.get("attention_mask", torch.ones(2, 40)).bool()
        torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)

    @torch.no_grad()
    def test_windows_longer_than_a_block(self, name, monkeypatch):
        monkeypatch.setattr("foveate.integrations.transformers.attention._BLOCK", 16)
        model, batch = family(name), left_padded([100, 61])
        expected, real = model(**batch, use_cache=False).logits, batch["attention_mask"].bool()
        with foveate.attached(model, "dense"):
            for use_cache in (True, False):
                found = model(**batch, use_cache=use_cache).logits
                torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("use_cache", [False, True])
    def test_gradients(self, name, use_cache):
        model, ids = copy.deepcopy(family(name)).double(), tokens(40)  # sums in fp32 differ by processor
        model.config._experts_implementation = "eager"  # grouped products know no fp64
        expected = torch.autograd.grad(model(ids, use_cache=False).logits.square().mean(), matters(model))
        with foveate.attached(model, "dense"):
            found = torch.autograd.grad(model(ids, use_cache=use_cache).logits.square().mean(), matters(model))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-7)
            assert other.abs().max() > 1e-6

    @torch.no_grad()
    def test_a_mask_of_pairs(self, name):
        model, ids = family(name), tokens(40)
        pairs = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
        pairs[..., 20:, :20] = False  # two texts in one row
        given = {"full_attention": pairs, "sliding_attention": pairs & pairs.new_ones(40, 40).triu(-7)}
        added = {kind: torch.where(mask, 0.0, float("-inf")) for kind, mask in given.items()}
        expected = model(ids, attention_mask=added, use_cache=False).logits
        beside = {"gpt-oss": "beside learned sinks", "Gemma 2": "under a cap of logits"}[name]
        with foveate.attached(model, "dense"):
            found = model(ids, attention_mask=given, use_cache=False).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            with pytest.raises(ValueError, match=f"attention_mask must be bool {beside}"):
                model(ids, attention_mask=added, use_cache=False)

    def test_under_another_name(self, name, monkeypatch):
        """A release that hands them over otherwise would change all tokens."""
        model = family(name)
        with foveate.attached(model, "dense"):
            functions = transformers.AttentionInterface._global_mapping
            own = functions["foveate"]
            argument = {"gpt-oss": "s_aux", "Gemma 2": "softcap"}[name]
            said = {
                "s_aux": "does not hand them over as s_aux",
                "softcap": "caps its logits and does not hand over the cap as softcap",
            }

            def renamed(*args, **kwargs):
                return own(*args, renamed=kwargs.pop(argument, None), **kwargs)

            monkeypatch.setitem(functions, "foveate", renamed)
            with pytest.raises(ReleaseError, match=said[argument]):
                generate(model, tokens(20))


class TestLearnedSinks:
    @torch.no_grad()
    def test_sinks_that_are_replaced_between_steps(self):
        model, ids, step = family("gpt-oss"), tokens(40), tokens(1, seed=3)
        modules = [module for module in model.modules() if hasattr(module, "sinks")]
        with foveate.attached(model, "dense"):
            cache = returned_cache(model(ids))
            for module in modules:
                module.sinks.data = module.sinks.data + 3
            replaced = model(step, **cached(cache)).logits
            for module in modules:
                module.sinks.data = module.sinks.data - 3
            assert not torch.allclose(replaced, model(step, **cached(returned_cache(model(ids)))).logits, atol=1e-2)

    def test_they_change_what_is_generated(self):
        """Else the tests of this family would show nothing."""
        model, ids = family("gpt-oss"), tokens(60)
        sinks = [module.sinks for module in model.modules() if hasattr(module, "sinks")]
        with foveate.attached(model, "luka"):
            before = generate(model, ids, 16)
            with torch.no_grad():
                for one in sinks:
                    one.sub_(30)
                after = generate(model, ids, 16)
                for one in sinks:
                    one.add_(30)
            assert not torch.equal(before, after)
            assert torch.equal(generate(model, ids, 16), before)


class TestCappedLogits:
    @pytest.fixture
    def whole(self):
        """Without windows, so that steps are replayed."""
        config = copy.deepcopy(family("Gemma 2").config)
        config.layer_types = ["full_attention"] * config.num_hidden_layers
        torch.manual_seed(0)
        return prepare(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))

    @pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
    def test_it_changes_what_is_generated(self, kind):
        """In layers of either kind; else the tests of this family would show nothing."""
        model, ids = family("Gemma 2"), tokens(60)
        modules = [module for module in model.modules() if getattr(module, "layer_type", None) == kind]
        modules = [module for module in modules if hasattr(module, "attn_logit_softcapping")]
        with foveate.attached(model, "luka"):
            before, cap = generate(model, ids, 16), modules[0].attn_logit_softcapping
            for module in modules:
                module.attn_logit_softcapping = None
            after = generate(model, ids, 16)
            for module in modules:
                module.attn_logit_softcapping = cap
            assert not torch.equal(before, after)
            assert torch.equal(generate(model, ids, 16), before)

    @pytest.mark.parametrize("name", ["dense", "luka", "kascade", "quest", "tova"])
    def test_replayed_steps(self, whole, name):
        own = generate(whole, tokens(40, 2), 20)
        with foveate.attached(whole, name, **methods.get(name).about.full_budget):
            whole.foveate.graphs.recorder = record
            assert torch.equal(generate(whole, tokens(40, 2), 20), own)
            used = foveate.stats(whole).graphs
            assert used.reason == ""
            assert used.replayed >= 10

    @torch.no_grad()
    def test_methods_that_share_a_prompt(self):
        model, specs = family("Gemma 2"), ["dense", "h2o:top_k=8,window=4", "quest:top_k=8,page_size=4,dense_layers=0"]
        found = {}
        for spec in specs:
            with foveate.attached(model, spec):
                cache = returned_cache(model(tokens(40)))
                found[spec] = [model(tokens(1, seed=n), **cached(cache)).logits for n in range(4)]
        with foveate.attached(model, SharedPrompt(tuple(map(methods.parse, specs)))):
            cache = foveate.Cache(model)
            cache.begin(40, assistant=False)
            model(tokens(40), **cached(cache))
        for spec in specs:
            with foveate.attached(model, spec):
                branch = cache.branch(model)
                for n in range(4):
                    torch.testing.assert_close(model(tokens(1, seed=n), **cached(branch)).logits, found[spec][n])

    @torch.no_grad()
    def test_dropout_is_refused(self):
        model = copy.deepcopy(family("Gemma 2")).train()
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.1
        with foveate.attached(model, "dense"), pytest.raises(ValueError, match="attention dropout"):
            model(tokens(20), use_cache=False)

    def test_anchors_are_calibrated_under_the_cap(self, whole):
        """Those found from a long prompt, with the cap and without, have other similarities."""
        found = []
        for cap in (2.0, None):
            for module in whole.modules():
                if hasattr(module, "attn_logit_softcapping"):
                    module.attn_logit_softcapping = cap
            similarity = Similarity(4, 4)
            with foveate.attached(whole, "dense") as attachment:
                for policy in attachment.policies.values():
                    policy.on_attention = similarity.look
                with torch.no_grad():
                    whole(tokens(60), use_cache=False)
            found.append(similarity.result().captured)
        assert not torch.allclose(*found, atol=1e-2)


@pytest.mark.parametrize("name", [*STATES, "Jamba"])
def test_long_prompts_of_recurrent_models_come_in_one_piece(name, monkeypatch):
    """Jamba's layers begin each pass of several tokens with an empty state."""
    with foveate.attached(family(name), "dense"):
        whole = generate(family(name), tokens(50), 4)
        monkeypatch.setattr(hooks, "LONG_PROMPT", 40)
        monkeypatch.setattr(hooks, "CHUNK", 16)
        assert torch.equal(generate(family(name), tokens(50), 4), whole)


@pytest.mark.parametrize("name", STATES)
class TestRecurrentLayers:
    """Their states go where the sequences go."""

    @pytest.fixture
    def model(self, name):
        with foveate.attached(family(name), "h2o", top_k=8, window=4):
            yield family(name)

    @pytest.fixture
    def dense(self, name):
        with foveate.attached(family(name), "dense"):
            yield family(name)

    def test_beams(self, name, dense):
        ours = generate(dense, tokens(30), 8, num_beams=3)
        foveate.detach(dense)
        assert torch.equal(ours, generate(dense, tokens(30), 8, num_beams=3))

    def test_turns(self, name, dense):
        def two_turns():
            how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
            first = dense.generate(tokens(30, 2), **how)
            ids = torch.cat([first.sequences, tokens(7, 2, seed=3)], 1)
            return generate(dense, ids, 8, **cached(returned_cache(first)))

        ours = two_turns()
        foveate.detach(dense)
        assert torch.equal(ours, two_turns())

    def test_a_prompt_in_chunks(self, name, model):
        whole = generate(model, tokens(50), 8)
        assert torch.equal(generate(model, tokens(50), 8, prefill_chunk_size=16), whole)

    def test_rows_of_a_padded_batch(self, name, model):
        batch = left_padded([50, 21])
        together = generate(model, **batch, new=8)
        for b, length in enumerate((50, 21)):
            assert torch.equal(generate(model, batch["input_ids"][b : b + 1, -length:], 8), together[b : b + 1])

    @torch.no_grad()
    def test_reordered_rows(self, name, model):
        caches = [returned_cache(model(tokens(40, 2))) for _ in range(2)]
        step = tokens(1, 2, seed=5)
        expected = model(step, **cached(caches[0])).logits
        caches[1].reorder_cache(torch.tensor([1, 0]))
        torch.testing.assert_close(model(step.flip(0), **cached(caches[1])).logits.flip(0), expected)

    @torch.no_grad()
    def test_selected_and_repeated_rows(self, name, model):
        def read(ids):
            return returned_cache(model(ids))

        ids, step = tokens(40, 3), tokens(1, 3, seed=5)
        expected = model(step, **cached(read(ids))).logits
        cache = read(ids)
        cache.batch_select_indices(torch.tensor([2, 0]))
        torch.testing.assert_close(model(step[[2, 0]], **cached(cache)).logits, expected[[2, 0]])
        cache = read(ids)
        cache.batch_select_indices(torch.tensor([True, False, True]))
        cache.batch_repeat_interleave(2)
        rows = [0, 0, 2, 2]
        torch.testing.assert_close(model(step[rows], **cached(cache)).logits, expected[rows])

    @torch.no_grad()
    def test_what_cannot_be_forgotten(self, name, dense):
        cache = returned_cache(dense(tokens(40)))
        with pytest.raises(ValueError, match=r"crop\(-2\): layer \d is recurrent and cannot forget tokens"):
            cache.crop(-2)
        dense(tokens(1), **cached(cache))
        with pytest.raises(ValueError, match=r"not supported with stateful models|can be cropped"):
            generate(dense, tokens(20), prompt_lookup_num_tokens=3)

    @torch.no_grad()
    def test_methods_that_share_a_prompt(self, name, dense):
        """Each goes on from the states at the prompt's end, also after another has."""
        specs, found = ["dense", "h2o:top_k=8,window=4"], {}
        for spec in specs:
            with foveate.attached(dense, spec):
                cache = returned_cache(dense(tokens(40)))
                found[spec] = [dense(tokens(1, seed=n), **cached(cache)).logits for n in range(4)]
        with foveate.attached(dense, SharedPrompt(tuple(map(methods.parse, specs)))):
            cache = foveate.Cache(dense)
            cache.begin(40, assistant=False)
            dense(tokens(40), **cached(cache))
        for spec in specs:
            with foveate.attached(dense, spec):
                branch = cache.branch(dense)
                for n in range(4):
                    torch.testing.assert_close(dense(tokens(1, seed=n), **cached(branch)).logits, found[spec][n])

    def test_replayed_steps(self, name, model):
        ordinary = generate(model, tokens(40, 2), 20)
        model.foveate.graphs.recorder = record
        assert torch.equal(generate(model, tokens(40, 2), 20), ordinary)
        used = foveate.stats(model).graphs
        assert (used.reason, used.captured) == ("", 1)
        assert used.replayed >= 15

    @torch.no_grad()
    def test_their_bytes_count(self, name, model):
        cache = returned_cache(model(tokens(40)))
        states = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
        held = [x for layer in states for x in (*layer.conv_states.values(), *layer.recurrent_states.values())]
        assert cache.unchanged_bytes == sum(x.numel() * x.element_size() for x in held if x is not None)
        assert foveate.stats(model).resident_bytes == cache.resident_bytes

"""Bad input: what the message says, and that nothing is changed by it."""

import contextlib
import copy
import dataclasses
import json
import re
import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import foveate
from foveate import methods
from foveate.state import Evicts
from tests.helpers import (
    CACHE,
    CONFIGS,
    VOCAB,
    cached,
    checkpoint_activations,
    fingerprint,
    generate,
    left_padded,
    prepare,
    returned_cache,
    tiny_model,
    tokens,
)

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def says(*parts: str) -> str:
    """A pattern for a message that holds these pieces in this order."""
    return ".*".join(re.escape(part) for part in parts)


@pytest.fixture
def model():
    return tiny_model()


@pytest.fixture
def h2o(model):
    """A model with an evicting method, attached."""
    foveate.attach(model, "h2o", **methods.get("h2o").about.small_budget)
    return model


@pytest.fixture
def dense(model):
    foveate.attach(model, "dense")
    return model


# Methods and settings


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("h20", {}, says("unknown method 'h20'", "did you mean 'h2o'?", "known are", "dense", "luka")),
        ("streamin:window=4", {}, says("unknown method 'streamin'", "did you mean 'streaming'?")),
        ("", {}, says("unknown method ''", "known are")),
        ("attention_is_all", {}, says("unknown method 'attention_is_all'", "known are")),
        ("h2o", {"topk": 4}, says("h2o has no setting 'topk'", "did you mean 'top_k'?", "top_k, min_k, window")),
        ("luka:pagesize=4", {}, says("luka has no setting 'pagesize'", "did you mean 'page_size'?")),
        ("dense", {"window": 4}, says("dense has no setting 'window'", "it has none")),
        ("dense:window=4", {}, says("dense has no setting 'window'", "it has none")),
        ("luka:page_size=16,128", {}, says("found '128'", "page_size=[...]")),
        ("h2o:top_k", {}, says("'h2o:top_k'", "expected setting=value", "found 'top_k'")),
        ("h2o:top_k=4,top_k=5", {}, says("'h2o:top_k=4,top_k=5'", "top_k is given twice, as 4 and as 5")),
        ("h2o:top_k=4, top_k = 4", {}, says("top_k is given twice, as 4 and as 4")),
        ('per_layer:layers={"0":"h2o","0":"dense"}', {}, says("0 is given twice, as h2o and as dense")),
        ('per_layer:layers={"rest":"h2o:top_k=4,top_k=5"}', {}, says("'h2o:top_k=4,top_k=5'", "top_k is given twice")),
        (methods.get("h2o")(), {"windw": 4}, says("h2o has no setting 'windw'", "did you mean 'window'?")),
        (7, {}, says("method must be a name, a spec string or a Method, not int")),
        (methods.get("h2o"), {}, says("method must be a name, a spec string or a Method")),
        ("per_layer", {}, says("per_layer: layers must be a dict of specs by layer, not None")),
        ("per_layer", {"layers": {}}, says("per_layer: layers must be a dict of specs by layer, not {}")),
        ("per_layer", {"layers": {"first": "h2o"}}, says("'first' is not a layer, a range such as '0-7', or 'rest'")),
        ("per_layer", {"layers": {"0-": "h2o"}}, says("'0-' is not a layer")),
        ("per_layer", {"layers": {"0": "h20"}}, says("unknown method 'h20'", "did you mean 'h2o'?")),
        ("per_layer", {"layers": {"0": "h2o"}}, says("no method for layer 1 of 3", "'rest'")),
        ("per_layer", {"layers": {"0-1": "h2o", "1": "dense", "rest": "dense"}}, says("layer 1 is named by several")),
        ("per_layer", {"layers": {"0-3": "h2o"}}, says("'0-3' names layers outside 0..2")),
        ("per_layer", {"layers": {"-4": "h2o", "rest": "dense"}}, says("'-4' names layers outside 0..2")),
        ("per_layer", {"layers": {"2-1": "h2o", "rest": "dense"}}, says("'2-1' runs backwards; write the lower layer")),
        ("per_layer", {"layers": {0: "h2o", "0": "dense", "rest": "dense"}}, says("'0' is given twice, as a number")),
        ("per_layer", {"layers": {"2-1": "h2o", "rest": "dense"}}, says("'2-1'")),
        ("mixed", {"lined": "h2o:top_k=0"}, says("h2o: top_k must be", "not 0")),
        ("mixed", {"clustered": "lukas"}, says("unknown method 'lukas'", "did you mean 'luka'?")),
    ],
)
def test_bad_methods_and_settings(model, method, settings, message):
    before = fingerprint(model)
    with pytest.raises(ValueError, match=message):
        foveate.attach(model, method, **settings)
    assert fingerprint(model) == before


COUNT, SHARE = "an integer of at least", "or a float in (0, 1] (a share)"
BUDGETS = [0, -1, 0.0, 1.5, -0.1, float("nan"), True, "4", None]


@pytest.mark.parametrize("value", BUDGETS)
@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("h2o", "top_k"),
        ("tova", "top_k"),
        ("uniform", "top_k"),
        ("snapkv", "top_k"),
        ("luka", "expand"),
        ("streaming", "window"),
    ],
)
def test_budgets_out_of_range(model, method, name, value):
    before = fingerprint(model)
    with pytest.raises(ValueError, match=says(f"{method}: {name} must be {COUNT} 1", SHARE, f"not {value!r}")):
        foveate.attach(model, method, **{name: value})
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("method", "name", "value", "rule"),
    [
        ("streaming", "sinks", -1, f"{COUNT} 0"),
        ("streaming", "sinks", 1.0, f"{COUNT} 0"),
        ("h2o", "min_k", -1, f"{COUNT} 0"),
        ("h2o", "window", 0, f"{COUNT} 1"),
        ("h2o", "window", 0.5, f"{COUNT} 1"),
        ("tova", "min_k", 0, f"{COUNT} 1"),
        ("tova", "pool", "heads", "one of layer, kv_head"),
        ("uniform", "min_k", -1, f"{COUNT} 0"),
        ("uniform", "window", 0, f"{COUNT} 1"),
        ("snapkv", "min_k", -1, f"{COUNT} 0"),
        ("snapkv", "window", 0, f"{COUNT} 1"),
        ("snapkv", "kernel_size", 4, "odd and positive"),
        ("snapkv", "kernel_size", 0, "odd and positive"),
        ("snapkv", "kernel_size", -3, "odd and positive"),
        ("snapkv", "kernel_size", 3.0, "odd and positive"),
        ("snapkv", "pooling", "sum", "one of avg, max"),
        ("luka", "page_size", 0, f"{COUNT} 2, or several, each a multiple of the one before"),
        ("luka", "tail", 0, f"{COUNT} 1"),
        ("luka", "top_k", -1, f"{COUNT} 0 (a number) {SHARE}"),
        ("luka", "top_k", 0.0, f"{COUNT} 0 (a number) {SHARE}"),
        ("luka", "compressor", "median", "one of mean, attention"),
        ("luka", "mass", "keep", "one of exact, preserve"),
        ("luka", "bias", "log2", "one of none, log, entropy"),
    ],
)
def test_settings_out_of_range(method, name, value, rule):
    with pytest.raises(ValueError, match=says(f"{method}: {name} must be {rule}, not {value!r}")):
        methods.make(method, **{name: value})


@pytest.mark.parametrize("method", methods.names())
def test_no_method_takes_nonsense_for_any_setting(method):
    for field in dataclasses.fields(methods.get(method)):
        for value in (-3, -0.5, float("nan"), "nonsense", object):
            with pytest.raises(ValueError, match=r"nonsense|not|unknown"):
                methods.make(method, **{field.name: value})


def test_numbers_of_numpy_are_numbers():
    made = methods.make("h2o", top_k=np.float32(0.25), window=np.int64(4))
    assert methods.settings_of(made) == methods.settings_of(methods.make("h2o:top_k=0.25,window=4"))
    assert json.loads(json.dumps(methods.settings_of(made)))["window"] == 4
    with pytest.raises(ValueError, match="window must be an integer of at least 1, not True"):
        methods.make(made, window=np.True_)


def test_what_attach_returns_is_shown_in_a_line(h2o):
    assert repr(foveate.attach(h2o, "tova:top_k=8")) == "Attachment(tova:top_k=8)"


def test_a_failed_attach_leaves_the_attached_method_in_place(h2o):
    before, expected = fingerprint(h2o), generate(h2o, tokens(40))
    with pytest.raises(ValueError, match="top_k must be"):
        foveate.attach(h2o, "h2o", top_k=0)
    with pytest.raises(ValueError, match="no method for layer"):
        foveate.attach(h2o, "per_layer", layers={"0": "dense"})
    with pytest.raises(ValueError, match="unknown method"), foveate.attached(h2o, "h3o"):
        pass
    assert fingerprint(h2o) == before
    assert torch.equal(generate(h2o, tokens(40)), expected)


# Models


def from_config(config):
    return transformers.AutoModelForCausalLM.from_config(config)


def t5():
    config = transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(config)


def shared_keys():
    layer_types = ["sliding_attention", "full_attention"] * 2
    config = SMALL | {"num_hidden_layers": 4, "head_dim": 8, "layer_types": layer_types, "num_kv_shared_layers": 2}
    config |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
    return from_config(transformers.Gemma4TextConfig(**config))


def softcapped():
    return from_config(transformers.Gemma2Config(**SMALL, head_dim=8, attn_logit_softcapping=-50.0))


def sliding():
    return from_config(transformers.MistralConfig(**SMALL, sliding_window=8))


def recurrent():
    return from_config(transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2))


def encoder():
    config = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    return transformers.BertModel(transformers.BertConfig(**config))


def latent():
    heads = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "v_head_dim": 8}
    heads |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "first_k_dense_replace": 2}
    return from_config(transformers.DeepseekV3Config(**SMALL | heads))


def cross_attention():
    config = transformers.MllamaTextConfig(**SMALL, cross_attention_layers=[1], bos_token_id=1, eos_token_id=2)
    return transformers.MllamaForCausalLM(config)


def indexer():
    if not hasattr(transformers, "Qwen4ExpForCausalLM"):
        pytest.skip("this version of Transformers has no Qwen4-Exp")
    config = {name: value for name, value in SMALL.items() if name != "intermediate_size"}
    config |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    config |= {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "hc_count": 2, "hc_lowrank": 8}
    config |= {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
    config |= {"indexer_compress_ratio": 4, "ple_layer_ids": [], "num_hidden_layers": 4}
    config |= {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")}
    config |= {f"linear_{kind}_head_dim": 8 for kind in ("key", "value")}
    return transformers.Qwen4ExpForCausalLM(transformers.Qwen4ExpTextConfig(**config))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (t5, says("T5ForConditionalGeneration is not supported: it has an encoder", "decoder-only")),
        (sliding, says("MistralForCausalLM is not supported: all of its layers are sliding-window layers")),
        (
            softcapped,
            says(
                "Gemma2ForCausalLM is not supported: layer 1 caps its attention logits at -50.0; attn_logit_softcapping"
            ),
        ),
        (shared_keys, says("Gemma4ForCausalLM is not supported: some of its layers share the keys and values")),
        (recurrent, says("MambaForCausalLM is not supported: all of its layers are recurrent layers")),
        (encoder, says("BertModel is not supported: no attention module was found for layers [0, 1]")),
        (latent, says("DeepseekV3ForCausalLM is not supported: its cache holds a compressed vector for each token")),
        (cross_attention, says("MllamaForCausalLM is not supported: its layers [1] attend to images")),
        (indexer, says("Qwen4ExpForCausalLM is not supported: its layers choose keys by an indexer of their own")),
        (lambda: nn.Linear(3, 3), says("model must be a Transformers PreTrainedModel, not Linear")),
    ],
)
def test_models_that_are_not_supported(build, message):
    model = build()
    before, hooks = fingerprint(model), [len(module._forward_pre_hooks) for module in model.modules()]
    config = copy.deepcopy(model.config.to_dict()) if hasattr(model, "config") else None
    with pytest.raises(ValueError, match=message):
        foveate.attach(model, "h2o")
    assert fingerprint(model) == before
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert config is None or model.config.to_dict() == config


def test_an_indexer_that_is_not_known():
    with pytest.raises(
        ValueError, match=says("no sparse attention for qwen4_exp_text models", "Qwen4ExpTextQSAIndexer")
    ):
        foveate.attach(indexer())


@pytest.mark.parametrize("model", ["smollm", None, 3], ids=["a_name", "none", "a_number"])
def test_what_is_no_model(model):
    with pytest.raises(
        ValueError, match=says("model must be a Transformers PreTrainedModel, not", type(model).__name__)
    ):
        foveate.attach(model, "h2o")


def two_attentions():
    """Calls its attention twice in every layer."""
    return from_config(transformers.DiffLlamaConfig(**SMALL, initializer_range=0.2))


def repeated_keys():
    """Repeats the keys that it took from its cache."""
    sizes = {name: value for name, value in SMALL.items() if name != "num_attention_heads"}
    return from_config(transformers.JetMoeConfig(**sizes, kv_channels=16, num_local_experts=2, initializer_range=0.2))


@pytest.mark.parametrize("build", [two_attentions, repeated_keys])
def test_a_model_that_attends_to_other_keys_than_it_caches(build):
    torch.manual_seed(0)
    model = prepare(build())
    before = fingerprint(model)
    with foveate.attached(model, "dense"), pytest.raises(ValueError, match=says("other keys", "not supported")):
        generate(model, tokens(30))
    assert fingerprint(model) == before


def test_a_changed_attention_implementation_is_noticed(h2o):
    h2o.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match=says("attention never took them", "'foveate'")):
        generate(h2o, tokens(30))


def test_attention_dropout_in_training():
    model = prepare(from_config(CONFIGS["llama"](attention_dropout=0.1)))
    with foveate.attached(model, "dense"):
        model.eval()
        model(tokens(20))
        model.train()
        with pytest.raises(ValueError, match=says("attention dropout (0.1)", "config.attention_dropout to 0")):
            model(tokens(20))


# Lengths


BEYOND = "513 positions, beyond the model's max_position_embeddings of 512"


def warned_of(work) -> list[str]:
    """What is warned of positions meanwhile."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        work()
    return [str(one.message) for one in warned if "max_position_embeddings" in str(one.message)]


@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_beyond_the_positions_of_the_model_warns_once(model, use_cache):
    expected = generate(model, tokens(500), 14, use_cache=use_cache)

    def again():
        for _ in range(2):
            assert torch.equal(generate(model, tokens(500), 14, use_cache=use_cache), expected)

    with foveate.attached(model, "dense"):
        (message,) = warned_of(again)
    assert BEYOND in message


@pytest.mark.parametrize("real", [500, 490], ids=["one", "left_padded"])
def test_generation_up_to_the_positions_of_the_model(dense, real):
    """The last token is never fed, and padding has no positions."""
    batch, new = {name: x[1:] for name, x in left_padded([500, real]).items()}, 513 - real
    assert not warned_of(lambda: generate(dense, **batch, new=new))
    assert warned_of(lambda: generate(dense, **batch, new=new + 1))


def test_generation_from_embeddings_beyond_the_positions(h2o):
    embeds = h2o.get_input_embeddings()(tokens(500)).detach()
    with pytest.warns(UserWarning, match=BEYOND):
        h2o.generate(inputs_embeds=embeds, max_new_tokens=14)


def test_a_turn_beyond_the_positions_warns(dense):
    out = dense.generate(tokens(480), max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    ids = torch.cat([out.sequences, tokens(6)], 1)
    options = {"attention_mask": torch.ones_like(ids), **cached(returned_cache(out)), "max_new_tokens": 20}
    with pytest.warns(UserWarning, match=BEYOND):
        dense.generate(ids, **options)


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [True, False])
def test_forward_calls_beyond_the_positions_are_those_of_the_stock_model(model, use_cache):
    """Rows of more tokens than the model has positions for, whose positions go on or, packed, begin again."""
    ids, packed = tokens(600), torch.arange(600).remainder(300)[None]
    expected = [model(ids, position_ids=positions, use_cache=use_cache).logits for positions in (None, packed)]
    with foveate.attached(model, "dense"):
        torch.testing.assert_close(model(ids, use_cache=use_cache).logits, expected[0], rtol=1e-4, atol=1e-4)
        if not use_cache:
            found = model(ids, position_ids=packed, use_cache=use_cache).logits
            torch.testing.assert_close(found, expected[1], rtol=1e-4, atol=1e-4)


# Caches


def foreign_caches(model):
    return {
        "DynamicCache": transformers.DynamicCache(config=model.config),
        "StaticCache": transformers.StaticCache(config=model.config, max_cache_len=64),
    }


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("how", ["generate", "forward"])
def test_a_cache_of_transformers(h2o, kind, how):
    cache = foreign_caches(h2o)[kind]
    call = generate if how == "generate" else type(h2o).__call__
    with pytest.raises(ValueError, match=says(f"{CACHE} is a {kind}", "pass foveate.Cache(model)")):
        call(h2o, tokens(20), **cached(cache))
    assert cache.get_seq_length() == 0


def test_a_filled_cache_of_transformers_in_training(h2o):
    h2o.train()
    cache = transformers.DynamicCache(config=h2o.config)
    h2o(tokens(20), **cached(cache))
    with pytest.raises(ValueError, match=says("cache that is not foveate's", "foveate.Cache(model)")):
        h2o(tokens(5), **cached(cache))


@pytest.mark.parametrize("implementation", ["static", "offloaded", "quantized"])
def test_a_cache_implementation(h2o, implementation):
    with pytest.raises(ValueError, match=says(f"cache_implementation='{implementation}'", "leave it out")):
        generate(h2o, tokens(20), cache_implementation=implementation)


def test_continuous_batching(h2o):
    with pytest.raises(ValueError, match=r"does not run continuous batching .* serve with vLLM"):
        h2o.generate_batch([[5, 6, 7]], max_new_tokens=2, warmup=False)
    foveate.detach(h2o)
    assert type(h2o.init_continuous_batching(transformers.GenerationConfig(eos_token_id=1))).__module__.startswith(
        "transformers."
    )


def test_the_dynamic_cache_implementation_is_ours(h2o):
    expected = generate(h2o, tokens(20))
    assert torch.equal(generate(h2o, tokens(20), cache_implementation="dynamic"), expected)


@pytest.mark.parametrize("how", ["generate", "forward"])
@pytest.mark.parametrize("whose", ["another_model", "a_copy_of_the_model", "another_method", "the_same_method_again"])
def test_a_cache_of_another_model_or_method(h2o, how, whose):
    ids = tokens(20)
    with torch.no_grad():
        if "model" in whose:
            other = copy.deepcopy(h2o) if "copy" in whose else tiny_model(seed=1)
            if "copy" not in whose:
                foveate.attach(other, h2o.foveate.method)
            cache = returned_cache(other(ids))
        else:
            cache = returned_cache(h2o(ids))
            foveate.attach(h2o, "dense" if whose == "another_method" else h2o.foveate.method)
        call = generate if how == "generate" else type(h2o).__call__
        more = torch.cat([ids, tokens(3)], 1) if how == "generate" else tokens(3)
        with pytest.raises(ValueError, match=says("another model or another attached method", "start a new cache")):
            call(h2o, more, **cached(cache))
    assert cache.get_seq_length() == 20


def test_a_cache_needs_an_attached_model(model):
    with pytest.raises(ValueError, match=says("not attached", "foveate.attach(model, method)")):
        foveate.Cache(model)
    with pytest.raises(ValueError, match="not attached"):
        foveate.stats(model)


@pytest.mark.parametrize("new", [1, 5])
def test_new_ids_without_a_mask_on_a_cache(h2o, new):
    cache = returned_cache(h2o.generate(tokens(20), max_new_tokens=4, return_dict_in_generate=True))
    with pytest.raises(ValueError, match=says("the cache holds 23 tokens", f"cover {new}", "whole conversation")):
        h2o.generate(tokens(new), **cached(cache), max_new_tokens=4)
    assert cache.get_seq_length() == 23


@pytest.mark.parametrize("how", ["assistant_model", "prompt_lookup_num_tokens"])
def test_assisted_decoding_on_a_cache_in_use(h2o, how):
    first = h2o.generate(tokens(20), max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    ids = torch.cat([first.sequences, tokens(5)], 1)
    options = {how: tiny_model(seed=1) if how == "assistant_model" else 3}
    with pytest.raises(ValueError, match=says("assisted decoding must start on an empty cache")):
        generate(h2o, ids, **cached(returned_cache(first)), **options)
    assert returned_cache(first).get_seq_length() == 23


def layer_lengths(cache):
    return [layer.get_seq_length() for layer in cache.layers]


@pytest.mark.parametrize("method", [name for name in methods.names() if methods.get(name).stateful])
def test_what_is_final_cannot_be_cropped(model, method):
    with torch.no_grad(), foveate.attached(model, method, **methods.get(method).about.small_budget):
        cache = returned_cache(model(tokens(40)))
        model(tokens(1), **cached(cache))
        with pytest.raises(ValueError, match=says("crop(-1)", "final", "activate_past_recording()")):
            cache.crop(-1)
        assert layer_lengths(cache) == [41] * 3
        model(tokens(1), **cached(cache))


def test_a_prompt_whose_tokens_were_evicted_cannot_be_cropped():
    """By a method whose decoded tokens can be."""

    @dataclass(frozen=True)
    class KeepsFirst(methods.Method):
        name: ClassVar[str] = "keeps_first"
        evicts: ClassVar[Evicts] = Evicts.AT_PROMPT_END
        stateful: ClassVar[bool] = False
        needs_prompt_end: ClassVar[bool] = True

        def prompt_end(self, cache, scaling):
            return torch.arange(min(cache.used, 8))

    model = tiny_model()
    with torch.no_grad(), foveate.attached(model, KeepsFirst()):
        cache = foveate.Cache(model, 40)
        for n in (40, 1, 1):
            model(tokens(n), **cached(cache))
        with pytest.raises(ValueError, match=says("crop(-9)", "evicted tokens of the prompt, which ends at token 40")):
            cache.crop(-9)
        cache.crop(-2)
        assert layer_lengths(cache) == [40] * 3


@pytest.mark.parametrize("dense_layer", [0, 2])
def test_a_refused_crop_changes_no_layer(model, dense_layer):
    layers = {dense_layer: "dense", "rest": "h2o:top_k=4,window=4"}
    with torch.no_grad(), foveate.attached(model, "per_layer", layers=layers):
        cache = returned_cache(model(tokens(40)))
        with pytest.raises(ValueError, match="final"):
            cache.crop(-3)
        assert layer_lengths(cache) == [40] * 3


def test_crops_that_make_no_sense(dense):
    with torch.no_grad():
        cache = returned_cache(dense(tokens(20)))
        with pytest.raises(ValueError, match=says("negative number of tokens to remove, not 3")):
            cache.crop(3)
        with pytest.raises(ValueError, match=says("crop(-21) of a cache of 20 tokens")):
            cache.crop(-21)
        assert layer_lengths(cache) == [20] * 3
        cache.crop(0)
        cache.crop(torch.tensor(-5))
        assert layer_lengths(cache) == [15] * 3


@pytest.mark.parametrize("rows", [[0, 2], [-1, 0]])
def test_rows_that_are_not_there(rows):
    """Beside layers that are Transformers' own: no layer is changed."""
    model = tiny_model("gemma3")
    with torch.no_grad(), foveate.attached(model, "dense"):
        cache = returned_cache(model(tokens(20).repeat(2, 1)))
        for take in (cache.reorder_cache, cache.batch_select_indices):
            with pytest.raises(ValueError, match=says(f"rows must be among the 2 of the cache, from 0, not {rows}")):
                take(torch.tensor(rows))
        assert len(model(tokens(1).repeat(2, 1), **cached(cache)).logits) == 2


def test_a_padded_prompt_cannot_be_cropped(dense):
    with torch.no_grad():
        cache = returned_cache(dense(**left_padded([20, 9])))
        with pytest.raises(ValueError, match=says("padded prompt cannot be cropped")):
            cache.crop(-1)
        assert layer_lengths(cache) == [20] * 3


def test_the_cache_cannot_be_offloaded(dense):
    cache = returned_cache(dense(tokens(9)))
    with pytest.raises(ValueError, match="cannot be offloaded"):
        cache.layers[0].offload()


# Forward calls


@pytest.mark.parametrize("how", ["generate", "forward"])
def test_attention_weights(h2o, how):
    call = generate if how == "generate" else type(h2o).__call__
    with pytest.raises(ValueError, match=says("output_attentions=True is not possible")):
        call(h2o, tokens(20), output_attentions=True)


def test_attention_weights_wanted_by_the_configuration(model):
    model.set_attn_implementation("eager")
    model.config.output_attentions = True

    def attach_and_call():
        foveate.attach(model, "h2o")
        model(tokens(20))

    with torch.no_grad(), pytest.raises(ValueError, match="output_attentions"):
        attach_and_call()


def test_attention_weights_without_a_cache(h2o):
    with pytest.raises(ValueError, match=says("output_attentions=True is not possible")):
        h2o(tokens(20), output_attentions=True, use_cache=False)


def refused(model, cache, message, ids, **options):
    """The call raises, and the cache is as it was: the next step gives what it would have given."""
    twin = copy.deepcopy(cache)
    with pytest.raises(ValueError, match=message):
        model(ids, **cached(cache), **options)
    assert layer_lengths(cache) == layer_lengths(twin)
    following = tokens(cache.layers[0].batch_size, seed=8).T
    after, untouched = (model(following, **cached(one)).logits for one in (cache, twin))
    torch.testing.assert_close(after, untouched)


@pytest.mark.parametrize("method", ["dense", "h2o"])
class TestRefusedCallsLeaveTheCacheAsItWas:
    @pytest.fixture
    def model(self, method):
        model = tiny_model()
        foveate.attach(model, method, **methods.get(method).about.small_budget)
        with torch.no_grad():
            yield model

    def test_a_mask_of_pairs(self, model):
        cache = returned_cache(model(tokens(20, batch=2)))
        pairs = torch.ones(2, 1, 3, 23, dtype=torch.bool).tril(20)
        refused(model, cache, says("(2, 1, 3, 23)", "2-D mask"), tokens(3, batch=2), attention_mask=pairs)

    def test_another_batch_size(self, model):
        cache = returned_cache(model(tokens(20, batch=2)))
        refused(model, cache, says("the cache holds 2 sequences, but the batch has 3"), tokens(1, batch=3))
        assert torch.equal(cache.ids.read(20), tokens(20, batch=2))

    def test_padding_after_the_prompt(self, model):
        cache = returned_cache(model(tokens(20, batch=2)))
        mask = torch.ones(2, 23, dtype=torch.int64)
        mask[1, 20] = 0
        message = says("padding after the prompt", "generate")
        refused(model, cache, message, tokens(3, batch=2), attention_mask=mask)

    def test_a_mask_that_is_too_short(self, model):
        cache = returned_cache(model(tokens(20, batch=2)))
        mask = torch.ones(2, 3, dtype=torch.int64)
        mask[1, 0] = 0
        message = says("attention_mask has shape (2, 3)", "holds 20 tokens", "3 are new", "(2, 23)")
        refused(model, cache, message, tokens(3, batch=2), attention_mask=mask)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("shape", [(2, 0), (2, 1), (2, 19), (2, 21), (3, 20)])
def test_a_mask_of_the_wrong_shape_in_generate(h2o, shape, padding):
    """Transformers makes positions of a mask, and drops one without padding."""
    mask = torch.ones(shape, dtype=torch.int64)
    mask[:, :padding] = 0
    message = says("attention_mask", "(2, 20)")
    if shape[1] > 20:
        message = says("attention_mask or position_ids cover 21 tokens", "the prompt has 20")
    elif 0 < shape[1] <= padding:
        message = "is all padding"
    with pytest.raises(ValueError, match=message):
        generate(h2o, tokens(20, batch=2), attention_mask=mask)


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_mask_of_the_wrong_shape(family, use_cache):
    model, batch = tiny_model(family), left_padded([20, 14])
    longer = {"attention_mask": nn.functional.pad(batch["attention_mask"], (0, 5), value=1)}
    with foveate.attached(model, "dense"):
        expected = model(**batch, use_cache=use_cache).logits
        assert torch.equal(model(**batch | longer, use_cache=use_cache).logits, expected)
        for shape in [(20,), (2, 0), (2, 19), (1, 20), (3, 20)]:
            with pytest.raises(ValueError, match=says("attention_mask has shape", str(shape), "(2, 20)")):
                model(batch["input_ids"], attention_mask=torch.ones(shape), use_cache=use_cache)


@torch.no_grad()
def test_positions_of_other_tokens(dense):
    with pytest.raises(ValueError, match=says("position_ids have shape (1, 19)", "20 tokens are new")):
        dense(tokens(20), position_ids=torch.arange(19)[None])


@pytest.mark.parametrize("ending", ["mask", "batch"])
def test_a_refused_call_beside_sliding_layers_is_no_trap(ending):
    """Layers that are not foveate's may have taken the tokens: then the cache is refused from there on."""
    model = tiny_model("gemma3")
    with torch.no_grad(), foveate.attached(model, "dense"):
        cache = returned_cache(model(tokens(20, batch=2)))
        twin, following = copy.deepcopy(cache), tokens(1, batch=2, seed=8)
        mask = torch.ones(2, 21, dtype=torch.int64)
        mask[1, 20] = 0
        refused_call = {"input_ids": tokens(1, batch=2), "attention_mask": mask}
        if ending == "batch":
            refused_call = {"input_ids": tokens(1, batch=3)}
        with pytest.raises((ValueError, RuntimeError)):
            model(**refused_call, **cached(cache))
        with contextlib.suppress(ValueError):
            after = model(following, **cached(cache)).logits
            torch.testing.assert_close(after, model(following, **cached(twin)).logits)


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("layer", [0, 1])
def test_a_cache_whose_forward_was_interrupted(dense, layer):
    with torch.no_grad():
        cache = returned_cache(dense(tokens(20)))
        hook = dense.model.layers[layer].self_attn.o_proj.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            dense(tokens(3), **cached(cache))
        hook.remove()
        with pytest.raises(ValueError, match=says("interrupted", "start a new cache")):
            dense(tokens(3), **cached(cache))
        dense(tokens(3))


def test_gradients_through_a_cache(dense):
    first = dense(tokens(20))
    second = dense(tokens(3), **cached(returned_cache(first)))
    first.logits.sum().backward()
    with pytest.raises(RuntimeError, match=says("gradients do not flow through foveate's cache", "use_cache=False")):
        second.logits.sum().backward()


def test_a_mask_of_pairs_in_the_first_call(h2o):
    pairs = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=says("(1, 1, 20, 20)", "2-D mask")):
        h2o(tokens(20), attention_mask=pairs)


@pytest.mark.parametrize("method", ["dense", "streaming"])
def test_packed_sequences_without_a_cache_are_refused_or_right(model, method):
    """Two documents in one row: each must come out as it would alone, or the call must say that it cannot."""
    documents = tokens(40, seed=1), tokens(30, seed=2)
    positions = torch.cat([torch.arange(40), torch.arange(30)])[None]
    with torch.no_grad(), foveate.attached(model, method, **methods.get(method).about.small_budget):
        alone = torch.cat([model(ids, use_cache=False).logits for ids in documents], 1)
        with contextlib.suppress(ValueError):
            packed = model(torch.cat(documents, 1), position_ids=positions, use_cache=False).logits
            torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


def test_scaled_rotary_embeddings_reach_beyond_the_stated_positions():
    """The published YaRN recipe leaves max_position_embeddings at the original length."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    model = prepare(from_config(CONFIGS["llama"](max_position_embeddings=64, rope_parameters=rope)))
    with foveate.attached(model, "dense"):
        assert not warned_of(lambda: generate(model, tokens(250), 7))
        (message,) = warned_of(lambda: generate(model, tokens(250), 8))
    assert "257 positions, beyond the model's max_position_embeddings of 256" in message


def test_composed_methods_may_be_nested(model):
    with foveate.attached(model, "mixed", lined='per_layer:layers={"rest":"h2o:top_k=4,window=4"}'):
        generate(model, tokens(30))
        assert foveate.stats(model).layers[0].method == "h2o:top_k=4,window=4"


def test_gradient_checkpointing_is_refused_where_layers_read_what_others_chose(model):
    checkpoint_activations(model)
    try:
        refused = pytest.raises(ValueError, match="gradient checkpointing is not possible with kascade_paper")
        with foveate.attached(model.train(), "kascade_paper", anchors=1, top_k=9, tile=12), refused:
            model(tokens(20), use_cache=False)
        with foveate.attached(model, "kascade", anchors=1, top_k=9):
            model(tokens(20), use_cache=False).logits.sum().backward()
    finally:
        checkpoint_activations(model, on=False)
        model.eval().zero_grad()


# Attaching, detaching, and what was attached before


@torch.no_grad()
def test_a_cache_after_its_method_was_detached(h2o):
    """Transformers' own attention would see the new token alone."""
    cache = returned_cache(h2o(tokens(20)))
    foveate.detach(h2o)
    with pytest.raises(ValueError, match=says("foveate cache", "may have been detached", "start a new cache")):
        h2o(tokens(1), **cached(cache))
    assert cache.get_seq_length() == 20
    h2o(tokens(1))


@torch.no_grad()
def test_a_cache_after_a_failed_forward_and_detach(h2o):
    cache = returned_cache(h2o(tokens(20)))
    hook = h2o.lm_head.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        h2o(tokens(1), **cached(cache))
    hook.remove()
    foveate.detach(h2o)
    with pytest.raises(ValueError, match="may have been detached"):
        h2o(tokens(1), **cached(cache))


@pytest.mark.parametrize("error", [False, True])
def test_what_was_attached_before_is_back_after_a_block(h2o, error):
    expected, before = generate(h2o, tokens(40)), fingerprint(h2o)
    attachment, ids = h2o.foveate, tokens(41)
    cache = returned_cache(h2o.generate(ids[:, :36], max_new_tokens=5, do_sample=False, return_dict_in_generate=True))
    steps, outcome = foveate.stats(h2o).layers[0].decode_steps, contextlib.nullcontext()
    if error:
        outcome = pytest.raises(ZeroDivisionError)
    with outcome, foveate.attached(h2o, "luka"):
        generate(h2o, tokens(40))
        assert foveate.stats(h2o).layers[0].method.startswith("luka")
        if error:
            raise ZeroDivisionError
    assert h2o.foveate is attachment
    assert foveate.stats(h2o).layers[0].decode_steps == steps
    assert {key[:2] for key in fingerprint(h2o)} == {key[:2] for key in before}
    assert torch.equal(generate(h2o, tokens(40)), expected)
    with torch.no_grad():
        h2o(tokens(1), **cached(cache))
    foveate.detach(h2o)
    plain = tiny_model()
    assert torch.equal(generate(h2o, tokens(40)), generate(plain, tokens(40)))


def test_blocks_in_blocks(model):
    plain = generate(model, tokens(40))
    with foveate.attached(model, "h2o", top_k=4, window=4):
        outer = generate(model, tokens(40))
        with foveate.attached(model, "streaming", window=4), foveate.attached(model, "luka"):
            pass
        assert torch.equal(generate(model, tokens(40)), outer)
    assert torch.equal(generate(model, tokens(40)), plain)


# Numbers that are none


@pytest.mark.parametrize("method", methods.names())
@pytest.mark.parametrize("how", ["generate", "forward"])
def test_weights_that_are_nan(model, method, how):
    """The second layer's values are NaN: the error names it and its method."""
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.fill_(float("nan"))
    call = generate if how == "generate" else type(model).__call__
    settings = methods.get(method).about.small_budget
    with torch.no_grad(), foveate.attached(model, method, **settings):
        name = foveate.stats(model).layers[1].method
        with pytest.raises(ValueError, match=says(f"layer 1 ({name})", "not finite", "weights", "torch.float32")):
            call(model, tokens(60))


def test_nan_behind_the_last_attention(model):
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.fill_(float("nan"))
    with foveate.attached(model, "h2o"), pytest.raises(ValueError, match=says("after the last layer", "not finite")):
        generate(model, tokens(60))


# Rows


def test_a_prompt_without_tokens(h2o):
    with pytest.raises(ValueError, match=says("input_ids has shape (1, 0)", "at least one token")):
        h2o(tokens(0))


@torch.no_grad()
def test_padding_on_the_right_that_is_not_finite(dense):
    """Of a call without `generate`, in which rows may end with padding, real tokens alone are looked at."""
    batch = {name: x.flip(1) for name, x in left_padded([20, 9]).items()}
    dense.get_input_embeddings().weight[0] = float("nan")
    logits = dense(**batch).logits
    assert logits[batch["attention_mask"].bool()].isfinite().all()


def test_padding_on_the_right(h2o):
    batch = left_padded([20, 9])
    flipped = {name: x.flip(1) for name, x in batch.items()}
    with pytest.raises(ValueError, match=says("row 1 of attention_mask ends with padding", "padding_side = 'left'")):
        h2o.generate(**flipped, max_new_tokens=4)


def test_a_row_that_is_all_padding(h2o):
    batch = left_padded([20, 9, 20])
    batch["attention_mask"][1] = 0
    with pytest.raises(ValueError, match=says("row 1 of attention_mask is all padding", "at least one token")):
        h2o.generate(**batch, max_new_tokens=4)


@pytest.mark.parametrize("length", [0, -5, 2.5, "x", True])
def test_a_prompt_has_at_least_one_token(length):
    model = tiny_model()
    with (
        foveate.attached(model, "h2o:top_k=9,window=3", cuda_graph=False),
        pytest.raises(ValueError, match=f"prompt_length must be an integer of at least 1, not {length!r}"),
    ):
        foveate.Cache(model, length)

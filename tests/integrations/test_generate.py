"""generate and forward calls of attached models, in every mode, against the stock model and against simpler runs."""

import copy
import functools
import itertools
import pickle
import sys
import threading
import time
import warnings

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend

import foveate
from foveate import Cache, methods
from foveate.integrations.transformers import attention, hooks
from foveate.runtime import handover
from tests.combinations import every_pair, in_turn
from tests.helpers import (
    COMMON,
    CONFIGS,
    FAMILIES,
    ONE_OF_EACH,
    SLIDING,
    VOCAB,
    assistant,
    cached,
    checkpoint_activations,
    cut_rows,
    fingerprint,
    generate,
    left_padded,
    of_release,
    prepare,
    repetitive,
    returned_cache,
    tiny_model,
    tokens,
)

SMALL = {name: methods.make(name, **methods.get(name).about.small_budget) for name in methods.names()}
SPECS = {
    name: method.spec
    for name, method in SMALL.items()
    if method.prompt_tile(1) is not None  # tests/methods/test_lined.py
}
SPECS |= {  # what one layer hands to another; other settings are the matrix's, layer by layer
    "kascade_anchors": "kascade_paper:top_k=6,tile=1,anchors=[0.0,0.5]",
    "kascade_decode": "kascade_paper:top_k=6,anchors=1,decode_only=true",
    "luka_levels": "luka:page_size=[3, 6, 12],sinks=2,tail=9,top_k=2,expand=1",
    "h2o_in_prompt": "h2o:top_k=9,window=8,evict_every=17",
    "adakv_in_prompt": "adakv:top_k=9,window=5,kernel_size=3,evict_every=17",
}
SPARSE = of_release(name for name in SPECS if name != "dense")
PROMPT = 61
LENGTHS = [PROMPT, 23, 40]
METHODS = ("method", SPARSE)
KINDS = ("method", [name for name in SPARSE if name in ONE_OF_EACH])
TWO_FAMILIES = ("family", ["llama", "gemma3"])
every_method = pytest.mark.parametrize(*METHODS)
every_kind = pytest.mark.parametrize(*KINDS)
every_trainable = pytest.mark.parametrize("method", [name for name in SPARSE if not name.endswith("in_prompt")])
every_family = pytest.mark.parametrize("family", FAMILIES)

MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "several_sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 20},
    "chunks_and_beams": {"num_beams": 3, "prefill_chunk_size": 20},
    "no_cache": {"use_cache": False},
}
SINGLE_MODES = {
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
    "assisted": {},
    "assisted_sampling": {"do_sample": True, "top_k": 20},
    "early_exit": {"assistant_early_exit": 1},
    "early_exit_sampling": {"assistant_early_exit": 2, "do_sample": True, "top_k": 20},
}


def spec(method: str) -> str:
    return SPECS[method]


def run(model, inputs, **options):
    torch.manual_seed(7)
    return generate(model, **inputs, **options)


def single(length: int = PROMPT, seed: int = 0, padding: int = 0) -> dict:
    ids = repetitive(length, seed)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {name: torch.nn.functional.pad(x, (padding, 0)) for name, x in inputs.items()}


@functools.cache
def greedy(family: str, method: str, length: int = PROMPT, seed: int = 0):
    """What the plainest run gives: one prompt in one piece, token by token."""
    model = tiny_model(family)
    with foveate.attached(model, spec(method)):
        return run(model, single(length, seed))


def begin(model, inputs, **options):
    """First turn of a conversation: everything so far, its mask, and the cache."""
    out = model.generate(**inputs, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, **options)
    mask = inputs["attention_mask"]
    mask = torch.cat([mask, mask.new_ones(len(mask), 6)], 1)
    return out.sequences, mask, returned_cache(out)


def decode_from(model, sequences, mask, cache, said, said_mask=None, new: int = 6, **options):
    """Next turn: the ids said are appended to the conversation."""
    said_mask = torch.ones_like(said) if said_mask is None else said_mask
    ids, mask = torch.cat([sequences, said], 1), torch.cat([mask, said_mask], 1)
    return generate(model, ids, new, attention_mask=mask, **cached(cache), **options)


SAID = tokens(9, seed=50)


@functools.cache
def second_turn(method: str):
    """What is said to `SAID`, by the whole conversation on the cache of the first turn."""
    model = tiny_model()
    with foveate.attached(model, spec(method)):
        return decode_from(model, *begin(model, single()), SAID)


# Dense is the stock model


@every_pair(("family", FAMILIES), ("mode", MODES), ("padded", [False, True]))
def test_dense_gives_the_tokens_of_the_stock_model(family, padded, mode):
    model, inputs = tiny_model(family), left_padded(LENGTHS) if padded else single()
    expected = run(model, inputs, **MODES[mode])
    with foveate.attached(model, "dense"):
        assert torch.equal(run(model, inputs, **MODES[mode]), expected)


@every_pair(
    TWO_FAMILIES,
    ("mode", SINGLE_MODES),
    ("attached_assistant", [False, True]),
    ("padding", [0, 5]),
    besides=[
        ("qwen2", "assisted", True, 5),
        ("qwen3", "prompt_lookup", False, 0),
        ("mistral", "early_exit", False, 5),
    ],
)
def test_dense_speculates_like_the_stock_model(family, mode, attached_assistant, padding):
    model, helper = tiny_model(family), assistant(family)
    options = SINGLE_MODES[mode] | ({"assistant_model": helper} if "assisted" in mode else {})
    try:
        expected = run(model, single(padding=padding), **options)
    except TypeError:  # 5.17 crops the layers that an early exit has left out, which hold nothing
        assert "early_exit" in mode
        assert transformers.__version__ == "5.17.0"
        return
    if attached_assistant:
        foveate.attach(helper, "dense")
    with foveate.attached(model, "dense"):
        assert torch.equal(run(model, single(padding=padding), **options), expected)


@in_turn(
    ("method", of_release(name for name in methods.names() if name in ONE_OF_EACH)),
    ("assisted", [False, True]),
    ("length", [1, 40]),
)
def test_full_budget_speculates_over_padding_like_the_stock_model(method, assisted, length):
    """Of a single token the assistant's prompt is padding alone: it decodes the prompt's last token."""
    model, inputs = tiny_model(), single(length, padding=5)
    expected = run(model, inputs)
    options = {"assistant_model": assistant()} if assisted else {"prompt_lookup_num_tokens": 3}
    if assisted:
        foveate.attach(options["assistant_model"], method, **methods.get(method).about.full_budget)
    with foveate.attached(model, method, **methods.get(method).about.full_budget):
        assert torch.equal(run(model, inputs, **options), expected)


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_logits_in_every_dtype(family, dtype):
    model, batch = tiny_model(family).to(dtype), left_padded(LENGTHS)
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**batch).logits[real].float()
        with foveate.attached(model, "dense"):
            actual = model(**batch).logits[real]
    assert actual.dtype == dtype
    error = (actual.float() - expected).abs()
    assert error.max() <= {torch.float32: 1e-4, torch.float16: 0.1, torch.bfloat16: 0.8}[dtype]
    assert error.mean() <= {torch.float32: 1e-5, torch.float16: 0.01, torch.bfloat16: 0.08}[dtype]


@every_family
@pytest.mark.parametrize("use_cache", [True, False])
def test_dense_logits_of_bare_forward_calls(family, use_cache):
    model, ids = tiny_model(family), tokens(40, batch=2)
    with torch.no_grad():
        expected = model(ids, use_cache=use_cache).logits
        with foveate.attached(model, "dense"):
            out = model(ids, use_cache=use_cache)
    torch.testing.assert_close(out.logits, expected, rtol=1e-4, atol=1e-4)
    assert (returned_cache(out) is not None) == use_cache


@every_family
def test_dense_logits_of_several_forward_calls_on_one_cache(family):
    model, ids = tiny_model(family), tokens(40, batch=2)
    with torch.no_grad():
        expected = model(ids).logits
        with foveate.attached(model, "dense"):
            cache, logits = None, []
            for first, last in ((0, 21), (21, 22), (22, 30), (30, 31), (31, 40)):
                out = model(ids[:, first:last], **cached(cache))
                cache = returned_cache(out)
                logits.append(out.logits)
    assert isinstance(cache, foveate.Cache)
    assert cache.get_seq_length() == 40
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-4, atol=1e-4)


def test_a_cache_shows_its_keys_and_values_as_those_of_transformers_do():
    model, ids = tiny_model("gemma3"), tokens(40, batch=2)  # with sliding-window layers
    with torch.no_grad():
        expected = returned_cache(model(ids))
        with foveate.attached(model, "dense"):
            assert foveate.Cache(model).layers[1].keys is None
            found = returned_cache(model(ids))
    for mine, its in zip(found.layers, expected.layers, strict=True):
        torch.testing.assert_close((mine.keys, mine.values), (its.keys, its.values))
    with pytest.raises(ValueError, match="cannot be set"):
        found.layers[1].keys = expected.layers[1].keys


@every_family
def test_dense_from_embeddings(family):
    model, batch = tiny_model(family), left_padded(LENGTHS)
    inputs = {"inputs_embeds": model.get_input_embeddings()(batch["input_ids"]).detach()}
    inputs |= {"attention_mask": batch["attention_mask"], "max_new_tokens": 10, "do_sample": False}
    expected = model.generate(**inputs)
    with foveate.attached(model, "dense"):
        assert torch.equal(model.generate(**inputs), expected)


@every_family
@pytest.mark.parametrize("padded", [False, True], ids=["one", "padded_batch"])
def test_dense_over_three_turns_on_one_cache(family, padded):
    model, inputs = tiny_model(family), left_padded(LENGTHS) if padded else single()

    def talk():
        sequences, mask, cache = begin(model, inputs)
        for turn, lengths in enumerate(([9, 4, 1], [2, 1, 11])):
            said = left_padded(lengths if padded else lengths[:1], seed=50 + turn)
            reply = decode_from(model, sequences, mask, cache, *said.values(), new=6)
            sequences = torch.cat([sequences, said["input_ids"], reply], 1)
            mask = torch.cat([mask, said["attention_mask"], torch.ones_like(reply)], 1)
        return sequences

    expected = talk()
    with foveate.attached(model, "dense"):
        if padded and family in SLIDING:  # where the stock model gives rows other tokens than alone
            with pytest.raises(ValueError, match="padding between its tokens, which sliding-window layers"):
                talk()
        else:
            assert torch.equal(talk(), expected)


@every_family
def test_dense_beams_on_a_cache_made_for_them(family):
    """A second turn with beams: the cache is repeated for them first, as for the stock model."""
    model, said = tiny_model(family), tokens(9, seed=50)

    def talk():
        sequences, mask, cache = begin(model, single())
        cache.batch_repeat_interleave(3)
        return decode_from(model, sequences, mask, cache, said, num_beams=3)

    expected = talk()
    with foveate.attached(model, "dense"):
        assert torch.equal(talk(), expected)


MORE = {  # beside those of tests/integrations/test_families.py
    "qwen2_sliding": lambda: transformers.Qwen2Config(
        **COMMON, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "llama4_chunked": lambda: transformers.Llama4TextConfig(
        **COMMON, head_dim=16, num_local_experts=2, attention_chunk_size=8, no_rope_layers=[1, 1, 0]
    ),
}


@pytest.mark.parametrize("family", MORE)
def test_dense_on_other_models_of_their_kind(family):
    torch.manual_seed(0)
    model = prepare(transformers.AutoModelForCausalLM.from_config(MORE[family]()))
    batch = left_padded([40, 25])
    with torch.no_grad():
        expected = model(tokens(40)).logits, run(model, batch)
        with foveate.attached(model, "dense"):
            torch.testing.assert_close(model(tokens(40)).logits, expected[0], rtol=1e-4, atol=1e-4)
            assert torch.equal(run(model, batch), expected[1])
            assert foveate.stats(model).summary()["decode_steps"] == 11


# Every method in every mode agrees with the plain run


@in_turn(METHODS, TWO_FAMILIES)
def test_the_method_is_active(family, method):
    model, ids = tiny_model(family), tokens(PROMPT + 1)

    def next_logits():
        cache = returned_cache(model(ids[:, :PROMPT]))
        return model(ids[:, PROMPT:], **cached(cache)).logits

    with torch.no_grad():
        stock = next_logits()
        with foveate.attached(model, spec(method)):
            assert (next_logits() - stock).abs().max() > 0.01
            assert foveate.stats(model).summary()["keys_read_share"] < 0.75


@in_turn(KINDS, TWO_FAMILIES, ("padding", [0, 5]))
def test_prompt_lookup_gives_the_greedy_tokens(family, method, padding):
    model = tiny_model(family)
    with foveate.attached(model, spec(method)):
        assert torch.equal(run(model, single(padding=padding), prompt_lookup_num_tokens=3), greedy(family, method))


@in_turn(METHODS, TWO_FAMILIES, ("attached_assistant", [False, True]), ("padding", [0, 5]))
def test_assisted_decoding_gives_the_greedy_tokens(family, method, attached_assistant, padding):
    model, helper = tiny_model(family), assistant(family)
    if attached_assistant:
        foveate.attach(helper, spec(method))
    with foveate.attached(model, spec(method)):
        assert torch.equal(run(model, single(padding=padding), assistant_model=helper), greedy(family, method))


@in_turn(KINDS, ("padding", [0, 5]))
def test_early_exit_gives_the_greedy_tokens(method, padding):
    model = tiny_model()
    with foveate.attached(model, spec(method)):
        assert torch.equal(run(model, single(padding=padding), assistant_early_exit=2), greedy("llama", method))
        assert torch.equal(run(model, single()), greedy("llama", method))


@in_turn(KINDS, ("chunk", [7, 20, 60]), TWO_FAMILIES)
def test_chunked_prefill_equals_one_piece(family, method, chunk):
    model = tiny_model(family)
    with foveate.attached(model, spec(method)):
        assert torch.equal(run(model, single(), prefill_chunk_size=chunk), greedy(family, method))


@pytest.mark.parametrize(("family", "method"), [*(("llama", method) for method in SPARSE), ("gemma3", "quest")])
def test_long_prompts_are_read_in_chunks(family, method, monkeypatch):
    """By themselves: of whole tiles, but where a prompt has to come in one piece, or holds more than text."""
    monkeypatch.setattr(hooks, "LONG_PROMPT", PROMPT - 1)
    monkeypatch.setattr(hooks, "CHUNK", 20)
    model, widths = tiny_model(family), []
    expected = greedy(family, method)
    with foveate.attached(model, spec(method)) as attachment:
        model.get_decoder().register_forward_pre_hook(
            lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        assert torch.equal(run(model, single()), expected)
        chunk = 20 // attachment.prompt_tile * attachment.prompt_tile or attachment.prompt_tile
        one_piece = attachment.whole_prompt or chunk >= PROMPT
        assert max(widths) == (PROMPT if one_piece else chunk)
        widths.clear()
        run(model, single(PROMPT - 1), new=1)
        assert max(widths) == PROMPT - 1, "not long"
        widths.clear()
        model.generate(**single(), max_new_tokens=1, output_hidden_states=True, return_dict_in_generate=True)
        assert max(widths) == PROMPT, "the states of all tokens are asked for"


@pytest.mark.parametrize(
    ("rows", "padded", "widest"),
    [(1, False, 14), (2, False, 7), (3, False, 7), (2, True, PROMPT), (1, True, PROMPT + 5)],
)
def test_long_prompts_are_cut_between_tiles(rows, padded, widest, monkeypatch):
    """The chunk is one of all rows together. Rows padded on the left begin their tiles elsewhere: they are not cut."""
    model, widths = tiny_model(), []
    inputs = {"input_ids": tokens(PROMPT, rows), "attention_mask": torch.ones(rows, PROMPT, dtype=torch.long)}
    if padded:
        inputs = left_padded([PROMPT, 40]) if rows == 2 else single(padding=5)
    with foveate.attached(model, "kascade_paper:top_k=6,tile=21,anchors=[0]") as attachment:
        assert attachment.prompt_tile == 7
        expected = run(model, inputs)
        monkeypatch.setattr(hooks, "LONG_PROMPT", PROMPT - 1)
        monkeypatch.setattr(hooks, "CHUNK", 20)
        model.get_decoder().register_forward_pre_hook(
            lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        assert torch.equal(run(model, inputs), expected)
    assert max(widths) == widest


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("over", [0, 1])
def test_prompts_are_long_by_the_tokens_of_all_rows(rows, over, monkeypatch):
    model, widths = tiny_model(), []
    monkeypatch.setattr(hooks, "LONG_PROMPT", rows * PROMPT - over)
    monkeypatch.setattr(hooks, "CHUNK", 4 * rows)
    with foveate.attached(model, "dense"):
        model.get_decoder().register_forward_pre_hook(
            lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        generate(model, tokens(PROMPT, rows), new=1)
    assert max(widths) == (4 if over else PROMPT)


@in_turn(METHODS, TWO_FAMILIES, ("chunk", [None, 20]))
def test_rows_of_a_padded_batch_equal_batches_of_one(family, method, chunk):
    model, batch = tiny_model(family), left_padded([PROMPT, 1, 23, 40])
    with foveate.attached(model, spec(method)):
        together = run(model, batch, new=8, prefill_chunk_size=chunk)
        for row, ids in zip(together, cut_rows(batch)):
            assert torch.equal(row[None], generate(model, ids, new=8))


@in_turn(KINDS, ("chunk", [None, 20]))
def test_beams_of_a_batch_equal_each_alone(method, chunk):
    model, batch = tiny_model(), left_padded([PROMPT, 40])
    with foveate.attached(model, spec(method)):
        together = run(model, batch, num_beams=3, prefill_chunk_size=chunk)
        for row, ids in zip(together, cut_rows(batch)):
            assert torch.equal(row[None], generate(model, ids, num_beams=3))


@every_kind
def test_seeded_sampling_is_reproducible_and_equals_repeated_prompts(method):
    model, batch = tiny_model(), left_padded([PROMPT, 40])
    with foveate.attached(model, spec(method)):
        several = run(model, batch, do_sample=True, num_return_sequences=2)
        assert torch.equal(several, run(model, batch, do_sample=True, num_return_sequences=2))
        repeated = {name: tensor.repeat_interleave(2, 0) for name, tensor in batch.items()}
        assert torch.equal(several, run(model, repeated, do_sample=True))
    assert len({tuple(row) for row in several.tolist()}) == 4


@every_kind
def test_embeddings_give_the_greedy_tokens(method):
    model = tiny_model()
    embeds = model.get_input_embeddings()(single()["input_ids"]).detach()
    with foveate.attached(model, spec(method)):
        out = model.generate(inputs_embeds=embeds, max_new_tokens=12, min_new_tokens=12, do_sample=False)
        assert torch.equal(out, greedy("llama", method))


@every_method
def test_without_a_cache_prefill_is_the_method_and_generation_runs(method):
    model, batch = tiny_model(), left_padded([LENGTHS[0], LENGTHS[1], LENGTHS[1]])  # rows of one length, too
    with torch.no_grad(), foveate.attached(model, spec(method)):
        real = batch["attention_mask"].bool()
        without, cached = (model(**batch, use_cache=use_cache).logits[real] for use_cache in (False, True))
        torch.testing.assert_close(without, cached, rtol=1e-4, atol=1e-4)
        assert run(model, batch, new=4, use_cache=False).shape == (3, 4)


@in_turn(KINDS, ("dtype", [torch.bfloat16, torch.float16]))
def test_half_precision_runs_on_padded_batches(method, dtype):
    model = tiny_model().to(dtype)
    with foveate.attached(model, spec(method)):
        assert run(model, left_padded(LENGTHS)).shape == (3, 12)


AUTOCAST = functools.partial(torch.autocast, "cpu", torch.bfloat16)


@every_family
def test_dense_logits_under_autocast(family):
    model, batch = tiny_model(family), left_padded(LENGTHS)
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)  # foveate makes them
    with torch.no_grad(), AUTOCAST():
        expected = model(**batch, position_ids=positions).logits
        with foveate.attached(model, "dense"):
            actual = model(**batch).logits
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(actual[real], expected[real], rtol=0.02, atol=0.1)


@pytest.mark.parametrize("method", [name for name in KINDS[1] if not name.endswith("in_prompt")])
def test_autocast_from_the_first_turn_to_training(method):
    """The layers compute in the type of autocast, and the cache keeps it when a second turn runs without."""
    model, batch = tiny_model(), left_padded(LENGTHS)
    with foveate.attached(model, spec(method)):
        with AUTOCAST():
            sequences, mask, cache = begin(model, batch)
            gradients(model, left_padded([40, 22]), train=True)
        decode_from(model, sequences, mask, cache, tokens(5, batch=3), new=2)
    assert {layer.cache.dtype for layer in cache.layers} == {torch.bfloat16}


def test_a_layer_switches_autocast_off_only_where_it_is_on(monkeypatch):
    callers = []

    class Autocast(torch.autocast):
        def __enter__(self):
            callers.append(sys._getframe(1).f_globals["__name__"])
            return super().__enter__()

    monkeypatch.setattr(torch, "autocast", Autocast)
    model = tiny_model()
    with torch.no_grad(), foveate.attached(model, "dense"):
        model(tokens(9))
        assert attention.__name__ not in callers
        with AUTOCAST():
            model(tokens(9))
        assert callers.count(attention.__name__) == 3


@pytest.mark.parametrize("method", ["kascade", "luka"])
def test_a_trainer_in_mixed_precision(method, tmp_path):
    model, batch = tiny_model(), left_padded([40, 22])
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    data = [{name: x[row] for name, x in (batch | {"labels": labels}).items()} for row in (0, 1)]
    how = {"bf16": True, "use_cpu": True, "max_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    with foveate.attached(model, spec(method)):
        trainer = transformers.Trainer(
            model, transformers.TrainingArguments(str(tmp_path), **how), train_dataset=data, eval_dataset=data
        )
        trainer.train()
        assert 0 < trainer.evaluate()["eval_loss"] < 20


@in_turn(KINDS, ("context", [torch.no_grad, torch.inference_mode, torch.enable_grad]))
def test_a_loop_of_forward_calls_gives_the_greedy_tokens(method, context):
    model = tiny_model()
    with context(), foveate.attached(model, spec(method)):
        out = model(single()["input_ids"])
        chosen = [out.logits[:, -1].argmax(-1)]
        for _ in range(11):
            out = model(chosen[-1][:, None], **cached(returned_cache(out)))
            chosen.append(out.logits[:, -1].argmax(-1))
    assert torch.equal(torch.stack(chosen, 1), greedy("llama", method))


@every_kind
def test_a_prompt_fed_by_hand_gives_the_greedy_tokens(method):
    model, ids = tiny_model(), single()["input_ids"]
    with torch.no_grad(), foveate.attached(model, spec(method)):
        cache = foveate.Cache(model, prompt_length=PROMPT)
        for first in range(0, PROMPT, 20):
            out = model(ids[:, first : first + 20], **cached(cache))
        chosen = [out.logits[:, -1].argmax(-1)]
        for _ in range(11):
            chosen.append(model(chosen[-1][:, None], **cached(cache)).logits[:, -1].argmax(-1))
    assert torch.equal(torch.stack(chosen, 1), greedy("llama", method))


@pytest.mark.parametrize("method", ["h2o", "pages", "kascade"])
@torch.no_grad()
def test_chunks_by_hand_without_the_length_of_the_prompt_are_told_of_once(method):
    model, ids = tiny_model(), single()["input_ids"]
    with foveate.attached(model, spec(method)):
        first = model(ids[:, :20], use_cache=True)
        cache = returned_cache(first)
        with pytest.warns(UserWarning, match=rf"{method} takes the first .*Cache\(model, prompt_length=...\)"):
            model(ids[:, 20:40], **cached(cache))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(ids[:, 40:], **cached(cache))
            cache.reset()
            for part in (ids[:, :20], *ids[:, 20:30].split(1, 1), ids[:, 30:]):  # decoded in between
                model(part, **cached(cache))
            for length in (20, PROMPT):
                cache = foveate.Cache(model, prompt_length=length)
                for part in ids.split(20, 1):
                    model(part, **cached(cache))


@torch.no_grad()
def test_methods_that_take_all_tokens_alike_say_nothing_of_chunks():
    model, ids = tiny_model(), single()["input_ids"]
    for method in ("dense", "streaming"):
        with foveate.attached(model, spec(method)), warnings.catch_warnings():
            warnings.simplefilter("error")
            cache = foveate.Cache(model)
            outs = [model(part, **cached(cache)).logits for part in ids.split(20, 1)]
            torch.testing.assert_close(torch.cat(outs, 1), model(ids).logits, atol=1e-4, rtol=1e-4)


# Several turns


@in_turn(METHODS, ("family", ["llama", "qwen3"]))
def test_two_turns_of_a_padded_batch_equal_each_row_alone(family, method):
    """Not for Gemma 3: its own sliding-window layers count padding between turns, in the stock model too."""
    model, batch, said = tiny_model(family), left_padded([PROMPT, 8, 40]), left_padded([3, 12, 7], seed=50)
    with foveate.attached(model, spec(method)):
        together = decode_from(model, *begin(model, batch), *said.values())
        for row, ids, more in zip(together, cut_rows(batch), cut_rows(said)):
            alone = begin(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            assert torch.equal(row[None], decode_from(model, *alone, more))


@in_turn(KINDS, ("new", [4, 5, 6, 7]))
def test_two_turns_in_chunks_equal_whole_turns(method, new):
    """Chunked by hand, as generate of the oldest supported release cannot chunk onto a cache."""
    model, said = tiny_model(), tokens(13, seed=50)

    def talk(cuts):
        out = model.generate(**single(), max_new_tokens=new, do_sample=False, return_dict_in_generate=True)
        cache, ids = returned_cache(out), torch.cat([out.sequences[:, -1:], said], 1)
        cache.begin(PROMPT + new + 13, assistant=False)
        logits = [model(ids[:, first:last], **cached(cache)).logits for first, last in zip([0, *cuts], [*cuts, 14])]
        logits.append(model(tokens(1, seed=60), **cached(cache)).logits)
        return torch.cat(logits, 1)

    with torch.no_grad(), foveate.attached(model, spec(method)):
        torch.testing.assert_close(talk([5, 13]), talk([]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", [SPECS["streaming"], "streaming:sinks=2,window=0.3"])
@pytest.mark.parametrize("new", [4, 7])
def test_turns_of_a_window_equal_one_long_prompt(method, new):
    """What a query sees under a window depends on its position alone, so turns leave no trace."""
    model, said = tiny_model(), tokens(9, seed=50)
    with foveate.attached(model, method):
        out = model.generate(**single(), max_new_tokens=new, do_sample=False, return_dict_in_generate=True)
        everything = torch.cat([out.sequences, said], 1)
        expected = generate(model, everything)
        assert torch.equal(generate(model, everything, **cached(returned_cache(out))), expected)


@every_kind
def test_new_ids_alone_equal_the_whole_conversation(method):
    model = tiny_model()
    with foveate.attached(model, spec(method)):
        sequences, mask, cache = begin(model, single())
        fresh = torch.cat([sequences[:, -1:], SAID], 1)
        mask = torch.cat([mask, torch.ones_like(SAID)], 1)
        assert torch.equal(generate(model, fresh, 6, attention_mask=mask, **cached(cache)), second_turn(method))


@every_kind
def test_a_copied_cache_serves_two_continuations(method):
    """The second one outside of the inference mode of the first turn."""
    model, others = tiny_model(), tokens(4, seed=51)
    with foveate.attached(model, spec(method)):
        expected = decode_from(model, *begin(model, single()), others)
        with torch.inference_mode():
            sequences, mask, cache = begin(model, single())
            twin = copy.deepcopy(cache)
            assert torch.equal(decode_from(model, sequences, mask, twin, others), expected)
        assert torch.equal(decode_from(model, sequences, mask, cache, SAID), second_turn(method))


@every_kind
def test_a_reset_cache_is_a_new_one(method):
    model = tiny_model()
    with foveate.attached(model, spec(method)):
        cache = foveate.Cache(model)
        generate(model, tokens(30, seed=9), **cached(cache))
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(run(model, single(), **cached(cache)), greedy("llama", method))


@every_kind
def test_decoding_that_is_taken_back_leaves_no_trace(method):
    model = tiny_model()

    def logits_after(detour: int):
        cache = foveate.Cache(model)
        cache.activate_past_recording()
        model(single()["input_ids"], **cached(cache))
        for step in range(4):
            model(tokens(1, seed=step), **cached(cache))
        if detour:
            model(tokens(detour, seed=77), **cached(cache))
            cache.crop(-detour)
        out = [model(tokens(1, seed=20 + step), **cached(cache)).logits for step in range(6)]
        assert cache.get_seq_length() == PROMPT + 10
        return torch.cat(out)

    with torch.no_grad(), foveate.attached(model, spec(method)):
        torch.testing.assert_close(logits_after(5), logits_after(0), rtol=1e-4, atol=1e-4)


# The compiler


@pytest.mark.full
def test_compiled_steps_are_those_of_the_model_and_compiled_once():
    model, counter = tiny_model(), CompileCounterWithBackend("eager")
    with torch.no_grad(), foveate.attached(model, spec("h2o")):
        seen = []
        for call in (model, torch.compile(model, backend=counter)):
            ids, cache, logits, compiled = tokens(20), Cache(model), [], []
            for _ in range(12):
                logits.append(call(ids, **cached(cache)).logits[:, -1:])
                ids = logits[-1].argmax(-1)
                compiled.append(counter.frame_count)
            seen.append(torch.cat(logits, 1))
    assert torch.equal(*seen)
    assert compiled[0] > 0
    assert compiled[1] == compiled[-1]
    torch.compiler.reset()


# Training


def gradients(model, batch, train: bool):
    model.train(train)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    model.zero_grad()
    out = model(**batch, labels=labels)
    out.loss.backward()
    model.eval()
    return out.loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def check_gradients(family, padded, train):
    model, batch = tiny_model(family), left_padded([20, 9, 14]) if padded else single(20)
    loss, expected = gradients(model, batch, train)
    with foveate.attached(model, "dense"):
        attached_loss, actual = gradients(model, batch, train)
    torch.testing.assert_close(attached_loss, loss, rtol=1e-5, atol=1e-5)
    for name, gradient in expected.items():
        scale = gradient.abs().max()
        torch.testing.assert_close(actual[name] / scale, gradient / scale, rtol=1e-3, atol=1e-4, msg=name)


@every_family
@pytest.mark.parametrize("padded", [False, True], ids=["one", "padded_batch"])
def test_dense_gradients_equal_those_of_the_stock_model(family, padded):
    check_gradients(family, padded, train=True)


@pytest.mark.parametrize("padded", [False, True], ids=["one", "padded_batch"])
def test_dense_gradients_in_evaluation_mode(padded):
    """With a cache that nobody asked for, as in the stock model."""
    check_gradients("llama", padded, train=False)


@every_trainable
def test_gradients_flow_through_every_method(method):
    model = tiny_model()
    with foveate.attached(model, spec(method)):
        _, found = gradients(model, left_padded([40, 22]), train=True)
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert all(gradient.abs().max() > 0 for gradient in found.values())


def test_gradient_checkpointing_gives_the_same_gradients():
    model, batch = tiny_model(), single(20)
    _, expected = gradients(model, batch, train=True)
    checkpoint_activations(model)
    with foveate.attached(model, "dense"):
        _, actual = gradients(model, batch, train=True)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


def test_checkpointed_layers_may_run_again_after_another_model_was_asked():
    """A teacher is evaluated, with a cache, between the student's forward and its backward pass."""
    student, teacher, batch = tiny_model().train(), tiny_model(seed=1), single(20)
    checkpoint_activations(student)
    found = []
    for between in (False, True):
        with foveate.attached(student, "dense"), foveate.attached(teacher, "h2o"):
            student.zero_grad()
            loss = student(**batch).logits.square().mean()
            if between:
                with torch.no_grad():
                    teacher(**batch)
            loss.backward()
        found.append([parameter.grad.clone() for parameter in student.parameters()])
    for alone, interleaved in zip(*found):
        assert torch.equal(alone, interleaved)


def test_a_training_forward_builds_no_cache():
    model = tiny_model().train()
    with foveate.attached(model, "h2o"):
        out = model(tokens(20))
    assert not isinstance(returned_cache(out), foveate.Cache) or returned_cache(out).get_seq_length() == 0


# Attaching and detaching


def recorded(config):
    """A configuration as plain values, the attention implementation included."""
    return copy.deepcopy(config.to_dict()), config._attn_implementation


@every_family
@pytest.mark.parametrize("method", ["dense", "h2o", "mixed"])
def test_detach_restores_every_attribute(family, method):
    model = tiny_model(family)
    hook = model.model.register_forward_pre_hook(lambda module, args: None)
    before, config, expected = fingerprint(model), recorded(model.config), run(model, single())
    foveate.attach(model, spec(method))
    assert fingerprint(model) != before
    run(model, single())
    foveate.detach(model)
    assert fingerprint(model) == before
    assert recorded(model.config) == config
    assert list(model.model._forward_pre_hooks) == [hook.id]
    assert torch.equal(run(model, single()), expected)


def test_detach_of_a_model_that_is_not_attached_does_nothing():
    model = tiny_model()
    before = fingerprint(model)
    foveate.detach(model)
    assert fingerprint(model) == before


def test_attaching_again_replaces_the_method():
    model = tiny_model()
    before = fingerprint(model)
    foveate.attach(model, spec("streaming"))
    run(model, single())
    foveate.attach(model, spec("h2o"))
    assert len(model.model._forward_pre_hooks) == 1
    assert torch.equal(run(model, single()), greedy("llama", "h2o"))
    assert foveate.stats(model).layers[0].method == spec("h2o")
    foveate.detach(model)
    assert fingerprint(model) == before


def test_attached_detaches_after_an_error():
    model = tiny_model()
    before = fingerprint(model)
    with pytest.raises(KeyError), foveate.attached(model, "h2o"):
        raise KeyError
    assert fingerprint(model) == before


def test_detach_keeps_what_was_changed_since():
    model = tiny_model()
    config = model.config
    config.note = "removed"
    foveate.attach(model, "h2o")
    model.resize_token_embeddings(VOCAB + 9)
    model.config.use_cache, model.config.added = False, [1]
    del model.config.note
    model.set_attn_implementation("eager")
    foveate.detach(model)
    assert model.config is model.model.config is config
    assert (config.vocab_size, config.use_cache, config.added) == (VOCAB + 9, False, [1])
    assert not hasattr(config, "note")
    assert {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")} == {"eager"}


def test_detach_leaves_what_another_model_changed_in_a_shared_configuration():
    first, second = tiny_model(), tiny_model()
    second.config = first.config
    with foveate.attached(first, "h2o"):
        second.config.use_cache = False
    assert not first.config.use_cache


def test_what_a_block_changes_stays_when_an_earlier_method_returns():
    model = tiny_model()
    foveate.attach(model, spec("h2o"))
    with foveate.attached(model, "dense"):
        model.resize_token_embeddings(VOCAB + 9)
    assert model.config.vocab_size == model.model.config.vocab_size == VOCAB + 9
    assert model.foveate.config is model.model.config
    foveate.detach(model)
    assert model.config.vocab_size == VOCAB + 9


@pytest.mark.parametrize("outside", [None, "streaming"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_blocks_that_end_in_any_order(order, outside):
    model, names = tiny_model(), ["dense", "h2o", "tova"]
    before = fingerprint(model)
    kept = None if outside is None else foveate.attach(model, outside)
    blocks = [foveate.attached(model, name) for name in names]
    attachments = [block.__enter__() for block in blocks]
    still = [0, 1, 2]
    for index in order:
        blocks[index].__exit__(None, None, None)
        still.remove(index)
        assert getattr(model, "foveate", None) is (attachments[still[-1]] if still else kept)
    foveate.detach(model)
    assert fingerprint(model) == before


def test_attaching_a_base_model():
    model, ids = tiny_model().model, tokens(30, batch=2)
    before = fingerprint(model)
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        with foveate.attached(model, "dense"):
            out = model(ids)
    assert isinstance(returned_cache(out), foveate.Cache)
    torch.testing.assert_close(out.last_hidden_state, expected, rtol=1e-4, atol=1e-4)
    assert fingerprint(model) == before


def test_two_models_of_one_configuration_do_not_influence_each_other():
    config = CONFIGS["llama"]()
    config._attn_implementation = "sdpa"
    kind = type(tiny_model())
    first, second = prepare(kind(config), 1), prepare(kind(config), 2)
    assert first.config is second.config is config
    before, expected, plain = recorded(config), run(second, single()), fingerprint(second)
    with foveate.attached(first, spec("h2o")):
        assert recorded(config) == before
        assert fingerprint(second) == plain
        assert second.config._attn_implementation == "sdpa"
        assert torch.equal(run(second, single()), expected)
        with foveate.attached(second, spec("streaming")):
            assert foveate.stats(first).layers[0].method != foveate.stats(second).layers[0].method
            streamed = run(second, single())
            run(first, single())
            assert torch.equal(run(second, single()), streamed)
    assert recorded(config) == before
    assert torch.equal(run(second, single()), expected)


@every_family
def test_a_copied_model_is_attached_and_independent(family):
    model = tiny_model(family)
    foveate.attach(model, spec("h2o"))
    run(model, single())
    twin = copy.deepcopy(model)
    assert foveate.stats(twin).summary()["decode_steps"] == 0
    assert torch.equal(run(twin, single()), greedy(family, "h2o"))
    foveate.stats(twin, reset=True)
    assert foveate.stats(model).summary()["decode_steps"] == 11
    foveate.detach(model)
    assert torch.equal(run(twin, single()), greedy(family, "h2o"))
    assert torch.equal(run(model, single()), greedy(family, "dense"))
    foveate.detach(twin)
    assert torch.equal(run(twin, single()), greedy(family, "dense"))
    assert not any("foveate" in module.__dict__ for module in twin.modules())
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert torch.equal(run(model, single()), greedy(family, "dense"))


@pytest.mark.parametrize("method", ["dense", *KINDS[1]])
def test_a_pickled_model_is_attached_and_independent(monkeypatch, method):
    model = tiny_model()
    foveate.attach(model, spec(method))
    expected = run(model, single())
    with torch.no_grad():
        model(tokens(20), use_cache=False)
    pickled = pickle.dumps(model)
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.delitem(interface._global_mapping, "foveate")  # as in another process
    twin = pickle.loads(pickled)
    assert foveate.stats(twin).summary()["decode_steps"] == 0
    assert torch.equal(run(twin, single()), expected)
    cache = returned_cache(model.generate(tokens(20), max_new_tokens=2, return_dict_in_generate=True))
    with pytest.raises(ValueError, match="made for another model"):
        twin(tokens(1), **cached(cache))
    assert foveate.stats(model).summary()["decode_steps"] == 12
    foveate.detach(twin)
    assert not any("foveate" in module.__dict__ for module in twin.modules())
    assert torch.equal(run(twin, single()), greedy("llama", "dense"))


def test_three_threads_with_three_models(monkeypatch):
    work = [("llama", "h2o"), ("gemma3", "luka"), ("llama", "streaming")]
    models = [tiny_model(family) for family, _ in work]
    for model, (_, method) in zip(models, work):
        foveate.attach(model, spec(method))
    expected = [greedy(family, method) for family, method in work]
    found, barrier, post = {}, threading.Barrier(3), handover.post

    def post_and_yield(*args) -> None:
        post(*args)
        time.sleep(1e-4)  # another thread's turn, between a layer's cache and its attention

    def talk(index: int) -> None:
        barrier.wait()
        found[index] = [generate(models[index], **single()) for _ in range(2)]

    monkeypatch.setattr(handover, "post", post_and_yield)
    threads = [threading.Thread(target=talk, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, expected[index]) for index in range(3) for one in found[index])


def test_an_interrupted_forward_leaves_no_trace():
    def interrupt(*_):
        raise KeyboardInterrupt

    model = tiny_model()
    with foveate.attached(model, spec("h2o")):
        hook = model.model.layers[1].self_attn.o_proj.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(model, single())
        hook.remove()
        assert torch.equal(run(model, single()), greedy("llama", "h2o"))


def test_a_pad_token_that_is_sampled_is_no_padding():
    """An assistant is given no mask, and Transformers takes every pad token for padding."""
    model, sampled = tiny_model(), set()
    config = model.generation_config
    config.num_assistant_tokens, config.pad_token_id = 2, 0
    few = {"do_sample": True, "max_new_tokens": 8, "suppress_tokens": list(range(6, model.config.vocab_size))}
    with foveate.attached(model, "dense"):
        for seed in range(6):
            torch.manual_seed(seed)
            ids = tokens(4)
            out = model.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=model, **few)
            sampled |= {*out[0, 4:-2].tolist()}
    assert 0 in sampled


@pytest.mark.parametrize("name", [name for name in methods.names() if name in ONE_OF_EACH])
def test_a_question_is_taken_back(name):
    """The remedy that `crop` names, with `generate`: a document is asked again and again, as if for the first time."""
    model, method = tiny_model(), methods.make(name, **methods.get(name).about.small_budget)
    document, how, expected = tokens(80, 2, seed=3), {"max_new_tokens": 6, "do_sample": False}, {}
    with foveate.attached(model, method):
        cache = foveate.Cache(model)
        with torch.no_grad():
            model(document, **cached(cache))
        plain = copy.deepcopy(cache)
        cache.activate_past_recording()
        for length in (6, 1, 6):
            ids = torch.cat([document, tokens(length, 2, seed=length)], 1)
            if length not in expected:
                expected[length] = model.generate(ids, **how, **cached(copy.deepcopy(plain)))
            assert torch.equal(model.generate(ids, **how, **cached(cache)), expected[length])
            if method.stateful and length > 2:
                with pytest.raises(ValueError, match=r"to the ends of prompts and to decoded tokens .* to 80, "):
                    cache.crop(81 - cache.get_seq_length())
            cache.crop(80 - cache.get_seq_length())
        bytes_held = cache.resident_bytes
        model.generate(ids, **how, **cached(cache))
        cache.crop(80 - cache.get_seq_length())
        assert cache.resident_bytes == bytes_held


@pytest.mark.parametrize("name", ["h2o", "dense", "luka"])
def test_recording_for_an_assistant_ends_with_its_call(name):
    model, helper = tiny_model(), assistant("llama")
    with foveate.attached(model, spec(name)):
        cache = foveate.Cache(model)
        out = model.generate(tokens(40), assistant_model=helper, max_new_tokens=8, do_sample=False, **cached(cache))
        assert all(layer.record_past for layer in cache.layers)
        ids = torch.cat([out, tokens(5, seed=9)], 1)
        expected = model.generate(ids, max_new_tokens=4, do_sample=False)
        found = model.generate(ids, max_new_tokens=4, do_sample=False, **cached(cache))
        assert not any(layer.record_past for layer in cache.layers)
        if name == "dense":
            assert torch.equal(found, expected)


@pytest.mark.parametrize("lengths", [[96], [96, 96], [96, 61], [50, 96, 13]])
@pytest.mark.parametrize("method", ["kascade_paper:top_k=9,tile=16,anchors=1", "oracle_topk:top_k=9,tile=7", "dense"])
def test_chunks_that_generate_makes_change_no_answer(monkeypatch, method, lengths):
    """Of rows as long as each other and of padded ones, whose tiles begin elsewhere in each row."""
    model, batch = tiny_model(), left_padded(lengths)
    with foveate.attached(model, method, cuda_graph=False):
        how = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        expected = model.generate(**batch, **how)
        monkeypatch.setattr(hooks, "LONG_PROMPT", 1)
        monkeypatch.setattr(hooks, "CHUNK", 40 * len(lengths))
        found = model.generate(**batch, **how)
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.allclose(torch.stack(found.logits), torch.stack(expected.logits), atol=1e-4)


@pytest.mark.parametrize("removed", [1, 5, 19])
@pytest.mark.parametrize("later", [1, 4, 30])
def test_a_cropped_cache_knows_the_tokens_that_it_reads_next(removed, later):
    """However many they are, fewer or more than were removed."""
    model, ids, others = tiny_model(), tokens(20), tokens(30, seed=5)
    with foveate.attached(model, "dense", cuda_graph=False):
        cache = foveate.Cache(model)
        model(ids, **cached(cache))
        cache.crop(-removed)
        model(others[:, :later], **cached(cache))
        known = torch.cat([ids[:, : 20 - removed], others[:, :later]], 1)
        assert torch.equal(cache.ids.read(cache.get_seq_length()), known)

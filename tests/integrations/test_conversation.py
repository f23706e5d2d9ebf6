"""`foveate.ask`: questions about a document that is read once."""

import contextlib
import copy

import pytest
import torch
import transformers

import foveate
from foveate.errors import UserError
from foveate.hybrids.models import presets
from foveate.integrations.transformers import conversation, loading
from foveate.integrations.transformers.support import forgets
from foveate.prompting import encode, template_settings
from tests import tiny
from tests.families import RECURRENT, family
from tests.helpers import cached
from tests.integrations.test_csa import KINDS, SMALL

DOCUMENT = "Call me Ishmael. Some years ago I thought I would sail about a little. " * 12
QUESTIONS = ["Why?", "Who is it that speaks here, and what was he called before he went to sea?", "What did he do?"]
KEEPS = [None, "dense", "pages:top_k=32", "quest:top_k=32", "sparq", "kascade:anchors=1,top_k=32"]
TURNS = ["h2o:top_k=16,window=4", "snapkv:top_k=0.25", "tova:top_k=24", "streaming:window=32", "luka:page_size=8"]
"""What they keep, or summarise, depends on where the first turn ends."""


class Letters:
    """A tokenizer of letters, for models of 97 tokens; its texts name their tokens."""

    chat_template = bos_token_id = None
    pad_token_id = 0

    def encode(self, text, add_special_tokens=True):
        return [3 + ord(letter) % 90 for letter in text]

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def loaded(folder):
    model, tokenizer = loading.load_model(folder, "float32", "cpu"), loading.load_tokenizer(folder)
    model.generation_config = transformers.GenerationConfig(eos_token_id=1, pad_token_id=0)
    return model, tokenizer


def plainly(model, tokenizer, document=DOCUMENT, read=0, most=8):
    """The answers of `generate` to whole prompts; so many tokens of each are read before, in a pass of their own."""
    answers = []
    for question in QUESTIONS:
        message = f"{document.strip()}\n\n{question}"
        prompt = [{"role": "user", "content": message}] if tokenizer.chat_template else message
        ids = torch.tensor([encode(tokenizer, prompt)])
        given = {}
        if read:
            cache = foveate.Cache(model)
            with torch.inference_mode():
                model(ids[:, :read], **cached(cache))
            given = cached(cache)
        how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": most, "do_sample": False, "pad_token_id": 0}
        made = model.generate(ids, **how, **given)[0, ids.shape[1] :].tolist()
        ends = conversation.end_tokens(model)
        made = made[: next((n for n, one in enumerate(made) if one in ends), len(made))]
        answers.append(tokenizer.decode(made, skip_special_tokens=True).strip())
    return answers


def document_tokens(tokenizer):
    return len(conversation._opening(tokenizer, DOCUMENT.strip(), {}))


@pytest.mark.parametrize("template", [tiny.TEMPLATE, None])
@pytest.mark.parametrize("method", KEEPS)
def test_answers_are_those_of_whole_prompts(loaded, method, template):
    model, tokenizer = loaded
    tokenizer.chat_template = template
    attachment = None if method is None else foveate.attach(model, method)
    answers = foveate.ask(model, tokenizer, DOCUMENT, QUESTIONS, max_new_tokens=8)
    assert answers == plainly(model, tokenizer)
    assert len(set(answers)) == len(QUESTIONS)
    assert getattr(model, "foveate", None) is attachment


@pytest.mark.parametrize("method", TURNS)
def test_what_is_kept_is_chosen_without_the_question(loaded, method):
    model, tokenizer = loaded
    foveate.attach(model, method)
    answers = foveate.ask(model, tokenizer, DOCUMENT, QUESTIONS, max_new_tokens=8)
    found = foveate.stats(model).summary()
    assert found["tokens_evicted"] + found["pages_refined"] > 0
    assert answers == plainly(model, tokenizer, read=document_tokens(tokenizer))
    other_order = foveate.ask(model, tokenizer, DOCUMENT, QUESTIONS[::-1], max_new_tokens=8)
    assert other_order == answers[::-1]


@pytest.mark.parametrize("name", [*RECURRENT, "Gemma 2", "gpt-oss"])
def test_models_of_every_kind(name):
    model = family(name)
    with foveate.attached(model, "dense"):
        answers = foveate.ask(model, Letters(), DOCUMENT[:150], QUESTIONS, max_new_tokens=8)
        assert answers == plainly(model, Letters(), DOCUMENT[:150])
    assert forgets(model) == (name == "Jamba")


@pytest.mark.parametrize(("preset", "method"), [("gdn_attn", "dense"), ("lalte", None), ("lansa", None)])
def test_hybrids(preset, method):
    torch.manual_seed(0)
    config = presets.make_config(preset, "tiny", eos_token_id=2, pad_token_id=0, initializer_range=0.3)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with foveate.attached(model, method) if method else contextlib.nullcontext():
        answers = foveate.ask(model, Letters(), DOCUMENT[:150], QUESTIONS, max_new_tokens=8)
        assert answers == plainly(model, Letters(), DOCUMENT[:150])


@pytest.mark.parametrize("name", ["deepseek_v32", "glm5_next"])
def test_sparse_attention_of_the_models_own(name):
    config, kind, more = KINDS[name]
    if not hasattr(transformers, kind):
        pytest.skip(f"this version of Transformers has no {kind}")
    torch.manual_seed(0)
    sizes = SMALL | more | {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = getattr(transformers, config)(**sizes)
    if kind == "Glm5NextForConditionalGeneration":
        vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
        vision["projection_intermediate_size"] = 16
        config = transformers.Glm5NextConfig(text_config=config.to_dict(), vision_config=vision)
    model = getattr(transformers, kind)(config).eval()
    foveate.attach(model)
    answers = foveate.ask(model, Letters(), DOCUMENT[:150], QUESTIONS, max_new_tokens=8)
    assert answers == plainly(model, Letters(), DOCUMENT[:150])


def test_a_long_document_is_read_in_chunks(loaded, monkeypatch):
    model, tokenizer = loaded
    foveate.attach(model, "pages:top_k=32")
    whole, passes = foveate.ask(model, tokenizer, DOCUMENT, QUESTIONS, max_new_tokens=8), []
    monkeypatch.setattr(conversation, "_CHUNK", 50)
    model.register_forward_pre_hook(lambda _, args, kwargs: passes.append(args), with_kwargs=True)
    assert foveate.ask(model, tokenizer, DOCUMENT, QUESTIONS, max_new_tokens=8) == whole
    read = [len(args[0][0]) for args in passes if args]
    assert sum(read) == document_tokens(tokenizer)
    assert max(read) <= 64
    assert len(read) > 2


def test_the_reading_is_kept_in_a_file(loaded, tmp_path, monkeypatch):
    model, tokenizer = loaded
    foveate.attach(model, "h2o:top_k=16,window=4")
    kept = tmp_path / "document.safetensors"
    answers = foveate.ask(model, tokenizer, DOCUMENT, QUESTIONS, max_new_tokens=8, kept=kept)
    with pytest.raises(UserError, match=r"kept='.*document\.safetensors' is of another document"):
        foveate.ask(model, tokenizer, DOCUMENT[5:], QUESTIONS, max_new_tokens=8, kept=kept)
    monkeypatch.setattr(conversation, "_read", None)
    assert foveate.ask(model, tokenizer, DOCUMENT, QUESTIONS, max_new_tokens=8, kept=kept) == answers


def test_arguments_of_generate(loaded):
    model, tokenizer = loaded
    foveate.attach(model, "dense")
    stopped = foveate.ask(model, tokenizer, DOCUMENT, QUESTIONS[:1], max_new_tokens=20, suppress_tokens=[1])
    assert len(tokenizer.encode(stopped[0])) > 10
    torch.manual_seed(0)
    how = {"max_new_tokens": 20, "suppress_tokens": [1], "do_sample": True}
    assert foveate.ask(model, tokenizer, DOCUMENT, QUESTIONS[:1], **how) != stopped


def test_nothing_is_read_for_bad_arguments(loaded, tmp_path):
    model, tokenizer = loaded
    with pytest.raises(UserError, match="a file takes an attached method"):
        foveate.ask(model, tokenizer, DOCUMENT, QUESTIONS, kept=tmp_path / "kept.safetensors")
    foveate.attach(model, "dense")
    assert foveate.ask(model, tokenizer, DOCUMENT, []) == []
    for document, questions, more, message in (
        (DOCUMENT, "Why?", {}, r"questions must be a list of texts, not one text: \['Why\?'\]"),
        (DOCUMENT, ["Why?", " "], {}, r"questions\[1\] must be a text that is not empty, not ' '"),
        ("", QUESTIONS, {}, "document must be a text that is not empty, not ''"),
        (DOCUMENT, ["caf\udce9"], {}, r"questions\[0\] is not UTF-8: its character 4"),
        (DOCUMENT, QUESTIONS, {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        (DOCUMENT * 20, QUESTIONS, {}, r"need [\d,]+ positions, and the model has 2,048; shorten"),
    ):
        with pytest.raises(UserError, match=message):
            foveate.ask(model, tokenizer, document, questions, **more)
    assert foveate.stats(model).summary()["decode_steps"] == 0
    jamba = family("Jamba")
    with foveate.attached(jamba, "dense"), pytest.raises(UserError, match="JambaForCausalLM cannot continue a cache"):
        foveate.ask(jamba, Letters(), DOCUMENT[:150], QUESTIONS, kept=tmp_path / "kept.safetensors")
    virtual = copy.copy(model)
    virtual.active_peft_config = type("Config", (), {"is_prompt_learning": True})
    with pytest.raises(UserError, match="virtual tokens"):
        foveate.ask(virtual, tokenizer, DOCUMENT, QUESTIONS)


class Merging(Letters):
    """A tokenizer that joins the end of a text with what follows in a way that no continuation which is tried shows."""

    def encode(self, text, add_special_tokens=True, **_):
        return super().encode(text.replace("\n\nWho", "~"))


@pytest.mark.parametrize("method", [None, "dense", "h2o:top_k=16,window=4"])
def test_questions_that_change_the_documents_tokens_are_read_whole(method):
    model, tokenizer = family("Gemma 2"), Merging()
    asked = [f"{QUESTIONS[0]}", "Who is it?"]
    with foveate.attached(model, method) if method else contextlib.nullcontext():
        answers = foveate.ask(model, tokenizer, DOCUMENT[:150], asked, max_new_tokens=8)
        ids = torch.tensor([tokenizer.encode(f"{DOCUMENT[:150].strip()}\n\n{asked[1]}")])
        how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        assert answers[1] == tokenizer.decode(model.generate(ids, **how)[0, ids.shape[1] :].tolist())


TOLD = (
    "{% for one in messages %}{{ one.content }}{% endfor %}"
    "<{{ date_string | default('today') }}{{ ' thinks' if enable_thinking | default(true) else '' }}>"
)
"""A template that knows the day and whether the model thinks aloud, with defaults of its own."""


@pytest.mark.parametrize(
    ("given", "end"),
    [
        ({}, "<today thinks>"),
        ({"thinking": False}, "<today>"),
        ({"thinking": True, "date": "1 May 2026"}, "<1 May 2026 thinks>"),
    ],
)
def test_templates_write_what_they_do_by_default_or_what_is_asked_for(loaded, monkeypatch, given, end):
    """Where methods are compared they think never, and the day is fixed."""
    model, tokenizer = loaded
    tokenizer.chat_template = TOLD
    seen = []
    real = conversation._generate
    monkeypatch.setattr(
        conversation,
        "_generate",
        lambda model, tokenizer, ids, *more, **options: (
            seen.append(tokenizer.decode(ids)) or real(model, tokenizer, ids, *more, **options)
        ),
    )
    foveate.ask(model, tokenizer, DOCUMENT, ["Why?"], max_new_tokens=2, **given)
    conversation.Conversation(model, tokenizer, "", 2, template_settings(**given)).answer("Why?")
    assert [text.endswith(f"Why?{end}") for text in seen] == [True, True]
    assert tokenizer.decode(encode(tokenizer, [{"role": "user", "content": "Why?"}])).endswith("Why?<26 Jul 2024>")

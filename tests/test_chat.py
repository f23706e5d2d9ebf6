"""`foveate chat`: turns over one cache."""

import contextlib

import pytest
import torch
from typer.testing import CliRunner

import foveate
from foveate.cli import app
from foveate.errors import UserError
from foveate.integrations.transformers import loading
from foveate.integrations.transformers.conversation import Conversation
from foveate.prompting import encode
from tests import tiny
from tests.families import family
from tests.helpers import cached
from tests.integrations.test_conversation import Letters

DOCUMENT = "Call me Ishmael. Some years ago I thought I would sail about a little. " * 12
QUESTIONS = ["Who is it?", "What did he do?", "Why?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("models") / "tiny-llama")


def talk(folder, method, template=tiny.TEMPLATE, document=DOCUMENT, most=6):
    network, tokenizer = loading.load_model(folder, "float32", "cpu"), loading.load_tokenizer(folder)
    tokenizer.chat_template = template
    foveate.attach(network, method)
    return Conversation(network, tokenizer, document, most)


@pytest.mark.parametrize("read", [False, True])
def test_turns_over_one_cache_answer_as_whole_prompts_do(folder, read, monkeypatch):
    ours = talk(folder, "dense")
    generate, held = ours._model.generate, []

    def both(ids, **given):
        cache = given.pop(next(name for name in given if isinstance(given[name], foveate.Cache)))
        held.append(cache.get_seq_length())
        alone = generate(ids, **given | {"streamer": None})
        made = generate(ids, **given, **cached(cache))
        assert torch.equal(made, alone)
        return made

    monkeypatch.setattr(ours._model, "generate", both)
    if read:
        assert ours.read() == ours.tokens > 100
    for question in QUESTIONS:
        ours.answer(question)
    assert [bool(one) for one in held] == [read, True, True]


@pytest.mark.parametrize(("method", "again"), [("dense", 0), ("quest:top_k=1.0", 0), ("h2o:top_k=16,window=4", 1)])
def test_a_template_that_writes_earlier_turns_anew(folder, method, again, monkeypatch):
    """What has changed is read again, and the document with it only where the method cannot forget tokens."""
    rewriting = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] if loop.last or loop.first else 'earlier' }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    ours = talk(folder, method, rewriting)
    ours.read()
    ours.answer(QUESTIONS[0])
    generate, held = ours._model.generate, []

    def noted(ids, **given):
        held.append(next(one for one in given.values() if isinstance(one, foveate.Cache)).get_seq_length())
        return generate(ids, **given)

    monkeypatch.setattr(ours._model, "generate", noted)
    ours.answer(QUESTIONS[1])
    ids = encode(ours._tokenizer, ours._turns[:-1])
    assert ours._held.ids[: len(ids)] == ids
    assert ours.read_again == again
    assert (held[0] == 0) == bool(again)


class Words(Letters):
    """A tokenizer of letters that writes earlier turns anew; its answers are letters, too."""

    def apply_chat_template(self, messages, **_):
        *earlier, last = [one["content"] for one in messages]
        return "".join(one[: 30 if place == 0 else 2] + "|" for place, one in enumerate(earlier)) + last + ":"

    chat_template = "as above"

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(33 + one % 90) for one in ids)


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("name", ["Gemma 2", "Jamba", "Llama"])
def test_layers_that_cannot_forget_are_read_anew(name, attached):
    """Windows that are full, and recurrent states."""
    model = family(name)
    with foveate.attached(model, "dense") if attached else contextlib.nullcontext():
        ours = Conversation(model, Words(), DOCUMENT[:60], 6)
        ours.read()
        for turn, question in enumerate(QUESTIONS):
            ours.answer(question)
            assert ours.read_again == (0 if name == "Llama" else turn)
            said = ours._held.ids
            alone = torch.tensor([said[:-6]])
            made = model.generate(alone, attention_mask=torch.ones_like(alone), max_new_tokens=6, do_sample=False)
            assert made[0].tolist() == said


@pytest.mark.parametrize("question", ["a", "start", "assistant", "<|end|>"])
def test_any_question_stands_where_it_belongs(folder, question):
    ours = talk(folder, "dense")
    ours.read()
    ours.answer(question)
    ids = encode(ours._tokenizer, [ours._turns[0]])
    assert ours._tokenizer.decode(ours._held.ids[: len(ids)]) == ours._tokenizer.decode(ids)


@pytest.mark.parametrize("method", ["h2o:top_k=16,window=4", "luka", "quest:top_k=16"])
def test_methods_answer_after_the_document(folder, method):
    ours = talk(folder, method)
    ours.read()
    for question in QUESTIONS:
        ours.answer(question)
    assert len(ours._turns) == 6


def test_a_conversation_ends_where_positions_do(folder):
    ours = talk(folder, "dense", document=DOCUMENT * 20)
    with pytest.raises(UserError, match="positions"):
        ours.read()


def test_the_command(folder, tmp_path):
    file = tmp_path / "book.md"
    file.write_text(DOCUMENT, encoding="utf-8")
    arguments = ["chat", "--model", folder, "--method", "luka", "--file", file, "--max-new-tokens", 3]
    done = CliRunner().invoke(app, [str(one) for one in arguments], input="Who is it?\nWhy?\n\n")
    assert done.exit_code == 0, done.output
    assert done.output.count("tokens/s") == 2
    assert "luka · read" in done.output
    assert CliRunner().invoke(app, ["chat", "--model", str(folder), "--max-new-tokens", "0"]).exit_code == 2


def test_a_question_that_is_no_utf_8_is_asked_for_again(folder):
    arguments = ["chat", "--model", str(folder), "--max-new-tokens", "3"]
    done = CliRunner().invoke(app, arguments, input=b"caf\xe9?\nhello\n\n")
    assert done.exit_code == 0, done.output
    assert "the question is not UTF-8: its character 4 is" in done.output
    assert "tokens so far" in done.output, "the next question is answered"

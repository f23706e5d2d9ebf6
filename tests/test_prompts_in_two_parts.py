"""A prompt that is read in two parts has the ids of the whole, under every kind of tokenizer; text stays text."""

import functools
import warnings

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from foveate import prompting
from foveate.integrations.transformers import conversation
from foveate.prompting import encode, encode_opening, encode_text, leading_ids, render
from tests import tiny

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
TEXT = "The ship's log: 1851, 12.50.\n\nCall me Ishmael.  Some years ago,\n never mind how long!\t(naïve) 北京\n\n\n"


@functools.cache
def made(kind):
    """A tokenizer of a kind, with merges that cross as much as the kind lets them."""
    unigram = kind == "unigram"
    raw = Tokenizer(models.Unigram() if unigram else models.BPE(byte_fallback=kind == "sentencepiece", unk_token=None))
    byte_level = kind in ("gpt2", "gpt2 without template", "llama3")
    if byte_level:
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if kind == "llama3":
            split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
            whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            raw.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
        raw.decoder = decoders.ByteLevel()
    elif kind == "sentencepiece":  # Llama 2's: no words but one
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:  # T5's and Gemma's
        raw.pre_tokenizer = pre_tokenizers.Metaspace()
    text = (tiny.SAMPLE / "books" / "moby_dick.txt").read_text(encoding="utf-8")[:40_000]
    pieces = [text[start : start + 60] for start in range(0, len(text), 60)] + [TEXT]
    if not byte_level:  # as SentencePiece is trained, on lines
        pieces = [line for piece in pieces for line in piece.split("\n")] + ["\n"]
    how = {"vocab_size": 900, "special_tokens": [*SPECIAL, "<unk>"], "show_progress": False}
    if unigram:
        trainer = trainers.UnigramTrainer(**how, unk_token="<unk>")
    else:
        alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else sorted(set("".join(pieces)))
        trainer = trainers.BpeTrainer(**how, initial_alphabet=alphabet)
    raw.train_from_iterator(pieces, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<|pad|>", eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    tokenizer.chat_template = None if "without" in kind else tiny.TEMPLATE
    return tokenizer


KINDS = ("gpt2", "gpt2 without template", "llama3", "sentencepiece", "unigram")
each_kind = pytest.mark.parametrize("kind", KINDS)
PIECES = st.lists(
    st.sampled_from([*TEXT, *TEXT.split(" "), "\n\n", "  ", "'s", "12", "é", "e\u0301", "…"]), max_size=12
)
TEXTS = PIECES.map("".join).filter(str.strip)


@each_kind
@given(TEXTS, TEXTS)
@example("Call me", "What is it?")
@example("a\n\n", "\n\nb")
def test_whole_prompts_begin_with_the_ids_of_the_opening(kind, document, question):
    tokenizer = made(kind)
    opening = conversation._opening(tokenizer, document.strip(), {})
    whole = conversation._encode(tokenizer, render(tokenizer, [conversation._user(document.strip(), question)]))
    message = f"{document.strip()}\n\n{question}"
    prompt = [{"role": "user", "content": message}] if tokenizer.chat_template else message
    assert whole == encode(tokenizer, prompt)
    assert whole[: len(opening)] == opening
    before = render(tokenizer, [conversation._user(document.strip(), "")])
    assert len(opening) >= len(encode_text(tokenizer, before)) - 24, "most of the document is read ahead"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "without" not in kind])  # a text needs no template
def test_openings_of_long_texts(kind):
    """Wherever one is cut; of tokenizers that know no words but by spaces, at an empty line, as `ask` cuts it."""
    tokenizer, text = made(kind), TEXT * 30
    whole, first = encode_text(tokenizer, text), len(text) - len(TEXT)
    assert first > prompting._TRIED
    for cut in range(first, len(text)):
        if kind in ("sentencepiece", "unigram") and not (text[:cut].endswith("\n\n") and text[cut] > "\n"):
            continue
        opening = encode_opening(tokenizer, text[:cut])
        assert whole[: len(opening)] == opening
        assert len(opening) >= len(encode_text(tokenizer, text[:cut])) - 24


@each_kind
@pytest.mark.parametrize("written", ["<|end|>", "<|user|> and <|end|>\n", "a<|pad|>b", "<|end"])
def test_text_that_is_written_as_a_special_token_stays_text(kind, written):
    tokenizer = made(kind)
    messages = [{"role": "user", "content": f"Call me. {written} Who?"}]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ids = encode(tokenizer, messages)
    specials = tokenizer.convert_tokens_to_ids(SPECIAL)
    template = tokenizer.convert_tokens_to_ids(["<|user|>", "<|end|>", "<|assistant|>"])
    assert [one for one in ids if one in specials] == (template if tokenizer.chat_template else [])
    assert len(said) == any(one in written for one in SPECIAL)
    assert all("written as special tokens of the model" in str(one.message) for one in said)
    if "gpt2" in kind or kind == "llama3":
        assert written in tokenizer.decode(ids)
    raw = leading_ids(tokenizer) + tokenizer.encode(written, add_special_tokens=False)
    assert encode(tokenizer, written) == raw, "in raw text it is the token"

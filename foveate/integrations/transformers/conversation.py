"""Questions about a document, which a model reads once, and conversations of several turns."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.cache_utils import LinearAttentionLayer

from foveate.errors import UserError, check_text
from foveate.integrations.transformers import Cache, load_cache, save_cache
from foveate.integrations.transformers.attachment import Attachment
from foveate.integrations.transformers.positions import max_positions, rotated_otherwise
from foveate.integrations.transformers.releases import CACHE
from foveate.integrations.transformers.support import cache_layers, decoder_of, forgets, keeps_memory, unwrapped
from foveate.prompting import (
    Message,
    answer_text,
    encode_opening,
    encode_text,
    end_tokens,
    leading_ids,
    pad_token,
    render,
    template_settings,
)

_CHUNK = 8192
"""Tokens of a document that are read at once."""
_QUESTION = "(the question that is to come)"
"""Stands for it where a document is read first."""


def ask(
    model: torch.nn.Module,
    tokenizer: Any,
    document: str,
    questions: Sequence[str],
    *,
    max_new_tokens: int = 128,
    kept: str | Path | None = None,
    thinking: bool | None = None,
    date: str | None = None,
    **options: Any,
) -> list[str]:
    """Answer several questions about one document, which is read once, before any question is known.

    Document and question are one message of the user, with an empty line between them, in the tokenizer's chat template
    if it has one. The document is read as a turn of its own: methods that evict choose what they keep without the
    question. Each question continues a copy of the cache alone, so an answer depends neither on the other questions nor
    on their order. Jamba's layers cannot continue a cache: of such a model each prompt is read whole.

    Args:
        model: with or without a method attached (:func:`foveate.attach`), and it stays so; without one it attends as
            Transformers has it.
        tokenizer: the model's.
        document: the text.
        questions: any number of texts.
        max_new_tokens: of an answer, which may end before.
        kept: a file for the reading. If it is there, it is read instead of the document; else it is written
            (:func:`foveate.save_cache`), which takes an attached method.
        thinking: whether the model thinks aloud before it answers, for chat templates that know ``enable_thinking``
            (Qwen 3's); None: as the template does by default.
        date: the day that a chat template writes which knows ``date_string`` (Llama 3's), in its spelling; None: as the
            template does by default, which may be today.
        options: further arguments of `generate`; answers are greedy if they do not say otherwise.

    Returns:
        The answers, in the order of the questions, without white space around them.

    Raises:
        ValueError: for an empty document or question, texts that do not fit the model's positions, or a file of another
            document, model or method, or of no method; nothing is read before.
    """
    model = _unwrapped(model)
    if isinstance(questions, str):
        raise UserError(f"questions must be a list of texts, not one text: [{questions[:40]!r}]")
    for what, text in (("document", document), *((f"questions[{n}]", one) for n, one in enumerate(questions))):
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{what} must be a text that is not empty, not {text!r}")
        check_text(text, what)
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    template, document = template_settings(thinking, date), document.strip()
    opening = _opening(tokenizer, document, template)
    prompts = [_encode(tokenizer, render(tokenizer, [_user(document, one)], template)) for one in questions]
    needed, most = max(map(len, prompts), default=0) + max_new_tokens, _positions(model)
    if most and needed > most:
        raise UserError(
            f"document, question and answer need {needed:,} positions, and the model has {most:,}; shorten the "
            "document or max_new_tokens"
        )
    if not prompts:
        return []
    cache = _kept(model, opening, kept)
    answers = []
    for place, ids in enumerate(prompts):
        own = cache if place + 1 == len(prompts) else copy.deepcopy(cache)
        if ids[: len(opening)] != opening or _rotated_otherwise(model, len(opening), len(ids)):
            own = _new_cache(model)
        made = _generate(model, tokenizer, ids, own, max_new_tokens, **options)
        answers.append(answer_text(tokenizer, made, end_tokens(model), ""))
    return answers


def _kept(model: torch.nn.Module, ids: list[int], path: str | Path | None) -> Any:
    """The cache of the document's ids: read from a file if the file exists, else from a pass over the ids, after which
    the cache is saved to the file.

    Raises ValueError if the file holds other tokens.
    """
    if path is not None and Path(path).expanduser().exists():
        cache = load_cache(model, path)
        known = cache.ids.read(cache.get_seq_length())
        if known is None or known.tolist() != [ids]:
            raise UserError(
                f"kept={str(path)!r} is of another document, or of another day where the chat template writes it (date "
                "sets it); name another file, or remove it"
            )
        return cache
    if path is not None and forgets(model):
        raise UserError(f"kept={str(path)!r}: layers of {type(model).__name__} cannot continue a cache; leave it out")
    if path is not None and not isinstance(_attachment(model), Attachment):
        raise UserError(
            f"kept={str(path)!r}: a file takes an attached method; call foveate.attach(model, method) first"
        )
    cache = _read(model, ids)
    if path is not None:
        save_cache(model, cache, path)
    return cache


class Conversation:
    """Turns of a user and an attached model, over one cache.

    Args:
        model: a causal language model, with or without a method attached.
        tokenizer: the model's, with a chat template.
        document: opens the first turn; empty: there is none.
        max_new_tokens: of an answer.
        template: what the chat template is given (:func:`foveate.prompting.template_settings`).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Any,
        document: str,
        max_new_tokens: int,
        template: Mapping[str, Any] | None = None,
    ):
        self._model, self._tokenizer, self._template = _unwrapped(model), tokenizer, dict(template or {})
        self._document, self._most = document.strip(), max_new_tokens
        self._turns: list[Message] = []
        self.read_again = 0
        """How often all turns had to be read anew."""
        self._start()

    def _start(self) -> None:
        self._cache, self._held, self._begun = _new_cache(self._model), _Read("", []), 0

    @property
    def tokens(self) -> int:
        """Tokens of all turns so far."""
        return len(self._held.ids)

    def read(self) -> int:
        """Read the document before a question is known; returns the number of its tokens."""
        self._held = _Read("", _opening(self._tokenizer, self._document, self._template))
        self._check(self.tokens + self._most)
        self._cache, self._begun = _read(self._model, self._held.ids), self.tokens
        return self.tokens

    def answer(self, question: str, streamer: Any = None) -> str:
        """The answer to a question.

        Args:
            streamer: of Transformers, gets the answer's tokens as they come.
        """
        user = self._user(question)
        text = render(self._tokenizer, [*self._turns, user], self._template)
        ids = self._held.then(self._tokenizer, text)
        self._check(len(ids) + self._most)
        if self._turns and forgets(self._model):
            self._forget_from(0)
        elif _rotated_otherwise(self._model, self._begun, len(ids)):
            self._start()
            self.read_again += 1
        elif ids[: self.tokens] != self._held.ids:
            self._forget_from(next((n for n, pair in enumerate(zip(ids, self._held.ids)) if pair[0] != pair[1]), 0))
        new = _generate(self._model, self._tokenizer, ids, self._cache, self._most, streamer=streamer)
        if new and new[-1] in end_tokens(self._model):
            new.pop()  # the template writes it
        said = self._tokenizer.decode(new)
        self._held = _Read(text + said, ids + new)
        self._begun = self._begun or len(ids)
        if _rotated_otherwise(self._model, self._begun, self.tokens):
            self._start()  # of some models `generate` has read all anew on a cache of its own
        self._turns += [user, {"role": "assistant", "content": said}]
        return said

    def _forget_from(self, place: int) -> None:
        """Keep the first tokens alone, where a template writes earlier turns anew; none if the cache cannot."""
        beyond = self._cache.get_seq_length() - place
        try:
            if beyond > 0:
                self._cache.crop(-beyond)
        except (ValueError, RuntimeError):  # foveate's caches raise the first, Transformers' caches the second
            self._start()
            self.read_again += 1

    def _user(self, question: str) -> Message:
        """The user's message; the first one begins with the document."""
        return _user("" if self._turns else self._document, question)

    def _check(self, needed: int) -> None:
        most = _positions(self._model)
        if most and needed > most:
            raise UserError(
                f"the conversation and its next answer need {needed:,} positions, and the model has "
                f"{most:,}; begin a new one, or shorten the document or max-new-tokens"
            )


class _Read:
    """What of a conversation was read: the ids of its tokens, and, where an answer of the model ends them, its text."""

    def __init__(self, text: str, ids: list[int]):
        self.text, self.ids = text, ids

    def then(self, tokenizer: Any, text: str) -> list[int]:
        """The token ids of a text that continues the conversation.

        If the tokenizer splits the tokens of an answer differently from the model, the ids begin with the model's own
        tokens, followed by the ids of the new text. Otherwise they are the ids of the whole text.
        """
        whole = _encode(tokenizer, text)
        if not self.text or not text.startswith(self.text) or whole[: len(self.ids)] == self.ids:
            return whole
        return self.ids + encode_text(tokenizer, text[len(self.text) :])


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UserError("the model has virtual tokens of PEFT before each prompt, of which no document is read ahead")
    return unwrapped(model)


def _attachment(model: torch.nn.Module) -> Any:
    return getattr(model, "foveate", None)


def _positions(model: torch.nn.Module) -> int:
    """Tokens that the model has positions for; 0: it does not say."""
    return max_positions(decoder_of(model).config.get_text_config(decoder=True).to_dict())


def _rotated_otherwise(model: torch.nn.Module, first: int, then: int) -> bool:
    """Whether keys read at the end of ``first`` tokens, if any, are others than in a context of ``then``."""
    config = decoder_of(model).config.get_text_config(decoder=True)
    return first > 0 and bool(rotated_otherwise(config, first, then))


def _user(document: str, question: str) -> Message:
    return {"role": "user", "content": f"{document}\n\n{question}" if document else question}


def _opening(tokenizer: Any, document: str, template: Mapping[str, Any]) -> list[int]:
    """The ids before a question about a document, whatever it is."""
    text = render(tokenizer, [_user(document, _QUESTION)], template).rpartition(_QUESTION)[0]
    return _first(tokenizer) + encode_opening(tokenizer, text)


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of a rendered text."""
    return _first(tokenizer) + encode_text(tokenizer, text)


def _first(tokenizer: Any) -> list[int]:
    """The first token, as a list; a chat template writes it itself."""
    return [] if tokenizer.chat_template else leading_ids(tokenizer)


def _new_cache(model: torch.nn.Module, prompt_length: int | None = None) -> Any:
    if isinstance(_attachment(model), Attachment):
        return Cache(model, prompt_length=prompt_length)
    return transformers.Cache(layers=cache_layers(decoder_of(model).config.get_text_config(decoder=True)))


@torch.inference_mode()
def _read(model: torch.nn.Module, ids: list[int]) -> Any:
    """A cache that holds these tokens, read in chunks; an empty one of a model that cannot continue it."""
    if forgets(model):
        return _new_cache(model)
    cache, attachment, tile = _new_cache(model, len(ids)), _attachment(model), 1
    one_piece = any(isinstance(layer, LinearAttentionLayer) or keeps_memory(layer) for layer in cache.layers)
    one_piece = one_piece or _rotated_otherwise(model, _CHUNK, max(_CHUNK, len(ids)))
    if isinstance(attachment, Attachment):
        one_piece, tile = one_piece or attachment.whole_prompt, attachment.prompt_tile
    chunk = len(ids) if one_piece else max(_CHUNK // tile, 1) * tile
    for part in torch.tensor([ids], device=model.device).split(chunk, 1):
        model(part, use_cache=True, logits_to_keep=1, **{CACHE: cache})
    return cache


@torch.inference_mode()
def _generate(
    model: torch.nn.Module, tokenizer: Any, ids: list[int], cache: Any, max_new_tokens: int, **options: Any
) -> list[int]:
    """The ids that the model generates after a prompt. A cache holds the prompt's first tokens."""
    tensor = torch.tensor([ids], device=model.device)
    given = {"do_sample": False, "pad_token_id": pad_token(model, tokenizer)} | options | {CACHE: cache}
    made = model.generate(tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=max_new_tokens, **given)
    return made[0, len(ids) :].tolist()

"""From a prompt (chat messages or raw text) to token ids, and from the ids that a model adds to its answer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from foveate.errors import FoveateWarning, UserError

Message = dict[str, str]
"""A chat message: `{"role": "system" | "user" | "assistant", "content": text}`."""

Prompt = str | Sequence[Message]

_TIMES, _ADDED = 4, 1_000_000
"""How many times as long as its messages, and how many characters longer, a prompt may be."""
_MARK = 0xF0000
"""The first of the characters of private use that stand for texts written as special tokens."""
_IS_MARK = re.compile(f"[{chr(_MARK)}-{chr(_MARK + 0xFFFD)}]")
_TRIED = 2000
"""Characters at the end of a text on which continuations are tried."""
_CONTINUATIONS = (*"aA1._(é的\u0301\t\n ", " a", "  a", "'s", "\n\na", "\n a")
COMPARABLE: Mapping[str, Any] = {"date_string": "26 Jul 2024", "enable_thinking": False}
"""What chat templates are given where methods are compared: a prompt depends on no clock, and models that can think
aloud answer at once."""


def template_settings(thinking: bool | None = None, date: str | None = None) -> dict[str, Any]:
    """What a chat template is given outside of comparisons: nothing but what was asked for, so that it writes what it
    writes by default.

    Args:
        thinking: whether the model is to think aloud before it answers, in templates that know ``enable_thinking``.
        date: the day, in the template's own spelling, in templates that know ``date_string``.
    """
    given = {"enable_thinking": thinking, "date_string": date}
    return {name: value for name, value in given.items() if value is not None}


def encode(
    tokenizer: Any, prompt: Prompt, answer_prefix: str = "", template: Mapping[str, Any] = COMPARABLE
) -> list[int]:
    """Token ids of a prompt, `[L]`.

    Messages go through the tokenizer's chat template, if it has one, and the answer prefix follows the generation
    prompt; without a template their contents are joined by empty lines, and the prefix follows after a space. Raw text
    gets the tokenizer's beginning-of-text token, if it uses one, and never an end token. What messages of the user or
    the system hold that is written as a special token stays text, with a warning; in raw text it is the token.
    `template` goes to the chat template.
    """
    text = render(tokenizer, prompt, template)
    if not isinstance(prompt, str) and tokenizer.chat_template:
        return encode_text(tokenizer, text + answer_prefix)
    text = f"{text} {answer_prefix}" if answer_prefix else text
    return leading_ids(tokenizer) + encode_text(tokenizer, text)


def render(tokenizer: Any, prompt: Prompt, template: Mapping[str, Any] = COMPARABLE) -> str:
    """The text that :func:`encode` makes tokens of, for :func:`encode_text`; without a chat template it lacks the first
    token. Special tokens that messages of the user or the system spell out are marked by characters of private use.

    Raises `UserError` for a text that holds such a character itself.
    """
    for text in [prompt] if isinstance(prompt, str) else [one["content"] for one in prompt]:
        if _IS_MARK.search(text):
            raise UserError(f"the text holds a character of private use from U+{_MARK:X} on: remove it")
    if isinstance(prompt, str):
        return prompt
    prompt = _marked(tokenizer, prompt)
    return (
        _chat(tokenizer, prompt, template) if tokenizer.chat_template else "\n\n".join(one["content"] for one in prompt)
    )


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text of :func:`render`, without the first token of a tokenizer that puts one before a text."""
    specials = _special_tokens(tokenizer)
    marks = {chr(_MARK + place): name for place, name in enumerate(specials)}
    if not specials or not any(mark in text for mark in marks):
        return tokenizer.encode(text, add_special_tokens=False)
    ids: list[int] = []
    for piece in re.split(f"({'|'.join(map(re.escape, sorted(specials, key=len, reverse=True)))})", text):
        if piece in specials:
            ids.append(specials[piece])
        elif piece:
            plain = piece.translate({ord(mark): name for mark, name in marks.items()})
            found = tokenizer.encode(plain, add_special_tokens=False, split_special_tokens=True)
            if not {*specials.values()}.isdisjoint(found):  # its vocabulary has the text as a piece: cut that in two
                cut = {ord(mark): f"{name[0]}\0{name[1:]}" for mark, name in marks.items()}
                parts = piece.translate(cut).split("\0")
                found = [number for part in parts for number in tokenizer.encode(part, add_special_tokens=False)]
            ids += found
    return ids


def encode_opening(tokenizer: Any, text: str) -> list[int]:
    """Token ids of the beginning of a text, up to the last token that no continuation changes.

    A tokenizer may join the end of a text with what follows, or split it otherwise, such as an empty line before a
    word under GPT-2's rule. The last word is left out where the text ends in one, and continuations of several kinds
    are tried on the end of the text; so a prompt that begins with this text begins with these ids.
    """
    ids, end = encode_text(tokenizer, text), text[-_TRIED:]
    alone, changed = encode_text(tokenizer, end), 0
    for other_end in (re.sub(r"\s*\S+\Z", "", end), *(end + more for more in _CONTINUATIONS)):
        other = encode_text(tokenizer, other_end)
        same = next((n for n, pair in enumerate(zip(alone, other)) if pair[0] != pair[1]), min(len(alone), len(other)))
        changed = max(changed, len(alone) - same)
    return ids[: len(ids) - changed]


def encode_continued(tokenizer: Any, text: str, continuation: str) -> tuple[list[int], list[int]]:
    """Token ids of a raw text, `[L]`, and of its continuation, `[T]`, split as lm-eval-harness splits them.

    White space at the end of the text belongs to the continuation. Both are tokenised as one text. The text alone has
    some number of tokens; that many first tokens are the text's, and the others are the continuation's. Raises
    `UserError` if either has no token.
    """
    bare = text.rstrip()
    first, whole = leading_ids(tokenizer), bare + text[len(bare) :] + continuation
    size = len(tokenizer.encode(bare, add_special_tokens=False))
    ids = tokenizer.encode(whole, add_special_tokens=False)
    prompt, target = first + ids[:size], ids[size:]
    if not prompt or not target:
        what = "text" if not prompt else "continuation"
        raise UserError(f"no token is left of the {what} of {whole[-60:]!r} in this tokenizer")
    return prompt, target


def encode_turns(tokenizer: Any, prompt: Prompt, question: str, answer_prefix: str = "") -> tuple[list[int], int]:
    """As :func:`encode`, in two turns: ids of the prompt, and how many of them come before the question.

    The text is cut where the question begins, and both parts are tokenised on their own.

    Args:
        question: the end of the prompt's last message.
    """
    text, first = render(tokenizer, prompt), []
    if not isinstance(prompt, str):
        question = _marked_text(tokenizer, question)  # as the text has it
    if isinstance(prompt, str) or not tokenizer.chat_template:
        first, answer_prefix = leading_ids(tokenizer), f" {answer_prefix}" if answer_prefix else ""
    context, found, rest = text.rpartition(question)
    if not question or not found or not context.strip():
        raise ValueError(f"the prompt has no context before the question {question!r}")
    ids = first + encode_text(tokenizer, context)
    return ids + encode_text(tokenizer, found + rest + answer_prefix), len(ids)


def question_of(template: str, **values: Any) -> str:
    """What a template asks after its context, filled in: the end of the message."""
    return template.rpartition("{context}")[2].strip().format(**values)


def leading_ids(tokenizer: Any) -> list[int]:
    """The beginning-of-text token, as a list of one, if this tokenizer puts one before a text, else an empty list."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer.encode("a")[:1] == [bos] else []


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """The special tokens of a tokenizer, as they are written, with their ids."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {one.content: number for number, one in added.items() if one.special and one.content}


def _marked(tokenizer: Any, messages: Sequence[Message]) -> list[Message]:
    """Messages with a character of private use in the place of each text that is written as a special token."""
    marked = [
        one if one["role"] == "assistant" else {**one, "content": _marked_text(tokenizer, one["content"])}
        for one in messages
    ]
    pairs = [(one["content"], other["content"]) for one, other in zip(messages, marked)]
    found = [name for name in _special_tokens(tokenizer) if any(name in a and name not in b for a, b in pairs)]
    if found:
        names = ", ".join(sorted(set(found)))
        warnings.warn(
            f"the text holds {names}, written as special tokens of the model are: read as text",
            FoveateWarning,
            stacklevel=3,
        )
    return marked


def _marked_text(tokenizer: Any, text: str) -> str:
    for place, name in enumerate(_special_tokens(tokenizer)):
        text = text.replace(name, chr(_MARK + place))
    return text


def _chat(tokenizer: Any, messages: Sequence[Message], template: Mapping[str, Any]) -> str:
    from jinja2 import TemplateError

    ways = [list(messages)]
    if messages[0]["role"] == "system":  # some templates know none: the system prompt then opens the user's message
        system, user, *rest = messages
        ways.append([{"role": "user", "content": f"{system['content']}\n\n{user['content']}"}, *rest])
    for way in ways:
        try:
            text = tokenizer.apply_chat_template(way, tokenize=False, add_generation_prompt=True, **template)
        except TemplateError as error:
            refusal = str(error)
        except Exception as error:  # what a program that is no template runs into
            raise UserError(f"the tokenizer's chat template fails: {type(error).__name__}: {error}") from None
        else:
            if len(text) > _TIMES * sum(len(one["content"]) for one in messages) + _ADDED:
                raise UserError(f"the tokenizer's chat template makes {len(text):,} characters of the prompt")
            return text
    raise UserError(f"the tokenizer's chat template refuses the prompt: {refusal}")


def pad_token(model: Any, tokenizer: Any) -> int:
    """The id to pad with: the tokenizer's, else an end token, else 0."""
    return next(token for token in (tokenizer.pad_token_id, *end_tokens(model), 0) if token is not None)


def end_tokens(model: Any) -> list[int]:
    """The ids that end an answer."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        return []
    return list(ends) if isinstance(ends, (list, tuple)) else [ends]


def answer_text(tokenizer: Any, ids: list[int], ends: Sequence[int], stop: str) -> str:
    """The answer: what comes before the first end token and the stop string, without surrounding white space."""
    length = next((n for n, token in enumerate(ids) if token in ends), len(ids))
    text = tokenizer.decode(ids[:length], skip_special_tokens=True).strip()
    return text.split(stop, 1)[0].rstrip() if stop else text

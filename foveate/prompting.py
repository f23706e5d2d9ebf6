"""From a prompt (chat messages or raw text) to token ids, and from the ids that a model adds to its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foveate.errors import UserError

Message = dict[str, str]
"""A chat message: `{"role": "system" | "user" | "assistant", "content": text}`."""

Prompt = str | Sequence[Message]

_TIMES, _ADDED = 4, 1_000_000
"""How many times as long as its messages, and how many characters longer, a prompt may be."""
# Templates that print the day would make a prompt depend on the clock; those that can think aloud are asked not to.
_TEMPLATE_SETTINGS = {"date_string": "26 Jul 2024", "enable_thinking": False}


def encode(tokenizer: Any, prompt: Prompt, answer_prefix: str = "") -> list[int]:
    """Token ids of a prompt, `[L]`.

    Messages go through the tokenizer's chat template, if it has one, and the answer prefix follows the generation
    prompt; without a template their contents are joined by empty lines, and the prefix follows after a space. Raw text
    gets the tokenizer's beginning-of-text token, if it uses one, and never an end token.
    """
    text = render(tokenizer, prompt)
    if not isinstance(prompt, str) and tokenizer.chat_template:
        return tokenizer.encode(text + answer_prefix, add_special_tokens=False)
    text = f"{text} {answer_prefix}" if answer_prefix else text
    return leading_ids(tokenizer) + tokenizer.encode(text, add_special_tokens=False)


def render(tokenizer: Any, prompt: Prompt) -> str:
    """The text that :func:`encode` makes tokens of, but for its first token where there is no chat template."""
    if isinstance(prompt, str):
        return prompt
    return _chat(tokenizer, prompt) if tokenizer.chat_template else "\n\n".join(one["content"] for one in prompt)


def encode_continued(tokenizer: Any, text: str, continuation: str) -> tuple[list[int], list[int]]:
    """Token ids of a raw text, `[L]`, and of its continuation, `[T]`, split as lm-eval-harness splits them.

    White space at the end of the text is the continuation's. Both are tokenised as one text, of which the tokens beyond
    the number that the text alone has are the continuation's. Raises `UserError` if either has no token.
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
    if isinstance(prompt, str) or not tokenizer.chat_template:
        first, answer_prefix = leading_ids(tokenizer), f" {answer_prefix}" if answer_prefix else ""
    context, found, rest = text.rpartition(question)
    if not question or not found or not context.strip():
        raise ValueError(f"the prompt has no context before the question {question!r}")
    ids = first + tokenizer.encode(context, add_special_tokens=False)
    return ids + tokenizer.encode(found + rest + answer_prefix, add_special_tokens=False), len(ids)


def question_of(template: str, **values: Any) -> str:
    """What a template asks after its context, filled in: the end of the message."""
    return template.rpartition("{context}")[2].strip().format(**values)


def leading_ids(tokenizer: Any) -> list[int]:
    """The beginning-of-text token, as a list of one, if this tokenizer puts one before a text, else an empty list."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer.encode("a")[:1] == [bos] else []


def _chat(tokenizer: Any, messages: Sequence[Message]) -> str:
    from jinja2 import TemplateError

    ways = [list(messages)]
    if messages[0]["role"] == "system":  # some templates know none: the system prompt then opens the user's message
        system, user, *rest = messages
        ways.append([{"role": "user", "content": f"{system['content']}\n\n{user['content']}"}, *rest])
    for way in ways:
        try:
            text = tokenizer.apply_chat_template(way, tokenize=False, add_generation_prompt=True, **_TEMPLATE_SETTINGS)
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

"""The file of a lens: what each of the first decoded tokens read, by layer, KV head and token."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foveate.errors import DataError
from foveate.io import infile, outfile
from foveate.io.json_text import parse_json

KIND, SCHEMA = "lens of foveate", 2
STATES = {
    "e": "evicted",
    "n": "kept, not read",
    "s": "read through a summary",
    "r": "read",
    "u": "read, chosen by another layer",
}
"""The letters of a pattern: what a decoded token did with each token before it and with itself."""
_PATTERN = re.compile(rf"(?:[{''.join(STATES)}][1-9]\d{{0,8}})+")


def pattern(letters: str) -> str:
    """Letters of :data:`STATES`, one a token, as runs: ``rrree`` is ``r3e2``."""
    return "".join(f"{letter}{len(list(run))}" for letter, run in itertools.groupby(letters))


def letters(runs: str) -> str:
    """The letters of a :func:`pattern`, one a token."""
    return "".join(letter * int(number) for letter, number in re.findall(r"([a-z])(\d+)", runs))


def texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text of each token. Some tokenizers leave out the space before a token that is decoded alone."""
    first = tokenizer.decode(tokens[:1])
    found = [tokenizer.decode([tokens[0], token])[len(first) :] for token in tokens[1:]]
    return [first, *found]


def is_lens(path: Path) -> bool:
    """Whether a file begins as :func:`write` writes it."""
    begin = json.dumps({"kind": KIND})[:-1].encode()
    try:
        with infile.opened(path) as file:
            return file.read(len(begin)) == begin
    except OSError:
        return False


def write(
    out: Path,
    tokens: Sequence[str],
    prompt_tokens: int,
    layers: Sequence[Mapping[str, Any]],
    steps: Sequence[Sequence[Sequence[str]]],
    recall: Sequence[Sequence[Sequence[float]]],
    **facts: Any,
) -> None:
    """Write a lens as JSON.

    Args:
        tokens: the text of each token, the prompt's tokens first.
        prompt_tokens: number of tokens of the prompt.
        layers: for each layer ``layer``, ``method`` and ``reads_choice_of``; or ``layer`` and ``unchanged``, the reason
            why nothing is known of it.
        steps: for each decoded token and layer a :func:`pattern` for each KV head; none for an unchanged layer. The
            pattern of decoded token s (from 0) covers the prompt and s + 1 decoded tokens, the last of them itself.
        recall: in the form of ``steps``, the share of exact attention that the read tokens hold, 0 to 1.
        facts: what the lens was made with: model, method, number format, device, versions, commit.

    Raises `UserError` if the file cannot be written.
    """
    places: dict[str, int] = {}
    numbered = [[[places.setdefault(one, len(places)) for one in heads] for heads in step] for step in steps]
    value = {"kind": KIND, "schema": SCHEMA, **facts, "prompt_tokens": prompt_tokens, "tokens": list(tokens)}
    value |= {"layers": list(layers), "patterns": list(places), "steps": numbered, "recall": recall}
    outfile.write(out, (json.dumps(value, ensure_ascii=False) + "\n").encode())


def read(path: Path) -> dict[str, Any]:
    """A lens as :func:`write` writes it: ``steps`` hold numbers of ``patterns``.

    Raises `DataError` if there is no such file, or it is something else, damaged, or of another schema.
    """
    try:
        value = parse_json(infile.read(path))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: malformed JSON ({error})") from None
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise DataError(f"{path}: not a lens; `foveate generate --lens FILE` writes one")
    if value.get("schema") != SCHEMA:
        raise DataError(f"{path}: schema {value.get('schema')!r}, and this version reads {SCHEMA}")
    try:
        fault = _fault(value)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        fault = f"{type(error).__name__}: {error}"
    if fault:
        raise DataError(f"{path}: a damaged lens ({fault})")
    return value


def _fault(value: Mapping[str, Any]) -> str:
    """What is wrong with the content of a lens; empty: nothing."""
    tokens, prompt, layers, patterns = (value[name] for name in ("tokens", "prompt_tokens", "layers", "patterns"))
    if not all(isinstance(one, str) for one in (value["model"], value["method"], value["dtype"], *tokens)):
        return "'model', 'method', 'dtype' and 'tokens' must be texts"
    if not all(isinstance(one, str) and _PATTERN.fullmatch(one) for one in patterns):
        return "'patterns' must be runs of the letters " + ", ".join(STATES)
    known = [
        isinstance(one["layer"], int) and isinstance(one.get("method", one.get("unchanged")), str) for one in layers
    ]
    if not layers or not all(known):
        return "'layers' must have a number, and a method or why they are unchanged"
    lengths = [sum(map(int, re.findall(r"\d+", one))) for one in patterns]
    for number, step in enumerate(value["steps"]):
        if len(step) != len(layers) or any(("unchanged" in one) == bool(heads) for one, heads in zip(layers, step)):
            return f"step {number} has patterns of other layers"
        if any(index < 0 or lengths[index] != prompt + number + 1 for heads in step for index in heads):
            return f"a pattern of step {number} is not of its {prompt + number + 1} tokens"
    if not value["steps"] or prompt + len(value["steps"]) > len(tokens):
        return f"{len(value['steps'])} steps of {len(tokens)} tokens, {prompt} of them prompt"
    for own, step in zip(value["recall"], value["steps"], strict=True):
        for shares, heads in zip(own, step, strict=True):
            if len(shares) != len(heads) or not all(0 <= share <= 1 for share in shares):
                return "'recall' must be shares from 0 to 1, one for each KV head"
    return ""

"""`foveate chat`: a conversation about a document, which is read once, with live statistics.

torch and Transformers are imported inside the command, so that help and bad names answer at once.
"""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from foveate.cli.imports import Import
from foveate.cli.progress import INTERRUPTED
from foveate.cli.quiet import quiet
from foveate.cli.terminal import console
from foveate.errors import UserError, check_text, require
from foveate.integrations.early import check_model
from foveate.lab.cli.asking import Day, Device, Dtype, Model, Thinking


def chat(
    model: Model,
    method: Annotated[
        str, typer.Option(help='Such as pages or "luka:page_size=16"; auto: what attach would choose.')
    ] = "auto",
    file: Annotated[Path | None, typer.Option(help="A document to talk about (.txt, .md, .xz).")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512,
    thinking: Thinking = None,
    date: Day = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    imported: Import = None,
) -> None:
    """Talk to a model with a method; an empty line or the end of input ends."""
    require(max_new_tokens >= 1, "max-new-tokens", "at least 1", max_new_tokens)
    check_model(model, needs_weights=True)

    from transformers import TextStreamer

    import foveate
    from foveate.integrations.transformers import loading
    from foveate.integrations.transformers.conversation import Conversation
    from foveate.io.reading import read_text
    from foveate.lab.evaluation.runner import parse_method
    from foveate.lab.report import terminal
    from foveate.prompting import template_settings

    chosen = parse_method(method)
    text = "" if file is None else read_text(file)
    quiet()
    place = loading.choose_device(device)
    form = loading.choose_dtype(dtype, model, place)
    tokenizer = loading.load_tokenizer(model)
    if not tokenizer.chat_template:
        raise UserError(f"{model}: the tokenizer has no chat template; `foveate generate` continues a text")
    network = loading.load_model(model, form, place)
    notes = console(stderr=True)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no UTF-8 end no conversation

    with foveate.attached(network, chosen) as attachment:
        talk = Conversation(network, tokenizer, text, max_new_tokens, template_settings(thinking, date))
        if text:
            with notes.status(f"reading {file}"):
                read = talk.read()
            notes.print(f"{attachment.method.spec} · read {read:,} tokens of {file}", style="dim", markup=False)
        while question := _asked():
            start = time.perf_counter()
            try:
                check_text(question, "the question")
                said = talk.answer(question, TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
            except KeyboardInterrupt:
                notes.print("interrupted: the conversation ends here", style="dim")
                raise typer.Exit(INTERRUPTED) from None
            except UserError as error:
                notes.print(str(error), style="dim", markup=False)
                continue
            speed = len(tokenizer.encode(said, add_special_tokens=False)) / (time.perf_counter() - start)
            line = f"{talk.tokens:,} tokens so far · {speed:.1f} tokens/s"
            line += f" · all read {talk.read_again} times anew, as the chat template asks" if talk.read_again else ""
            notes.print(f"{line} · {terminal.reading(foveate.stats(network).summary())}", style="dim", markup=False)


def _asked() -> str:
    """What the user types next; empty at the end of input."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""

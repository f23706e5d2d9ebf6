"""`foveate chat`: a conversation about a document, which is read once, with live statistics.

torch and Transformers are imported inside the command, so that help and bad names answer at once.
"""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from foveate.cli.asking import Device, Dtype, Import, Model
from foveate.inputs.prompting import Message, render
from foveate.results.errors import UserError, check_text
from foveate.results.quiet import quiet

_INTERRUPTED = 130
_CHUNK = 8192
"""Tokens of a prompt that are read at once."""
_QUESTION = "(the question that is to come)"
"""Stands for it where a document is read first."""


def chat(
    model: Model,
    method: Annotated[str, typer.Option(help='Such as pages or "luka:page_size=16".')] = "dense",
    file: Annotated[
        Path | None, typer.Option(help="A document to talk about (.txt, .md, .xz).", show_default=False)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512,
    dtype: Dtype = "auto",
    device: Device = "auto",
    imported: Import = None,
) -> None:
    """Talk to a model with a method; an empty line or the end of input ends."""
    from transformers import TextStreamer

    import foveate
    from foveate.evaluation.runner import parse_method
    from foveate.inputs import loading, model_folder
    from foveate.inputs.reading import read_text
    from foveate.report import terminal

    if max_new_tokens < 1:
        raise UserError(f"max-new-tokens must be at least 1, got {max_new_tokens}")
    chosen = parse_method(method)
    text = "" if file is None else read_text(file)
    quiet()
    facts = model_folder.model_facts(model)
    place = loading.choose_device(device)
    form = loading.choose_dtype(dtype, model, place)
    tokenizer = loading.load_tokenizer(model)
    if not tokenizer.chat_template:
        raise UserError(f"{model}: the tokenizer has no chat template; `foveate generate` continues a text")
    network = loading.load_model(model, form, place)
    notes = terminal.console(stderr=True)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no UTF-8 end no conversation

    with foveate.attached(network, chosen) as attachment:
        talk = Conversation(network, tokenizer, text, max_new_tokens, facts.get("max_positions"))
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
                raise typer.Exit(_INTERRUPTED) from None
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


class Conversation:
    """Turns of a user and an attached model, over one cache.

    Args:
        network: an attached causal language model.
        tokenizer: the model's, with a chat template.
        document: opens the first turn; empty: there is none.
        max_new_tokens: of an answer.
        positions: tokens that the model has positions for; None: it does not say.
    """

    def __init__(self, network: Any, tokenizer: Any, document: str, max_new_tokens: int, positions: int | None = None):
        self._network, self._tokenizer, self._document = network, tokenizer, document.strip()
        self._most, self._positions = max_new_tokens, positions
        self._turns: list[Message] = []
        self._text = ""
        """The turns so far as the model has read and written them."""
        self._ids: list[int] = []
        self.read_again = 0
        """How often all turns had to be read anew."""
        self._start()

    def _start(self) -> None:
        import foveate

        self._cache, self._ids, self._text = foveate.Cache(self._network), [], ""

    @property
    def tokens(self) -> int:
        """Tokens of all turns so far."""
        return len(self._ids)

    def read(self) -> int:
        """Read the document before a question is known; returns the number of its tokens."""
        import torch

        from foveate.integrations.transformers.hooks import takes_chunks
        from foveate.integrations.transformers.releases import CACHE

        context = render(self._tokenizer, [self._user(_QUESTION)]).rpartition(_QUESTION)[0]
        ids = self._encode(context)
        self._check(len(ids) + self._most)
        self._cache.phase.prompt_end = len(ids)
        tensor = torch.tensor([ids], device=self._network.device)
        attachment = self._network.foveate
        tile = attachment.prompt_tile
        one_piece = attachment.whole_prompt or not takes_chunks(self._cache)
        chunk = len(ids) if one_piece else max(_CHUNK // tile, 1) * tile
        with torch.inference_mode():
            for part in tensor.split(chunk, 1):
                self._network(part, use_cache=True, logits_to_keep=1, **{CACHE: self._cache})
        self._ids, self._text = ids, context
        return len(ids)

    def answer(self, question: str, streamer: Any = None) -> str:
        """The answer to a question.

        Args:
            streamer: of Transformers, gets the answer's tokens as they come.
        """
        import torch

        from foveate.evaluation.generation import pad_token
        from foveate.integrations.transformers.releases import CACHE

        user = self._user(question)
        text = render(self._tokenizer, [*self._turns, user])
        if text.startswith(self._text):
            ids = self._ids + self._encode(text[len(self._text) :])
        else:
            ids = self._encode(text)
            self._forget_from(next((n for n, pair in enumerate(zip(ids, self._ids)) if pair[0] != pair[1]), 0))
        self._check(len(ids) + self._most)
        tensor = torch.tensor([ids], device=self._network.device)
        with torch.inference_mode():
            made = self._network.generate(
                tensor,
                attention_mask=torch.ones_like(tensor),
                max_new_tokens=self._most,
                do_sample=False,
                pad_token_id=pad_token(self._network, self._tokenizer),
                streamer=streamer,
                **{CACHE: self._cache},
            )
        new = made[0, len(ids) :].tolist()
        ends = self._network.generation_config.eos_token_id
        if new and new[-1] in (ends if isinstance(ends, list) else [ends]):
            new.pop()  # the template writes it
        said = self._tokenizer.decode(new)
        self._ids, self._text = ids + new, text + said
        self._turns += [user, {"role": "assistant", "content": said}]
        return said

    def _forget_from(self, place: int) -> None:
        """Keep the first tokens alone, where a template writes earlier turns anew; none if the method cannot."""
        held = self._cache.get_seq_length()
        try:
            self._cache.crop(min(place - held, 0))
        except ValueError:
            self._start()
            self.read_again += 1

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _user(self, question: str) -> Message:
        """The user's message; the first one begins with the document."""
        opening = f"{self._document}\n\n" if self._document and not self._turns else ""
        return {"role": "user", "content": f"{opening}{question}"}

    def _check(self, needed: int) -> None:
        if self._positions and needed > self._positions:
            raise UserError(
                f"the conversation and its next answer need {needed:,} positions, and the model has "
                f"{self._positions:,}; begin a new one, or shorten the document or max-new-tokens"
            )

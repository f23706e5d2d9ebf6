"""Turns a folder of text into a folder of tokenised text (see `foveate.hybrids.training.tokens`): once, in one step."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foveate.errors import DataError, UserError, require
from foveate.hybrids.training import questions as of_questions
from foveate.hybrids.training import tokenizer as of_tokenizer
from foveate.hybrids.training import tokens
from foveate.hybrids.training.documents import documents, normalised, read_titles, text_files
from foveate.hybrids.training.words import ADJECTIVES, NOUNS
from foveate.io import outfile
from foveate.io.digest import digest, sha256

Say = Callable[[str], None]
_SAMPLE = 40_000_000  # characters on which a tokenizer is trained, and by which words are counted
_WORDS = 16_000  # number of the most frequent words, from which keys of training needles are made
_BATCH = 256  # documents, or pieces of one, tokenised together
_BOOK, _PIECE = 100_000, 20_000  # characters: a document longer than the first is cut into pieces, some held out
_WORD = re.compile(r"(?<![\w'-])[a-z]{4,10}(?![\w'-])")


@dataclass(frozen=True)
class Preparation:
    """What to tokenise, and how.

    Attributes:
        text: folder of .txt, .jsonl (also .xz), or files of wikiextractor.
        tokenizer: folder of a tokenizer; None trains one on the text.
        vocab_size: tokens of one that is trained.
        limit: training tokens to keep, taken alike from all files; None keeps all.
        held_out: share of the documents that training never sees; of a document of more than 100,000 characters, such
            as a book, share of its pieces.
        shard_tokens: tokens of a shard file, at most.
        leave_out: files with titles of documents that are left out (SQuAD's, or one title a line).
        questions: files of train sets for the cloze source (SQuAD's, or multi-hop ones).
    """

    text: Path
    tokenizer: Path | None = None
    vocab_size: int = 16384
    limit: int | None = None
    held_out: float = 0.005
    shard_tokens: int = 25_000_000
    leave_out: tuple[Path, ...] = ()
    questions: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        require(self.shard_tokens >= 1, "shard_tokens", "at least 1", self.shard_tokens)
        require(self.limit is None or self.limit >= 1, "limit", "at least 1", self.limit)
        share = "between 0 and 1 (a share of the documents)"
        require(0 < self.held_out < 1, "held_out", share, self.held_out)


def fingerprint(plan: Preparation) -> dict[str, Any]:
    """What the tokenised text depends on: digests of all files that are read, and the settings."""
    settings = asdict(plan)
    for name in ("leave_out", "questions"):
        settings[name] = digest(list(getattr(plan, name)))
    settings["text"] = digest(text_files(plan.text))
    if plan.tokenizer is not None:
        settings["tokenizer"] = digest([of_tokenizer.file_of(plan.tokenizer)])
    return settings


def prepare(plan: Preparation, out: Path, say: Say = print) -> bool:
    """Leaves the tokenised text in `out`; False if it was there already.

    The folder appears in one step, complete. Raises `UserError` if `out` is something else or was made from other text
    or with other settings, `DataError` for a folder without text or a damaged file.
    """
    out = Path(out)
    ours = fingerprint(plan)
    if (out / tokens.META).is_file():
        theirs = tokens.read_meta(out).get("source", {})
        if changed := [name for name in ours if theirs.get(name) != ours[name]]:
            raise UserError(f"{out} holds text prepared otherwise ({', '.join(changed)} differ); choose another folder")
        say(f"{out} already holds this text; nothing to do")
        return False
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is not a folder of tokenised text; choose another one")
    outfile.check_folder(out)
    with outfile.writing(out), tempfile.TemporaryDirectory(dir=_made(out.parent), prefix=f".{out.name}.") as scratch:
        folder = Path(scratch) / "text"
        folder.mkdir()
        _write(plan, ours, folder, say)
        if out.exists():
            out.rmdir()
        os.replace(folder, out)
        outfile.sync_folder(out.parent)
    return True


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write(plan: Preparation, source: dict[str, Any], folder: Path, say: Say) -> None:
    files = text_files(plan.text)
    left_out = read_titles(plan.leave_out)
    sample = list(_sample(files, left_out))
    if not sample:
        raise DataError(f"{plan.text}: a folder without text; its files hold no document")
    if plan.tokenizer is None:
        say(f"training a tokenizer on {sum(map(len, sample)):,} characters")
        tokenizer = of_tokenizer.train(sample, plan.vocab_size)
    else:
        tokenizer = of_tokenizer.load(plan.tokenizer)
    raw, end = tokens.unlimited(tokenizer.backend_tokenizer), tokenizer.eos_token_id
    tokenizer.save_pretrained(folder / tokens.TOKENIZER)
    _write_words(sample, folder)
    vocab_size = max(len(tokenizer), end + 1)
    if plan.questions:
        from safetensors.numpy import save_file

        coded = of_questions.tokenise(of_questions.read(plan.questions), lambda texts: _encode(raw, texts))
        coded["tokens"] = coded["tokens"].astype(np.uint32)
        save_file(coded, folder / tokens.QUESTIONS)
    dtype = tokens._DTYPES[tokens.dtype_name(vocab_size)]
    writers = {part: _Shards(folder, part, dtype, plan.shard_tokens) for part in tokens.PARTS}
    counts = Counter()
    for number, path in enumerate(files):
        _write_file(path, plan, left_out, raw, end, writers, counts, (number, len(files)))
        done = sum(writer.total for writer in writers.values())
        say(f"{path.name}: {done:,} tokens so far ({number + 1} of {len(files)} files)")
    for part, writer in writers.items():
        writer.close()
        if not writer.total:
            raise DataError(
                f"{plan.text}: no document falls to '{part}' with held_out {plan.held_out:g}; "
                "more documents are needed, or another share"
            )
    tokens.write_meta(
        folder,
        {
            "vocab_size": vocab_size,
            "dtype": tokens.dtype_name(vocab_size),
            "end": end,
            "bytes_per_token": counts["bytes"] / sum(writer.total for writer in writers.values()),
            "documents": {part: counts[part] for part in (*tokens.PARTS, "left_out")},
            "questions": len(coded["bounds"]) if plan.questions else 0,
            "parts": {part: writer.shards for part, writer in writers.items()},
            "source": json.loads(json.dumps(source)),
        },
    )


def _write_file(
    path: Path,
    plan: Preparation,
    left_out: frozenset[str],
    raw: Any,
    end: int,
    writers: dict[str, _Shards],
    counts: Counter,
    place: tuple[int, int],
) -> None:
    """Tokenises one file, up to its share of the limit."""
    number, of = place
    limit = None if plan.limit is None else plan.limit * (number + 1) // of
    batch: list[tuple[str, bool]] = []

    def flush() -> None:
        for (text, last), ids in zip(batch, _encode(raw, [text for text, _ in batch])):
            part = "held_out" if _draw(text) < plan.held_out else "train"
            if part == "train" and limit is not None:
                ids = ids[: max(0, limit - writers[part].total - 1)]
                if not ids:
                    continue
            writers[part].add([*ids, end] if last or part == "held_out" else ids)
            counts[part] += 1
            counts["bytes"] += len(text.encode())
        batch.clear()

    for document in documents(path):
        if normalised(document.title) in left_out:
            counts["left_out"] += 1
            continue
        *before, last = _pieces(document.text)
        batch += [*((piece, False) for piece in before), (last, True)]
        if len(batch) >= _BATCH:
            flush()
            if limit is not None and writers["train"].total >= limit - 1:
                break
    flush()


def _pieces(text: str) -> list[str]:
    """A document as a whole, or a book in pieces, each cut at the end of a line where there is one."""
    if len(text) <= _BOOK:
        return [text]
    pieces, start = [], 0
    while len(text) - start > _PIECE:
        cut = text.rfind("\n", start, start + _PIECE) + 1
        pieces.append(text[start : (start := cut if cut > start else start + _PIECE)])
    return [*pieces, text[start:]] if start < len(text) else pieces


def _sample(files: Sequence[Path], left_out: frozenset[str]) -> Iterator[str]:
    """Documents of all files, alike, of `_SAMPLE` characters together: from each file every k-th one."""
    share = _SAMPLE / len(files)
    for path in files:
        texts = [document.text for document in documents(path) if normalised(document.title) not in left_out]
        stride = max(1, round(sum(map(len, texts)) / share))
        yield from texts[::stride]


def _write_words(sample: Sequence[str], folder: Path) -> None:
    counts = Counter()
    for text in sample:
        counts.update(_WORD.findall(text))
    taken = {*ADJECTIVES, *NOUNS}
    words = [word for word, _ in counts.most_common() if word not in taken][:_WORDS]
    (folder / tokens.WORDS).write_text(json.dumps(words) + "\n", encoding="utf-8")


def _encode(raw: Any, texts: Sequence[str]) -> list[list[int]]:
    return [coded.ids for coded in raw.encode_batch_fast(list(texts), add_special_tokens=False)]


def _draw(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


class _Shards:
    """Files of at most ``limit`` tokens each, written one after the other."""

    def __init__(self, folder: Path, part: str, dtype: np.dtype, limit: int):
        self._folder, self._part, self._dtype, self._limit = folder, part, dtype, limit
        self._open: list[np.ndarray] = []
        self._held = 0
        self.shards: list[dict[str, Any]] = []

    @property
    def total(self) -> int:
        return self._held + sum(shard["tokens"] for shard in self.shards)

    def add(self, ids: Sequence[int]) -> None:
        """Appends the tokens of a document, which may span two shards."""
        array = np.asarray(ids, self._dtype)
        while self._held + len(array) >= self._limit:
            room = self._limit - self._held
            self._open.append(array[:room])
            self._held += room
            self._flush()
            array = array[room:]
        if len(array):
            self._open.append(array)
            self._held += len(array)

    def close(self) -> None:
        if self._held:
            self._flush()

    def _flush(self) -> None:
        path = self._folder / f"{self._part.replace('_', '-')}-{len(self.shards):05d}.bin"
        with path.open("wb") as file:
            for array in self._open:
                file.write(array.tobytes())
            file.flush()
            os.fsync(file.fileno())
        self.shards.append({"file": path.name, "tokens": self._held, "sha256": sha256(path)})
        self._open, self._held = [], 0

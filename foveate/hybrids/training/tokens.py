"""Tokenised text on the disk, memory-mapped: one stream of documents for training, one held out.

A folder holds `meta.json`, the shards that it names (little-endian uint16 or uint32), `tokenizer/`, `words.json` (the
words for keys of needles) and perhaps `questions.safetensors`. Training reads this folder alone.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foveate.errors import DataError
from foveate.io import reading
from foveate.io.digest import sha256

KIND = "tokenised text of foveate train"
SCHEMA = 1
META, TOKENIZER, WORDS, QUESTIONS = "meta.json", "tokenizer", "words.json", "questions.safetensors"
PARTS = ("train", "held_out")
_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def dtype_name(vocab_size: int) -> str:
    """The narrowest number format for token ids."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def unlimited(raw: Any) -> Any:
    """A `tokenizers` object without the truncation and the padding that its file may set, which would cut documents."""
    raw.no_truncation()
    raw.no_padding()
    return raw


class TokenStream:
    """Shards as one long sequence of token ids."""

    def __init__(self, paths: Sequence[Path], counts: Sequence[int], dtype: np.dtype):
        self._paths, self._dtype = list(paths), dtype
        self._ends = np.cumsum([0, *counts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def window(self, start: int, length: int) -> np.ndarray:
        """Token ids `start` to `start + length`, int64 `[length]`, read in a circle."""
        out = np.empty(length, np.int64)
        done, start = 0, start % len(self)
        while done < length:
            shard = int(np.searchsorted(self._ends, start, side="right")) - 1
            first = start - int(self._ends[shard])
            part = self._maps[shard][first : first + length - done]
            out[done : done + len(part)] = part
            done += len(part)
            start = (start + len(part)) % len(self)
        return out

    @functools.cached_property
    def _maps(self) -> list[np.ndarray]:
        return [np.memmap(path, self._dtype, mode="r") for path in self._paths]

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_maps"}  # a worker maps the files itself


class TokenStore:
    """A folder of tokenised text, opened. It can be handed to worker processes.

    Raises `DataError` if the folder is not one, or a shard is missing or has another size.
    """

    def __init__(self, folder: Path):
        self.folder = folder = Path(folder)
        self.meta = read_meta(folder)
        self.vocab_size: int = self.meta["vocab_size"]
        self.end: int = self.meta["end"]
        self.train, self.held_out = (self._stream(part) for part in PARTS)

    def verify(self) -> None:
        """Raises `DataError`, naming the shard, if the content of one is not what was written."""
        for part in PARTS:
            for shard in self.meta["parts"][part]:
                if sha256(self.folder / shard["file"]) != shard["sha256"]:
                    raise DataError(f"{self.folder / shard['file']}: damaged (its sha256 is not that in {META})")

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The `tokenizers` object, without padding or truncation."""
        from tokenizers import Tokenizer

        return unlimited(Tokenizer.from_file(str(self.folder / TOKENIZER / "tokenizer.json")))

    @functools.cached_property
    def words(self) -> list[str]:
        """Words of the text, the most frequent first. Evaluation uses none of them in its keys."""
        return reading.read_json(self.folder / WORDS)

    @functools.cached_property
    def questions(self) -> dict[str, np.ndarray] | None:
        """See `foveate.hybrids.training.questions`; None if the text was prepared without."""
        from safetensors.numpy import load_file

        path = self.folder / QUESTIONS
        return load_file(path) if path.is_file() else None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("tokenizer", "words", "questions")}

    def _stream(self, part: str) -> TokenStream:
        dtype = _DTYPES[self.meta["dtype"]]
        shards = self.meta["parts"][part]
        for shard in shards:
            path = self.folder / shard["file"]
            if not path.is_file():
                raise DataError(f"{path}: no such file; {META} names it")
            if path.stat().st_size != shard["tokens"] * dtype.itemsize:
                raise DataError(
                    f"{path}: {path.stat().st_size:,} bytes, {META} says {shard['tokens'] * dtype.itemsize:,}; "
                    "prepare the text again"
                )
        paths = [self.folder / shard["file"] for shard in shards]
        return TokenStream(paths, [shard["tokens"] for shard in shards], dtype)


def read_meta(folder: Path) -> dict[str, Any]:
    """The `meta.json` of a folder of tokenised text. Raises `DataError` if it is not one."""
    path = Path(folder) / META
    if not path.is_file():
        raise DataError(f"{folder}: no tokenised text there ({META} is missing); foveate train prepare writes it")
    meta = reading.read_json(path)
    if not isinstance(meta, dict) or meta.get("kind") != KIND:
        raise DataError(f"{path}: not the description of tokenised text")
    if meta.get("schema") != SCHEMA:
        raise DataError(f"{path}: schema {meta.get('schema')}, this version reads {SCHEMA}; prepare the text again")
    return meta


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Writes the `meta.json` of a folder."""
    text = json.dumps({"kind": KIND, "schema": SCHEMA, **meta}, indent=1)
    (Path(folder) / META).write_text(text + "\n", encoding="utf-8")

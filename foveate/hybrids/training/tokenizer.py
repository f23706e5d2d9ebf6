"""A tokenizer trained on the text: byte-level BPE whose digits stand alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from foveate.errors import UserError, first_line

END = "<|end|>"
"""Ends a document."""
PAD = "<|pad|>"
_PATTERN = (  # digits one by one, as in Qwen2; words take a leading space along
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = 256
_SPECIAL = [PAD, END]


def train(texts: Iterable[str], vocab_size: int) -> Any:
    """A Transformers tokenizer with `vocab_size` tokens at most; fewer where the text has no more to merge.

    Raises `UserError` for a vocabulary that has no room for the 256 bytes and the two special tokens.
    """
    if vocab_size < (least := _BYTES + len(_SPECIAL)):
        raise UserError(f"vocab_size must be at least {least} (bytes and special tokens), got {vocab_size}")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )


def file_of(folder: Path) -> Path:
    """The tokenizer.json of a folder. Raises `UserError` if there is none."""
    if not (path := Path(folder) / "tokenizer.json").is_file():
        raise UserError(f"{folder}: no tokenizer there (tokenizer.json is missing)")
    return path


def load(folder: Path) -> Any:
    """The tokenizer of a folder. Raises `UserError` if there is none, or no token ends its documents."""
    file_of(folder)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: not a tokenizer ({first_line(error)})") from None
    if tokenizer.eos_token_id is None:
        raise UserError(f"{folder}: the tokenizer has no eos_token, which ends a document")
    return tokenizer

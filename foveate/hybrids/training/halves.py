"""The ordinary tokens of a vocabulary as keys and values of associative recall."""

from __future__ import annotations

from typing import Any

import numpy as np


def halves(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Two disjoint halves of a vocabulary's ordinary tokens: keys and values."""
    plain = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder))
    keys, values = halved(np.array(plain, np.int64))
    return keys.tolist(), values.tolist()


def halved(plain: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids `[N]`, sorted, as two disjoint halves by a fixed draw: keys and values, in training as in evaluation."""
    mixed = np.random.default_rng(0).permutation(plain)
    return mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]

"""The rows of a vLLM batch: which decode, which are prompts, and what a CPU does with their tokens. Imports no vLLM.

``common`` is vLLM's ``CommonAttentionMetadata``. Its rows are requests, each with some consecutive new tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foveate import ops


def layer_index(name: str) -> int:
    """The index of a layer named such as ``model.layers.3.self_attn.attn``.

    Raises:
        ValueError: for a name without a number, or with several.
    """
    numbers = re.findall(r"(?<![^.])\d+(?![^.])", name)
    if len(numbers) != 1:
        raise ValueError(f"foveate: which layer of the model is {name!r}? Its name must hold one number")
    return int(numbers[0])


@dataclass
class Decoding:
    """The rows of a batch that decode one token, which vLLM puts first."""

    rows: int
    """Number of decoding rows. If no row of the batch has more than one token, this is the number of all rows, which
    includes padding (rows without a token) and prompts. vLLM replays the graph of decoding rows for such a batch,
    whatever its tokens are."""
    real: int
    """Number of decoding rows that are not padding."""
    prompts: list[bool] | None
    """Which of them have a prompt's token, which must read all keys; None: no row."""
    bound: int
    """No row is longer."""
    tokens: list[int]
    """The lengths, or upper bounds of the lengths, of the rows that are neither padding nor prompts."""
    dense: list[bool] | None = None
    """Which of them decode a token of a request that reads all keys, see :mod:`.requests`; None: no row."""


def decoding_rows(common: Any, dense: Sequence[bool] | None = None) -> Decoding:
    """The decoding rows of a batch. A prompt's chunk of one token counts as a prompt if the batch has other prompts.

    Args:
        dense: whether each row belongs to a request that reads all keys. Rows of padding may be missing. None: no row
            does.

    Raises:
        ValueError: if vLLM does not report which rows are prompts.
    """
    number, (tokens, lengths, prompts) = common.num_reqs, _known_rows(common)
    if (tokens > 1).any():
        number = int(((tokens != 1) | prompts).argmax())
    there = tokens[:number] > 0
    lengths, prompts = lengths[:number], prompts[:number] & there
    whole = there & ~prompts & _of_rows(np.array(dense or [], bool), number)
    marked, asked = (rows.tolist() if rows.any() else None for rows in (prompts, whole))
    bound, decoded = int(lengths[there].max(initial=0)), lengths[there & ~prompts].tolist()
    return Decoding(number, int(there.sum()), marked, bound, decoded, asked)


def verifying_rows(common: Any) -> list[int]:
    """The lengths, or bounds of them, of the rows whose tokens are no prompt's: the last one and drafts after it."""
    tokens, lengths, prompts = _known_rows(common)
    return lengths[(tokens > 0) & ~prompts].tolist()


def _known_rows(common: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each row: its new tokens, its length or a bound of it, and whether its tokens are a prompt's."""
    if common.is_prefilling is None:
        raise ValueError("foveate: this model runner of vLLM does not tell decoded tokens from prompts")
    number = common.num_reqs
    tokens = np.diff(common.query_start_loc_cpu.numpy()[: number + 1])
    return tokens, *(_of_rows(x.numpy(), number) for x in (common.seq_lens_cpu_upper_bound, common.is_prefilling))


def _of_rows(numbers: np.ndarray, rows: int) -> np.ndarray:
    """The numbers of the first ``rows`` rows; 0 of padding, which model runner V2 leaves out."""
    given = numbers[:rows]
    return np.pad(given, (0, rows - len(given)))


def rows_from(common: Any, first: int) -> Any:
    """The metadata of the rows from ``first`` on, where each row before has one token."""
    bound = common.seq_lens_cpu_upper_bound[first:]
    return common.replace(
        query_start_loc=common.query_start_loc[first:] - first,
        query_start_loc_cpu=common.query_start_loc_cpu[first:] - first,
        seq_lens=common.seq_lens[first:],
        seq_lens_cpu_upper_bound=bound,
        num_reqs=common.num_reqs - first,
        num_actual_tokens=common.num_actual_tokens - first,
        max_seq_len=int(bound.max()),
        block_table_tensor=common.block_table_tensor[first:],
        slot_mapping=common.slot_mapping[first:],
        is_prefilling=common.is_prefilling[first:],
    )


# On a CPU


@dataclass
class Prompt:
    """A row whose tokens are not decoded."""

    first: int
    """Its first token in the batch."""
    end: int
    length: int
    """Number of keys of the row, including the keys of its new tokens."""
    blocks: Tensor
    """int32 ``[1, M]``."""


def prompts_from(common: Any, first: int) -> list[Prompt]:
    """The rows from ``first`` on that have tokens."""
    ends, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens.tolist()
    rows = (b for b in range(first, common.num_reqs) if ends[b + 1] > ends[b])
    return [Prompt(ends[b], ends[b + 1], lengths[b], common.block_table_tensor[b : b + 1]) for b in rows]


def attend_prompt(row: Prompt, query: Tensor, k: Tensor, v: Tensor, out: Tensor, logits: ops.Logits) -> None:
    """Dense attention of a row's tokens.

    Args:
        query: ``[T, Hq, D]`` of the batch; ``out`` alike.
        k, v: blocks of keys and values, ``[N, Hkv, n, D]``.
    """
    q = query[row.first : row.end].transpose(0, 1)[None]
    k, v = ops.BlockTable(row.blocks, row.length).gather(q, k, v)
    found = ops.attend_causal(q, ops.KV(k, v), logits=logits, offset=row.length - q.shape[2]).out
    out[row.first : row.end] = found[0].transpose(0, 1)


def write_tokens(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    """Write keys and values ``[T, Hkv, D]`` to their slots; a token of padding has slot -1, or none.

    Args:
        kv_cache: ``[N, Hkv, n, 2 D]``.
        slots: int ``[at most T]``: block times n plus the place in it.
    """
    size, real = kv_cache.shape[2], slots >= 0
    taken = slots[real].long()
    pairs = torch.cat([x[: len(slots)][real] for x in (key, value)], -1)
    if kv_cache.dtype.itemsize == 1:  # as vLLM writes them: what is too large becomes the largest there is
        most = torch.finfo(kv_cache.dtype).max
        pairs = pairs.clamp(-most, most)
    kv_cache[taken // size, :, taken % size] = pairs.to(kv_cache.dtype)

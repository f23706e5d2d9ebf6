"""Problems of attention for tests of operations: odd sizes, awkward layouts, naive fp64 attention, a gauge of
temporaries. Nothing here imports a library of models or of property tests, which would cost every process under the
interpreter seconds."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foveate.ops import BlockTable


class Shape(NamedTuple):
    """Sizes of one attention problem."""

    batch: int
    kv_heads: int
    group: int
    queries: int
    offset: int
    dim: int
    value_dim: int

    @property
    def keys(self) -> int:
        return self.offset + self.queries


LAYOUTS = ["own", "slots", "tokens_first", "padded_rows"]


def in_buffer(x: Tensor, layout: str) -> Tensor:
    """The same numbers ``[B, H, L, D]`` as a view of a larger buffer whose unused part is NaN."""
    batch, heads, length, dim = x.shape
    nan = float("nan")
    if layout == "own":
        return x.clone()
    if layout == "slots":
        view = x.new_full((batch, heads, length + 9, dim), nan)[:, :, 4 : 4 + length]
    elif layout == "tokens_first":
        view = x.new_full((batch, length + 3, heads, dim), nan)[:, :length].transpose(1, 2)
    else:
        view = x.new_full((batch, heads, length, dim + 3), nan)[..., :dim]
    return view.copy_(x)


BLOCK_LAYOUTS = ["heads_first", "slots_first", "side_by_side", "flat"]
"""As FlashInfer, FlashAttention, vLLM and SGLang keep paged keys and values."""


def in_blocks(k: Tensor, v: Tensor, block_size: int, layout: str = "slots_first", spare: int = 3, seed: int = 0):
    """The same numbers in physical blocks in any order: ``(k, v, BlockTable)``.

    Slots of no key are NaN, and the table names too many blocks, some of which do not exist.
    """
    batch, heads, length, dim = k.shape
    needed, width = -(-length // block_size), dim + v.shape[3]
    number = batch * needed + spare
    size = {
        "heads_first": (2, number, heads, block_size, max(dim, v.shape[3])),
        "slots_first": (2, number, block_size, heads, max(dim, v.shape[3])),
        "side_by_side": (number, heads, block_size, width),
        "flat": (2, number * block_size, heads, max(dim, v.shape[3])),
    }[layout]
    memory = k.new_full(size, float("nan"))
    if layout == "side_by_side":
        both = memory[..., :dim], memory[..., dim:]
    elif layout == "flat":
        both = memory.unflatten(1, (number, block_size)).transpose(2, 3)
    else:
        both = memory if layout == "heads_first" else memory.transpose(2, 3)
    both = both[0][..., :dim], both[1][..., : v.shape[3]]
    order = torch.randperm(number, generator=torch.Generator().manual_seed(seed))[: batch * needed].to(k.device)
    for x, blocks in zip((k, v), both):
        whole = torch.nn.functional.pad(x, (0, 0, 0, needed * block_size - length), value=float("nan"))
        blocks[order] = whole.unflatten(2, (needed, block_size)).transpose(1, 2).flatten(0, 1)
    table = torch.nn.functional.pad(order.view(batch, needed), (0, 2), value=-1)
    table[:, -1] = 1 << 30
    return *both, BlockTable(table.to(torch.int32), length)


def problem(shape: Shape, seed: int = 0, dtype: torch.dtype = torch.float32, layout: str = "own", extra: int = 0):
    """Random ``q, k, v``; k and v have the ``layout``, and ``extra`` keys of NaN after those that queries may see."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    q = draw(shape.batch, shape.kv_heads * shape.group, shape.queries, shape.dim)
    k = draw(shape.batch, shape.kv_heads, shape.keys + extra, shape.dim)
    v = draw(shape.batch, shape.kv_heads, shape.keys + extra, shape.value_dim)
    k[:, :, shape.keys :] = float("nan")
    v[:, :, shape.keys :] = float("nan")
    return q, in_buffer(k, layout), in_buffer(v, layout)


class Naive(NamedTuple):
    out: Tensor
    lse: Tensor
    mass: Tensor
    """Per KV head, summed over its queries and its group."""
    weights: Tensor
    """``[B, Hq, Lq, Lk]``."""


def naive(q: Tensor, k: Tensor, v: Tensor, scaling: float, mask: Tensor | None = None) -> Naive:
    """Textbook attention in fp64 with every matrix written out; a query that sees nothing gets zeros."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    logits = q @ k.transpose(-1, -2) * scaling
    if mask is not None:
        mask = mask.expand(q.shape[0], -1, -1, -1)
        mask = mask.repeat_interleave(group, 1) if mask.shape[1] > 1 else mask
        logits = logits.masked_fill(~mask, float("-inf"))
    weights = logits.softmax(-1).nan_to_num(0.0)
    mass = weights.sum(2).unflatten(1, (-1, group)).sum(2)
    return Naive(weights @ v, logits.logsumexp(-1), mass, weights)


def causal_mask(queries: int, offset: int) -> Tensor:
    """bool ``[1, 1, queries, offset + queries]``."""
    keys = torch.arange(offset + queries)
    return (keys <= torch.arange(offset, offset + queries)[:, None])[None, None]


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Equal up to what rounding in the inputs' dtype allows."""
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor that any operation makes; views of existing memory do not count."""

    def __init__(self):
        super().__init__()
        self.bytes = 0
        self.what = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in torch.utils._pytree.tree_leaves((args, kwargs)) if _is(x)}
        for x in torch.utils._pytree.tree_leaves(result):
            if _is(x) and x.untyped_storage().data_ptr() not in known and x.untyped_storage().nbytes() > self.bytes:
                self.bytes, self.what = x.untyped_storage().nbytes(), f"{func} {tuple(x.shape)} {x.dtype}"
        return result


class Waits(TorchDispatchMode):
    """Notes operations for which the host waits for the device, or sends it numbers it has made."""

    _WAITING = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal", "lift_fresh")

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __enter__(self):
        self._tolist = Tensor.tolist
        Tensor.tolist = lambda x: self._read(x)  # on the CPU it is no operation
        return super().__enter__()

    def __exit__(self, *error):
        Tensor.tolist = self._tolist
        return super().__exit__(*error)

    def _read(self, x):
        self.names.append("tolist")
        return self._tolist(x)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self._WAITING:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _is(x: Any) -> bool:
    return isinstance(x, Tensor)


def of_rows(scores: Tensor, lengths: Tensor | None) -> Tensor:
    """Scores ``[B, H, ..., N]``, -inf after a row's keys, where they may be anything; ``lengths`` is ``[B]`` or ``[B,
    H']``, of which a layer's scores end with the longest."""
    if lengths is None:
        return scores
    lengths = lengths.view(len(scores), -1)
    lengths = lengths if lengths.shape[1] == scores.shape[1] else lengths.amax(1, keepdim=True)
    there = torch.arange(scores.shape[-1], device=scores.device) < lengths.unflatten(1, (-1, *[1] * (scores.dim() - 2)))
    return scores.masked_fill(~there, -torch.inf)


def listed(chosen):
    """Keys of tiles ``[B, Hkv, T, K]``, -1 for none, as arguments of :func:`foveate.ops.attend.attend_tiles`."""
    used_first = (chosen < 0).int().sort(dim=-1, stable=True).indices
    starts = chosen.shape[3] * torch.arange(chosen.shape[2] + 1, device=chosen.device)
    counts = (chosen >= 0).sum(-1, dtype=torch.int32)
    return {"indices": chosen.gather(-1, used_first).flatten(2), "starts": starts, "counts": counts}

"""Methods that choose whole pages for each decoded token: what ``quest``, ``pages`` and ``locks`` share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from torch import Tensor

from foveate import ops
from foveate.methods._common import attend_all, count_scored
from foveate.methods.base import SPARSE_FROM_TOKENS, Method, Replay, setting
from foveate.methods.budgets import Number, budget, clamp
from foveate.state import SlotCache

Own = TypeVar("Own", bound="SelectPages")


@dataclass(frozen=True)
class SelectPages(Method):
    """A method that reads, for each decoded token, the pages whose summaries score best; its prefill is dense.

    A subclass has a setting ``dense_layers``: the first layers, which read all keys and keep no summaries.
    """

    stateful: ClassVar[bool] = False
    sparse_from_tokens: ClassVar[int] = 2 * SPARSE_FROM_TOKENS  # choosing takes more small launches
    replay: ClassVar[Replay] = Replay()
    dense: ClassVar[bool] = False
    """Whether this layer reads all keys; set by :meth:`for_layer`."""
    if TYPE_CHECKING:  # a setting of subclasses, which stands last among theirs
        dense_layers: int

    top_k: int | float = setting(0.1, "keys read: a number, or a share of the tokens so far; in whole pages")
    min_k: int = setting(128, "least number of keys when top_k is a share")
    page_size: int = setting(16, "tokens of a page")

    def __post_init__(self):
        self._check_budget("top_k")
        for name in ("min_k", "dense_layers"):
            self._check_count(name)
        self._check_count("page_size", 1)

    # Defined by subclasses

    def summarise_newest(self, cache: SlotCache) -> None:
        """Bring the summaries of the pages that hold the rows' newest keys up to date."""
        raise NotImplementedError

    def choose(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        """The pages that one token a row reads, counted: int32 ``[B, H, P]`` ascending, then -1.

        H is the number of KV heads or of query heads.
        """
        raise NotImplementedError

    def least(self, length: Number) -> Number:
        """Pages that a row reads at least, if it has them."""
        raise NotImplementedError

    def most_of_least(self) -> int:
        """The largest :meth:`least` of any row."""
        raise NotImplementedError

    # Layers, prompt and decode

    def for_layer(self: Own, layer: int, num_layers: int, among: Sequence[int] | None = None) -> Own:
        own = dataclasses.replace(self)
        own.__dict__["dense"] = layer < self.dense_layers
        return own

    @property
    def role(self) -> str:
        return "dense" if self.dense else self.name

    @property
    def needs_prompt_end(self) -> bool:  # type: ignore[override]
        """A decoded token reads pages, those of a prompt read everything."""
        return not self.dense

    def decode(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        if self.dense:
            return attend_all(cache, q, scaling).out
        self.summarise_newest(cache)
        pages = self.choose(cache, q, scaling)
        count_scored(self, cache)
        how = {"lengths": cache.row_tensor("lengths"), "sink_logits": cache.sink_logits, "softcap": cache.softcap}
        how |= {"scaling": scaling, "block_table": cache.block_table}
        return ops.attend_pages(q, *cache.memory, pages, self.page_size, **how).out

    def decode_dense(self, cache: SlotCache, q: Tensor, scaling: float) -> Tensor:
        if not self.dense:
            self.summarise_newest(cache)
        return attend_all(cache, q, scaling).out

    # Budgets

    def pages(self, length: Number) -> Number:
        """Pages of a row, the one that is being filled included."""
        return -(-length // self.page_size)

    def count(self, length: Number) -> Number:
        """Pages that a row of this length may read."""
        allowed, pages = budget(self.top_k, length, self.min_k), self.pages(length)
        whole = clamp(clamp(allowed, 0, length) // self.page_size, self.least(length), pages)
        return whole + (length <= allowed) * (pages - whole)

    def _widest(self, length: int) -> int:
        """No row that is no longer may read more pages."""
        allowed = clamp(budget(self.top_k, length, self.min_k), 0, length)
        return clamp(self.pages(allowed), self.most_of_least(), self.pages(length))

    def _best(self, cache: SlotCache, scores: Tensor) -> Tensor:
        """The pages of the best scores ``[B, H, P]``, as many as each row may read."""
        return ops.topk_rows(scores, cache.each_row(self.count), cache.most(self._widest), dtype=torch.int32)

    def _keys_of(self, cache: SlotCache, pages: Tensor) -> Tensor:
        """How many keys of each KV head are read by heads that choose the pages ``[B, H, P]``, int64 ``[B, Hkv]``.

        A key counts once for all the heads of a group that read it.
        """
        return ops.keys_of_pages(pages, cache.geometry.num_kv_heads, self.page_size, cache.row_tensor("lengths"))

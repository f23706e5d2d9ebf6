"""Stores that tests share: the one that docs/guide/stores.md prints, and one that has no more than it must."""

import copy
import re
from pathlib import Path

import torch

from foveate.ops import KV
from foveate.state import Store
from foveate.state.transfers import Transfers

PAGE = (Path(__file__).parents[1] / "docs" / "guide" / "stores.md").read_text(encoding="utf-8")


def printed():
    """The class that the guide prints."""
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {"__name__": __name__}
    exec(example, names)
    return names["MappedFile"]


MappedFile = printed()


class Room:
    """What stores in host memory share: room for all hot pages."""

    def __init__(self):
        self.transfers = Transfers(torch.device("cpu"))

    def hot_pages(self, store, capacity):
        return -(-capacity // store.page_size)


class Least(Store):
    """Keys and values in one tensor side by side. Steps view them, so that every method can be served."""

    def __init__(self, shape):
        super().__init__(shape)
        self.dims = [shape.geometry.head_dim, shape.geometry.value_dim]
        self.both = torch.zeros(shape.batch_size, shape.geometry.num_kv_heads, 0, sum(self.dims), dtype=shape.dtype)

    def reserve(self, slots):
        new = self.both.new_zeros(*self.both.shape[:2], max(slots, self.both.shape[2]), sum(self.dims))
        new[:, :, : self.both.shape[2]] = self.both
        self.both = new

    def write(self, first, k, v):
        self.both[:, :, first : first + k.shape[2]] = torch.cat([k, v], 3)

    def put(self, slots, k, v):
        self.both.scatter_(2, slots[..., None, None].expand(-1, -1, 1, sum(self.dims)), torch.cat([k, v], 3))

    def view(self, used, lengths=None):
        return KV(*self.both[:, :, :used].split(self.dims, 3), lengths=lengths)

    def fetch_slots(self, slots):
        index = slots.clamp_min(0)[..., None].expand(-1, -1, -1, sum(self.dims))
        return self.both.gather(2, index).split(self.dims, 3)

    def of_row(self, b, used):
        one = copy.copy(self)
        one.shape, one.both = self.shape._replace(batch_size=1), self.both[b : b + 1]
        return one

    def take_rows(self, index):
        self.both = self.both[index]

"""Decode steps that an engine captures for a number of rows, and batches of as many rows that replay them."""

from __future__ import annotations

import torch

from foveate import methods
from foveate.ops import KV, BlockTable, Logits, attend
from foveate.runtime import EngineSteps

HEADS, KV_HEADS, DIM, BLOCK, LAYERS, ROWS, LONGEST = 4, 2, 16, 16, 6, 5, 320
LOGITS = Logits(DIM**-0.5)
BELOW = 250
"""Tokens of all rows, each taken as long as one, below which that one is read whole."""
BY_PAGES = "kascade_pages:top_k=7,pool=kv_head,pooling=post_softmax,weighted=false"
SPECS = [
    "dense",
    "kascade_paper:top_k=7,anchors=[0,3],decode_only=true",
    "kascade:top_k=0.3,min_k=4,anchors=[1,4]",
    'kascade_paper:top_k=9,anchors=[1,3],heads={"2": [1, 0]},decode_only=true',
    "oracle_topk:top_k=5,decode_only=true",
    "omnikv:top_k=6,filters=[0,3],wait=1",
    "lessismore:top_k=9,sinks=2,selections=[1,3]",
    "pages:top_k=24,page_size=2,rank=1,weighted=false",
    "locks:top_k=18,page_size=4,rank=2",
    f"{BY_PAGES},anchors=[1,3],page_size=2",
    f"{BY_PAGES},anchors=[0,3],first_layer=pages,page_size=4",
]
BATCHES = {
    "long": ([90, 201, 64, 120, 77], []),
    "longer than ever": ([91, 320, 65, 121, 78], []),
    "shorter, and short rows among long ones": ([49, 300, 50, 51, 2], []),
    "all short": ([5, 2, 49, 17, 33], []),
    "padding": ([130, 60, 200, 0, 0], []),
    "one row": ([300, 0, 0, 0, 0], []),
    "chunks of one token of prompts": ([130, 310, 200, 55, 0], [1, 3]),
    "nothing else": ([130, 310, 0, 0, 0], [0, 1]),
    "long again": ([92, 202, 66, 122, 79], []),
}
"""Lengths of rows, 0 for padding, and rows whose token is a prompt's."""


def of_layers(spec):
    return {n: methods.parse(spec).for_layer(n, LAYERS) for n in range(LAYERS)}


class Served:
    """Buffers at fixed addresses, as an engine has them: every row has keys for as many tokens as it may have."""

    def __init__(self, device="cpu", dtype=torch.float32):
        self.device, self.generator = torch.device(device), torch.Generator().manual_seed(0)
        width = LONGEST // BLOCK
        blocks = torch.randperm(ROWS * width, generator=self.generator).int().view(ROWS, width) + 1
        self.blocks = blocks.to(device)
        self.memory = self.drawn(LAYERS, ROWS * width + 1, KV_HEADS, BLOCK, 2 * DIM).to(dtype)
        self.q = self.drawn(LAYERS, ROWS, HEADS, 1, DIM).to(dtype)
        self.table = torch.zeros(ROWS, width, dtype=torch.int32, device=device)
        self.lengths = torch.ones(ROWS, dtype=torch.int32, device=device)
        self.slots = torch.full((ROWS,), -1, device=device)

    def drawn(self, *shape):
        return torch.randn(shape, generator=self.generator).to(self.device)

    def kv(self, layer):
        return self.memory[layer, ..., :DIM], self.memory[layer, ..., DIM:]

    def steps(self, spec, dense_below=BELOW):
        """Steps to which tokens have been written: those of other batches, which fill the same pages."""
        steps = EngineSteps(of_layers(spec), self.device, dense_below)
        for n in range(LAYERS):
            steps.written(n, HEADS, *self.kv(n), torch.arange(self.memory.shape[1] * BLOCK, device=self.device))
        return steps

    def fill(self, lengths):
        """The next batch: new queries, rows in other places, a new table, and new tokens where these fill pages."""
        self.q.copy_(self.drawn(*self.q.shape))
        self.lengths.copy_(torch.tensor(lengths))
        self.blocks = self.blocks.roll(1, 0)
        real = (self.lengths > 0)[:, None]
        self.table.copy_(self.blocks.where(real, 0))
        last = (self.lengths.long() - 1).clamp_min(0)
        block = self.blocks.gather(1, last[:, None] // BLOCK)[:, 0].long()
        self.slots.copy_((block * BLOCK + last % BLOCK).where(real[:, 0], -1))
        full = last % 4 == 3  # of pages of 2 tokens, and of 4
        new = self.drawn(LAYERS, ROWS, KV_HEADS, 2 * DIM).to(self.memory)
        self.memory[:, block[full], :, last[full] % BLOCK] = new[:, full].transpose(0, 1)

    def write(self, steps):
        """Summaries of the pages that the newest tokens fill."""
        for n in range(LAYERS):
            steps.written(n, HEADS, *self.kv(n), self.slots)

    def run(self, steps):
        """The outputs of all layers, ``[layers, B, Hq, D]``."""
        outs = []
        for n in range(LAYERS):
            outs.append(steps.attend(n, self.q[n], *self.kv(n), LOGITS)[:, :, 0])
        return torch.stack(outs)

    def capture(self, steps, recorder, run=None):
        """A recording of a step, after a first run."""
        run = run or self.run
        for first in (run, lambda steps: None):
            steps.begin_capture(self.lengths, self.table, LONGEST)
            first(steps)
        return recorder(lambda: run(steps))

    def begin(self, steps, lengths, prompts):
        real = sum(length > 0 for length in lengths)
        tokens = [length for row, length in enumerate(lengths) if length and row not in prompts]
        flags = [row in prompts for row in range(ROWS)] if prompts else None
        steps.begin(self.lengths, self.table, max(lengths), tokens, real, flags)

    def expected(self, spec, lengths, prompts):
        """Each row alone: read by the method, or dense where it is short or a prompt's."""
        outs, real = torch.zeros(LAYERS, ROWS, HEADS, DIM, device=self.device), sum(length > 0 for length in lengths)
        for row, length in enumerate(lengths):
            some = slice(row, row + 1)
            if not length:
                continue
            steps = self.steps(spec, dense_below=0)
            steps.begin(self.lengths[some], self.table[some], length, [length])
            for n in range(LAYERS):
                if length * real < BELOW or row in prompts:
                    kv = KV(*self.kv(n), BlockTable(self.table[some], length))
                    out = attend(self.q[n, some], kv, logits=LOGITS).out
                else:
                    out = steps.attend(n, self.q[n, some], *self.kv(n), LOGITS)
                outs[n, row] = out[0, :, 0]
        return outs

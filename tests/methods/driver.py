"""One layer of a method, fed token by token without a model."""

import torch

from foveate.ops import Logits
from foveate.runtime import Layer, Phase, handover
from foveate.state import Counters

HEADS, KV_HEADS, DIM, SCALING = 6, 2, 16, 0.3
GROUP = HEADS // KV_HEADS
PROMPT, TOTAL = 37, 56


class Driver:
    """One layer fed with random tokens, keys loud in one channel and, now and then, all over."""

    def __init__(self, method, softcap=None, batch=1):
        generator = torch.Generator().manual_seed(0)
        shapes = ((batch, heads, TOTAL, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        self.q, self.k, self.v = (torch.randn(shape, generator=generator) for shape in shapes)
        self.k[:, :, ::7] *= 2.0
        self.k[..., 3] += 9.0
        self.q[..., 5] *= 5.0
        self.softcap = softcap
        self.layer = Layer(method.for_layer(1, 2), Counters(), Phase(prompt_end=PROMPT))

    def feed(self, first, last):
        handover.begin("driver", self.layer.phase)
        new = [x[:, :, first:last] for x in (self.q, self.k, self.v)]
        handover.post(self.layer, new[1])
        return self.layer.attend(*new, None, Logits(SCALING, softcap=self.softcap))

    def capped(self, logits):
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

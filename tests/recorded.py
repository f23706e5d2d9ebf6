"""Decode steps of one layer that are recorded and replayed as those of a model."""

from __future__ import annotations

import torch
from transformers.utils import ModelOutput

from foveate.lab.recorded import record
from foveate.runtime import ReplayedSteps, Use


class Replayed:
    """A driver of the matrix, one attention layer, whose decode steps are recorded and replayed as those of a model."""

    def __init__(self, driver, recorder=record):
        self.driver, self.layers, self.use = driver, [driver.layer], Use()
        self.steps = ReplayedSteps(recorder, self.use)

    def run(self, q, k, v):
        return ModelOutput(out=self.driver.feed(self.kind(q, k, v)))

    def feed_steps(self, tokens):
        """The outputs for tokens that are fed one by one."""
        outs, self.kind = [], type(tokens)
        for i in range(len(tokens)):
            outs.append(self.steps(self.layers, self.run, vars(tokens[i : i + 1]), {}).out.clone())
        return torch.cat(outs, 2)

"""What answers show of anchors: how far predictions along them move, of pairs of layers or of all layers together.

Answers are compared batch by batch; what a batch shows is kept in a file of the folder of partial results.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate.errors import UserError
from foveate.lab.evaluation import generation
from foveate.lab.evaluation.calibration import divergence
from foveate.lab.evaluation.calibration.anchors import AnchorChoice, grown, improved
from foveate.lab.evaluation.calibration.partial_results import drop_others, made_how, partial_folder, read, write
from foveate.lab.evaluation.calibration.plan import Plan
from foveate.lab.evaluation.tasks.base import Item
from foveate.methods.kascade import Kascade

_PAIRS, _TRIED = "answers-{:04d}.safetensors", "tried-{:02d}-{:04d}.safetensors"
_ALL_PAIRS, _ALL_TRIED = "answers-*.safetensors", "tried-*.safetensors"
_UNMOVED = "no prediction moves, whichever layer reads another's choice: are all answers one token?"


class Tried(NamedTuple):
    """Anchors, as indices into the layers, with what is lost with each: nats a token."""

    alone: list[tuple[list[int], float]]  # added one by one
    moved: list[tuple[list[int], float]]  # what the last of these came to when they were moved; the last are the best
    seconds: float


class Answers:
    """The answers that a plan compares predictions along: none of a plan by similarity.

    Args:
        items: the prompts.
        about: what the answers depend on, as it is on record. Files of pairs made under something else are removed.
    """

    def __init__(self, plan: Plan, items: Sequence[Item], about: dict[str, Any] | None):
        self._plan, self._folder, self._how = plan, partial_folder(plan.out), json.dumps(about)
        self._batches = generation.batches(items, plan.batch_size) if plan.diverges else []
        self.paths: list[Path] = []  # a file of each batch, if pairs of layers are compared; not all need be there
        if plan.by == "divergence":
            self.paths = [self._folder / _PAIRS.format(number) for number in range(len(self._batches))]
            drop_others(self._folder.glob(_ALL_PAIRS), self._how)

    def tried(self) -> list[Path]:
        """Files of anchors that were tried together under these settings."""
        begin = json.dumps([self._how])[:-1]
        files = self._folder.glob(_ALL_TRIED) if self._plan.by == "together" else ()
        return [path for path in files if (made_how(path) or "").startswith(begin)]

    def steps(self, layers: Sequence[int], number: int) -> int:
        """Steps of :meth:`compare` or :meth:`search`, at most."""
        if self._plan.by == "divergence":
            return len(self._batches) * len(divergence.pairs(layers))
        added = 1 + sum(len(layers) - count for count in range(1, number))
        return len(self._batches) * (added + self._plan.rounds * (1 + (number - 1) * (len(layers) - number)))

    def compare(
        self, model: Any, tokenizer: Any, layers: Sequence[int], maps: Tensor, progress: Callable[[int], None]
    ) -> tuple[Tensor, Tensor]:
        """What is lost when one layer reads another's choice; `maps` as in :func:`divergence.measure`.

        Returns the divergence, fp32 ``[L, L]``, mean over the prompts, and the seconds of each batch.
        """
        pairs = len(divergence.pairs(layers))
        for index, (path, batch) in enumerate(zip(self.paths, self._batches)):
            begun = itertools.count(index * pairs)
            if not path.exists():
                start = time.perf_counter()
                how = (self._plan.method, layers, maps, lambda begun=begun: progress(next(begun)))
                lost = divergence.measure(model, tokenizer, batch, *how)
                write(path, {"divergence": lost * len(batch)}, start, self._how)
        summed, seconds = (
            torch.stack(one) for one in zip(*(read(path, "divergence", "seconds") for path in self.paths))
        )
        if not bool((summed.sum(0) > 0).any()):
            raise UserError(_UNMOVED)
        return summed.sum(0) / sum(map(len, self._batches)), seconds

    def search(
        self,
        model: Any,
        tokenizer: Any,
        layers: Sequence[int],
        choice: AnchorChoice,
        number: int,
        progress: Callable[[int], None],
    ) -> Tried:
        """Anchors added one by one, and moved, by what is lost when all layers read as they would.

        Args:
            choice: the heads that layers would read.
            number: how many anchors, at most.
        """
        begun = itertools.count()
        held: dict[int, divergence.Answered] = {}  # of one batch, so that memory does not grow with their number

        def compared(index: int, methods: list[Kascade]) -> Tensor:
            if index not in held:
                held.clear()
                held[index] = divergence.answer(model, tokenizer, self._batches[index])
            return divergence.together(model, held[index], methods, lambda: progress(next(begun)))

        def losses(turn: int, tried: list[list[int]]) -> Tensor:
            method = self._plan.in_use
            methods = [
                dataclasses.replace(
                    method,
                    anchors=[layers[one] for one in anchors],
                    heads=None if method.pools_layer else named(choice.at(anchors), layers),
                )
                for anchors in tried
            ]
            summed = torch.zeros(len(tried))
            for index, batch in enumerate(self._batches):
                path, how = self._folder / _TRIED.format(turn, index), json.dumps([self._how, tried])
                drop_others(filter(Path.exists, [path]), how)
                if path.exists():
                    progress([next(begun) for _ in tried][-1])
                else:
                    start = time.perf_counter()
                    write(path, {"divergence": compared(index, methods) * len(batch)}, start, how)
                summed += read(path, "divergence")[0]
            if turn == 0 and not summed[0] > 0:
                raise UserError(_UNMOVED)
            return summed / sum(map(len, self._batches))

        alone = grown(len(layers), losses, number)
        if self._plan.time_share is not None:  # the best that time allows: more anchors may lose more
            alone = alone[: 1 + min(range(len(alone)), key=lambda index: alone[index][1])]
        anchors = alone[-1][0]
        moved = improved(anchors, len(layers), lambda turn, tried: losses(number + turn, tried), self._plan.rounds)
        return Tried(alone, moved or alone[-1:], sum(float(read(path, "seconds")[0]) for path in self.tried()))


def named(choice: AnchorChoice, layers: Sequence[int]) -> dict[str, list[int]]:
    """The heads' maps by the layers' own numbers."""
    return {str(layers[layer]): heads for layer, heads in choice.heads.items()}

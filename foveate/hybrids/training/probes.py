"""Answers of a model in training, near and far: whether it retrieves at all, and whether from beyond its windows.

Losses of two runs cannot be compared while one has learned to retrieve and the other has not. So fresh rows of each
generated source are answered teacher-forced on the way, as in inference, and told apart by how far an answer is from
where it stood before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.errors import UserError
from foveate.hybrids.training.mixture import Mixture
from foveate.hybrids.training.opening import MEASURED
from foveate.hybrids.training.sources import ANSWER, Row

_SEED = 0
ROWS = 16
"""Rows of each source."""
_BATCH = 4
_BEGINNING = 3
"""First tokens of an answer by which its source is found, and which count as begun."""


class Answer(NamedTuple):
    """Tokens `begin` to `end` of a row are an answer, which stands `distance` tokens before, too."""

    begin: int
    end: int
    distance: int


class Probes:
    """Fresh rows of the mixture's generated sources, the same at every measurement and in every run of one mixture.

    Args:
        mixture: the mixture whose sources make the rows. The problems differ from the problems of training.
        length: tokens of a row.
        far: an answer counts as far if it is more than this many tokens from where it stood.
    """

    def __init__(self, mixture: Mixture, length: int, far: int):
        self.length, self.far = length, far
        self.rows = {source.kind: mixture.fresh(source, ROWS, length) for source in mixture.sources}
        self.answers = {kind: [list(answers(row)) for row in rows] for kind, rows in self.rows.items()}

    def require_far_recall(self) -> None:
        """Raises `UserError` if no answer of the sources `MEASURED`, by which a hold ends, is far."""
        asked = [answer for kind in MEASURED for row in self.answers.get(kind, ()) for answer in row]
        if not any(answer.distance > self.far for answer in asked):
            raise UserError(
                f"sparsity.recall is set, and in rows of batch.length {self.length:,} no answer of "
                f"{' or '.join(MEASURED)} is more than log.far ({self.far:,}) tokens from where it stood"
            )

    @torch.no_grad()
    def measure(
        self,
        network: nn.Module,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager],
        training: bool = False,
    ) -> dict[str, dict[str, dict[str, float]]]:
        """By source and distance (`near`, `far`): the answers' mean `loss` (nats a token), the percentage that is
        `right` in every token, that is `begun` right, and their number `n`.

        `training`: as in training, where layers with learned scores retain what these and the hold or release let them;
        else as in inference, where a buffer holds the best.
        """
        network.train(training)
        torch.manual_seed(_SEED)  # of the scores' dropout in training
        found = {}
        with torch.compiler.set_stance("force_eager"):  # compiling the layers for inference takes minutes
            for kind, rows in self.rows.items():
                values: dict[str, list[tuple[float, ...]]] = {"near": [], "far": []}
                for first in range(0, len(rows), _BATCH):
                    some = rows[first : first + _BATCH]
                    ids = torch.from_numpy(np.stack([row.ids for row in some])).to(device)
                    with autocast():
                        logits = network(input_ids=ids, use_cache=False).logits
                    for row, made, asked in zip(ids, logits, self.answers[kind][first : first + _BATCH]):
                        for answer, graded in zip(asked, _graded(row, made, asked)):
                            values["far" if answer.distance > self.far else "near"].append(graded)
                found[kind] = {where: _summary(graded) for where, graded in values.items() if graded}
        network.train()
        return {kind: by_distance for kind, by_distance in found.items() if by_distance}


def answers(row: Row) -> Iterator[Answer]:
    """The answers of a row that stand in it before, the nearest place counting."""
    at = np.flatnonzero(row.roles == ANSWER)
    for part in np.split(at, np.flatnonzero(np.diff(at) != 1) + 1):
        if not len(part):
            continue
        begin, end = int(part[0]), int(part[-1]) + 1
        first = begin if end - begin > 1 else begin - 1  # a single token with its key, as in associative recall
        want = row.ids[first : min(end, begin + _BEGINNING)]
        if first < len(want):
            continue
        windows = np.lib.stride_tricks.sliding_window_view(row.ids[:begin], len(want))[: first - len(want) + 1]
        places = np.flatnonzero((windows == want).all(1))
        if len(places):
            yield Answer(begin, end, first - int(places[-1]))


def _graded(ids: Tensor, logits: Tensor, asked: list[Answer]) -> list[tuple[float, ...]]:
    """Loss, tokens, whether right, and whether begun, of each answer of a row; waits for the device once."""
    if not asked:
        return []
    at = torch.cat([torch.arange(answer.begin, answer.end) for answer in asked]).to(ids.device)
    made = logits[at - 1].float()
    both = torch.stack([F.cross_entropy(made, ids[at], reduction="none"), (made.argmax(-1) == ids[at]).float()])
    graded = []
    for part in both.cpu().split([answer.end - answer.begin for answer in asked], dim=1):
        losses, right = part
        graded.append((losses.sum().item(), losses.numel(), right.all().item(), right[:_BEGINNING].all().item()))
    return graded


def _summary(graded: list[tuple[float, ...]]) -> dict[str, float]:
    losses, tokens, right, begun = map(np.array, zip(*graded))
    return {
        "loss": float(losses.sum() / tokens.sum()),
        "right": 100.0 * float(right.mean()),
        "begun": 100.0 * float(begun.mean()),
        "n": len(graded),
    }


def line(answered: dict[str, Any]) -> str:
    """A measurement in a line."""
    parts = [
        f"{kind} {where} {values['right']:.0f} % ({values['loss']:.2f})"
        for kind, by_distance in answered.items()
        for where, values in by_distance.items()
    ]
    return f"answers right (loss): {' · '.join(parts)}"

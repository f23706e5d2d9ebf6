"""Rows of several sources by shares: batches that depend on the seed, the step and the row's number alone.

Batches depend on no running state, so training resumes at any step without replaying, and any number of workers or
ranks makes the same batches. Rows are dealt in rounds of `ROUND`. Each round has the exact share of every source,
shuffled.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from foveate.errors import UserError
from foveate.hybrids.training.sources import ANSWER, LOSSES, Draw, Row, Source, Vocabulary
from foveate.hybrids.training.tokens import TokenStore

ROUND = 1000
"""Rows in which the shares are exact, to a thousandth."""
IGNORED = -100
_TASKS = (_ORDER, _DEAL, _ROW, _FRESH) = range(4)  # tell random streams of one seed apart


class TrainingPhase(NamedTuple):
    """Steps `begin` to `end` with rows of `length` tokens, `rows` of them in a step, of all ranks together."""

    begin: int
    end: int
    length: int
    rows: int


@dataclass(frozen=True)
class Shape:
    """Which rows a rank reads: `accumulate` micro-batches a step, each of `rows // (world · accumulate)` rows."""

    phases: tuple[TrainingPhase, ...]
    world: int = 1
    rank: int = 0
    accumulate: int = 1

    def phase(self, step: int) -> tuple[int, TrainingPhase]:
        """The phase of a step, and its number."""
        for number, phase in enumerate(self.phases):
            if phase.begin <= step < phase.end:
                return number, phase
        raise IndexError(f"step {step} of {self.phases[-1].end}")


class Mixture:
    """Sources by shares over a folder of tokenised text; a token of an answer weighs `answers` times any other."""

    def __init__(self, store: TokenStore, sources: Sequence[Source], seed: int, steps: int, answers: float = 1.0):
        self.sources = [source for source in sources if source.share > 0]
        total = sum(source.share for source in self.sources)
        if not self.sources or abs(total - 1) > 1e-6:
            parts = ", ".join(f"{source.kind} {source.share:g}" for source in sources)
            raise UserError(f"mixture: the shares must add up to 1, got {total:g} ({parts})")
        for source in self.sources:
            source.check(store)
        self.store, self.seed, self.steps, self.answers = store, seed, steps, answers
        self._counts = _apportioned([source.share for source in self.sources], ROUND)

    def row(self, phase: int, number: int, length: int, progress: float) -> tuple[np.ndarray, np.ndarray, str]:
        """Row `number` of a phase: ids and labels, int64 `[length]`, and its source's kind."""
        row, source = self._row(phase, number, length, progress)
        return row.ids, _labels(row, source), source.kind

    def _row(self, phase: int, number: int, length: int, progress: float) -> tuple[Row, Source]:
        round_, place = divmod(number, ROUND)
        deal, before = self._round(phase, round_)
        which = int(deal[place])
        source = self.sources[which]
        index = round_ * int(self._counts[which]) + int(before[place])
        rng = np.random.default_rng([self.seed, _ROW, phase, number])
        row = source.row(self.store, self._vocabulary, Draw(rng, length, index, (self.seed, _ORDER, phase), progress))
        if len(row.ids) != length:
            raise RuntimeError(f"a row of source {source.kind} has {len(row.ids)} tokens, expected {length}")
        return row, source

    def fresh(self, source: Source, count: int, length: int) -> list[Row]:
        """Rows of a source as at the end of training, which no step of any run has: the same for every seed."""
        which = [_FRESH, *source.kind.encode()]
        draws = (Draw(np.random.default_rng([*which, i, length]), length, i, (*which,), 1.0) for i in range(count))
        return [source.row(self.store, self._vocabulary, draw) for draw in draws]

    def batch(self, shape: Shape, step: int, micro: int) -> dict[str, Tensor]:
        """A micro-batch of one rank: `input_ids` and `labels`, int64 `[B, T]`; labels that do not count are -100.

        Labels stand at their own tokens; the model shifts them. Where answers have a weight, `label_weights`, fp32
        `[B, T]`, stand beside them. Raises `UserError` if no token counts.
        """
        number, phase = shape.phase(step)
        size = phase.rows // (shape.world * shape.accumulate)
        first = (step - phase.begin) * phase.rows + (micro * shape.world + shape.rank) * size
        rows = [self._row(number, first + i, phase.length, step / self.steps) for i in range(size)]
        ids = torch.from_numpy(np.stack([row.ids for row, _ in rows]))
        labels = torch.from_numpy(np.stack([_labels(row, source) for row, source in rows]))
        if not (labels[:, 1:] != IGNORED).any():
            raise UserError(
                f"step {step}: no token of a micro-batch of {size} rows counts in the loss; "
                "use more rows in a micro-batch, or loss = 'all'"
            )
        made = {"input_ids": ids, "labels": labels}
        if self.answers != 1:
            answers = torch.from_numpy(np.stack([row.roles == ANSWER for row, _ in rows]))
            made["label_weights"] = torch.where(answers, self.answers, 1.0)
        return made

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self.store)

    def _round(self, phase: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        return _dealt(self.seed, phase, number, tuple(self._counts))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_vocabulary"}


def _labels(row: Row, source: Source) -> np.ndarray:
    """A row's ids where its source counts them, else `IGNORED`."""
    return np.where(np.isin(row.roles, LOSSES[source.loss]), row.ids, IGNORED)


@functools.lru_cache(maxsize=8)
def _dealt(seed: int, phase: int, number: int, counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The source of each row of a round, and how many rows of the same source are before it."""
    deal = np.repeat(np.arange(len(counts)), counts)
    deal = np.random.default_rng([seed, _DEAL, phase, number]).permutation(deal)
    before = np.empty(ROUND, np.int64)
    for source in range(len(counts)):
        before[deal == source] = np.arange(counts[source])
    return deal, before


def _apportioned(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers that add up to `total`, by the largest remainders."""
    exact = np.array(shares) / sum(shares) * total
    counts = np.floor(exact + 1e-9).astype(int)
    for index in np.argsort(counts - exact, kind="stable")[: total - counts.sum()]:
        counts[index] += 1
    return counts.tolist()


class _MicroBatches(Dataset):
    """Micro-batches by their number since the first step."""

    def __init__(self, mixture: Mixture, shape: Shape):
        self._mixture, self._shape = mixture, shape

    def __len__(self) -> int:
        return self._shape.phases[-1].end * self._shape.accumulate

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._mixture.batch(self._shape, *divmod(index, self._shape.accumulate))


def batches(mixture: Mixture, shape: Shape, first_step: int, workers: int, pin: bool) -> Iterator[dict[str, Tensor]]:
    """All micro-batches from a step on, in order, made ahead by worker processes; 0 workers make them when asked."""
    dataset = _MicroBatches(mixture, shape)
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=range(first_step * shape.accumulate, len(dataset)),
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=4 if workers else None,
        # A fork of a process that runs CUDA and threads may hang; workers start afresh.
        multiprocessing_context="spawn" if workers else None,
        worker_init_fn=_one_thread,
    )
    return iter(loader)


def _one_thread(worker: int) -> None:
    torch.set_num_threads(1)


def held_out_batches(store: TokenStore, length: int, rows: int, limit: int) -> list[dict[str, Tensor]]:
    """Windows of the held-out text, evenly spread, `rows` at a time, of about `limit` tokens together.

    Raises `UserError` if the held-out text is shorter than one row.
    """
    windows = len(store.held_out) // length
    if not windows:
        raise UserError(
            f"{store.folder}: {len(store.held_out):,} held-out tokens, fewer than a row of {length:,}; "
            "prepare the text with a larger held_out"
        )
    chosen = np.unique(np.linspace(0, windows - 1, min(windows, max(1, limit // length))).astype(int))
    ids = [torch.from_numpy(store.held_out.window(int(i) * length, length)) for i in chosen]
    return [{"input_ids": part, "labels": part} for part in torch.stack(ids).split(rows)]


def open_store(folder: Path) -> TokenStore:
    """The folder of tokenised text, every shard checked against its digest."""
    store = TokenStore(folder)
    store.verify()
    return store

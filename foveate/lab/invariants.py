"""What every method promises: each promise compares two ways to the same answer.

A promise is stated here once. :func:`foveate.lab.check` asks it of a whole model, and the tests of foveate of a single
attention layer, whose state they compare as well. Both are a :class:`Subject`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from foveate.methods import Method, parse

PROMPT, STEPS = 61, 20
"""Number of tokens of a prompt, and of the tokens after it."""
LENGTHS = (PROMPT, PROMPT - 17, 23, 3)
"""Tokens of the prompts of a padded batch."""
CUTS = ((1, 7, 30, PROMPT - 1), range(5, PROMPT, 5))
"""Where a prompt is cut into pieces."""


class MissedError(Exception):
    """What does not hold, in words."""


class Tokens(Protocol):
    """Tokens of a batch of sequences, ``[B, n]``."""

    def __len__(self) -> int:
        """Tokens of each sequence."""

    def __getitem__(self, tokens: slice) -> Any:
        """Some tokens of each sequence."""

    def rows(self, index: Tensor) -> Any:
        """The sequences ``index``, int64 ``[B']``."""

    def cat(self, other: Any) -> Any:
        """Each sequence with other tokens after it."""


class Run(ABC):
    """Sequences with a cache, to which tokens are fed. Outputs are ``[B, n, ...]``."""

    @abstractmethod
    def feed(self, tokens: Any, real: Tensor | None = None) -> Tensor:
        """Feed tokens in one piece.

        Args:
            real: bool ``[B, n]``, False for padding; None: all are real.
        """

    @abstractmethod
    def steps(self, tokens: Any) -> Tensor:
        """Feed tokens one by one."""

    def draft(self, tokens: Any) -> Tensor:
        """Feed decoded tokens, at once if the run can do so."""
        return self.steps(tokens)

    @abstractmethod
    def turn(self, columns: int) -> None:
        """Begin a further prompt of ``columns`` columns, padding included."""

    @abstractmethod
    def record(self) -> None:
        """Keep from now on what :meth:`crop` needs."""

    @abstractmethod
    def settle(self) -> None:
        """Make all tokens final, and keep no more."""

    @abstractmethod
    def crop(self, tokens: int) -> None:
        """Remove the last ``tokens`` tokens; the remaining tokens become final."""

    @abstractmethod
    def reorder(self, rows: Tensor) -> None:
        """Replace the batch by these rows, int64 ``[B']``, as beam search does."""

    @abstractmethod
    def repeat(self, times: int) -> None:
        """Repeat each row."""

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Keep these rows, int64 ``[B']``."""

    @abstractmethod
    def copy(self) -> Run:
        """The same sequences with a cache of their own."""


class Subject(ABC):
    """A method at work.

    Args:
        method: as one layer has it, or as a model.
        group: query heads of a KV head.
    """

    def __init__(self, method: Method, group: int):
        self.method, self.group = method, group

    @property
    def tile(self) -> int | None:
        """See :meth:`Method.prompt_tile`."""
        return self.method.prompt_tile(self.group)

    @abstractmethod
    def tokens(self, rows: int, length: int, seed: int = 0) -> Any:
        """Random tokens, always the same for a seed."""

    @abstractmethod
    def stacked(self, rows: Sequence[Any]) -> Any:
        """Sequences of one length as a batch."""

    @abstractmethod
    def padded(self, rows: Sequence[Any], columns: int) -> tuple[Any, Tensor]:
        """Sequences of unequal length as a left-padded batch, and which tokens are real, bool ``[B, columns]``."""

    @abstractmethod
    def start(self, prompt: int = PROMPT) -> Run:
        """A run whose first prompt has ``prompt`` columns."""

    @abstractmethod
    def dense(self, tokens: Any) -> Tensor:
        """Outputs of dense attention for a prompt of ``PROMPT`` tokens and for the tokens after it."""

    @abstractmethod
    def same(self, found: Tensor, expected: Tensor, what: str, exact: bool = False) -> None:
        """Raise unless outputs are equal up to rounding, by default also up to another order of sums."""

    @abstractmethod
    def same_state(self, one: Run, other: Run, what: str) -> None:
        """Raise unless two runs hold the same; of a subject whose state is not seen, do nothing."""

    @abstractmethod
    def same_rows(self, batch: Run, alone: Sequence[Run], what: str) -> None:
        """Raise unless a batch holds, and has counted, what its rows do alone; else as :meth:`same_state`."""

    def whole(self, tokens: Any, prompt: int = PROMPT) -> tuple[Run, Tensor]:
        """A run that has read tokens, a prompt in one piece and the others one by one, and its outputs."""
        run = self.start(prompt)
        outs = [run.feed(tokens[:prompt])]
        outs += [run.steps(tokens[prompt:])] if len(tokens) > prompt else []
        return run, torch.cat(outs, 1)

    def pieces(self, run: Run, pieces: Sequence[tuple[Any, Tensor | None]]) -> Tensor | None:
        """Outputs of a prompt in pieces; None where they are refused, as the method declares.

        Raises:
            MissedError: where they are taken, and the method declares that they are not.
        """
        if self.tile is None and len(pieces) > 1:
            try:
                for piece in pieces:
                    run.feed(*piece)
            except ValueError as error:
                if "in one piece" in str(error):
                    return None
                raise
            raise MissedError(
                "prompt_tile declares that prompts come in one piece, and pieces are taken: return 1, or a tile"
            )
        return torch.cat([run.feed(*piece) for piece in pieces], 1)


IN_ONE_PIECE = "prompts come in one piece, as prompt_tile declares"


def full_budget(subject: Subject) -> None:
    """A method that leaves nothing out is dense attention."""
    tokens = subject.tokens(2, PROMPT + STEPS)
    what = f"with its full budget ({subject.method.spec}) it is not dense attention"
    subject.same(subject.whole(tokens)[1], subject.dense(tokens), what)


def later_tokens(subject: Subject) -> None:
    """A token changes no output before it, or before the tile of a prompt that it is in."""
    tokens, others = subject.tokens(1, PROMPT + 6), subject.tokens(1, PROMPT + 6, seed=1)
    reach = PROMPT if subject.tile is None else max(1, subject.tile)
    expected = subject.whole(tokens)[1]
    for changed in {min(reach, PROMPT - 2), PROMPT // 2, PROMPT - 1, PROMPT, PROMPT + 3}:
        found = subject.whole(tokens[:changed].cat(others[changed:]))[1]
        before = changed if changed >= PROMPT else changed // reach * reach
        if before:
            what = f"token {changed} changes outputs of earlier ones: mask later tokens in `prompt`"
            subject.same(found[:, :before], expected[:, :before], what, exact=True)
        if torch.allclose(found[:, changed:], expected[:, changed:]):
            raise MissedError(f"outputs do not depend on the tokens from {changed} on")


def prompt_in_pieces(subject: Subject, all_cuts: Iterable[Iterable[int]] = CUTS) -> str | None:
    """A prompt in pieces gives what it gives in one; pieces end between tiles."""
    tokens, whole = subject.tokens(2, PROMPT + STEPS), subject.start()
    expected = whole.feed(tokens[:PROMPT])
    what = (
        "a prompt in pieces gives something else than in one: what a hook notes of a piece belongs into a channel, and "
        "`prompt_end` comes once"
    )
    for cuts in all_cuts:
        tile = subject.tile or 1
        edges = sorted({0, *(max(cut // tile, 1) * tile for cut in cuts if cut < PROMPT), PROMPT})
        edges = [edge for edge in edges if edge <= PROMPT]
        run = subject.start()
        found = subject.pieces(run, [(tokens[first:last], None) for first, last in itertools.pairwise(edges)])
        if found is None:
            return IN_ONE_PIECE
        subject.same(found, expected, what)
        subject.same_state(run, whole, what)
    subject.same(run.steps(tokens[PROMPT:]), whole.steps(tokens[PROMPT:]), what)
    subject.same_state(run, whole, what)
    return None


def padded_batch(subject: Subject, chunks: Iterable[int] = (PROMPT,)) -> str | None:
    """Rows of unequal length in a padded batch are what they are alone; the prompt comes in pieces of each size."""
    prompts = [subject.tokens(1, length, seed=length) for length in LENGTHS]
    steps = [subject.tokens(1, STEPS, seed=1000 + length) for length in LENGTHS]
    batch, real = subject.padded(prompts, PROMPT)
    what = (
        "a row of {} tokens in a padded batch is not what it is alone: rows have numbers of their own, "
        "cache.lengths[row] and cache.positions[row], and cache.plan['lengths'] has all on the device"
    )
    runs: dict[tuple[int, tuple[int, ...]], tuple[Run, Tensor, Tensor]] = {}

    def alone(row: int, edges: tuple[int, ...]) -> tuple[Run, Tensor, Tensor]:
        if (row, edges) not in runs:
            run = subject.start(LENGTHS[row])
            read = torch.cat([run.feed(prompts[row][first:last]) for first, last in itertools.pairwise(edges)], 1)
            runs[row, edges] = run, read, run.steps(steps[row])
        return runs[row, edges]

    for chunk in chunks:
        run, cuts = subject.start(PROMPT), [*range(0, PROMPT, chunk), PROMPT]
        pieces = [(batch[first:last], real[:, first:last]) for first, last in itertools.pairwise(cuts)]
        found = subject.pieces(run, pieces)
        if found is None:
            return IN_ONE_PIECE
        decoded, by_themselves = run.steps(subject.stacked(steps)), []
        for row, length in enumerate(LENGTHS):
            tiled = (subject.tile or 1) > 1  # a tile that a piece ends in is split
            edges = sorted({max(cut - PROMPT + length, 0) for cut in cuts}) if tiled else (0, length)
            by_itself, expected, stepped = alone(row, tuple(edges))
            subject.same(found[row : row + 1, -length:], expected, what.format(length))
            subject.same(decoded[row : row + 1], stepped, what.format(length))
            by_themselves.append(by_itself)
        subject.same_rows(run, by_themselves, what.format("some"))
    return None


def second_turn(subject: Subject) -> str | None:
    """A second prompt in pieces and a padded batch gives what follows it alone, in one piece."""
    first = [subject.tokens(1, length, seed=length) for length in (31, 18)]
    steps = [subject.tokens(1, 7, seed=200 + row) for row in range(2)]
    second = [subject.tokens(1, length, seed=300 + length) for length in (12, 29)]
    last = [subject.tokens(1, 5, seed=400 + row) for row in range(2)]
    batch, run = subject.padded(first, 31), subject.start(31)
    run.feed(*batch)
    run.steps(subject.stacked(steps))
    run.turn(29)
    more, real = subject.padded(second, 29)
    read = subject.pieces(run, [(more[:11], real[:, :11]), (more[11:], real[:, 11:])])
    if read is None:
        return "a second prompt is refused, as prompt_tile declares"
    found = run.steps(subject.stacked(last))
    for row in range(2):
        alone = subject.start(len(first[row]))
        alone.feed(first[row])
        alone.steps(steps[row])
        alone.turn(len(second[row]))
        expected = alone.feed(second[row])
        what = "a second prompt in a batch is not what it is alone"
        if (subject.tile or 1) == 1:
            subject.same(read[row : row + 1, -len(second[row]) :], expected, what)
        subject.same(found[row : row + 1], alone.steps(last[row]), f"what follows {what}")
    return None


_CROPPED = (
    "after a crop a cache is not what it was before the tokens that left: state belongs into a channel, which is "
    "cropped; a method whose decoded tokens change entries of older ones is `stateful`; and means and sums must leave "
    "out empty slots"
)


def crop(subject: Subject, removed: int = 4) -> None:
    """Drafted tokens that are removed again leave nothing behind, while the past is recorded."""
    tokens, drafts = subject.tokens(1, PROMPT + STEPS), subject.tokens(1, 9, seed=5)
    run, fresh = subject.start(), subject.start()
    run.record()
    run.feed(tokens[:PROMPT])
    run.draft(tokens[PROMPT : PROMPT + 5])
    run.crop(0)
    run.draft(drafts)
    kept = drafts[: len(drafts) - removed]
    run.crop(removed)
    fresh.feed(tokens[:PROMPT])
    fresh.steps(tokens[PROMPT : PROMPT + 5])
    if len(kept):
        fresh.steps(kept)
    subject.same_state(run, fresh, _CROPPED)
    rest = tokens[PROMPT + 5 :]
    subject.same(run.draft(rest), fresh.steps(rest), _CROPPED)
    run.crop(0)
    run.settle()
    subject.same_state(run, fresh, _CROPPED)
    subject.same(run.steps(drafts), fresh.steps(drafts), _CROPPED)


def crop_of_final_tokens(subject: Subject) -> str | None:
    """Without a record of the past a crop is refused by a method that declares ``stateful``, and else exact."""
    tokens = subject.tokens(1, PROMPT + 3)
    run, _ = subject.whole(tokens)
    try:
        run.crop(2)
    except ValueError as error:
        if not subject.method.stateful or "activate_past_recording" not in str(error):
            raise
        return None
    if subject.method.stateful:
        raise MissedError("a method that declares `stateful` gave up tokens of which no snapshot was kept")
    fresh, _ = subject.whole(tokens[: PROMPT + 1])
    subject.same_state(run, fresh, _CROPPED)
    subject.same(run.steps(tokens[PROMPT + 1 :]), fresh.steps(tokens[PROMPT + 1 :]), _CROPPED)
    return None


def reordered_rows(subject: Subject) -> None:
    """Rows that beam search has reordered go on as rows that have read the same tokens."""
    tokens, order = subject.tokens(3, PROMPT + 5), torch.tensor([2, 0, 0])
    run, _ = subject.whole(tokens)
    run.reorder(order)
    _go_on_alike(subject, run, tokens.rows(order), 3)


def repeated_rows(subject: Subject) -> None:
    """The same of rows that were repeated, and then selected."""
    tokens = subject.tokens(2, PROMPT + 5)
    run, _ = subject.whole(tokens)
    run.repeat(3)
    run.select(torch.tensor([5, 1]))
    _go_on_alike(subject, run, tokens.rows(torch.tensor([1, 0])), 2)


def _go_on_alike(subject: Subject, run: Run, tokens: Any, rows: int) -> None:
    what = "rows that beam search has reordered go on otherwise: state belongs into a channel, whose rows are reordered"
    fresh, _ = subject.whole(tokens)
    steps = subject.tokens(rows, 7, seed=3)
    subject.same_state(run, fresh, what)
    subject.same(run.steps(steps), fresh.steps(steps), what)


def copied_cache(subject: Subject) -> None:
    """A copy of a cache goes on as the cache."""
    tokens, steps = subject.tokens(1, PROMPT + 6), subject.tokens(1, 8, seed=3)
    run, _ = subject.whole(tokens)
    twin = run.copy()
    what = (
        "a copy of a cache goes on otherwise than the cache: a hook keeps state in the method, which all rows share; "
        "use a channel"
    )
    expected = run.steps(steps)
    subject.same(twin.steps(steps), expected, what)
    subject.same_state(twin, run, what)


def spec(method: Method) -> None:
    """The spec of a method is read back as the same method."""
    if parse(method.spec) != method:
        raise MissedError(f"{method.spec} is not read back as the same method: settings are numbers, texts or lists")

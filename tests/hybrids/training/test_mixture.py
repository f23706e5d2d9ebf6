"""Batches: exact shares, the same rows whatever ranks and workers, each once."""

import numpy as np
import pytest
import torch

from foveate.errors import UserError
from foveate.hybrids.training import mixture
from foveate.hybrids.training.mixture import IGNORED, Mixture, Shape, TrainingPhase, batches, held_out_batches
from foveate.hybrids.training.needles import Needles
from foveate.hybrids.training.sources import Text
from foveate.hybrids.training.synthetic import SOURCES, Copies, Recall

PHASES = (TrainingPhase(0, 3, 64, 8), TrainingPhase(3, 5, 128, 4))


@pytest.fixture
def mixed(store):
    return Mixture(store, [Text(share=0.6), Copies(share=0.25, gap=(8, 40)), Recall(share=0.15, pairs=(2, 8))], 5, 5)


def rows_of(mixed, world, accumulate, workers=0, first=0):
    """The rows of each step, as bytes of ids and labels, whoever reads them."""
    steps = {}
    for rank in range(world):
        shape = Shape(PHASES, world, rank, accumulate)
        for number, batch in enumerate(batches(mixed, shape, first, workers, False)):
            step = first + number // accumulate
            for ids, labels in zip(batch["input_ids"], batch["labels"]):
                steps.setdefault(step, []).append((ids.numpy().tobytes(), labels.numpy().tobytes()))
    return {step: sorted(rows) for step, rows in steps.items()}


@pytest.mark.full
def test_ranks_micro_batches_workers_and_resuming_change_nothing(mixed):
    whole = rows_of(mixed, 1, 1)
    assert [len(whole[step]) for step in range(5)] == [8, 8, 8, 4, 4]
    assert rows_of(mixed, 2, 2) == rows_of(mixed, 4, 1) == whole
    assert rows_of(mixed, 1, 2, first=2) == {step: whole[step] for step in (2, 3, 4)}
    assert rows_of(mixed, 1, 1, workers=2) == whole
    assert rows_of(Mixture(mixed.store, mixed.sources, 6, 5), 1, 1) != whole


def test_every_phase_begins_with_its_first_row(mixed):
    """And goes on row by row, so that none is left out between steps."""
    for number, phase in enumerate(PHASES):
        for step in range(phase.begin, phase.end):
            first = (step - phase.begin) * phase.rows
            rows = [mixed.row(number, first + i, phase.length, step / 5)[0] for i in range(phase.rows)]
            assert np.array_equal(mixed.batch(Shape(PHASES), step, 0)["input_ids"].numpy(), np.stack(rows))


def test_shares_are_exact_in_every_round(mixed):
    kinds = [mixed.row(0, number, 64, 1.0)[2] for number in range(2 * mixture.ROUND)]
    for part in (kinds[: mixture.ROUND], kinds[mixture.ROUND :]):
        assert {kind: part.count(kind) for kind in set(part)} == {"text": 600, "copies": 250, "recall": 150}
    assert kinds[: mixture.ROUND] != kinds[mixture.ROUND :]
    assert max(len(run) for run in "".join(kind[0] for kind in kinds).split("t")) < 20  # shuffled, not in blocks


def test_rows_of_text_are_never_read_twice_within_an_epoch(mixed, store, monkeypatch):
    monkeypatch.setattr(mixture, "ROUND", 20)  # an epoch has many rounds
    mixed = Mixture(store, mixed.sources, 5, 5)
    windows = Text.windows(store, 64)
    read = [ids.tobytes() for ids, _, kind in (mixed.row(0, n, 64, 1.0) for n in range(1500)) if kind == "text"]
    assert len(read) > windows / 2
    assert len(set(read[:windows])) == min(windows, len(read))


def test_labels_count_what_can_be_predicted(store):
    counted = {}
    for loss in ("answers", "predictable", "all"):
        mixed = Mixture(store, [Recall(share=1.0, pairs=(4, 8), loss=loss)], 0, 1)
        ids, labels, _ = mixed.row(0, 3, 128, 1.0)
        assert np.array_equal(labels[labels != IGNORED], ids[labels != IGNORED])
        counted[loss] = set(np.flatnonzero(labels != IGNORED).tolist())
    assert counted["answers"] < counted["predictable"] < counted["all"] == set(range(128))


def test_batches_are_int64(mixed):
    batch = mixed.batch(Shape(PHASES), 4, 0)
    assert {name: (value.dtype, tuple(value.shape)) for name, value in batch.items()} == {
        "input_ids": (torch.int64, (4, 128)),
        "labels": (torch.int64, (4, 128)),
    }


def test_held_out_batches_are_held_out_text(store):
    made = held_out_batches(store, 64, 3, 512)
    whole = store.held_out.window(0, len(store.held_out)).tobytes()
    assert sum(len(batch["input_ids"]) for batch in made) == 8
    assert all(row.numpy().tobytes() in whole for batch in made for row in batch["input_ids"])
    with pytest.raises(UserError, match=r"held-out tokens, fewer than a row of 1,000,000"):
        held_out_batches(store, 1_000_000, 3, 512)


def test_bad_mixtures(store):
    with pytest.raises(UserError, match=r"shares must add up to 1, got 0.9 \(text 0.6, recall 0.3\)"):
        Mixture(store, [Text(share=0.6), Recall(share=0.3)], 0, 1)
    with pytest.raises(UserError, match=r"[\d,]+ tokens of text, fewer than a row of 1,000,000"):
        Mixture(store, [Text(share=1.0)], 0, 1).row(0, 0, 1_000_000, 0.0)
    store.meta = dict(store.meta)
    store.__dict__["words"] = ["one"]
    with pytest.raises(UserError, match="1 words for the keys of needles, at least 100 are needed"):
        Mixture(store, [Needles(share=1.0)], 0, 1)
    store.__dict__["questions"] = None
    with pytest.raises(UserError, match=r"mixture\.cloze needs questions, and the text was prepared without"):
        Mixture(store, [SOURCES["cloze"](share=1.0)], 0, 1)

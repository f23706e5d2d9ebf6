import dataclasses

import pytest
import torch

from benchmarks.calibration_table import objective, table
from foveate.calibration import Calibration
from foveate.errors import UserError
from foveate.lab.evaluation.calibration.anchors import best_anchors

LAYERS = [0, 1, 2, 4, 5]  # layer 3 is not one that can be an anchor


def calibration(seed, task, anchors=2, **run):
    generator = torch.Generator().manual_seed(seed)
    similarity = torch.rand(5, 5, generator=generator).triu()
    importance = torch.rand(5, generator=generator)
    worth = similarity * importance
    by_number = best_anchors(worth, 5)
    chosen = tuple(LAYERS[one] for one in by_number[anchors - 1][0])
    found = {
        "similarity": similarity.tolist(),
        "importance": importance.tolist(),
        "layers": LAYERS,
        "by_number": [{"anchors": [LAYERS[one] for one in best], "objective": value} for best, value in by_number],
        "chosen_by": {"by": "similarity", "over": "least", "weights": "importance"},
        "run": {
            "tasks": [{"task": task, "settings": {"length": 4096, "split": "vt"} if task == "ruler" else {}}],
            "tokens": [100] * 7,
            "keys": 64,
            "tile": 128,
            "model": "some-model",
            "weights": "abc",
            "dtype": "bfloat16",
            **run,
        },
        "device": "a device",
        "commit": "1234567",
    }
    return Calibration({}, chosen, {}, found), worth


def shares(text):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]


def test_anchors_are_measured_by_what_each_was_chosen_by():
    (one, worth), (other, other_worth) = (calibration(seed, "musique", 3) for seed in (0, 1))
    head, first, second = shares(table([one, other]))
    assert head == ["prompts", "anchors", "reached on musique (7)", "reached on musique (7)"]
    assert first[1] == ", ".join(map(str, one.anchors))
    assert first[2] == second[3] == "100.00 %"
    at = [LAYERS.index(anchor) for anchor in one.anchors]
    best = best_anchors(other_worth, 3)[2][1]
    assert first[3] == f"{100 * objective(other_worth, at) / best:.2f} %" != "100.00 %"
    assert objective(worth, at) == pytest.approx(best_anchors(worth, 3)[2][1])


def test_data_and_circumstances_are_told():
    text = table([calibration(0, "ruler")[0], calibration(1, "2wiki")[0]])
    assert text.startswith("some-model, bfloat16; 64 keys a tile of 128 queries (a device; commit 1234567):\n\n")
    assert [line[0] for line in shares(text)] == ["prompts", "ruler vt, 4K tokens (7)", "2wiki (7)"]


def test_calibrations_of_other_models_do_not_go_side_by_side():
    with pytest.raises(UserError, match="of different models"):
        table([calibration(0, "musique")[0], calibration(0, "musique")[0], _of_another()])


def _of_another():
    one, _ = calibration(0, "musique")
    return dataclasses.replace(one, found={**one.found, "run": {**one.found["run"], "weights": "other"}})


def test_a_calibration_that_does_not_tell_how_it_was_found():
    one, _ = calibration(0, "musique")
    with pytest.raises(UserError, match=r"does not tell how it was found.*importance"):
        table([dataclasses.replace(one, found={k: v for k, v in one.found.items() if k != "importance"})])


def by_divergence(seed, **run):
    one, _ = calibration(seed, "musique", **run)
    lost = torch.rand(5, 5, generator=torch.Generator().manual_seed(seed)).triu()
    by_number = best_anchors(-lost, 5)
    answers = {"method": "kascade:pooling=post_softmax", "answer_tokens": 16}
    found = one.found | {
        "run": one.found["run"] | {"answers": answers},
        "divergence": lost.tolist(),
        "chosen_by": {"by": "divergence", "over": "least", "weights": "importance"},
        "by_number": [{"anchors": [LAYERS[one] for one in best], "objective": value} for best, value in by_number],
    }
    return dataclasses.replace(one, anchors=tuple(LAYERS[one] for one in by_number[1][0]), found=found), lost


def test_what_anchors_lose_is_told_in_nats():
    (one, lost), (other, other_lost) = by_divergence(0), by_divergence(1)
    head, first, _ = shares(table([one, other]))
    assert head == ["prompts", "anchors", "lost on musique (7)", "lost on musique (7)"]
    at = [LAYERS.index(anchor) for anchor in one.anchors]
    assert first[2:] == [f"{-objective(-matrix, at):.4f} nats" for matrix in (lost, other_lost)]


def test_divergence_and_similarity_go_side_by_side():
    (one, _), (other, worth) = by_divergence(0), calibration(1, "2wiki")
    head, first, second = shares(table([one, other]))
    assert head[2:] == [
        "lost on musique (7), kascade:pooling=post_softmax along 16 tokens",
        "reached on 2wiki (7), least, weights importance",
    ]
    at = [LAYERS.index(anchor) for anchor in one.anchors]
    assert first[3] == f"{100 * objective(worth, at) / best_anchors(worth, 2)[1][1]:.2f} %"
    assert second[2].endswith(" nats")
    assert second[3] == "100.00 %"


@pytest.mark.parametrize("change", [{"keys": 32}, {"tile": 1}, {"dtype": "float32"}])
def test_calibrations_that_measured_something_else_do_not_go_side_by_side(change):
    with pytest.raises(UserError, match="differ in their keys, tile or dtype"):
        table([calibration(0, "musique")[0], calibration(1, "musique", **change)[0]])


def test_anchors_tried_together_have_a_line_and_no_sum():
    (one, worth), (other, _) = calibration(0, "2wiki"), calibration(1, "musique", 3, dtype="float32")
    answers = {"method": "kascade:pooling=post_softmax", "answer_tokens": 16}
    found = {**other.found, "chosen_by": {"by": "together"}, "run": {**other.found["run"], "answers": answers}}
    other = dataclasses.replace(other, found=found)
    head, first, second = shares(table([other, one]))
    assert head[2:] == ["reached on 2wiki (7), least, weights importance"]
    assert first[:2] == [
        "musique (7), together, kascade:pooling=post_softmax along 16 tokens",
        ", ".join(map(str, other.anchors)),
    ]
    at = [LAYERS.index(anchor) for anchor in other.anchors]
    assert first[2:] == [f"{100 * objective(worth, at) / best_anchors(worth, 3)[2][1]:.2f} %"]
    assert second[2:] == ["100.00 %"]
    with pytest.raises(UserError, match="tried together have no sums to compare"):
        table([other])


def test_sums_are_of_the_least_tile_and_importance_alone():
    one, _ = calibration(0, "musique")
    other = {**one.found, "chosen_by": {"by": "similarity", "over": "mean", "weights": "importance"}}
    with pytest.raises(UserError, match="anchors by the mean of tiles, weights importance"):
        table([dataclasses.replace(one, found=other)])

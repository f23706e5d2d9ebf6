"""Calibrations of one model side by side: do different prompts lead to the same anchors?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foveate.calibration import Calibration
from foveate.errors import UserError
from foveate.lab.report.markdown import markdown_table
from foveate.lab.report.plots.calibration import tasks


def table(found: Sequence[Calibration]) -> str:
    """A line for each calibration: its data, its anchors, and what they reach on the data of each.

    What anchors reach is the sum that the best ones of as many were chosen by, as a share of what those reach; of those
    chosen by divergence it is what they lose in sum. Anchors tried together have no such sum, and a line alone. Raises
    `UserError` for calibrations of different models or without a record of how they were found, or none with a sum.
    """
    first = found[0]
    try:
        summed = [one for one in found if one.found["chosen_by"]["by"] != "together"]
        weighted = [_worth(one) for one in summed]
        layers, run = first.found["layers"], first.found["run"]
        data = [f"{tasks(one.found['run'])} ({len(one.found['run']['tokens'])})" for one in found]
        ways = [_way(one) for one in found]
        best = [{len(entry["anchors"]): entry["objective"] for entry in one.found["by_number"]} for one in summed]
        commits = ", ".join(dict.fromkeys(one.found["commit"] for one in found))
    except (KeyError, TypeError) as error:
        raise UserError(f"a calibration does not tell how it was found ({error})") from None
    if not summed:
        raise UserError(
            "anchors that were tried together have no sums to compare; name another calibration beside them"
        )
    if any(one.found["run"]["weights"] != run["weights"] for one in found):
        raise UserError("the calibrations are of different models")
    measured = {(one.found["run"]["keys"], one.found["run"]["tile"], one.found["run"]["dtype"]) for one in summed}
    if len(measured) > 1:
        raise UserError("the calibrations differ in their keys, tile or dtype")
    if len(set(ways)) > 1:
        data = [f"{name}, {way}" for name, way in zip(data, ways)]
    verbs = ["lost" if _diverges(one) else "reached" for one in summed]
    on = [name for one, name in zip(found, data) if one in summed]
    head = ["prompts", "anchors", *(f"{verb} on {name}" for verb, name in zip(verbs, on))]
    lines = []
    for one, name in zip(found, data):
        at = [layers.index(anchor) for anchor in one.anchors]
        sums = [objective(matrix, at) for matrix in weighted]
        cells = [
            f"{-total:.4f} nats" if verb == "lost" else f"{100 * total / of[len(at)]:.2f} %"
            for verb, total, of in zip(verbs, sums, best)
        ]
        lines.append([name, ", ".join(map(str, one.anchors)), *cells])
    run = summed[0].found["run"]
    facts = f"{run['model']}, {run['dtype']}; {run['keys']} keys a tile of {run['tile']} queries"
    return f"{facts} ({first.found['device']}; commit {commits}):\n\n{markdown_table([head, *lines])}"


def objective(similarity: Tensor, anchors: Sequence[int]) -> float:
    """The sum over layers that some anchors reach, the first layer among them."""
    ends = [*anchors[1:], similarity.shape[0]]
    return float(sum(similarity[first, first:end].double().sum() for first, end in zip(anchors, ends)))


def _worth(one: Calibration) -> Tensor:
    """What the anchors were chosen by, ``[L, L]``."""
    if _diverges(one):
        return -torch.tensor(one.found["divergence"])
    by = one.found["chosen_by"]
    if (by["over"], by["weights"]) != ("least", "importance"):
        raise UserError(
            f"anchors by the {by['over']} of tiles, weights {by['weights']}: least and importance alone have sums"
        )
    return torch.tensor(one.found["similarity"]) * torch.tensor(one.found["importance"])


def _diverges(one: Calibration) -> bool:
    return one.found["chosen_by"]["by"] == "divergence"


def _way(one: Calibration) -> str:
    """What the anchors were chosen by, in words."""
    by, answers = one.found["chosen_by"], one.found["run"].get("answers")
    if answers:
        together = "together, " if by["by"] == "together" else ""
        prompts = f", {answers['prompts']} prompts" if "prompts" in answers else ""
        return f"{together}{answers['method']} along {answers['answer_tokens']} tokens{prompts}"
    return f"{by['over']}, weights {by['weights']}"

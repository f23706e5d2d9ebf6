"""Calibrations of one model side by side: do different prompts lead to the same anchors?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foveate.calibration import Calibration, objective
from foveate.evaluation.errors import UserError
from foveate.report.markdown import markdown_table


def table(found: Sequence[Calibration]) -> str:
    """A line for each calibration: its data, its anchors, and what they reach on the data of each.

    What anchors reach is the sum that the best ones of as many were chosen by, as a share of what those reach.

    Raises:
        UserError: for calibrations of different models, or ones that do not tell how they were found.
    """
    first = found[0]
    try:
        weighted = [_worth(one) for one in found]
        layers, run = first.found["layers"], first.found["run"]
        data = [_data(one) for one in found]
        best = [{len(entry["anchors"]): entry["objective"] for entry in one.found["by_number"]} for one in found]
        commits = ", ".join(dict.fromkeys(one.found["commit"] for one in found))
    except (KeyError, TypeError) as error:
        raise UserError(f"a calibration does not tell how it was found ({error})") from None
    if any(one.found["run"]["weights"] != run["weights"] for one in found):
        raise UserError("the calibrations are of different models")
    measured = {(one.found["run"]["keys"], one.found["run"]["tile"], one.found["run"]["dtype"]) for one in found}
    if len(measured) > 1:
        raise UserError("the calibrations differ in their keys, tile or dtype")
    if len({tuple(one.found["chosen_by"][name] for name in ("over", "weights")) for one in found}) > 1:
        by = [one.found["chosen_by"] for one in found]
        data = [f"{name}, {one['over']}, weights {one['weights']}" for name, one in zip(data, by)]
    head = ["prompts", "anchors", *(f"reached on {name}" for name in data)]
    lines = []
    for one, name in zip(found, data):
        at = [layers.index(anchor) for anchor in one.anchors]
        shares = [objective(matrix, at) / of[len(at)] for matrix, of in zip(weighted, best)]
        lines.append([name, ", ".join(map(str, one.anchors)), *(f"{100 * share:.2f} %" for share in shares)])
    facts = f"{run['model']}, {run['dtype']}; {run['keys']} keys a tile of {run['tile']} queries"
    return f"{facts} ({first.found['device']}; commit {commits}):\n\n{markdown_table([head, *lines])}"


def _worth(one: Calibration) -> torch.Tensor:
    """What the anchors were chosen by, ``[L, L]``."""
    by = one.found["chosen_by"]
    similarity = torch.tensor(one.found["similarity" if by["over"] == "least" else "mean_similarity"])
    return similarity * torch.tensor(one.found["importance"]) if by["weights"] == "importance" else similarity


def _data(one: Calibration) -> str:
    run = one.found["run"]
    length = run["task_settings"].get("length")
    return f"{run['task']}{f', {length:,} tokens' if length else ''} ({len(run['tokens'])})"

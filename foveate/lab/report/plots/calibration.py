"""What a calibration found, as a picture: similarity of layers, their importance, attention on few keys by head.

After figures 3, 4 and 1 of the Kascade paper. Where anchors were chosen by divergence, it stands for similarity.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from foveate.calibration import Calibration
from foveate.errors import DataError
from foveate.lab.report.markdown import context_length
from foveate.lab.report.plots.figure import INK, drawing, look, title

_HEIGHT, _WIDTH = 4.2, 13.0
_LEAST = 1e-4  # the smallest divergence that the colours distinguish


def draw(found: Calibration, out: Path) -> None:
    """Three panels, as PNG.

    Raises `UserError` for a file name that is no PNG's, when matplotlib is missing, or the calibration lacks its
    matrices.
    """
    try:
        layers, run = found.found["layers"], found.found["run"]
        diverges = found.found.get("divergence") is not None
        pairs = np.array(found.found["divergence" if diverges else "similarity"], dtype=float)
        importance = np.array(found.found["importance"], dtype=float)
        coverage = np.array(found.found["coverage"], dtype=float)
        facts = (
            f"{run['model']} · {tasks(run)}, {len(run['tokens'])} prompts of {min(run['tokens']):,} to "
            f"{max(run['tokens']):,} tokens · {run['keys']} keys a tile of {run['tile']} queries · {run['dtype']}"
        )
        covered = f"attention on the {found.found['coverage_keys']} heaviest keys of a query"
        anchors = [layers.index(anchor) for anchor in found.anchors]
        number = len(layers)
        if (pairs.shape, importance.shape, coverage.shape[:-1]) != ((number, number), (number,), (number,)):
            raise ValueError("its matrices are not of its layers")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the calibration does not tell how it was found ({error})") from None
    ends = [*anchors[1:], len(layers)]
    with drawing(out, _HEIGHT, _WIDTH) as figure:
        from matplotlib.colors import LogNorm
        from matplotlib.patches import Rectangle

        left, middle, right = figure.subplots(1, 3, width_ratios=(1.15, 1, 1.1))
        shown = np.where(np.tri(len(layers), k=-1, dtype=bool), np.nan, pairs)
        scale = {"norm": LogNorm(_LEAST, 1.0, clip=True), "cmap": "viridis_r"} if diverges else {"vmax": 1.0}
        image = left.imshow(shown, interpolation="nearest", **{"cmap": "viridis", **scale})
        for first, end in zip(anchors, ends):
            left.add_patch(
                Rectangle((first - 0.5, first - 0.5), end - first, 1, fill=False, edgecolor="#D55E00", lw=1.6)
            )
        figure.colorbar(image, ax=left, fraction=0.046, pad=0.03)
        what = "divergence, nats a token" if diverges else "similarity of layers"
        left.set_title(f"{what} (framed: what is reused)")
        left.set_xlabel("layer j, which reads")
        left.set_ylabel("layer i, which chooses")
        colors = ["#D55E00" if index in anchors else look("dense").color for index in range(len(layers))]
        middle.bar(range(len(layers)), importance, color=colors, width=0.8)
        middle.set_title("importance: 1 - cosine before and after attention")
        middle.set_xlabel("layer (anchors in colour)")
        image = right.imshow(coverage, cmap="viridis", interpolation="nearest", aspect="auto", vmax=1.0)
        figure.colorbar(image, ax=right, fraction=0.046, pad=0.03)
        right.set_title(covered)
        right.set_xlabel("query head")
        right.set_ylabel("layer")
        for axis in (left, right):
            axis.grid(False)
        step = max(1, len(layers) // 10)
        at = range(0, len(layers), step)
        for set_ticks in (left.set_xticks, left.set_yticks, middle.set_xticks, right.set_yticks):
            set_ticks(list(at), [str(layers[index]) for index in at])
        left.tick_params(colors=INK)
        title(figure, f"Anchors {list(found.anchors)}", facts)


def tasks(run: Mapping[str, Any]) -> str:
    """The tasks of a calibration in words."""
    names = []
    for task in run["tasks"]:
        split, length = task["settings"].get("split"), task["settings"].get("length")
        split = f" {split}" if task["task"] == "ruler" else ""
        names.append(f"{task['task']}{split}{f', {context_length(length)} tokens' if length else ''}")
    return " and ".join(names)

"""Which share of exact attention each layer's reads hold, by method, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from foveate.errors import UserError
from foveate.lab.report.plots import figure


def draw(recalls: Mapping[str, Mapping[int, float]], out: Path, facts: str) -> None:
    """A picture of layers, from left to right, by methods, from top to bottom, as PNG.

    Args:
        recalls: for each method's spec the recall, 0 to 1, by the index of the layer. A layer that a method leaves
            unchanged has none, and its cell is empty.
        facts: what was measured on, in words.

    Raises:
        UserError: when no method has a recall, and as :func:`figure.check` does.
    """
    layers = sorted({layer for by_layer in recalls.values() for layer in by_layer})
    if not layers:
        raise UserError("nothing to draw: no recall was measured")
    shown = np.array([[by_layer.get(layer, np.nan) for layer in layers] for by_layer in recalls.values()])
    with figure.drawing(out, 1.7 + 0.34 * len(recalls)) as page:
        axis = page.subplots()
        image = axis.imshow(100 * shown, cmap="viridis", aspect="auto", interpolation="nearest", vmin=0, vmax=100)
        axis.grid(False)
        axis.set_yticks(range(len(recalls)), list(recalls))
        at = range(0, len(layers), max(1, len(layers) // 16))
        axis.set_xticks(list(at), [str(layers[index]) for index in at])
        axis.set_xlabel("layer")
        page.colorbar(image, ax=axis, fraction=0.03, pad=0.02, label="recall, %")
        figure.title(page, "Share of exact attention that the tokens hold that a decode step reads", facts)

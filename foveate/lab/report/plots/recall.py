"""Which share of exact attention each layer's reads hold, by method, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foveate.errors import UserError
from foveate.lab.report import lines
from foveate.lab.report.plots import figure
from foveate.lab.report.rows import Row


def recall(rows: Sequence[Row], out: Path) -> list[str]:
    """A picture of the field ``recall``, as PNG: layers from left to right, methods from top to bottom.

    A layer that a method leaves unchanged has no recall, and its cell is empty.

    Args:
        rows: of `foveate compare` on the same items.

    Returns:
        A line for each row that is not drawn.

    Raises:
        UserError: when no row has a recall, for rows of several comparisons, and as :func:`figure.check` does.
    """
    rows, notes = lines.once(rows)
    shown = [row for row in rows if row.get("recall")]
    if not shown:
        raise UserError("no recall was measured: compare with recall=4, say, on a task whose answers are generated")
    if len(found := lines.cells(shown)) > 1:
        raise UserError(f"the rows are of {len(found)} comparisons: choose one of them with --where task=NAME, say")
    notes += [f"{row['spec']}: no recall was measured, not drawn" for row in rows if not row.get("recall")]
    layers = sorted({int(layer) for row in shown for layer in row["recall"]})
    cells = np.array([[row["recall"].get(str(layer), np.nan) for layer in layers] for row in shown])
    with figure.drawing(out, 1.7 + 0.34 * len(shown)) as page:
        axis = page.subplots()
        image = axis.imshow(100 * cells, cmap="viridis", aspect="auto", interpolation="nearest", vmin=0, vmax=100)
        axis.grid(False)
        axis.set_yticks(range(len(shown)), [row["spec"] for row in shown])
        at = range(0, len(layers), max(1, len(layers) // 16))
        axis.set_xticks(list(at), [str(layers[index]) for index in at])
        axis.set_xlabel("layer")
        page.colorbar(image, ax=axis, fraction=0.03, pad=0.02, label="recall, %")
        words = f"{lines.place(shown[0], shown)} · {lines.circumstances(shown)}"
        if items := shown[0]["run"].get("recall"):
            words += f", recall of the first {items}"
        figure.title(page, "Share of exact attention that the tokens hold that a decode step reads", words)
    return notes

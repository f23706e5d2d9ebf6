"""The loss of a training run by its tokens, as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foveate.errors import UserError
from foveate.lab.report.plots import figure


def losses(rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Draws the training loss and, where it was measured, the held-out loss, from the rows of a run's log.

    Raises `UserError` if no row has a loss, or without matplotlib.
    """
    trained = [row for row in rows if "loss" in row]
    if not trained:
        raise UserError(f"{out}: the run's log has no loss yet, so there is nothing to draw")
    tokens = {row["step"]: row["tokens"] for row in trained}
    held_out = [row for row in rows if "held_out" in row and row["step"] in tokens]
    with figure.drawing(out, 4.4, 7.0) as drawn:
        axis = drawn.subplots()
        axis.plot(
            [row["tokens"] for row in trained], [row["loss"] for row in trained], color="#0072B2", label="training"
        )
        if held_out:
            x, y = [tokens[row["step"]] for row in held_out], [row["held_out"] for row in held_out]
            axis.plot(x, y, "o", color="#D55E00", label="held-out text")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}M")
        axis.set_xlabel("tokens")
        axis.set_ylabel("loss, nats a token")
        axis.legend()

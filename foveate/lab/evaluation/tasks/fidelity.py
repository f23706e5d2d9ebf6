"""How closely a method follows dense attention, token by token, on the items of another task.

Answers are right or wrong, and at hundreds of items their difference from dense has an interval of several points. The
distributions of the tokens say more: every method is led along dense attention's own answers, and at each token
its prediction is compared with dense attention's. What a method costs shows long before an answer changes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from foveate.errors import UserError
from foveate.lab.evaluation.metrics import Aggregate, Values
from foveate.lab.evaluation.tasks.base import Item, Output, Task


def _per_token(key: str, scale: float) -> Aggregate:
    def aggregate(values: Values) -> np.ndarray:
        return scale * values[key].sum(axis=-1) / values["tokens"].sum(axis=-1)

    return aggregate


@dataclasses.dataclass(frozen=True)
class Fidelity(Task):
    """Agreement with dense attention along its answers to another task. Score: tokens with the same choice, percent.

    Raises `UserError` for a task that scores given texts instead of asking for answers.
    """

    name = "fidelity"
    splits = ()
    metrics = {"agreement": _per_token("agreed", 100.0), "kl": _per_token("divergence", 1.0)}
    main = "agreement"
    follows_dense_answers = True

    of: Task = dataclasses.field(kw_only=True)

    def __post_init__(self) -> None:
        if "max_new_tokens" not in self.of.settings():
            raise UserError(f"--fidelity is for tasks that ask for answers, and '{self.of.name}' scores given texts")
        object.__setattr__(self, "split", self.of.split)

    @property
    def own_data(self) -> Path | None:  # type: ignore[override]
        return self.of.own_data

    @property
    def length(self) -> int:
        return self.of.length  # type: ignore[attr-defined]

    def settings(self) -> dict[str, Any]:
        return {"of": self.of.name, **self.of.settings()}

    def arguments(self) -> list[str]:
        return [*self.of.arguments(), "--fidelity"]

    def reads(self, data: Path, out: Path) -> bool:
        return self.of.reads(data, out)

    def files(self, data: Path) -> list[Path]:
        return self.of.files(data)

    def items(self, data: Path, tokenizer: Any, limit: int, seed: int) -> list[Item]:
        return self.of.items(data, tokenizer, limit, seed)

    def grade(self, item: Item, output: Output) -> dict[str, float]:
        divergence = float(f"{output.divergence:.4g}")  # below its own error in half precision
        return {"agreed": float(output.agreed), "divergence": divergence, "tokens": float(output.tokens)}

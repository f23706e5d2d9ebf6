"""Which rows of training are open: hold, release, and recall as the measure of both.

In a *hold* every row is open: all tokens are retained, so that attention learns to find what is far away, and scores
learn what it looks for. In a *release* ever fewer rows are; in the others scores alone decide
(`foveate.hybrids.layers.LearnedEviction.opened`). `STAYS` of them are open to the end, since a dropped token tells
scores nothing. By the clock both last a share of the run. With a bound on recall the hold ends when the model recalls
from beyond its windows, and the release goes on only while it still does: scores learn nothing from a model that does
not look back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foveate.hybrids.layers.lte import STAYS
from foveate.hybrids.training.sparsity import SparsitySettings

READINGS = 2
"""Readings in a row above the bound that end a hold."""
MEASURED = ("needles", "recall")
"""Sources whose far answers are the recall of a model; the worse of the two counts."""


class Opening:
    """The share of rows that are open, step by step: 1 in the hold, less and less in a release, then `STAYS`.

    Args:
        settings: `hold` and `release`, shares of the run; `recall`, the bound in percent, None: by the clock. With a
            bound, `hold` is the longest that the model may take.
        steps: of the run.
    """

    def __init__(self, settings: SparsitySettings, steps: int):
        self.bound = settings.recall
        self.longest = settings.held(steps)
        self.length = round((settings.hold + settings.release) * steps) - self.longest
        self.held, self.released = 0, 0
        self.holding = self.longest > 0
        self.waiting = False
        """Whether the release waits because recall fell below the bound."""
        self.recall = 0.0
        """The last reading, in percent."""
        self._passed = 0

    @property
    def over(self) -> bool:
        """Whether hold and release are."""
        return not self.holding and self.released == self.length

    @property
    def share(self) -> float:
        """Of the rows, how many are open in the next step."""
        if self.holding:
            return 1.0
        return STAYS + (1 - STAYS) * (self.length - self.released) / (self.length + 1) if self.length else 0.0

    @property
    def failed(self) -> bool:
        """Whether the longest hold is over and recall never passed the bound."""
        return self.holding and self.held >= self.longest

    def step(self) -> None:
        """Ends a step."""
        if self.holding:
            self.held += 1
            self.holding = self.bound is not None or self.held < self.longest
        elif not self.waiting:
            self.released = min(self.released + 1, self.length)

    @property
    def missed(self) -> str | None:
        """What a run that is over, with a bound, has not reached; None if nothing."""
        if self.failed:
            return (
                f"in {self.held:,} steps of sparsity.hold far recall was not above sparsity.recall ({self.bound:g} %) "
                f"on {READINGS} readings in a row: the model has not learned to look back, and the run ends here "
                "without a model. Try another seed, a longer hold, or a higher optim.answers"
            )
        if self.bound is not None and not self.over:
            return f"the release is not over: {self.share:.0%} of the rows are still open"
        if self.bound is not None and not self._passed:
            return f"at the end far recall is {self.recall:.0f} %; sparsity.recall asks for {self.bound:g} %"
        return None

    def read(self, recall: float) -> str | None:
        """Takes a reading of recall, in percent, of open rows until the release is over; returns what to say of it.

        `READINGS` in a row above the bound end the hold. Below the bound the release waits until one is above it.
        """
        self.recall, before = recall, self.waiting
        self._passed = self._passed + 1 if recall >= self.bound else 0
        if self.holding:
            self.holding = self._passed < READINGS
            return None if self.holding else f"far recall is {recall:.0f} %; the hold ends, the release begins"
        self.waiting = not self.over and not self._passed
        if self.waiting == before:
            return None
        return f"far recall is {recall:.0f} %; the release {'waits' if self.waiting else 'goes on'}"

    def state(self) -> dict[str, Any]:
        """JSON values from which `load` goes on."""
        return {name: getattr(self, name) for name in ("held", "released", "holding", "waiting", "recall", "_passed")}

    def load(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def far_recall(answered: Mapping[str, Mapping[str, Mapping[str, float]]]) -> float:
    """The percentage of far answers that are right, by the worse of needles and pairs; see `Probes.measure`."""
    return min(answered[kind]["far"]["right"] for kind in MEASURED if "far" in answered.get(kind, {}))

"""The choice of a method for a model: Kascade with a calibration that is known for its weights, else pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from foveate.calibration import known, say_once
from foveate.methods.base import About, Method, register
from foveate.methods.kascade import Kascade
from foveate.methods.pages import Pages


@register
class Auto(Method):
    """Becomes ``kascade`` where a calibration for its settings is kept, or comes with foveate, for the model's weights;
    else ``pages``. It says which, and why.

    Raises:
        ValueError: for layers of no model in particular.
    """

    name: ClassVar[str] = "auto"
    about: ClassVar[About] = About("foveate")

    def chosen_for(self, facts: Mapping[str, Any]) -> tuple[Method, str]:
        """The method, and why it was chosen, in words that begin with its name.

        Args:
            facts: of the model, as :meth:`foveate.calibration.Calibration.check_model` takes.
        """
        found, others = known(facts), []
        for one in found.calibrations:
            method = Kascade(calibration=one.source)
            if not (differing := method.differing(one)):
                return method, f"kascade, with calibration {one.source!r}, which {one.origin} for these weights"
            others.append(f"calibration {one.source!r} is for another {' and '.join(differing)} than kascade's")
        why = "; ".join([*others, *found.obstacles])
        return Pages(), f"pages, because {why or 'no calibration is known for these weights (foveate calibrate)'}"

    def for_model(self, facts: Callable[[], Mapping[str, Any]]) -> Method:
        method, why = self.chosen_for(facts())
        say_once(f"auto: {why}")
        return method

    def for_layer(self, layer: int, num_layers: int, among: Sequence[int] | None = None) -> Method:
        raise ValueError("auto chooses by a model's weights, and these are of none: name a method")

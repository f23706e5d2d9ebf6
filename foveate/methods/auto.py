"""The choice of a method for a model: Kascade if a calibration is known for the model's weights, else pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from foveate.calibration import known, say_once
from foveate.methods.base import About, Method, register
from foveate.methods.kascade import Kascade
from foveate.methods.pages import Pages

SHARE = 0.2
"""The share of the keys that ``kascade`` reads when `auto` chose it. With the paper's share, a tenth, answers of
hundreds of tokens lose points (docs/guide/choose.md)."""


@register
class Auto(Method):
    """Becomes ``kascade``, with a fifth of the keys, if a calibration for its settings is kept, or comes with foveate,
    for the model's weights; else ``pages``. A message names the chosen method and the reason.

    Raises:
        ValueError: when a layer is made without a model.
    """

    name: ClassVar[str] = "auto"
    about: ClassVar[About] = About("foveate")

    def chosen_for(self, facts: Mapping[str, Any]) -> tuple[Method, str]:
        """The chosen method, and a text that begins with its name and gives the reason.

        Args:
            facts: facts of the model, as :meth:`foveate.calibration.Calibration.check_model` takes them. They are empty
                within another method, which is made before its model is known.
        """
        found, others = known(facts), []
        for one in found.calibrations:
            method = Kascade(calibration=one.source, top_k=SHARE)
            if not (differing := method.differing(one)):
                why = f"calibration {one.source!r}, which {one.origin} for these weights"
                return method, f"kascade, with {SHARE:.0%} of the keys and {why}"
            others.append(f"calibration {one.source!r} is for another {' and '.join(differing)} than kascade's")
        none = "no calibration is known for these weights (foveate calibrate)"
        none = none if facts else "within another method no calibration is looked for"
        return Pages(), f"pages, because {'; '.join([*others, *found.obstacles]) or none}"

    def for_model(self, facts: Callable[[], Mapping[str, Any]]) -> Method:
        method, why = self.chosen_for(facts())
        say_once(f"auto: {why}")
        return method

    def for_layer(self, layer: int, num_layers: int, among: Sequence[int] | None = None) -> Method:
        raise ValueError("auto chooses by a model's weights, and these are of none: name a method")

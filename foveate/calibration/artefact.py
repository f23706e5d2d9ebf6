"""What a calibration found, in one JSON file that people can read: anchors, head maps, and what they were chosen by."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foveate.errors import FoveateWarning
from foveate.io import infile, outfile
from foveate.io.json_text import parse_json

KIND, SCHEMA = "foveate calibration", 1
SHIPPED, _SHIPPED_AS = Path(__file__).parent.parent / "calibrations", "shipped:"
KEPT_AS = "kept:"
_RELATIVE, _ABSOLUTE = 2**-8, 2**-20  # of two number formats of one checkpoint's weights
_LARGEST, _SLACK = sys.float_info.max, 1e-3
_FOUND = {"similarity": 1.0, "mean_similarity": 1.0, "coverage": 1.0, "importance": 2.0, "divergence": _LARGEST}
"""The largest value of each measurement by which anchors were chosen; no value is below 0."""
_AGAIN = "`foveate calibrate --model DIR` makes one for this model"


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Anchor layers and head maps for one model.

    `model` holds the facts that :func:`check_model` compares. `settings` holds the settings of Kascade for which the
    anchors were chosen; older files have none. `found` holds the measurements by which they were chosen, for people and
    pictures. `source` is the file that the calibration was read from.
    """

    model: Mapping[str, Any]
    anchors: tuple[int, ...]
    heads: Mapping[str, list[int]]
    """For each layer that reads an anchor's choice: for each of its KV heads, the anchor's KV head that it reads."""
    found: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str = dataclasses.field(default="", compare=False)

    def check_model(self, facts: Mapping[str, Any]) -> None:
        """Raises `ValueError` if the calibration was made for another model than the one that `facts` describe.

        Args:
            facts: as `model`; the weights of a layer are compared where both have them.
        """
        check_facts(self.model, facts, f"calibration {self.source!r}", _AGAIN)

    @property
    def origin(self) -> str:
        """How foveate has come to it, after "which"."""
        return "comes with foveate" if self.source.startswith(_SHIPPED_AS) else "`foveate calibrate` has kept"

    def check_layers(self, layers: int) -> None:
        """Raises `ValueError` if this was made for a model of another depth."""
        _check_fact(self.model, "layers", layers, f"calibration {self.source!r}", _AGAIN)

    def write(self, path: Path) -> None:
        """Writes the file in one step. Raises `ValueError` if it cannot be written."""
        outfile.write(path, self.text().encode())

    def text(self) -> str:
        """The file's content: one line for each number, list or row of a matrix."""
        values = {"kind": KIND, "schema": SCHEMA, "anchors": list(self.anchors), "heads": dict(self.heads)}
        values |= {"settings": dict(self.settings)} if self.settings else {}
        return _pretty({**values, "model": dict(self.model), "found": dict(self.found)}, 0) + "\n"


def check_facts(model: Mapping[str, Any], facts: Mapping[str, Any], what: str, again: str) -> None:
    """Raises `ValueError` if `facts` are of another model than `model`; the weights of a layer where both have them.

    Warns, once for each artefact, where `model` has no weights.

    Args:
        what: the artefact that was made for `model`, in words.
        again: how to make one for the model that `facts` are of.
    """
    for key in ("model_type", "layers", "heads", "kv_heads", "head_dim"):
        _check_fact(model, key, facts.get(key), what, again)
    if not any(model.get("weights") or ()):
        say_once(f"{what} holds no weights: whether it was made for this model is known by the shape alone")
    for ours, theirs in zip(model.get("weights") or [], facts.get("weights") or []):
        pairs = zip(ours, theirs) if ours and theirs else ()
        if not all(math.isclose(a, b, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE) for a, b in pairs):
            raise ValueError(f"{what} is for another model of the same shape: its weights differ; {again}")


@functools.cache
def say_once(text: str) -> None:
    """Warns, once for each text."""
    warnings.warn(text, FoveateWarning, stacklevel=5)


def _check_fact(model: Mapping[str, Any], key: str, value: Any, what: str, again: str) -> None:
    if model.get(key) != value:
        raise ValueError(f"{what} is for a model with {key} {model.get(key)!r}, and this one has {value!r}; {again}")


def kept_folder() -> Path:
    """Where `foveate calibrate` keeps what it finds: a folder of the user's caches, which need not be there."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "foveate", "calibrations")


def load(path: Path | str) -> Calibration:
    """Reads a calibration: a file, ``shipped:NAME``, one that comes with this package, or ``kept:NAME``, one in
    :func:`kept_folder`.

    Raises:
        ValueError: if there is no such file, or it is something else, damaged, or of another schema.
    """
    file, path = Path(path), str(path)
    for prefix, folder in ((_SHIPPED_AS, SHIPPED), (KEPT_AS, kept_folder())):
        if path.startswith(prefix):
            file = folder / f"{path.removeprefix(prefix)}.json"
    try:
        value = parse_json(infile.read(file, infile.MOST_OF_SETTINGS))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such calibration; {_AGAIN}") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: malformed JSON ({error}); {_AGAIN}") from None
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise ValueError(f"{path}: not a calibration of foveate; {_AGAIN}")
    if value.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema {value.get('schema')!r}, and this version reads {SCHEMA}; {_AGAIN}")
    try:
        found = Calibration(
            dict(value["model"]),
            tuple(value["anchors"]),
            {str(layer): list(heads) for layer, heads in value["heads"].items()},
            dict(value["found"]),
            dict(value.get("settings", {})),
            path,
        )
        layers, kv_heads = found.model["layers"], found.model["kv_heads"]
        readers = [int(layer) for layer in found.heads]
        whole = all(type(one) is int and 0 <= one < layers for one in (*found.anchors, *readers))
        rising = len(found.anchors) > 0 and list(found.anchors) == sorted(set(found.anchors))
        seen = found.found.get("layers") or range(layers)
        later = sorted(readers) == [one for one in seen if one > found.anchors[0] and one not in found.anchors]
        maps = all(
            len(heads) == kv_heads and all(type(head) is int and 0 <= head < kv_heads for head in heads)
            for heads in found.heads.values()
        )
        weights = all(_in(some or [], -_LARGEST) for some in found.model.get("weights", []))
        beyond = [
            f"'{name}' must hold numbers from 0 to {most:g}"
            for name, most in _FOUND.items()
            if not _in(found.found.get(name), 0.0, most)
        ]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: a damaged calibration ({type(error).__name__}: {error}); {_AGAIN}") from None
    if not (whole and rising and later and maps and weights):
        raise ValueError(f"{path}: a damaged calibration (its anchors, heads or weights are no model's); {_AGAIN}")
    if beyond:
        raise ValueError(f"{path}: a damaged calibration ({'; '.join(beyond)}); {_AGAIN}")
    return found


def shipped(facts: Mapping[str, Any]) -> Calibration | None:
    """The calibration in this package for the model that `facts` describe; None if there is none.

    Args:
        facts: see :meth:`Calibration.check_model`. Nothing is found unless they have the weights of each layer.
    """
    weights = facts.get("weights") or [None]
    for path in sorted(SHIPPED.glob("*.json")) if all(weights) else ():
        found = load(f"{_SHIPPED_AS}{path.stem}")
        theirs = found.model.get("weights") or [None]
        with contextlib.suppress(ValueError):
            if all(theirs) and len(theirs) == len(weights):
                found.check_model(facts)
                return found
    return None


def _in(value: Any, least: float, most: float = _LARGEST) -> bool:
    """Whether a number, or every number of a list, is in a range up to rounding. None passes."""
    if isinstance(value, list):
        return all(_in(one, least, most) for one in value)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value is None or (number and least - _SLACK <= value <= most + _SLACK)


def _pretty(value: Any, depth: int) -> str:
    """JSON with objects and lists of lists over several lines, and a list of numbers in one."""
    pad, end = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict) and value:
        lines = [f"{pad}{json.dumps(key)}: {_pretty(one, depth + 1)}" for key, one in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{end}}}"
    if isinstance(value, list) and any(isinstance(one, (list, dict)) for one in value):
        return "[\n" + ",\n".join(pad + _pretty(one, depth + 1) for one in value) + f"\n{end}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)

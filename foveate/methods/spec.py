"""Methods by name and by spec, the string ``name:setting=value,...``, in which rows of results record them."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from foveate.calibration.kept import SHAPE
from foveate.io import infile
from foveate.io.json_text import parse_json
from foveate.methods._declared import check_class
from foveate.methods._earlier import written_now
from foveate.methods._settings import spelled_value
from foveate.methods.base import REGISTRY, Method

COMPOSED = "composed"
"""Name of the method that a spec ``A+B`` stands for."""


def names() -> list[str]:
    """The names of registered methods, sorted; without `auto`, which stands for another method."""
    return sorted(REGISTRY.keys() - {"auto"})


def get(name: str) -> type[Method]:
    """The class of a method.

    Raises:
        ValueError: when the name is unknown (the error names the nearest name), or the class is no dataclass.
    """
    found = REGISTRY.get(name)
    if found is None:
        for cls in _below(Method):
            if cls.__dict__.get("name") == name:
                raise ValueError(f"{cls.__name__} is not registered as {name!r}: write @register above it")
        raise ValueError(f"unknown method {name!r}{_nearest(name, names())}; known are {', '.join(names())}")
    check_class(found, Method)
    return found


def _below(cls: type[Method]) -> Iterator[type[Method]]:
    """All subclasses."""
    for one in cls.__subclasses__():
        yield one
        yield from _below(one)


SETTING, SETTING_SCHEMA = "foveate_setting", 2
"""Kind and version of the files that `foveate tune` writes; such a file names a method."""
_MADE_FOR = "made_for"
"""Attribute of a method that comes from files of `foveate tune`, or has parts that do: for each file its spec, and the
architecture for which it was made."""
_FIELDS = {
    "kind": str,
    "schema": int,
    "method": str,
    "architecture": dict,
    "objective": str,
    "max_loss": int | float,
    "measured": dict,
}


def make(method: str | Method, **settings: Any) -> Method:
    """A method from its name, its spec string or a file of `foveate tune`, or a copy of a method with other settings.

    Settings may be NumPy numbers.

    Raises:
        ValueError: for an unknown method or setting (the error names the nearest) or a value out of range.
    """
    settings = {key: value.item() if isinstance(value, np.generic) else value for key, value in settings.items()}
    if isinstance(method, Method):
        check_class(type(method), Method)
        settings = _known(type(method), settings)
        return keep_made_for(method._changed(**settings), method) if settings else method
    if not isinstance(method, str):
        raise ValueError(f"method must be a name, a spec string or a Method, not {type(method).__name__}")
    path = method.strip()
    try:
        cls, given, architecture = _read(method)
        made = cls(**(given | _known(cls, settings)))
    except ValueError as error:  # of a file whose method is none
        named = path in str(error) or not path.endswith(".json") or ":" in path
        raise error if named else ValueError(f"{path}: {error}") from None
    if architecture is not None:
        vars(made)[_MADE_FOR] = [*vars(made).get(_MADE_FOR, ()), (made.spec, architecture)]
    return made


def keep_made_for(method: Method, part: Method) -> Method:
    """The method, for which :func:`check_made_for` then also checks the files that ``part`` comes from."""
    if files := vars(part).get(_MADE_FOR):
        vars(method)[_MADE_FOR] = [*vars(method).get(_MADE_FOR, ()), *files]
    return method


def check_made_for(method: Method, facts: Mapping[str, Any]) -> None:
    """Raise ValueError if a method, or a part of it, comes from a file of `foveate tune` for a model of another shape.

    Args:
        facts: facts of the model, such as its number of ``layers``.
    """
    for spec, architecture in vars(method).get(_MADE_FOR, ()):
        for name in SHAPE:
            there, here = architecture.get(name), facts.get(name)
            if there is not None and here is not None and there != here:
                raise ValueError(
                    f"{spec} was found by foveate tune for a model of {name} {there}, and this one has {here}; "
                    "search anew, or name the method itself"
                )


def parse(spec: str) -> Method:
    """A method from ``name`` or ``name:setting=value,...``; inverse of :attr:`Method.spec`."""
    return make(spec)


def spelled(spec: str) -> str:
    """A spec in the order of :attr:`Method.spec` and without defaults. A file that it names need not exist.

    Raises:
        ValueError: for an unknown method or setting (the error names the nearest).
    """
    cls, given, _ = _read(spec)
    return cls._spell(given)


def respelled(spec: str) -> str:
    """The present form of a spec of an earlier version; any other spec unchanged."""
    name, _, rest = spec.partition(":")
    try:
        return _written_now(name.strip(), _split(rest, spec)) or spec
    except ValueError:
        return spec


def _written_now(name: str, settings: Mapping[str, Any]) -> str:
    """The present spec of the method that had this name and these settings in an earlier version; empty if no method
    had them."""
    found = written_now(name, settings)
    if found is None:
        return ""
    cls = get(found[0])
    return cls._spell(found[1]) if found[1].keys() <= {field.name for field in dataclasses.fields(cls)} else ""


def _read(spec: str) -> tuple[type[Method], dict[str, Any], dict[str, Any] | None]:
    """The class and the settings that a spec gives, and the architecture if the spec names a file of `foveate tune`.

    The settings of a composition are the specs of its two methods.
    """
    architecture, both = None, split(spec)
    if len(both) == 1 and names_file(spec):
        spec, architecture = _of_file(Path(spec.strip()))
        both = split(spec)
    if len(both) > 2:
        raise ValueError(f"{spec!r}: a composition has two methods, one that evicts and one that selects: A+B")
    if len(both) == 2:
        return get(COMPOSED), dict(zip(("keeps", "reads"), both)), architecture
    name, _, rest = spec.partition(":")
    cls = get(name.strip())
    return cls, _known(cls, _split(rest, spec)), architecture


def names_file(spec: str) -> bool:
    """Whether a spec names a file of `foveate tune`."""
    return spec.strip().endswith(".json") and ":" not in spec


def _of_file(path: Path) -> tuple[str, dict[str, Any]]:
    """The spec in a file of `foveate tune`, and the architecture it was made for. Raises ValueError for another
    file."""
    try:
        once = functools.partial(_each_once, str(path))
        found = parse_json(
            infile.read(path, infile.MOST_OF_SETTINGS), object_pairs_hook=once, parse_constant=_no_number
        )
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path}: not a setting of foveate tune ({getattr(error, 'strerror', None) or error})"
        ) from None
    if not isinstance(found, dict) or found.get("kind") != SETTING:
        raise ValueError(f"{path}: not a setting of foveate tune")
    if found.get("schema") != SETTING_SCHEMA:
        raise ValueError(f"{path}: schema {found.get('schema')!r}, and this version reads {SETTING_SCHEMA}")
    if strange := sorted(found.keys() ^ _FIELDS.keys()):
        what = "unknown" if strange[0] in found else "missing"
        raise ValueError(f"{path}: {strange[0]!r} is {what}; a setting of foveate tune has {', '.join(_FIELDS)}")
    for name, kind in _FIELDS.items():
        if not isinstance(found[name], kind) or isinstance(found[name], bool):
            raise ValueError(f"{path}: {name!r} must not be {found[name]!r}")
    if any(map(names_file, split(found["method"]))):
        raise ValueError(f"{path}: names another file, {found['method']}, in the place of a method")
    return found["method"], found["architecture"]


def _no_number(text: str) -> None:
    raise json.JSONDecodeError(f"{text} is no number of JSON", text, 0)


def _split(text: str, spec: str) -> dict[str, Any]:
    pairs: list[tuple[str, Any]] = []
    for piece in _pieces(text):
        if not piece.strip():
            continue
        key, equals, value = piece.partition("=")
        if not equals:
            hint = f" (write lists in brackets: {pairs[-1][0]}=[...])" if pairs and piece.strip().isdigit() else ""
            raise ValueError(f"{spec!r}: expected setting=value, found {piece.strip()!r}{hint}")
        try:
            read = parse_json(value, object_pairs_hook=functools.partial(_each_once, spec))
        except json.JSONDecodeError:
            read = {"True": True, "False": False, "None": None}.get(value.strip(), value.strip())
        pairs.append((key.strip(), read))
    return _each_once(spec, pairs)


def split(spec: str) -> list[str]:
    """The specs that + signs join; a list of one if there is none. A + joins specs only if a name follows it."""
    return [one.strip() for one in _pieces(spec, r"\+(?=\s*[A-Za-z_][\w-]*\s*(?:[:+]|$))")]


def _pieces(text: str, sign: str = ",") -> Iterator[str]:
    """The parts of a text between signs, by default commas, that are outside quotation marks and brackets."""
    start = depth = 0
    for found in re.finditer(rf"""("(?:\\.|[^"\\])*")|([\[{{])|([\]}}])|({sign})""", text):
        depth += 1 if found[2] else -1 if found[3] else 0
        if found[4] and depth <= 0:
            yield text[start : found.start()]
            start = found.end()
    yield text[start:]


def _each_once(spec: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The settings of a spec, or a JSON object in a setting, as a dict. Raises ValueError if one is given twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(
                f"{spec!r}: {key} is given twice, as {spelled_value(found[key])} and as {spelled_value(value)}"
            )
        found[key] = value
    return found


def _known(cls: type[Method], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, unchanged. Raises ValueError for a setting that the class does not have."""
    known = [field.name for field in dataclasses.fields(cls)]
    for key in settings:
        if key not in known:
            if now := _written_now(cls.name, settings):
                raise ValueError(f"{cls.name} has no setting {key!r} any more: write {now}")
            raise ValueError(
                f"{cls.name} has no setting {key!r}{_nearest(key, known)}; "
                + (f"it has {', '.join(known)}{cls._unknown}" if known else "it has none")
            )
    return dict(settings)


def _nearest(word: str, words: list[str]) -> str:
    near = difflib.get_close_matches(word, words, 1, 0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""

"""A method's settings: documented fields, checked when a method is made, and written as one string, the spec."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

Same = TypeVar("Same", bound="Settings")

MOST = 1 << 24
"""Largest whole number that a setting may be: more tokens than any cache holds."""
MOST_KEPT = 1 << 12
"""Largest value of a setting that takes memory whatever a cache holds, such as a window of queries or a page."""


def setting(default: Any, help: str) -> Any:
    """A documented field of a method, with its default and help text."""
    return dataclasses.field(default=default, metadata={"help": help})


def redefined(base: type[Settings], name: str, default: Any) -> Any:
    """A base class's field with another default."""
    return dataclasses.field(default=default, metadata=base.__dataclass_fields__[name].metadata)


@dataclass(frozen=True)
class Settings:
    """A frozen dataclass whose fields are the settings of a method."""

    name: ClassVar[str] = ""
    """Registered name."""
    _unknown: ClassVar[str] = ""
    """A text that is added to the error about a setting that the class does not have."""

    def __deepcopy__(self, memo):
        return self

    def _settings(self) -> dict[str, Any]:
        """See :func:`settings_of`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def spec(self) -> str:
        """The method as one string, which :func:`~foveate.methods.parse` reads. It holds only the settings that differ
        from their defaults."""
        return self._spell({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @classmethod
    def _spell(cls, settings: dict[str, Any]) -> str:
        changed = [
            f"{field.name}={spelled_value(settings[field.name])}"
            for field in dataclasses.fields(cls)
            if field.name in settings
            and spelled_value(settings[field.name]) != spelled_value(field.default)  # 1 is a number, 1.0 a share
        ]
        return cls.name + (":" + ",".join(changed) if changed else "")

    def _changed(self: Same, **settings: Any) -> Same:
        """See :func:`~foveate.methods.make`."""
        return dataclasses.replace(self, **settings)

    # Checks for subclasses

    def _check(self, name: str, allowed: bool, rule: str) -> None:
        if not allowed:
            raise ValueError(f"{self.name}: {name} must be {rule}, not {getattr(self, name)!r}")

    def _check_count(self, name: str, least: int = 0, most: int = MOST) -> None:
        value = getattr(self, name)
        self._check(name, _whole(value, least, most), f"an integer of at least {least}{_bound(value, most)}")

    def _check_budget(self, name: str, least: int = 1) -> None:
        value = getattr(self, name)
        share = isinstance(value, float) and 0.0 < value <= 1.0
        rule = f"an integer of at least {least}{_bound(value)} (a number) or a float in (0, 1] (a share)"
        self._check(name, share or _whole(value, least), rule)

    def _check_nested(self, name: str) -> None:
        """Check a list of whole numbers from 0, or a list of such lists, and store it as tuples. Raises ValueError."""
        value = getattr(self, name)
        lists = isinstance(value, list | tuple)
        rows = value if lists and value and all(isinstance(one, list | tuple) for one in value) else [value]
        ok = lists and all(type(one) is int and 0 <= one <= MOST for row in rows for one in row)
        self._check(name, ok, "a list of whole numbers from 0, or a list of such lists")
        object.__setattr__(self, name, tuple(value) if rows == [value] else tuple(map(tuple, value)))

    def _check_odd(self, name: str) -> None:
        value = getattr(self, name)
        self._check(name, _whole(value, 1) and value % 2 == 1, f"odd and positive{_bound(value)}")

    def _check_choice(self, name: str, *choices: str) -> None:
        self._check(name, getattr(self, name) in choices, "one of " + ", ".join(choices))


def _bound(value: Any, most: int = MOST) -> str:
    """The end of an error message about a number that is larger than ``most``; empty for other values."""
    return f" and at most {most:,}" if isinstance(value, int) and value > most else ""


def _whole(value: Any, least: int, most: int = MOST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def settings_of(method: Settings) -> dict[str, Any]:
    """A method's settings as JSON-able values.

    A method that holds other methods gives all their settings, too, so that a record stays true when a default changes.
    """
    return method._settings()


_NOT_TEXT = ("true", "false", "null", "NaN", "Infinity", "True", "False", "None")
"""Words that a spec reads as values of another kind, unless they are in quotation marks."""


def spelled_value(value: Any) -> str:
    bare = isinstance(value, str) and value.isidentifier() and value not in _NOT_TEXT
    return value if bare else json.dumps(value)

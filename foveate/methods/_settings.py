"""A method's settings: documented fields, checked when it is made, and spelled as one string."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

Same = TypeVar("Same", bound="Settings")


def setting(default: Any, help: str, later: bool = False, before: Any = None) -> Any:
    """A documented field of a method.

    `before`: the value that reproduces results recorded before this setting existed.
    `later`: the setting was added later; `before` is then the default unless given. :meth:`Settings.settings` leaves
    the setting out while it has that value, so that those results still count as this method's.
    """
    before = default if later and before is None else before
    return dataclasses.field(default=default, metadata={"help": help, "later": later, "before": before})


def redefined(base: type[Settings], name: str, default: Any) -> Any:
    """A base class's field with another default."""
    return dataclasses.field(default=default, metadata=base.__dataclass_fields__[name].metadata)


@dataclass(frozen=True)
class Settings:
    """A frozen dataclass whose fields are the settings of a method."""

    name: ClassVar[str] = ""
    """Registered name."""
    retired: ClassVar[Mapping[str, Any]] = {}
    """Removed settings that older rows record, each with the value under which it had no effect."""
    former_defaults: ClassVar[Mapping[str, Any]] = {}
    """Former values of defaults that have changed, which specs of older rows leave out; see
    :func:`~foveate.methods.restated`."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Former names of the method and of its settings, which specs and rows may still use, each with the present one."""

    def __deepcopy__(self, memo):
        return self

    def settings(self) -> dict[str, Any]:
        """The settings as JSON-able values, without those that came later and change nothing, see :func:`setting`."""
        values = {field: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            field.name: value
            for field, value in values.items()
            if not (field.metadata.get("later") and value == field.metadata["before"])
        }

    @functools.cached_property
    def spec(self) -> str:
        """The method in one string, which :func:`~foveate.methods.parse` reads: only settings that differ from the
        defaults."""
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

    def changed(self: Same, **settings: Any) -> Same:
        """The method with some settings replaced."""
        return dataclasses.replace(self, **settings)

    # Checks for subclasses

    def _check(self, name: str, allowed: bool, rule: str) -> None:
        if not allowed:
            raise ValueError(f"{self.name}: {name} must be {rule}, not {getattr(self, name)!r}")

    def _check_count(self, name: str, least: int = 0) -> None:
        value = getattr(self, name)
        ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
        self._check(name, ok, f"an integer of at least {least}")

    def _check_budget(self, name: str, least: int = 1) -> None:
        value = getattr(self, name)
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
        share = isinstance(value, float) and 0.0 < value <= 1.0
        self._check(name, whole or share, f"an integer of at least {least} (a number) or a float in (0, 1] (a share)")

    def _check_odd(self, name: str) -> None:
        value = getattr(self, name)
        odd = isinstance(value, int) and not isinstance(value, bool) and value > 0 and value % 2 == 1
        self._check(name, odd, "odd and positive")

    def _check_choice(self, name: str, *choices: str) -> None:
        self._check(name, getattr(self, name) in choices, "one of " + ", ".join(choices))


def spelled_value(value: Any) -> str:
    return value if isinstance(value, str) and value.isidentifier() else json.dumps(value)

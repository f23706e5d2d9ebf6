"""What the settings of training share: fields with their help, and checks that name a setting."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from foveate.errors import UserError


def setting(default: Any, text: str) -> Any:
    """A dataclass's field with its help; a `default` that can be called makes a new value each time."""
    made = {"default_factory": default} if callable(default) else {"default": default}
    return field(**made, metadata={"help": text})


def require(right: bool, name: str, allowed: str, value: Any) -> None:
    """Raises `UserError` unless a setting's value is right."""
    if not right:
        raise UserError(f"{name} must be {allowed}, got {value}")

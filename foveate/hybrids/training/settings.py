"""A setting of training: a field with its help."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def setting(default: Any, text: str) -> Any:
    """A dataclass's field with its help; a `default` that can be called makes a new value each time."""
    made = {"default_factory": default} if callable(default) else {"default": default}
    return field(**made, metadata={"help": text})

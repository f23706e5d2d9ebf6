"""The evaluation tasks by name. A module in this folder that registers a task is found by itself."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from typing import Any, TypeVar

from foveate.errors import UserError, unknown
from foveate.lab.evaluation.tasks.base import Item, Output, Task

__all__ = ["Item", "Output", "Task", "get", "names", "parse", "register"]

_TASKS: dict[str, type[Task]] = {}
T = TypeVar("T", bound=type[Task])


def register(task: T) -> T:
    """Class decorator: makes a task, as a frozen dataclass, known by its `name`.

    Raises ValueError if the name is taken.
    """
    if task.name in _TASKS:
        raise ValueError(f"task '{task.name}' is registered twice")
    _TASKS[task.name] = task if "__dataclass_params__" in vars(task) else dataclasses.dataclass(frozen=True)(task)
    return _TASKS[task.name]


def names() -> list[str]:
    """The names of all tasks, sorted."""
    _load()
    return sorted(_TASKS)


def get(name: str) -> type[Task]:
    """The task of this name. Raises `UserError` naming the nearest one if there is none."""
    _load()
    if name not in _TASKS:
        raise unknown("task", name, names())
    return _TASKS[name]


def parse(spec: str, **settings: Any) -> Task:
    """A task from `"name"` or `"name:key=value,..."`; `settings` that are None are left out, others must not repeat.

    Raises `UserError` for an unknown task, setting or split (naming the nearest), or a value of the wrong kind.
    """
    name, _, rest = spec.partition(":")
    task = get(name.strip())
    fields = {field.name: field for field in dataclasses.fields(task)}
    given = {key: value for key, value in settings.items() if value is not None}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise UserError(f"task '{name}': '{part}' is not of the form key=value")
        if key in given:
            raise UserError(f"task '{name}': {key} is given twice")
        given[key] = value
    for key, value in given.items():
        if key not in fields:
            raise unknown("setting", key, fields, f"task '{name}'")
        kind = type(fields[key].default)
        try:
            given[key] = kind(value)
        except ValueError:
            raise UserError(f"task '{name}': {key} must be of type {kind.__name__}, got '{value}'") from None
    return task(**given)


@functools.cache
def _load() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")

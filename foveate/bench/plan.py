"""What a bench measures: its options, declared once for code and for the command line."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from foveate.results.errors import UserError, check_seed

if TYPE_CHECKING:
    from foveate.methods import Method

DTYPES = ("bfloat16", "float16", "float32")
Row = dict[str, Any]
Say = Callable[[str], None]
"""Receives progress, line by line."""
Keep = Callable[[list[Row]], None]
"""Receives rows as soon as they are complete."""

_OPTION = "option"
Own = TypeVar("Own", bound="Plan")


class Option(NamedTuple):
    """How the command line offers a field of a plan, and which of its values are allowed."""

    flag: str
    """Without dashes."""
    help: str
    least: float | None = None
    choices: Sequence[str] = ()
    only: Sequence[str] = ()
    """The choices of the command that use the field, where several share the plan; empty: all of them."""
    parser: Callable[[str], Any] | None = None


def option(
    default: Any,
    help: str,
    *,
    flag: str = "",
    least: float | None = None,
    choices: Sequence[str] = (),
    only: Sequence[str] = (),
    parser: Callable[[str], Any] | None = None,
) -> Any:
    """A field of a plan that is an option of its command.

    Args:
        default: its value if it is not given; ``...`` for an option that has to be.
        help: what it is, for the help of the command.
        flag: its name there; by default that of the field.
        least: the least value that is allowed. A field with several values must have one, and each is checked.
        choices: the values that are allowed.
        only: see :class:`Option`.
        parser: converts the text of the option, where the type of the field does not say how.
    """
    about = Option(flag, help, least, choices, only, parser)
    given = {} if default is ... else {"default": default}
    return dataclasses.field(**given, metadata={_OPTION: about})


def seed() -> Any:
    return option(0, "Seed of the inputs.")


def device() -> Any:
    return option("cuda", "cuda or cpu.", choices=("cuda", "cpu"))


def dtype(default: str, choices: Sequence[str] = DTYPES) -> Any:
    return option(default, f"{', '.join(choices[:-1])} or {choices[-1]}.", choices=choices)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure. Fields that are made by :func:`option` are options; others are for code alone."""

    bench: ClassVar[str]
    """Name of the command."""

    @classmethod
    def options(cls) -> dict[str, Option]:
        """The options by the names of their fields."""
        found = {field.name: field.metadata[_OPTION] for field in dataclasses.fields(cls) if _OPTION in field.metadata}
        return {name: about._replace(flag=about.flag or name.replace("_", "-")) for name, about in found.items()}

    @classmethod
    def of(cls: type[Own], given: Mapping[str, Any], **more: Any) -> Own:
        """The plan that options give, by their flags; those that are None or of other plans are ignored.

        Args:
            more: fields of the plan.
        """
        values = {name: given.get(about.flag) for name, about in cls.options().items()}
        return cls(**{name: value for name, value in values.items() if value is not None}, **more)

    def check(self) -> None:
        """Raise UserError that names an option, its value, and what is allowed."""
        for name, about in self.options().items():
            value = getattr(self, name)
            if value is None:
                continue
            several = not isinstance(value, str) and isinstance(value, Sequence)
            if about.least is not None:
                least = min(value, default="none") if several else value
                if least == "none" or least < about.least:
                    raise UserError(f"{about.flag} must be at least {about.least}, not {least}")
            if about.choices:
                _check_choices(about, value, several)
        for spec in getattr(self, "methods", ()):
            parsed(spec)
        check_seed(getattr(self, "seed", 0))
        if str(getattr(self, "device", "")).startswith("cuda"):
            _check_cuda()

    def check_multiple(self, name: str, of: str) -> None:
        """Raise UserError unless one number is a multiple of another."""
        if getattr(self, name) % getattr(self, of):
            flags = {field: about.flag for field, about in self.options().items()}
            number, base = getattr(self, name), getattr(self, of)
            raise UserError(f"{flags[name]} must be a multiple of {flags[of]}, {base}, not {number}")

    def specs(self) -> list[str]:
        """The methods as they are spelled out, `dense` first and each once."""
        return list(dict.fromkeys(["dense", *(parsed(spec).spec for spec in self.methods)]))

    def values(self, *names: str) -> dict[str, Any]:
        """Some of its fields, by their names."""
        return {name: getattr(self, name) for name in names}

    def without(self, *names: str) -> dict[str, Any]:
        """All of its fields but some, by their names."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in names}

    def words(self) -> Iterator[tuple[str, Any]]:
        """The options of the command that makes the rows: flags and values, folders shortened to their last names."""
        if hasattr(self, "level"):
            yield "level", self.level
        for name, about in self.options().items():
            value = getattr(self, name)
            folder = isinstance(value, Path) or (name == "model" and Path(value).is_dir())
            yield about.flag, Path(value).resolve().name if folder else value

    def command(self) -> str:
        """The command line that makes the rows."""
        parts = [f"foveate bench {self.bench}"]
        for flag, value in self.words():
            if isinstance(value, bool):
                parts += [f"--{flag}"] * value
            elif value is not None:
                several = value if isinstance(value, (list, tuple)) else (value,)
                parts += [f"--{flag} {shlex.quote(str(one))}" for one in several]
        return " ".join(parts)


def parsed(spec: str) -> Method:
    """The method of a spec. Raises UserError for one that cannot be."""
    from foveate.methods import parse

    try:
        return parse(spec)
    except ValueError as error:
        raise UserError(str(error)) from None


def _check_choices(about: Option, value: Any, several: bool) -> None:
    choices = ", ".join(about.choices)
    if several:
        strange = [one for one in value if one not in about.choices]
        if strange or not value:
            raise UserError(f"{about.flag} must be among {choices}, not {', '.join(strange) or 'none'}")
    elif value not in about.choices:
        allowed = " or ".join(about.choices) if len(about.choices) == 2 else f"one of {choices}"
        raise UserError(f"{about.flag} must be {allowed}, not '{value}'")


def _check_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError("no CUDA device is here; --device cpu runs the references, at small sizes")

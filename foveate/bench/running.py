"""How a command of `foveate bench` takes its options from plans, and how rows are kept, written and shown."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from foveate.bench.plan import Keep, Option, Plan, Row, Say
from foveate.results.errors import UserError, unknown
from foveate.results.outfile import announce

Run = Callable[[Any, Say, Keep], list[Row]]
"""Gives the rows of a plan."""
Given = Mapping[str, Any]
"""Values of options by their flags; None for what was not given."""
Out = Annotated[
    Path | None,
    typer.Option(
        help="File for the rows (JSON Lines), those of other cases stay in it.", show_default=False, callback=announce
    ),
]
_REPEATED = " May be repeated."


class Choice(NamedTuple):
    """An option that says what a command measures, such as a level, and the plan of each choice."""

    flag: str
    help: str
    default: str | tuple[str, ...]
    """A tuple where several may be chosen."""
    plans: Mapping[str, type[Plan]]

    def check(self, given: Given) -> None:
        """Raise UserError for an unknown choice, or an option that has no effect with the choices made."""
        chosen = given[self.flag] if isinstance(given[self.flag], list) else [given[self.flag]]
        for name in chosen:
            if name not in self.plans:
                raise unknown(self.flag, name, self.plans)
        offers = _offers(self.plans)
        for flag, owners in offers.items():
            if given[flag] is not None and not owners.keys() & set(chosen):
                particular = {other: of.keys() for other, of in offers.items() if of.keys() < self.plans.keys()}
                own = ", ".join(f"--{other}" for other, of in particular.items() if of & set(chosen))
                made = f"--{self.flag} {' and '.join(chosen)}"
                raise UserError(f"--{flag} does nothing with {made}; of its own it has {own}")


class _Offer(NamedTuple):
    """A field of a plan as an option."""

    default: Any
    kind: Any
    about: Option


def command(app: typer.Typer, name: str, offered: type[Plan] | Choice) -> Callable[[Callable[..., None]], None]:
    """Make a command of a function, which gets the values of the options by their flags, and the file for the rows.

    Its docstring is the help. Options that not all plans of a choice have say of which they are.
    """
    choice = offered if isinstance(offered, Choice) else None
    plans = choice.plans if choice else {name: offered}
    parameters = [_parameter(owners, len(plans)) for owners in _offers(plans).values()]
    if choice:
        kind = str if isinstance(choice.default, str) else Sequence[str]
        own = _Offer(choice.default, kind, Option(choice.flag, choice.help))
        parameters.insert(0, _parameter({name: own}, 1))
    parameters.append(inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Out))

    def register(work: Callable[[Given, Path | None], None]) -> None:
        def run(out: Path | None, **values: Any) -> None:
            given = {name.replace("_", "-"): value for name, value in values.items()}
            if choice:
                choice.check(given)
            work(given, out)

        run.__signature__ = inspect.Signature(parameters)
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        app.command(name, help=inspect.getdoc(work))(run)

    return register


def measure(out: Path | None, *runs: tuple[Run, Plan], markdown: Callable[[list[Row]], str] | None = None) -> None:
    """Run plans of one bench, write their rows as they come, and show them.

    An interrupted run keeps what it has measured.

    Args:
        out: file for the rows, or None.
        runs: what gives the rows of a plan, with the plan.
        markdown: gives the table to print; without it rows are shown as a table for the terminal.

    Raises:
        UserError: before anything is measured, if the file cannot be written or holds rows of another bench.
    """
    from foveate.report.terminal import console, speeds
    from foveate.results import measurements

    if out is not None:
        measurements.check_out(out, runs[0][1].bench)
    notes = console(stderr=True)
    say = functools.partial(notes.print, style="dim", markup=False)
    keep = functools.partial(measurements.write, out) if out is not None else lambda rows: None
    rows = [row for run, plan in runs for row in run(plan, say, keep)]
    if not rows:
        return  # of several processes, only the first has rows
    if markdown is not None:
        typer.echo(markdown(rows))
    else:
        console().print(speeds(rows))


def _offers(plans: Mapping[str, type[Plan]]) -> dict[str, dict[str, _Offer]]:
    """What each flag is in the plans that have it, by the choices that they are the plans of."""
    found: dict[str, dict[str, _Offer]] = {}
    for choice, plan in plans.items():
        kinds = typing.get_type_hints(plan)
        for name, about in plan.options().items():
            if not about.only or choice in about.only:
                found.setdefault(about.flag, {})[choice] = _Offer(getattr(plan, name, ...), kinds[name], about)
    return found


def _parameter(owners: Mapping[str, _Offer], plans: int) -> inspect.Parameter:
    """An option of the command line; one that not all plans have alike is None unless it is given."""
    default, kind, about = next(iter(owners.values()))
    words, shown = about.help, True
    if len(owners) < plans:
        words = f"{words.removesuffix('.')} ({', '.join(owners)})."
    if len(owners) < plans or len({offer.default for offer in owners.values()}) > 1:
        default, shown = None, _defaults(owners)
    parts = typing.get_args(kind)
    if type(None) in parts or about.parser:  # the parser says what it makes of a text
        kind, parts = parts[0], typing.get_args(parts[0])
    if several := typing.get_origin(kind) is Sequence:
        kind, words = list[parts[0]], words + _REPEATED
    flag = f"--{about.flag}"
    if kind is bool and shown:
        flag = f"{flag}/--no-{about.flag}"
    option = typer.Option(flag, help=words, show_default=shown, parser=about.parser)
    return inspect.Parameter(
        about.flag.replace("-", "_"),
        inspect.Parameter.KEYWORD_ONLY,
        default=list(default) if several and isinstance(default, tuple) else default,
        annotation=Annotated[kind | None if default is None else kind, option],
    )


def _defaults(owners: Mapping[str, _Offer]) -> str | bool:
    """The defaults of the plans in words; False where there are none to show."""
    words: dict[str, list[str]] = {}
    for choice, (default, _, about) in owners.items():
        if default is not None and default is not False:
            several = default if isinstance(default, tuple) else (default,)
            text = f"--{about.flag}" if default is True else ", ".join(map(str, several))
            words.setdefault(text, []).append(choice)
    first, *others = words or [""]
    return "; ".join([first, *(f"with {' and '.join(words[text])} {text}" for text in others)]) or False

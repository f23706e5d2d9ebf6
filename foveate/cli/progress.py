"""How far a run is: a progress bar on a terminal, lines elsewhere; and what is said where it is interrupted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import typer

INTERRUPTED = 130  # the exit code of a command that the user has interrupted


class Progress:
    """A progress bar on a terminal; elsewhere what is said stands on lines of its own."""

    _told = -1

    def __init__(self, console: Any, total: int):
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._console = console
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        columns += [TextColumn("left"), TimeRemainingColumn()]
        self._bar = Bar(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("loading", total=total)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    @property
    def on_terminal(self) -> bool:
        """Whether the bar is seen."""
        return self._console.is_terminal

    def show(self, step: int, steps: int, line: str) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=step, total=steps, description=line)

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, style="dim", markup=False, soft_wrap=True)

    def answered(self, method: str, items: int) -> None:
        """Count ``items`` more answers of a method. Without a terminal, print a line at each tenth of the total."""
        (task,) = self._bar.tasks
        done = task.completed + items
        self._tenths(done, task.total, method, f"{done:,} of {task.total:,} answers, the last by {method}")

    def at(self, done: int, of: int) -> None:
        """Show that ``done`` steps of a calibration's ``of`` steps are done: prompts read, answers compared."""
        self._tenths(done, of, "calibrating", f"calibrating: {done:,} of at most {of:,} steps done")

    def _tenths(self, done: float, of: float, line: str, words: str) -> None:
        self.show(done, of, line)
        before, self._told = self._told, int(10 * done // of)
        if not self.on_terminal and self._told > before:
            self.say(words)


def sayer(console: Any) -> Callable[[str], None]:
    """A function that prints a line that a user should know."""
    return lambda text: console.print(text, style="dim", markup=False, soft_wrap=True)


@contextlib.contextmanager
def resumable(say: Callable[[str], None], kept: str) -> Iterator[None]:
    """A run that an interruption does not lose; `kept` says where its results so far are."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted; {kept}, the same command goes on from there")
        raise typer.Exit(INTERRUPTED) from None

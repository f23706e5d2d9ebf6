"""How far a run is: a progress bar on a terminal, lines elsewhere."""

from __future__ import annotations

from typing import Any


class Progress:
    """A progress bar on a terminal; elsewhere what is said stands on lines of its own."""

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

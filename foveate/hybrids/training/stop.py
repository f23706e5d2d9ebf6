"""When a run ends early: after its minutes, or at a signal."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any


class Stop:
    """Whether a run is to end early: its minutes are over, or it got a signal."""

    def __init__(self, minutes: float | None):
        self._until = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self.signal: int | None = None
        """The number of the signal that it got."""

    @property
    def asked(self) -> bool:
        return self.signal is not None or time.monotonic() >= self._until

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """SIGTERM and the first SIGINT end the run after its step; a second SIGINT ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: Any) -> None:
            if self.signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = number

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

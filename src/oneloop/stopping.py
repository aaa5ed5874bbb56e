"""Reasons to stop a run before its end that leave time to save: a signal to any of its ranks, and a budget of hours."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from oneloop import watchdog

EXIT_CODE = 75
"""Exit code of a rank that has saved and stopped before the end: EX_TEMPFAIL of sysexits.h, run it again."""
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
SAME_SIGNAL_SECONDS = 3.0
"""Signals this close together are one: a scheduler sends it to all processes, and a launcher passes it on."""


class Stopped(SystemExit):
    """The run has saved its state and ends; its code is `EXIT_CODE`."""

    def __init__(self, message: str):
        super().__init__(EXIT_CODE)
        self.message = message

    def __str__(self) -> str:
        return self.message


class Requests:
    """Listens for reasons to stop, from `listen` to `close`; the main thread asks for them at step boundaries."""

    def __init__(self, rank: int, max_hours: float | None):
        self.rank = rank
        self.deadline = None if max_hours is None else _process_start() + max_hours * 3600
        self.max_hours = max_hours
        self.reason = ""
        """Why this rank should stop; empty while it should not."""
        self._received = 0.0
        self._previous: dict = {}
        # Without ranks to start, `accelerate launch` passes no signal on: it ends, and leaves its process behind.
        self._launcher = os.getppid() if "ACCELERATE_MIXED_PRECISION" in os.environ else None

    def listen(self) -> None:
        """Take the signals over. Python only lets the main thread do that; elsewhere they keep their meaning."""
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}

    def close(self) -> None:
        """Give the signals their former meaning back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous = {}

    def ignore(self) -> None:
        """Take no more signals: the state is saved, and the process about to end by itself."""
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)
        self._previous = {}

    def check(self, seconds_to_save: float, seconds_a_step: float) -> str:
        """The reason to stop now, if any. seconds: what a further step, and saving after it, would take."""
        if not self.reason and self.deadline is not None:
            if time.time() + seconds_to_save + seconds_a_step > self.deadline:
                self.reason = f"max_hours {self.max_hours:g} are nearly over"
        if not self.reason and self._launcher is not None and os.getppid() != self._launcher:
            self.reason = "the launcher has ended"
        return self.reason

    def _handle(self, number: int, _frame) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if self._received and now - self._received > SAME_SIGNAL_SECONDS:
            _say(f"\nrank {self.rank}: second signal ({name}): stopping at once; the last saved state is intact\n")
            os._exit(128 + number)
        if not self._received:
            self._received = now
            watchdog.asked_to_stop()
            self.reason = f"rank {self.rank} received {name}"
            _say(f"\n{self.reason}: saving after this step, then stopping; a second signal stops at once\n")


def _say(text: str) -> None:
    # Not print: the handler may interrupt one, whose lock it would wait for.
    try:
        os.write(sys.__stderr__.fileno(), text.encode())
    except (OSError, ValueError, AttributeError):
        pass


def _process_start() -> float:
    import psutil

    return psutil.Process().create_time()

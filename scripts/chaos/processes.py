"""One start of a command with everything that it starts, and killing it: at a moment, or inside a save."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

POLL_SECONDS = 0.002
HALF_WRITTEN = re.compile(r"step-\d{8,}(\.partial|~\d+\.(removing|replaced))")
STATE = re.compile(r"step-(\d{8,})")


class Failure(Exception):
    """What ends the experiment at once: a run that fails or hangs by itself."""


# --- processes ------------------------------------------------------------------------------------------------------


class Start:
    """One start of the command, with everything that it starts."""

    def __init__(self, command: list[str], log: Path):
        self.log, self.began = log, time.monotonic()
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._known: set = set()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def resumed_step(self) -> int | None:
        """The step that the run says it goes on from."""
        steps = re.findall(r"^resume: .*step-(\d{8,}), step \d+ of ", self.text, flags=re.MULTILINE)
        return int(steps[-1]) if steps else None

    def family(self) -> list:
        """Everything that was started and lives: the launcher first."""
        import psutil

        with contextlib.suppress(psutil.Error):
            launcher = psutil.Process(self.process.pid)
            self._known |= {launcher, *launcher.children(recursive=True)}
        return sorted(filter(_lives, self._known), key=lambda one: (one.pid != self.process.pid, one.pid))

    def ranks(self) -> list[tuple[str, object]]:
        """(name, process) of each training process: what the launcher itself has started."""
        import psutil

        found = []
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    found.append((child.environ().get("LOCAL_RANK"), child))
        found = [item for item in found if item[0] is not None] or found[:1]  # a single one is given no number
        return sorted(((f"rank {number or 0}", child) for number, child in found), key=lambda item: item[0])

    def wait(self, seconds: float) -> None:
        """Until the command and all that it started are over. Raises Failure."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            self.family()
            if time.monotonic() > deadline:
                self.kill_all()
                raise Failure(f"not over after {seconds:.0f} s: see {self.log}")
            time.sleep(0.05)
        while left := self.family():
            if time.monotonic() > deadline:
                self.kill_all()
                raise Failure(f"{len(left)} processes outlived their launcher for {seconds:.0f} s: see {self.log}")
            time.sleep(0.05)

    def kill_all(self) -> None:
        while members := self.family():
            for member in members:
                _signal(member, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.01)


def _lives(process) -> bool:
    import psutil

    with contextlib.suppress(psutil.Error):
        # One that nobody waits for keeps its number when it is over.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _signal(process, number: int) -> None:
    import psutil

    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


# --- kills ----------------------------------------------------------------------------------------------------------


def half_written(states: Path) -> set[tuple[str, int]]:
    """(name, inode) of each state that is half written, half removed or half replaced."""
    with contextlib.suppress(OSError):
        return {(entry.name, entry.inode()) for entry in os.scandir(states) if HALF_WRITTEN.fullmatch(entry.name)}
    return set()


def newest_step(states: Path) -> int | None:
    """Step of the newest state with its full name."""
    with contextlib.suppress(OSError):
        matches = [STATE.fullmatch(entry.name) for entry in os.scandir(states) if entry.is_dir(follow_symlinks=False)]
        return max((int(match.group(1)) for match in matches if match), default=None)
    return None


def kill(start: Start, draw: random.Random, until=lambda: True) -> str | None:
    """SIGKILL one random rank, or everything; returns which, or None where `until` does not hold any more.

    All processes are halted while that is asked: a save of a small state is over within milliseconds.
    """
    family = start.family()
    for member in family:
        _signal(member, signal.SIGSTOP)
    try:
        if not until():
            return None
        ranks = start.ranks()
        if ranks and draw.random() < 0.5:
            which, victim = draw.choice(ranks)
            _signal(victim, signal.SIGKILL)
            return which
        start.kill_all()
        return "all"
    finally:
        for member in family:
            _signal(member, signal.SIGCONT)


def at_a_moment(start: Start, draw: random.Random, seconds: float) -> str | None:
    """Kill `seconds` after the start; None if the run is over before."""
    while start.process.poll() is None:
        if start.seconds >= seconds:
            return kill(start, draw)
        start.family()
        time.sleep(0.02)
    return None


def inside_a_save(start: Start, draw: random.Random, states: Path, save_seconds: float) -> str | None:
    """Kill in the middle of one of the next saves; None if the run is over before."""
    to_pass, seen = draw.randrange(3), half_written(states)  # what an earlier kill left is no save
    while start.process.poll() is None:
        if new := half_written(states) - seen:
            seen |= new
            to_pass -= 1
            if to_pass < 0:
                time.sleep(draw.uniform(0, save_seconds))
                which = kill(start, draw, until=lambda new=new: bool(half_written(states) & new))
                if which:
                    return which
        time.sleep(POLL_SECONDS)
    return None

"""The undisturbed run and rounds of killed ones, each compared with it."""

from __future__ import annotations

import math
import random
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from chaos.comparison import differences
from chaos.processes import POLL_SECONDS, Failure, Start, at_a_moment, half_written, inside_a_save, newest_step

LEFT_ALONE_SECONDS = 120
"""How long a run whose rank was killed may take to end by itself."""


@dataclass
class Kill:
    """One kill, and how the run went on."""

    number: int
    round: int
    seconds: float
    """After the start of the command."""
    which: str
    inside_save: bool
    """Whether a half-written state lay there once all was over."""
    newest_step: int | None
    """Step of the newest complete state at that moment."""
    resumed_step: int | None = None
    """Where the next start went on; None: from the beginning, or it was killed before it said so."""


class Experiment:
    """The undisturbed run, and rounds of killed ones."""

    def __init__(self, command: list[str], folder: Path, kills: int, inside: float, seed: int):
        self.command, self.folder, self.num_kills, self.draw = command, folder, kills, random.Random(seed)
        self.wanted_inside = math.ceil(kills * inside)
        self.share_inside = inside
        self.kills: list[Kill] = []
        self.problems: list[str] = []
        self.num_starts = self.num_rounds = 0
        self.running: Start | None = None
        self.seconds = self.save_seconds = 0.0

    def run(self) -> None:
        """Everything. Raises Failure."""
        whole = self.folder / "undisturbed"
        self._undisturbed(whole)
        idle_rounds = 0
        while len(self.kills) < self.num_kills and not self.problems:
            self.num_rounds += 1
            killed = self.folder / f"killed-{self.num_rounds}"
            before = len(self.kills)
            self._round(killed)
            differing = differences(whole, killed)
            self.problems += [f"round {self.num_rounds}: {text}" for text in differing]
            _say(f"round {self.num_rounds}: {len(self.kills) - before} kills, {len(differing)} differences")
            if not self.problems:
                shutil.rmtree(killed)  # this round's own
            idle_rounds = idle_rounds + 1 if len(self.kills) == before else 0
            if idle_rounds == 5:
                raise Failure("five rounds ended before they could be killed: train longer, or save more often")
        inside = sum(kill.inside_save for kill in self.kills)
        if inside < self.wanted_inside and not self.problems:
            self.problems.append(f"only {inside} kills fell into a save, {self.wanted_inside} were asked for")

    def _start(self, output_dir: Path) -> Start:
        self.num_starts += 1
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        log = logs / f"start-{self.num_starts:03d}.txt"
        self.running = Start([*self.command, "--output_dir", str(output_dir)], log)
        return self.running

    def _undisturbed(self, folder: Path) -> None:
        _say("undisturbed run")
        start, saves, since = self._start(folder), [], None
        while start.process.poll() is None:
            saving = bool(half_written(folder / "states"))
            if saving and since is None:
                since = time.monotonic()
            elif not saving and since is not None:
                saves.append(time.monotonic() - since)
                since = None
            time.sleep(POLL_SECONDS)
        self.seconds = start.seconds
        if start.process.returncode:
            raise Failure(f"the undisturbed run ended with exit code {start.process.returncode}: see {start.log}")
        start.wait(LEFT_ALONE_SECONDS)
        self.save_seconds = statistics.median(saves) if saves else 0.0
        _say(f"undisturbed run: {self.seconds:.1f} s, {len(saves)} saves of {1000 * self.save_seconds:.0f} ms seen")
        if not saves and self.wanted_inside:
            raise Failure("no save was seen in the undisturbed run: set --save_every, or --inside 0")

    def _round(self, folder: Path) -> None:
        """Start the command until it finishes, killing it as long as there are kills to be done."""
        states, last = folder / "states", None
        while True:
            found_before, start = half_written(states), self._start(folder)
            which, missing = None, self.num_kills - len(self.kills)
            if missing:
                still_inside = self.wanted_inside - sum(kill.inside_save for kill in self.kills)
                if still_inside >= missing or self.draw.random() < self.share_inside:
                    which = inside_a_save(start, self.draw, states, self.save_seconds)
                else:
                    which = at_a_moment(start, self.draw, self.draw.uniform(0, self.seconds))
            seconds, limit = start.seconds, LEFT_ALONE_SECONDS if which else 300 + 10 * self.seconds
            start.wait(limit)
            self._check_resumed(last, start, states, is_over=which is None)
            if which is None:
                if start.process.returncode:
                    raise Failure(f"a run ended with exit code {start.process.returncode} by itself: see {start.log}")
                return
            if start.process.returncode == 0:
                return  # it was killed when it had done all its work
            number = len(self.kills) + 1
            inside = bool(half_written(states) - found_before)
            last = Kill(number, self.num_rounds, seconds, which, inside, newest_step(states))
            self.kills.append(last)
            where = "inside a save" if last.inside_save else "elsewhere"
            _say(f"kill {number} of {self.num_kills}: {which} after {seconds:.1f} s, {where}; state {last.newest_step}")

    def _check_resumed(self, last: Kill | None, start: Start, states: Path, is_over: bool) -> None:
        """Take down where a start went on, which must be the newest complete state that the kill before it left."""
        if last is None:
            return
        last.resumed_step = start.resumed_step
        # One that was killed itself may not have come so far as to say it.
        if last.resumed_step != last.newest_step and (is_over or last.resumed_step is not None):
            found = "the beginning" if last.resumed_step is None else f"step {last.resumed_step}"
            self.problems.append(
                f"after kill {last.number} the run went on from {found}, and not from step {last.newest_step}"
            )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

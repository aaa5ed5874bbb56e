"""Contenders that take turns step by step on one device: seconds and peak memory of each, and how many steps fit.

The turns are `benchmarks.baton`'s. Memory is kept apart by what each contender allocates and frees in its own turns,
since the others' models stay on the device meanwhile.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from benchmarks import baton

from gpu_check import device as devices
from gpu_check.report import OutOfTime, Report, TooSmall

LEAST_STEPS = 10
"""Timed steps below which a median says too little."""
ASSUMED_SHARE = 0.4
"""Of the device's measured matrix rate that a training step is assumed to reach, to foresee how long it takes."""

USABLE_SHARE = 0.92
"""Of a device's memory: the rest is its context and what fragmentation costs."""


@dataclass(frozen=True)
class Rounds:
    """How many steps each contender does."""

    warm_up: int
    steps: int

    @property
    def total(self) -> int:
        return self.warm_up + self.steps


def rounds_that_fit(seconds: float, seconds_a_round: float, wanted: Rounds) -> Rounds:
    """The wanted rounds, or fewer, within `seconds`. Raises OutOfTime below `LEAST_STEPS` timed ones."""
    affordable = int(seconds / seconds_a_round)
    if affordable >= wanted.total:
        return wanted
    warm_up = min(wanted.warm_up, affordable // 4)
    if affordable - warm_up < LEAST_STEPS:
        raise OutOfTime(f"{seconds:.0f} s are left, a round takes about {seconds_a_round:.1f} s")
    return Rounds(warm_up, affordable - warm_up)


def check_memory(device: torch.device, num_contenders: int, held: float, highest: float) -> None:
    """Raise TooSmall where the device cannot keep what every contender holds between its turns and let one of them
    work. held: bytes between turns; highest: bytes of one at the highest point of a step."""
    total = devices.total_bytes(device)
    needed = (num_contenders - 1) * held + highest
    if total is not None and needed > USABLE_SHARE * total:
        raise TooSmall(f"{num_contenders} contenders need {needed / 2**30:.0f} GiB, there are {total / 2**30:.0f}")


@dataclass
class _Memory:
    held: int = 0
    """Bytes that this contender has allocated and not freed."""
    at_start: int = 0
    steps: int = 0
    peak: int = 0


@dataclass
class Result:
    """What a contest gave."""

    seconds: dict[str, list[float]]
    peaks: dict[str, int]
    """Most bytes a contender held during its timed steps."""
    failures: dict[str, str] = field(default_factory=dict)
    """Optional contenders that raised, and what."""

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, above: str, below: str) -> float:
        """Median over the rounds of one contender's time over another's."""
        return baton.ratio(self.seconds[above], self.seconds[below]).paired

    def doubt(self, copy: str, original: str) -> str:
        """Why ratios of this contest would say nothing; empty if they do: the A/A control."""
        control = baton.ratio(self.seconds[copy], self.seconds[original])
        return "" if baton.conclusive(control) else f"A/A control: {control}"

    def table(self) -> dict:
        """For the results file."""
        return {
            name: {
                "median_ms": round(1000 * statistics.median(values), 3),
                "fastest_ms": round(1000 * min(values), 3),
                "slowest_ms": round(1000 * max(values), 3),
                "peak_mib": round(self.peaks[name] / 2**20, 1),
                "steps": len(values),
            }
            for name, values in self.seconds.items()
        }


def hold(
    contenders: dict[str, Callable], rounds: Rounds, device: torch.device, optional: tuple[str, ...] = ()
) -> Result:
    """Alternate the contenders; each trains `rounds.total` steps and calls what it is given after each.

    A contender of `optional` that raises is left out of the result; what another raises is raised here.
    """
    books = {name: _Memory() for name in contenders}
    failures: dict[str, str] = {}

    def watched(name: str) -> Callable:
        book = books[name]

        def begin() -> None:
            devices.reset_peak(device)
            book.at_start = devices.allocated_bytes(device)

        def end() -> None:
            devices.synchronize(device)
            if book.steps >= rounds.warm_up:
                book.peak = max(book.peak, book.held + devices.peak_bytes(device) - book.at_start)
            book.held += devices.allocated_bytes(device) - book.at_start
            book.steps += 1

        def steps(step_done: Callable) -> None:
            def done() -> None:
                end()
                step_done()
                begin()

            begin()
            try:
                contenders[name](done)
            except Exception as error:
                if name not in optional:
                    raise
                failures[name] = f"{type(error).__name__}: {error}"
            while book.steps < rounds.total:  # it failed; the others go on, and wait for it in every round
                end()
                step_done()

        return steps

    watching = {name: watched(name) for name in contenders}
    seconds = baton.alternate(watching, rounds.steps, rounds.warm_up, devices.Clock(device))
    return Result(
        {name: values for name, values in seconds.items() if name not in failures},
        {name: book.peak for name, book in books.items() if name not in failures},
        failures,
    )


def record(report: Report, name: str, result: Result, rounds: Rounds, copy: str, original: str) -> None:
    """Put a contest's figures, its A/A control and its failures into the report."""
    control = baton.ratio(result.seconds[copy], result.seconds[original])
    found = {"contenders": result.table(), "warm_up": rounds.warm_up, "steps": rounds.steps}
    found["control"] = {"paired": round(control.paired, 4), "of_medians": round(control.of_medians, 4)}
    found["seconds"] = {name: [round(value, 6) for value in values] for name, values in result.seconds.items()}
    report.record(**{name: found})
    for contender, error in result.failures.items():
        report.note(f"{contender} failed and was left out: {error}")

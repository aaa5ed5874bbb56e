"""Times contenders against each other in one process: each does one step in turn, while the others stand still.

Separate processes are no base for a ratio on a shared machine: the same code, run twice, differs by a third. Contenders
that alternate step by step meet the same neighbours, the same clock rate and the same caches, so their ratio is
steady to a few percent, and a second copy of the baseline (the A/A control) says to how many.
"""

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

WARM_UP_STEPS = 8
"""Steps of each contender that are not counted: loading, first allocations, first calls of kernels."""
CONTROL_RANGE = (0.93, 1.07)
"""Ratio of two copies of the same code outside of which a run says nothing."""

Contender = Callable[[Callable[[], None]], None]
"""Trains, and calls what it is given at the end of each step."""


@dataclass
class _Turn:
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    done: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    seconds: list[float] = field(default_factory=list)
    failure: BaseException | None = None


def alternate(
    contenders: dict[str, Contender],
    num_steps: int,
    warm_up: int = WARM_UP_STEPS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds by `clock` of each of `num_steps` steps of each contender, after `warm_up` steps that are not counted.

    Each contender must do exactly `warm_up + num_steps` steps. The order changes from round to round, so that nobody
    always follows the same one. Raises what a contender raised.
    """
    turns = {name: _Turn() for name in contenders}

    def run(name: str) -> None:
        turn = turns[name]
        turn.go.acquire()
        started = clock()

        def step_done() -> None:
            nonlocal started
            turn.seconds.append(clock() - started)
            turn.done.release()
            turn.go.acquire()
            started = clock()

        try:
            contenders[name](step_done)
        except BaseException as error:  # raised again by the thread that waits for this one
            turn.failure = error
        turn.done.release()

    threads = {name: threading.Thread(target=run, args=(name,), daemon=True) for name in contenders}
    for thread in threads.values():
        thread.start()
    names = list(contenders)
    # One round more than there are steps: what a contender does after its last one is nobody's time.
    for number in range(warm_up + num_steps + 1):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            turns[name].go.release()
            turns[name].done.acquire()
            if turns[name].failure is not None:
                raise turns[name].failure
            expected = min(number + 1, warm_up + num_steps)
            assert len(turns[name].seconds) == expected, f"{name} did {len(turns[name].seconds)} steps"
    return {name: turn.seconds[warm_up:] for name, turn in turns.items()}


@dataclass(frozen=True)
class Ratio:
    """One contender's time over another's, in two ways; they differ where a machine was unsteady."""

    of_medians: float
    paired: float
    """Median over the rounds of the ratio within a round."""

    def __str__(self) -> str:
        return f"{self.paired:.3f} paired, {self.of_medians:.3f} of medians"


def ratio(above: list[float], below: list[float]) -> Ratio:
    """Compare two contenders of one `alternate`."""
    pairs = [a / b for a, b in zip(above, below, strict=True)]
    return Ratio(statistics.median(above) / statistics.median(below), statistics.median(pairs))


def conclusive(control: Ratio) -> bool:
    """Whether two copies of the same code came out alike enough for other ratios to mean something."""
    low, high = CONTROL_RANGE
    return low <= control.paired <= high and low <= control.of_medians <= high

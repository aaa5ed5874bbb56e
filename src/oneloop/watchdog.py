"""Notices that ranks wait for one that will not come, says which one that is and where it stands, and ends the run.

The backends have time limits too, but those end the ranks that wait, and blame them. Here every rank counts its
progress (`beat`), and a thread of its own tells the others, through the store that the process group was built with,
how far it is and where its main thread stands. Who is furthest behind when nothing has moved for a while is the one
that is waited for. The same thread looks after the processes of the machine's other ranks and of the launcher.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType

from oneloop import peers, standstill
from oneloop.standstill import Report

TIMEOUT = "ONELOOP_TIMEOUT_SECONDS"
"""Environment variable: seconds without progress anywhere after which ranks that wait for another one end the run."""

_DEFAULT_SECONDS = 3600.0  # the first rank may read or write a large model while the others wait
_BACKEND_EXTRA_SECONDS = 60.0  # a backend's own limit must not come first: it ends, and blames, the ranks that wait
_GRACE_SECONDS = 5.0  # in which the cause of an end may speak before those who only suffer from it
_STACKS_SHOWN = 8  # when all ranks wait for each other, so many show where

_beats = 0
_is_stopping = False
_num_watches = 0
_stand_in: int | None = None
_watch: _Watch | None = None


def timeout_seconds() -> float:
    """The limit of ONELOOP_TIMEOUT_SECONDS. Raises ValueError for what is no time."""
    text = os.environ.get(TIMEOUT) or str(_DEFAULT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < 1e8:
        raise ValueError(f"{TIMEOUT} is {text!r}: give a number of seconds above 0")
    return seconds


def backend_timeout() -> timedelta:
    """The limit for operations of the process groups: somewhat later than ours."""
    return timedelta(seconds=timeout_seconds() + _BACKEND_EXTRA_SECONDS)


def set_group_timeouts() -> None:
    """Give all process groups of this process the limit that the first one was made with; a backend makes further
    ones with a default of its own (torch 2.15: 30 minutes, 10 over NCCL)."""
    from torch.distributed import distributed_c10d

    if not distributed_c10d.is_initialized():
        return
    # Public since torch 2.15.
    set_timeout = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout
    for group in list(distributed_c10d._world.pg_map):
        set_timeout(backend_timeout(), group)


def beat() -> None:
    """Count progress. Called wherever work goes on piece by piece, the same on all ranks; costs nothing."""
    global _beats
    _beats += 1


def beats() -> int:
    """The progress counted so far."""
    return _beats


def catch_up(count: int) -> None:
    """Count progress up to `count`: of a rank that has done nothing because another one does it for both."""
    global _beats
    _beats = max(_beats, count)


@contextlib.contextmanager
def waiting_for(thread: int) -> Iterator[None]:
    """While the main thread only waits for another one of this process, that is where this rank stands."""
    global _stand_in
    _stand_in = thread
    try:
        yield
    finally:
        _stand_in = None


def _frame() -> FrameType | None:
    frames = sys._current_frames()
    return frames.get(_stand_in or 0) or frames.get(threading.main_thread().ident or 0)


def asked_to_stop() -> None:
    """This rank was told to stop and goes on to save: it must not, once another rank has failed."""
    global _is_stopping
    _is_stopping = True


def start() -> None:
    """Begin to watch; on all ranks, once the process group exists. A process alone has nobody to wait for."""
    global _watch, _num_watches
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    stop()
    seconds = timeout_seconds()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    # A connection of its own: a client of the store serves one call at a time, and the main thread's may block in it.
    store = distributed_c10d._get_default_store().clone()
    store.set_timeout(timedelta(seconds=_GRACE_SECONDS))
    _num_watches += 1  # a process may train several times, and a launcher start its ranks anew
    name = f"oneloop/watchdog/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{_num_watches}"
    _watch = _Watch(
        dist.PrefixStore(name, store),
        dist.get_rank(),
        dist.get_world_size(),
        seconds,
        os.getppid() if "LOCAL_RANK" in os.environ else None,
    )
    _watch.start()


def stop() -> None:
    """End the watch of this rank, if any, and let the others know that it has ended as it should."""
    _end_watch("ended")


def failed() -> None:
    """End the watch of this rank, if any, and let the others know that it is about to print why it ends."""
    _end_watch("failed")


def _end_watch(state: str) -> None:
    global _watch
    if _watch is not None:
        _watch.stop(state)
        _watch = None


def wait_for_cause() -> str:
    """After contact to another rank was lost: give it time to say why. Returns what is known of the cause, or ''."""
    until = time.monotonic() + _GRACE_SECONDS
    known = ""
    while time.monotonic() < until:
        time.sleep(0.2)
        known = (_watch.cause() if _watch is not None else "") or known
    return known


# --- the thread -------------------------------------------------------------------------------------------------------


class _Watch:
    """The thread of one rank, and what it knows of the others."""

    def __init__(self, store, rank: int, world_size: int, timeout: float, launcher: int | None):
        self.store, self.rank, self.world_size, self.timeout = store, rank, world_size, timeout
        self.launcher = launcher
        self.interval = min(5.0, timeout / 15)
        self.machine = peers.machine()
        self.beats, self.idle_seconds, self.standing_seconds = _beats, 0.0, 0.0
        self.stack: list[tuple[int, int]] = []
        self.state, self.number = "runs", 0
        self.publishing = threading.Lock()
        self.seen: dict[int, tuple[Report, float]] = {}
        """Newest report of each rank, and for how long it has been the newest."""
        self.met: set[int] = set()
        """Ranks that have reported at least once."""
        self.dead: list[int] = []
        self.peers = peers.Peers()
        self.thread = threading.Thread(target=self._run, name="oneloop-watchdog", daemon=True)

    def start(self) -> None:
        self._publish()
        self.thread.start()

    def stop(self, state: str) -> None:
        """Tell the others, and end the thread."""
        self._publish(state)
        self.peers.wake()
        self.thread.join(_GRACE_SECONDS)
        if not self.thread.is_alive():
            self.peers.close()
            faulthandler.cancel_dump_traceback_later()

    def cause(self) -> str:
        """Which ranks are known to have ended first."""
        spoken = [rank for rank, report in self._read().items() if report.state in ("failed", "hangs")]
        if spoken:
            return f"{_ranks(spoken)} ended first, with a message of its own."
        return f"{_ranks(self.dead)} died." if self.dead else ""

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            self._meet()
            # Short rounds until all the processes to look after are known.
            ended = self.peers.wait(self.interval if len(self.met) == self.world_size else min(0.2, self.interval))
            if ended is None:
                return
            if self.launcher is not None and os.getppid() != self.launcher:
                self._launcher_is_gone()
            for rank, pid, number in ended:
                self._peer_ended(rank, pid, number)
            if _is_stopping and (self.dead or self._someone_failed()):
                time.sleep(1)  # the launcher calls the first to end the root cause: let that be another one
                os._exit(1)
            now = time.monotonic()
            # No more than a round should take: a job that was suspended as a whole comes back after hours.
            passed, last = min(now - last, 2 * self.interval), now
            self._look(passed)

    def _look(self, passed: float) -> None:
        """One round: report, and when this rank has stood for some time, look at the others."""
        stack = standstill.signature(_frame())
        moved, self.beats = self.beats != _beats, _beats
        self.idle_seconds = 0.0 if moved else self.idle_seconds + passed
        self.standing_seconds = 0.0 if moved or stack != self.stack else self.standing_seconds + passed
        self.stack = stack
        self._publish()
        # A second net, that needs no Python: native code that keeps the interpreter's lock stops this thread, too.
        faulthandler.dump_traceback_later(self.timeout, file=2)
        if self.idle_seconds < self.timeout / 4:
            self.seen = {}
            return
        for rank, report in self._read().items():
            before, age = self.seen.get(rank, (report, 0.0))
            self.seen[rank] = (report, age + passed if report == before else 0.0)
        if len(self.seen) < self.world_size:
            return
        silent = {rank for rank, (_, age) in self.seen.items() if age > self.timeout / 2}
        reports = {rank: report for rank, (report, _) in self.seen.items()}
        culprits = standstill.blame(reports, silent, self.timeout)
        if culprits:
            self._end(reports, culprits)

    def _publish(self, state: str | None = None) -> None:
        with self.publishing:
            self.state = state or self.state
            self.number += 1
            report = Report(
                self.beats,
                self.idle_seconds,
                self.standing_seconds,
                *standstill.stands(_frame()),
                os.getpid(),
                self.machine,
                self.state,
                self.number,
            )
            with contextlib.suppress(RuntimeError):  # the store is gone: that is noticed elsewhere
                self.store.set(str(self.rank), json.dumps(dataclasses.asdict(report)))

    def _read(self) -> dict[int, Report]:
        """The newest reports of all ranks; none while there is a rank without one, or when the store is gone."""
        keys = [str(rank) for rank in range(self.world_size)]
        with contextlib.suppress(RuntimeError):
            if self.store.check(keys):
                return {rank: Report(**json.loads(text)) for rank, text in enumerate(self.store.multi_get(keys))}
        return {}

    def _meet(self) -> None:
        """Look after the processes of this machine's other ranks, as soon as they are known."""
        if len(self.met) == self.world_size:
            return
        for rank, report in self._read().items():
            self.met.add(rank)
            if rank != self.rank and report.machine == self.machine:
                self.peers.add(rank, report.pid)

    # --- ends ---

    def _end(self, reports: dict[int, Report], culprits: list[int]) -> None:
        """Say who is waited for and end this process. The launcher ends the others."""
        waiting = [rank for rank in reports if rank not in culprits]
        why = f"No progress for {self.timeout:g} s ({TIMEOUT}). "
        if waiting:
            why += f"{_ranks(waiting).capitalize()} waited at {reports[waiting[0]].place or 'an unknown place'}.\n"
        else:
            why += "All ranks wait, each in a collective operation that the others do not take part in.\n"
        if self.rank in culprits:
            turn, turns = (min(number, _STACKS_SHOWN) for number in (culprits.index(self.rank), len(culprits)))
            time.sleep(0.2 * turn)
            self._publish("hangs")
            if turn < _STACKS_SHOWN:
                _say(f"rank {self.rank} hangs", why + _main_stack())
            time.sleep(1 + 0.2 * (turns - turn))
            os._exit(1)
        speechless = set(culprits)
        until = time.monotonic() + 2 + 2 * self.interval  # they may look a round later
        while speechless and time.monotonic() < until:
            time.sleep(0.2)
            speechless -= {rank for rank, report in self._read().items() if report.state in ("hangs", "failed")}
        for rank in sorted(speechless) if self.rank == waiting[0] else ():
            _say(f"rank {rank} hangs", why + _of_speechless(reports[rank]))
            # Of the launcher's signals, a stopped process takes only the last, half a minute later.
            if rank in self.peers.ranks():
                with contextlib.suppress(OSError):
                    os.kill(reports[rank].pid, signal.SIGKILL)
        time.sleep(2)  # the launcher calls the first to end the root cause: let that be another one
        os._exit(1)

    def _launcher_is_gone(self) -> None:
        try:
            if os.environ["LOCAL_RANK"] == "0":
                _say("the launcher is gone", f"Process {self.launcher}, which had started the ranks, has ended.\n")
        finally:  # nobody may be left to read it
            os._exit(1)

    def _someone_failed(self) -> bool:
        return any(report.state in ("failed", "hangs") for report in self._read().values())

    def _peer_ended(self, rank: int, pid: int, number: int | None) -> None:
        """Speak for a rank of this machine that could not, on the first rank that is left there."""
        reports = self._read()
        if self.dead or self._someone_failed():
            return  # what follows a first end is no news
        if number in peers.ORDERLY or (rank in reports and reports[rank].state == "ended"):
            return
        self.dead.append(rank)
        if self.rank < min(self.peers.ranks(), default=self.world_size):
            _say(f"rank {rank} has died", peers.obituary(pid, number) + "\n")


def _of_speechless(report: Report) -> str:
    """What is said of a rank that is waited for and does not say itself where it stands."""
    if report.state != "runs":
        return "It has left the training, and the others have not.\n"
    return (
        f"Its process {report.pid} on {report.machine.split()[0]} does not answer: it is stopped, out of reach, or in "
        "native code, whose stack then stands above, under 'Timeout'. It was last seen at "
        f"{report.place or 'an unknown place'}.\n"
    )


def _main_stack() -> str:
    frame = _frame()
    return "Its main thread (most recent call last):\n" + "".join(traceback.format_stack(frame))


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _say(title: str, text: str) -> None:
    print(f"\n--- {title} ---\n{text}", file=sys.stderr, flush=True)

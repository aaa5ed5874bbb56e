"""Runs a function over pieces of work in several processes, in order, and no faster than the results are taken."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

_function: Callable | None = None  # what the processes of a pool run: inherited by forking, so it need not be pickled


def num_processes(asked: int | None) -> int:
    """How many processes share the work: `asked`, or one for each core that this process may use."""
    if sys.platform != "linux":
        return 1  # other systems cannot fork a process that has threads
    return asked or len(os.sched_getaffinity(0))


def in_order(function: Callable, pieces: Iterable, count: int, beat: Callable[[], None]) -> Iterator:
    """Yield `function(piece)` for each piece, in their order; computed by `count` processes, or here if that is 1.

    `beat` is called while results are waited for. Raises what `function` raises, and ValueError when a process dies.
    """
    if count == 1:
        for piece in pieces:
            beat()
            yield function(piece)
        return
    global _function
    _function = function
    waiting: deque[Future] = deque()
    with warnings.catch_warnings():
        # Python 3.12 warns that a process with threads forks; what the children run takes none of their locks.
        warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
        pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), _begin, (os.getpid(),))
        try:
            for piece in pieces:
                waiting.append(pool.submit(_run, piece))
                if len(waiting) > 2 * count:
                    yield _result(waiting.popleft(), beat)
            while waiting:
                yield _result(waiting.popleft(), beat)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            _function = None


def _result(future: Future, beat: Callable[[], None]):
    while not wait([future], timeout=1.0).done:
        beat()
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise ValueError(
            "dataset_num_proc: a process that tokenises was ended from outside, by the system for want of memory if "
            "nobody did it by hand (`dmesg` tells): lower dataset_num_proc"
        ) from error


def _begin(parent: int) -> None:
    """In a new process: end with the parent, use one core, and leave signals to the parent: terminals and schedulers
    send them to all processes."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    gc.freeze()  # else each collection would copy the parent's pages


def _run(piece):
    return _function(piece)

"""Computes pieces of work in processes of their own, ahead of who takes the results and in order.

The processes are forked once, as early as their owner likes: what is forked after a model was loaded keeps the old
content of every page that training writes to, which for optimizer states in host memory would be as much again.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_KILLED = (
    "dataset_num_proc: a process that tokenises was ended from outside, by the system for want of memory if nobody did "
    "it by hand (`dmesg` tells): lower dataset_num_proc or shuffle_buffer_size"
)


class Ended(Exception):
    """`take` was called after the last result."""


class Processes:
    """Processes that each answer one call after the other; where there is no forking, calls are answered here."""

    def __init__(self, function: Callable, count: int):
        self.function, self.is_open = function, True
        self.free: queue.SimpleQueue = queue.SimpleQueue()
        self.processes: list = []
        self.count = count
        self._ours: list = []
        if sys.platform != "linux":  # other systems cannot fork a process that has threads
            return
        context = multiprocessing.get_context("fork")
        for _ in range(count):
            ours, theirs = context.Pipe()
            self._ours.append(ours)
            arguments = (function, theirs, list(self._ours), os.getpid())
            process = context.Process(target=_serve, args=arguments, name="tokenise")
            with warnings.catch_warnings():
                # Python 3.12 warns that a process with threads forks; what the child runs takes none of their locks.
                warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
                process.start()
            theirs.close()
            self.processes.append(process)
            self.free.put((ours, process))
        # Before multiprocessing's own, which waits for its processes.
        atexit.register(self.close)

    def call(self, piece: Any) -> Any:
        """`function(piece)`, by a process that is free. Raises what it raises, and ValueError when a process dies."""
        if not self._ours:
            return self.function(piece)
        connection, process = self.free.get()
        try:
            connection.send(piece)
            # The end of the connection does not tell for certain: a process that another thread forked at the same
            # moment may hold the other end, too.
            while not connection.poll(1.0):
                if not process.is_alive() and not connection.poll():
                    raise EOFError
            result, error = connection.recv()
        except (EOFError, OSError) as death:
            raise ValueError(_KILLED) from death
        finally:
            self.free.put((connection, process))
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """End the processes, whatever they do."""
        self.is_open = False
        atexit.unregister(self.close)
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _serve(function: Callable, connection, others: list, parent: int) -> None:
    """What a process does: answers until nobody asks any more."""
    # A scheduler that asks a run to save and stop sends its signals to all processes; these have to go on until it is
    # done. They end with the parent, or when it closes its end.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        return
    for other in others:
        other.close()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    gc.freeze()  # what the parent had belongs to it, above all what lives on a device
    while True:
        try:
            piece = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (function(piece), None)
        except Exception as error:
            answer = (None, _portable(error))
        connection.send(answer)


def _portable(error: Exception) -> Exception:
    """The exception, or one that says the same if it may not be sent as it is: a library's own class may want other
    arguments than those it keeps."""
    text = "".join(traceback.format_exception(error))
    if type(error).__module__ != "builtins":
        return RuntimeError(text)
    error.add_note(f"in a process that tokenises:\n{text}")
    error.__cause__ = error.__context__ = None
    return error


class Ahead:
    """Results over a series of pieces, computed ahead; the pieces are made on a thread of this process."""

    def __init__(self, processes: Processes, pieces: Iterable, limit: int):
        """limit: pieces that are made and not taken."""
        self._processes, self._pieces = processes, pieces
        self._room, self._limit = threading.Semaphore(limit), limit
        self._results: queue.SimpleQueue[Future | None] = queue.SimpleQueue()
        self._callers = ThreadPoolExecutor(processes.count, thread_name_prefix="tokenise")
        self._is_closed = False
        self._maker = threading.Thread(target=self._make, name="read rows", daemon=True)
        self._maker.start()

    def _make(self) -> None:
        try:
            for piece in self._pieces:
                self._room.acquire()
                if self._is_closed:
                    return
                self._results.put(self._callers.submit(self._processes.call, piece))
        except BaseException as error:
            failed: Future = Future()
            failed.set_exception(error)
            self._results.put(failed)
        else:
            self._results.put(None)

    def allow(self, limit: int) -> None:
        """Let at least so many pieces be made and not taken."""
        while self._limit < limit:
            self._limit += 1
            self._room.release()

    def take(self, beat: Callable[[], None]) -> Any:
        """The next result; `beat` is called every second of waiting for it.

        Raises, in its turn, what the making or the computing of a piece raised, and Ended after the last one.
        """
        while True:
            try:
                future = self._results.get(timeout=1.0)
                break
            except queue.Empty:
                beat()
        if future is None:
            raise Ended
        self._room.release()
        while not futures.wait([future], timeout=1.0).done:
            beat()
        return future.result()

    def close(self) -> None:
        """End all that goes on, in the processes too."""
        self._is_closed = True
        self._room.release()
        self._processes.close()
        self._callers.shutdown(wait=True, cancel_futures=True)
        # It may be waiting for a network; then it ends with this process.
        self._maker.join(timeout=5.0)

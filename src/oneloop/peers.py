"""The processes of a machine's other ranks: noticed when they end, and spoken for when they could not speak.

A process that is killed says nothing, its launcher names the signal at the end of a stack of its own, and the other
ranks know only that a connection broke.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket

OUT_OF_MEMORY = (
    "What this run needs does not fit into the memory it may use: lower per_device_batch_size or max_length, start "
    "fewer processes on this machine, or take a file of accelerate_configs/ that shards or offloads more."
)

ORDERLY = (0, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that somebody sent to end a process, and 0, an exit: the process's own words, or its launcher's, explain."""


class Peers:
    """Processes to be told of when they end. Linux only; elsewhere none is ever told of."""

    def __init__(self):
        self.of_descriptor: dict[int, tuple[int, int]] = {}
        """A descriptor that becomes readable when the process ends: (rank, process id)."""
        self.poller = select.poll()
        self.wake_reader, self.wake_writer = os.pipe()
        self.poller.register(self.wake_reader, select.POLLIN)

    def add(self, rank: int, pid: int) -> None:
        """Look after a process, unless it or the means to do so are missing."""
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(pid)
                self.of_descriptor[descriptor] = (rank, pid)
                self.poller.register(descriptor, select.POLLIN)

    def wait(self, seconds: float) -> list[tuple[int, int, int | None]] | None:
        """Sleep until a process ends, at most so long: (rank, process id, signal as of `signal_of`) of those that
        have; None after `wake`."""
        ended = []
        for descriptor, _ in self.poller.poll(1000 * seconds):
            if descriptor == self.wake_reader:
                return None
            rank, pid = self.of_descriptor.pop(descriptor)
            ended.append((rank, pid, signal_of(pid)))
            self.poller.unregister(descriptor)
            os.close(descriptor)
        return ended

    def ranks(self) -> list[int]:
        """Ranks whose processes are looked after and have not ended."""
        return sorted(rank for rank, _ in self.of_descriptor.values())

    def wake(self) -> None:
        """Make `wait` return, from another thread."""
        os.write(self.wake_writer, b"x")

    def close(self) -> None:
        """Give the descriptors back."""
        for descriptor in (*self.of_descriptor, self.wake_reader, self.wake_writer):
            os.close(descriptor)


def signal_of(pid: int) -> int | None:
    """The signal that ended a process which its parent has not taken note of yet; 0: it exited; None: unknown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[-1]) & 0x7F if fields[0] == "Z" else None


def obituary(pid: int, number: int | None) -> str:
    """What is said of a process that ended without a word; number: as of `signal_of`."""
    memory = f"If nobody did that by hand, it was the system, for want of memory (`dmesg` tells). {OUT_OF_MEMORY}"
    if number is None:
        return f"Process {pid} ended without a word: it crashed, or signal 9 (SIGKILL) killed it. {memory}"
    name = f"signal {number} ({signal.Signals(number).name})"
    if number == signal.SIGKILL:
        return f"Process {pid} was killed by {name}. {memory}"
    return f"Process {pid} crashed with {name}; its stack stands above, if it could still print it."


def machine() -> str:
    """This machine and, where there is such a thing, its name space of process ids: where texts are equal, the same
    process has the same id."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()

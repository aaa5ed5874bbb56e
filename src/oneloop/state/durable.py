"""Files that are on the disk when they are done, not only in the system's cache."""

from __future__ import annotations

import errno
import hashlib
import os
import queue
import threading
from pathlib import Path

_FLUSH_SECONDS = 0.02


class HashingFile:
    """A new file that is hashed and brought to the disk by two other threads while it is written."""

    def __init__(self, path: Path):
        self._file = open(path, "wb", buffering=0)
        self._digest = hashlib.sha256()
        self._blocks: queue.Queue = queue.Queue(maxsize=4)
        self._is_written = threading.Event()
        self._error: OSError | None = None
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._hash, self._flush)]
        self.sha256 = ""

    def __enter__(self) -> HashingFile:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind, *_) -> None:
        self._blocks.put(None)
        self._is_written.set()
        for thread in self._threads:
            thread.join()
        try:
            if kind is None:
                os.fsync(self._file.fileno())
                if self._error is not None:
                    raise self._error
                self.sha256 = self._digest.hexdigest()
        finally:
            self._file.close()

    def write(self, block: memoryview) -> None:
        self._blocks.put(block)
        while block:
            block = block[self._file.write(block) :]

    def _hash(self) -> None:
        while (block := self._blocks.get()) is not None:
            self._digest.update(block)

    def _flush(self) -> None:
        """Left to the end, all of it would wait in the system's cache until the last byte is hashed."""
        try:
            while not self._is_written.wait(_FLUSH_SECONDS):
                os.fdatasync(self._file.fileno())
        except OSError as error:  # the system tells it once
            self._error = error
        except AttributeError:  # not on this system
            pass


def write_through(path: Path, data: bytes) -> None:
    """Write a small file to the disk, not only to the system's cache. Raises OSError."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk: a file's own fsync does not (fsync(2)). Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network disks know no such thing for folders
            raise
    finally:
        os.close(descriptor)

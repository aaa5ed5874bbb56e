"""Files that are on the disk when they are done, not only in the system's cache."""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from pathlib import Path


class HashingFile:
    """A new file whose content is hashed by another thread while it is written, and is on the disk when it closes."""

    def __init__(self, path: Path):
        self._file = open(path, "wb", buffering=0)
        self._digest = hashlib.sha256()
        self._blocks: queue.Queue = queue.Queue(maxsize=4)
        self._thread = threading.Thread(target=self._hash, daemon=True)
        self.sha256 = ""

    def __enter__(self) -> HashingFile:
        self._thread.start()
        return self

    def __exit__(self, kind, *_) -> None:
        self._blocks.put(None)
        self._thread.join()
        try:
            if kind is None:
                os.fsync(self._file.fileno())
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
    finally:
        os.close(descriptor)

"""Prepared rows on disk: flat arrays that training reads row by row, so that memory does not grow with the data.

An entry is a folder named by the key of everything that its content depends on. It appears by a rename, whole and
flushed to disk, and is never changed again; what was interrupted lies under another name and is removed by the next
that prepares the same. For each column of the rows there are two files: `NAME.values`, the rows' arrays one after the
other, and `NAME.ends`, where each ends (int64, in elements). `meta.json` says what is in them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

FORMAT_VERSION = 1
META = "meta.json"
REJECTED = "rejected.jsonl"
TEXT = "text"  # what stands for a dtype where a column holds texts, as UTF-8


class Entry:
    """An entry that is there, opened for reading. A row is read from its place when it is asked for."""

    def __init__(self, folder: Path):
        """Raises ValueError, naming the file, for an entry that is not what was written."""
        self.folder = folder
        try:
            self.meta: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
            self._dtypes = self.meta["columns"]
            self._files = {name: os.open(folder / f"{name}.values", os.O_RDONLY) for name in self._dtypes}
            self._ends = {name: self._map(folder / f"{name}.ends") for name in self._dtypes}
            for name, dtype in self._dtypes.items():
                size = os.fstat(self._files[name]).st_size
                last = int(self._ends[name][-1]) if len(self._ends[name]) else 0
                if len(self._ends[name]) != len(self) or size != last * _item(dtype).itemsize:
                    raise ValueError(f"{name} has not the size that {META} gives")
        except (OSError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise ValueError(
                    "datasets: more files are open than the system allows, some ten for each source: raise the limit "
                    "(`ulimit -n`), or let fewer sources have more files each, as a folder or glob"
                ) from error
            raise damaged(folder, error) from error

    @staticmethod
    def _map(path: Path) -> np.ndarray:
        return np.memmap(path, np.int64, "r") if path.stat().st_size else np.empty(0, np.int64)

    def __len__(self) -> int:
        return self.meta["num_rows"]

    def __getitem__(self, number: int) -> dict[str, np.ndarray | str]:
        """The row `number` as {column: array (T,) or text}."""
        row = {}
        for name, dtype in self._dtypes.items():
            start, end = self._bounds(name, number)
            item = _item(dtype)
            # Not mapped: pages of a map count as memory of the process that has touched them.
            raw = os.pread(self._files[name], (end - start) * item.itemsize, start * item.itemsize)
            row[name] = raw.decode("utf-8") if dtype == TEXT else np.frombuffer(raw, item)
        return row

    def _bounds(self, name: str, number: int) -> tuple[int, int]:
        ends = self._ends[name]
        return int(ends[number - 1]) if number else 0, int(ends[number])

    def lengths_of(self, numbers: np.ndarray) -> np.ndarray:
        """Tokens of the rows `numbers` (n,): (n,) int64."""
        ends = self._ends["input_ids"]
        return ends[numbers] - np.where(numbers > 0, ends[numbers - 1], 0)

    def column(self, name: str) -> np.ndarray:
        """All values of a column that has one for each row, mapped: (len(self),)."""
        path = self.folder / f"{name}.values"
        return np.memmap(path, _item(self._dtypes[name]), "r") if path.stat().st_size else np.empty(0, np.int64)


def damaged(folder: Path, error: Exception) -> ValueError:
    """What is said of an entry that is not what was written."""
    return ValueError(
        f"data_cache_dir: {folder} is damaged ({error}): remove that folder and run again, to prepare it anew"
    )


def _item(dtype: str) -> np.dtype:
    return np.dtype("uint8" if dtype == TEXT else dtype)


class Writer:
    """Writes one entry; nothing of it is visible under its name before `publish`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._values: dict[str, Any] = {}
        self._ends: dict[str, Any] = {}
        self._totals: dict[str, int] = {}
        self._dtypes: dict[str, str] = {}
        self._rejected = None
        self.num_rows = 0

    def add(self, columns: dict[str, tuple[str, bytes, np.ndarray]], num_rows: int) -> None:
        """Append rows. columns: name -> (dtype, the rows' values one after the other, their lengths (num_rows,))."""
        if not num_rows:
            return
        if not self._dtypes:
            for name, (dtype, _, _) in columns.items():
                self._dtypes[name], self._totals[name] = dtype, 0
                self._values[name] = (self.folder / f"{name}.values").open("wb")
                self._ends[name] = (self.folder / f"{name}.ends").open("wb")
        if set(columns) != set(self._dtypes):
            raise ValueError(f"the recipe's encode gives rows of columns {sorted(self._dtypes)} and {sorted(columns)}")
        for name, (dtype, values, lengths) in columns.items():
            if dtype != self._dtypes[name]:
                raise ValueError(f"the recipe's encode gives {name} as {self._dtypes[name]} and as {dtype}")
            ends = self._totals[name] + np.cumsum(lengths, dtype=np.int64)
            self._values[name].write(values)
            self._ends[name].write(ends.tobytes())
            self._totals[name] = int(ends[-1])
        self.num_rows += num_rows

    def reject(self, line: dict) -> None:
        """Keep a row that cannot be used, as one line of JSON."""
        if self._rejected is None:
            self._rejected = (self.folder / REJECTED).open("w", encoding="utf-8")
        self._rejected.write(json.dumps(line, ensure_ascii=True, default=str) + "\n")

    def publish(self, target: Path, meta: dict[str, Any]) -> None:
        """Flush everything and give the folder its name; one that is there by now is as good, and kept."""
        files = [*self._values.values(), *self._ends.values(), *([self._rejected] if self._rejected else [])]
        meta = meta | {"format_version": FORMAT_VERSION, "columns": self._dtypes, "num_rows": self.num_rows}
        described = (self.folder / META).open("w", encoding="utf-8")
        described.write(json.dumps(meta, indent=1) + "\n")
        for file in [*files, described]:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        _sync(self.folder)
        if (target / META).is_file():
            shutil.rmtree(self.folder)
            return
        # Of this name, and without a description: left of an entry that somebody removed in part.
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        elif target.exists() or target.is_symlink():
            target.unlink()
        self.folder.rename(target)
        _sync(target.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def find(root: Path, key: str) -> Path | None:
    """The folder of an entry, if it is there."""
    folder = root / key
    return folder if (folder / META).is_file() else None


@contextmanager
def claimed(root: Path, key: str, beat: Callable[[], None]) -> Iterator[Writer | None]:
    """Prepare an entry alone: yields a writer, or None where another process has prepared it in the meantime.

    Waits for that process as long as it lives, calling `beat` meanwhile; the lock goes with its owner. Left-overs of
    interrupted ones are removed.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (root / f"{key}.lock").open("w") as lock:
        _wait_for(lock, beat)
        if find(root, key):
            yield None
            return
        for left in root.glob(f"{key}.partial-*"):
            shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{key}.partial-", dir=root))
        try:
            yield Writer(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _wait_for(lock, beat: Callable[[], None]) -> None:
    import time

    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            beat()
            time.sleep(0.2)


# --- what an entry depends on -----------------------------------------------------------------------------------------

_RACY_SECONDS = 2.0


def file_sha256(path: Path, root: Path, beat: Callable[[], None]) -> str:
    """The sha256 of a file's content; remembered under `root` for as long as the file has not been touched.

    Size, times and inode tell: no program can set a file's ctime. What was written within the clock's grain of being
    read is not remembered, since a later write could leave all of them as they are.
    """
    path = path.resolve()
    notes = root / "hashes" / hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
    before = _touched(path)
    try:
        known = json.loads(notes.read_text())
        if known["touched"] == before:
            return known["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            beat()
    after = _touched(path)
    if after != before:
        raise ValueError(f"{path} was changed while it was read: run again when it is finished")
    import time

    if time.time() - after[1] / 1e9 > _RACY_SECONDS:
        notes.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=notes.parent, delete=False) as file:
            json.dump({"touched": after, "sha256": digest.hexdigest(), "path": str(path)}, file)
        os.replace(file.name, notes)
    return digest.hexdigest()


def _touched(path: Path) -> list[int]:
    about = path.stat()
    return [about.st_size, about.st_ctime_ns, about.st_mtime_ns, about.st_ino, about.st_dev]


def key_of(parts: dict[str, Any]) -> str:
    """The name of an entry: a digest of everything its content depends on, as JSON."""
    text = json.dumps({"format_version": FORMAT_VERSION} | parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40]

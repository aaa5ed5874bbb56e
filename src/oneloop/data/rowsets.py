"""Rows to train on or to evaluate: those of one or several prepared sources, or a part of them, under one numbering."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oneloop.data import cache, sampling
from oneloop.data.reports import Report


class RowSet:
    """Rows of several sources, numbered through; a row is read when it is asked for.

    parts: what has `len`, rows by number, `lengths_of` and a fingerprint, such as `cache.Entry`.
    """

    def __init__(self, parts: Sequence[Any], weights: Sequence[float] | None = None, all_exhausted: bool = True):
        self.parts = list(parts)
        self._starts = np.cumsum([0, *(len(part) for part in self.parts)])
        weights = None if weights is None else tuple(weights)
        sizes = tuple(len(part) for part in self.parts)
        self.order = sampling.Order(sizes, weights, all_exhausted)
        """Which rows an epoch visits, in which order."""
        shares = [] if weights is None else [repr(weights)]  # they decide which rows an epoch has
        self.fingerprint = _combined([*(part.fingerprint for part in self.parts), *shares])
        """sha256 of the tokenised rows in their order in the files."""

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def highest_id(self) -> int:
        """The highest token id in any row."""
        return max((part.report.highest_id for part in self.parts), default=0)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max((part.report.longest for part in self.parts), default=0)

    def _place(self, number: int) -> tuple[int, int]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        return part, number - int(self._starts[part])

    def __getitem__(self, number):
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        part, at = self._place(int(number))
        return self.parts[part][at]

    def lengths_of(self, numbers: np.ndarray) -> np.ndarray:
        """Tokens of the rows `numbers` (n,): (n,) int64."""
        numbers = np.asarray(numbers, np.int64)
        if len(self.parts) == 1:
            return self.parts[0].lengths_of(numbers)
        part_of = np.searchsorted(self._starts, numbers, side="right") - 1
        lengths = np.zeros(len(numbers), np.int64)
        for part in np.unique(part_of):
            mine = part_of == part
            lengths[mine] = self.parts[part].lengths_of(numbers[mine] - self._starts[part])
        return lengths

    def where(self, number: int) -> str:
        """Where a row stands, as `file:line`."""
        part, at = self._place(number)
        return self.parts[part].where(at)


class Prepared:
    """The rows of one prepared source, or those of them with the numbers `chosen` (n,), ascending."""

    def __init__(self, folder: Path, files: list[str], chosen: np.ndarray | None = None, source: str = ""):
        """files, source: where the rows are now, for messages."""
        self.entry, self.files, self.chosen, self.source = cache.Entry(folder), files, chosen, source
        try:
            self.report = Report(**self.entry.meta["report"])
        except (KeyError, TypeError) as error:
            raise cache.damaged(folder, error) from error
        """What became of the source's rows when they were prepared."""
        self.fingerprint: str = self.entry.meta["fingerprint"]
        if chosen is not None:
            self.fingerprint = _combined([self.fingerprint, hashlib.sha256(chosen.tobytes()).hexdigest()])

    def select(self, chosen: np.ndarray) -> Prepared:
        """Those with the numbers `chosen` (n,) int64, ascending."""
        assert self.chosen is None
        return Prepared(self.entry.folder, self.files, chosen, self.source)

    def __len__(self) -> int:
        return len(self.entry) if self.chosen is None else len(self.chosen)

    def __getitem__(self, number: int) -> dict:
        return self.entry[number if self.chosen is None else int(self.chosen[number])]

    def lengths_of(self, numbers: np.ndarray) -> np.ndarray:
        """Tokens of the rows `numbers` (n,): (n,) int64."""
        return self.entry.lengths_of(numbers if self.chosen is None else self.chosen[numbers])

    def digests(self) -> np.ndarray:
        """A number for each row that is the same for rows from equal examples: (len(self),) uint64."""
        digests = self.entry.column("digest")
        return digests if self.chosen is None else digests[self.chosen]

    def where(self, number: int) -> str:
        """Where a row stands, as `file:line`."""
        number = number if self.chosen is None else int(self.chosen[number])
        file, line = self.entry.column("file")[number], self.entry.column("line")[number]
        return f"{self.files[file]}:{line}"


class InMemory:
    """Rows given as a list of {"input_ids", "labels", ...}, each (T,) int."""

    def __init__(self, rows: list[dict]):
        self.rows = rows
        self._lengths = np.array([len(row["input_ids"]) for row in rows], np.int64)
        digest = Fingerprint()
        for row in rows:
            digest.update(row["input_ids"], row["labels"])
        self.fingerprint = digest.hexdigest()
        highest = max((int(max(row["input_ids"])) for row in rows), default=0)
        self.report = Report(len(rows), len(rows), highest_id=highest, longest=int(self._lengths.max(initial=0)))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict:
        return self.rows[number]

    def lengths_of(self, numbers: np.ndarray) -> np.ndarray:
        """Tokens of the rows `numbers` (n,): (n,) int64."""
        return self._lengths[numbers]

    def where(self, number: int) -> str:
        """The row's number."""
        return f"row {number}"


class Fingerprint:
    """sha256 over tokenised rows, as training states have recorded it since they exist."""

    def __init__(self):
        self._digest = hashlib.sha256()

    def update(self, input_ids, labels) -> None:
        """Add a row: input_ids, labels (T,) int."""
        ids, labels = (np.ascontiguousarray(values, "<i4") for values in (input_ids, labels))
        self._digest.update(len(ids).to_bytes(8, "little") + ids.tobytes() + labels.tobytes())

    def hexdigest(self) -> str:
        """The sha256 of all rows so far."""
        return self._digest.hexdigest()


def _combined(fingerprints: list[str]) -> str:
    if len(fingerprints) == 1:
        return fingerprints[0]
    return hashlib.sha256(" ".join(fingerprints).encode()).hexdigest()

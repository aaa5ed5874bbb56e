"""The order in which a stream visits its rows: a pure function of (seed, epoch), and nothing of it is held in a buffer.

An epoch's files come in an order of their own. Their rows are cut into windows of so many rows, and each window is
shuffled as a whole. To go on in the middle it is enough to know where a window began and how many of its rows were
used: the window is read again, and nothing before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from oneloop.data.readers import Cursor, Raw

_UNSHUFFLED_ROWS = 1000


class Order(NamedTuple):
    """What the order depends on beside the files."""

    seed: int
    shuffle: bool
    buffer_size: int

    def first(self, epoch: int, window: int) -> int:
        """Place in the epoch's order of the first row of a window. The first window of an epoch is shorter, by a draw:
        else rows would share a window with the same others in all epochs."""
        if not self.shuffle:
            return window * _UNSHUFFLED_ROWS
        drawn = 1 + int(np.random.default_rng([self.seed, epoch, 1]).integers(self.buffer_size))
        return window and drawn + (window - 1) * self.buffer_size

    def files(self, num_files: int, epoch: int) -> list[int]:
        """The files in the order of an epoch."""
        if not self.shuffle:
            return list(range(num_files))
        return np.random.default_rng([self.seed, epoch]).permutation(num_files).tolist()

    def rows(self, num_rows: int, epoch: int, window: int) -> np.ndarray:
        """The rows of a window in their order: (num_rows,) int64."""
        if not self.shuffle:
            return np.arange(num_rows)
        return np.random.default_rng([self.seed, epoch, 2 + window]).permutation(num_rows)


class Window(NamedTuple):
    """Where a window begins."""

    epoch: int
    index: int
    cursor: list
    """[how many of the epoch's files were read to their end, the reader's cursor in the next one or None]."""


class Row(NamedTuple):
    """A row in its place."""

    number: int
    """Place in the epoch's order, from 0."""
    file: int
    raw: Raw


class EpochEnd(NamedTuple):
    """No rows of the epoch are left."""

    epoch: int
    num_rows: int


BEGINNING = Window(0, 0, [0, None])


def walk(
    read: Callable[[int, Cursor | None], Iterator[tuple[Raw, Cursor]]], num_files: int, order: Order, start: Window
) -> Iterator[Window | Row | EpochEnd]:
    """Yield all rows from the beginning of a window on, epoch after epoch without end.

    Each window is announced, and the end of each epoch. read: (number of a file, cursor) -> its rows behind it.
    """
    epoch, index, cursor = start
    while True:
        rows = _in_order_of_files(read, order.files(num_files, epoch), cursor)
        num_rows = num_wanted = first = 0
        while num_rows == num_wanted:
            yield Window(epoch, index, cursor)
            first, num_wanted = order.first(epoch, index), order.first(epoch, index + 1) - order.first(epoch, index)
            held: list = []
            for file, raw, after in itertools.islice(rows, num_wanted):
                held.append((file, raw))
                cursor = after
            num_rows = len(held)
            for offset, place in enumerate(order.rows(num_rows, epoch, index).tolist()):
                file, raw = held[place]
                held[place] = None  # whoever takes the row holds it now
                yield Row(first + offset, file, raw)
            index += 1
        yield EpochEnd(epoch, first + num_rows)
        epoch, index, cursor = epoch + 1, 0, [0, None]


def _in_order_of_files(read, order: list[int], cursor: list) -> Iterator[tuple[int, Raw, list]]:
    done, within = cursor
    for place in range(done, len(order)):
        for raw, after in read(order[place], within):
            yield order[place], raw, [place, after]
        within = None

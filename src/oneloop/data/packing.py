"""Puts rows side by side into blocks, so that no position is spent on padding. N is the number of rows.

Every row is in exactly one block, whole; nothing is cut, lost or used twice. A row longer than a block has been dealt
with before (`truncation`).
"""

from __future__ import annotations

import bisect
import heapq

import numpy as np


def best_fit(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Few blocks: each row, longest first, goes where it leaves the least room (best-fit decreasing).

    lengths: (N,) int, tokens of each row, none above `capacity`. Returns the row numbers of each block. At most 11/9 of
    the fewest blocks possible, and next to the bound where many rows are short (Johnson et al., SIAM J. Comput. 3(4),
    1974).

    Raises ValueError for a row longer than a block.
    """
    _check(lengths, capacity)
    blocks: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # room -> numbers of the blocks that have so much
    rooms: list[int] = []  # those of which there is a block, ascending; never more than there are lengths
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            block, room = len(blocks), capacity
            blocks.append([])
        else:
            room = rooms[place]
            block = with_room[room].pop()
            if not with_room[room]:
                del rooms[place]
        blocks[block].append(row)
        left = room - length
        if left:
            if not with_room[left]:
                bisect.insort(rooms, left)
            with_room[left].append(block)
    return [np.array(rows, np.int64) for rows in blocks]


def balanced(lengths: np.ndarray, capacity: int, multiple: int) -> list[np.ndarray]:
    """As few blocks as hold the rows, in a number that is a multiple of `multiple`, and all about equally full.

    For the rows of one optimizer step: the ranks then have equally much to do, and the blocks of one forward pass are
    of one length. Each row, longest first, goes into the emptiest block (LPT: Graham, SIAM J. Appl. Math. 17(2), 1969);
    where that overflows, the blocks are those of `best_fit`. Some may be empty. Returns the row numbers of each.

    Raises ValueError for a row longer than a block.
    """
    _check(lengths, capacity)
    fewest = -(-int(lengths.sum()) // capacity)
    count = max(1, -(-fewest // multiple)) * multiple
    blocks: list[list[int]] = [[] for _ in range(count)]
    filled = [(0, number) for number in range(count)]
    for row in np.argsort(-lengths, kind="stable").tolist():
        tokens, block = filled[0]
        tokens += int(lengths[row])
        if tokens > capacity:
            tight = best_fit(lengths, capacity)
            return tight + [np.empty(0, np.int64)] * (-len(tight) % multiple)
        heapq.heapreplace(filled, (tokens, block))
        blocks[block].append(row)
    return [np.array(rows, np.int64) for rows in blocks]


def _check(lengths: np.ndarray, capacity: int) -> None:
    if len(lengths) and int(lengths.max()) > capacity:
        row = int(lengths.argmax())
        raise ValueError(f"packing: row {row} has {lengths[row]} tokens, a block holds {capacity} (max_length)")

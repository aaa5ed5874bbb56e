"""Puts the optimizer steps of a stream together: which rows each is made of, agreed on by all ranks.

The ranks tell each other of their rows what all of them need to come to the same decision, some rows more than a step
at a time. All that follows from it, errors among it, is then the same on every rank without a further word.
"""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from oneloop import watchdog
from oneloop.data import ahead, packing, reports, stream_rows
from oneloop.data.batches import Batch, collate, collate_packed
from oneloop.data.reports import Report
from oneloop.data.stream_rows import Seen
from oneloop.data.windows import BEGINNING, Window

CHUNK_ROWS = 64
_FIRST_ROWS, _MOST_ROWS = 16, 4096  # that a rank tells of at a time
_STOPS = -1  # in place of a piece: the row ends the run


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How steps are made, see the config's fields."""

    step_size: int
    counts_tokens: bool
    per_device_batch_size: int
    block_length: int | None
    is_flat: bool
    pad_token_id: int
    on_bad_row: str


class Place(NamedTuple):
    """Where a step begins."""

    epoch: int
    position: int
    """Rows of the epoch used."""
    number: int
    """Rows of the epoch's order done with, those that were refused among them."""
    pieces: int
    """Of the row after these, pieces used."""
    window: int
    """That in which the next row is, or one before it."""
    cursor: list
    """Where it begins: see `windows.Window`."""
    rows_used: int
    """In all epochs."""


def beginning(epoch: int, rows_used: int) -> Place:
    """The place where an epoch begins."""
    return Place(epoch, 0, 0, 0, BEGINNING.index, BEGINNING.cursor, rows_used)


class Step(NamedTuple):
    """What one rank does in an optimizer step."""

    row_ids: list[int]
    """Running numbers of the step's rows over all ranks."""
    where: list[str]
    """Of each, `file:line`."""
    read: list[Seen]
    """Rows of the epoch's order that are done with after it, those that were refused among them."""
    epoch: int
    after: Place
    micro_batches: list[np.ndarray]
    """Of the row ids, those of each micro-batch of this rank."""
    batches: Future[list[Batch]]


class _Told(NamedTuple):
    """What a rank tells the others."""

    seen: list[Seen]
    windows: list[Window]
    num_rows: int | None
    """Rows of the epoch in all, if this rank knows."""
    error: str
    is_for_user: bool
    beats: int


class Planner:
    """Makes one step after the other, from a place on. All ranks have to ask for the same ones."""

    def __init__(self, stream: Any, rules: Rules, place: Place, so_far: list[Report]):
        self.stream, self.rules, self.place = stream, rules, place
        self.reports = copy.deepcopy(so_far)
        """What became of the rows of each source up to `place`."""
        self._unread: deque[Seen] = deque()  # told of, and not yet done with
        self._waiting: deque[tuple[Seen, int]] = deque()  # rows to use: a row read, and which piece of it
        self._mine: dict[int, list[dict]] = {}  # number of a row -> what it became
        self._ready: deque[tuple[Seen, list[dict]]] = deque()  # tokenised, and not told of
        self._windows = [Window(place.epoch, place.window, place.cursor)]
        self._begin(place)
        self._num_told = self._num_pieces = self._num_tokens = 0
        self._waited = 0.0
        self._num_read = 0
        self._ahead = ahead.Ahead(stream.processes(), stream.chunks(self._windows[0], place.number), self._limit(0))
        self._collator = ThreadPoolExecutor(1, thread_name_prefix="batches")

    def _begin(self, place: Place) -> None:
        world_size = self.stream.world_size
        self._told = place.number  # rows of the epoch that all ranks know of
        self._next = place.number + (self.stream.rank - place.number) % world_size  # this rank's next one
        self._num_rows: int | None = None  # of the epoch, once known
        self._own_end: int | None = None

    def _limit(self, rows_of_step: int) -> int:
        """Chunks to have ready: those of two steps, and a few for each process."""
        if not rows_of_step and not self.rules.counts_tokens:
            rows_of_step = self.rules.step_size
        return 2 * self.stream.processes().count + 2 + 2 * rows_of_step // (self.stream.world_size * CHUNK_ROWS)

    def close(self) -> None:
        """End all that goes on ahead."""
        self._ahead.close()
        self._collator.shutdown(wait=True, cancel_futures=True)

    def take_wait_seconds(self) -> float:
        """Time in which rows were waited for since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def attempt(self) -> Step | Exception:
        """The next step, or what is wrong with it, to be raised in its turn."""
        try:
            return self._step()
        except Exception as error:
            return error

    # --- which rows ---------------------------------------------------------------------------------------------------

    def _step(self) -> Step:
        while (count := self._num_chosen()) is None:
            self._learn()
        chosen = [self._waiting.popleft() for _ in range(count)]
        if chosen and chosen[-1][1] == _STOPS:
            self._stop_at(chosen[-1][0])
        is_end = self._is_told_all and not self._waiting
        last = math.inf if is_end else chosen[-1][0].number
        read = []
        while self._unread and self._unread[0].number <= last:
            read.append(self._unread.popleft())
            self._count(self.reports, read[-1])
        if is_end and (self.place.epoch == 0 or not self.place.position):
            self._refuse_nothing(chosen)
        before, self.place = self.place, self._after(chosen, is_end)
        if is_end:
            self._windows = [Window(*self.place[:1], BEGINNING.index, BEGINNING.cursor)]
            self._begin(self.place)
        if not chosen:  # resumed with other rules, behind the last row that they keep
            return self._step()
        self._check_limits(chosen)
        self._ahead.allow(self._limit(len(read)))
        step = self._computed(before, chosen, read)
        self._mine = {} if is_end else {n: became for n, became in self._mine.items() if n >= self.place.number}
        return step

    @property
    def _is_told_all(self) -> bool:
        return self._num_rows is not None and self._told >= self._num_rows

    def _num_chosen(self) -> int | None:
        """How many of the waiting rows are the next step; None while that is not known, or whether any are left."""
        tokens = 0
        for count, (seen, piece) in enumerate(self._waiting):
            if self.rules.counts_tokens:
                tokens += seen.lengths[piece] if piece != _STOPS else 0
                if count and tokens > self.rules.step_size:
                    return count
            elif count == self.rules.step_size:
                return count
            if piece == _STOPS:
                return count + 1
        return len(self._waiting) if self._is_told_all else None

    def _after(self, chosen: list[tuple[Seen, int]], is_end: bool) -> Place:
        rows_used = self.place.rows_used + len(chosen)
        if is_end:
            return beginning(self.place.epoch + 1, rows_used)
        seen, piece = chosen[-1]
        is_whole = piece + 1 == len(seen.lengths)
        number, pieces = (seen.number + 1, 0) if is_whole else (seen.number, piece + 1)
        in_reach = [w for w in self._windows if self.stream.order.first(w.epoch, w.index) <= number]
        window = in_reach[-1]
        self._windows = [w for w in self._windows if w.index >= window.index]
        position = self.place.position + len(chosen)
        return Place(self.place.epoch, position, number, pieces, window.index, window.cursor, rows_used)

    def _count(self, so_far: list[Report], seen: Seen) -> None:
        stream_rows.count(so_far[self.stream.source_of[seen.file]], seen)

    def _stop_at(self, seen: Seen) -> None:
        so_far = copy.deepcopy(self.reports)
        for one in self._unread:
            self._count(so_far, one)
        number = self.stream.source_of[seen.file]
        reports.check(self.stream.sources[number], so_far[number], self.stream.names, "stop")
        raise AssertionError("a bad row that the report does not have")

    def _refuse_nothing(self, chosen: list) -> None:
        """Raises ValueError for a source, or another epoch, without any row to use."""
        for source, report in zip(self.stream.sources, self.reports, strict=True):
            if self.place.epoch == 0:
                reports.check(source, report, self.stream.names, "skip")
        if not chosen and not self.place.position:
            source = self.stream.sources[0]
            raise ValueError(f"{source.field} {source.path!r} leaves no row to use any more: have the files changed?")

    def _check_limits(self, chosen: list[tuple[Seen, int]]) -> None:
        if self.stream.limits is None:
            return
        num_tokens, num_positions = self.stream.limits
        for seen, piece in chosen:
            if seen.highest_id >= num_tokens:
                raise ValueError(
                    f"model_name_or_path: the tokenizer gives token id {seen.highest_id} at {self._where(seen)}, but "
                    f"the model knows {num_tokens} tokens; the two do not belong together."
                )
            if seen.lengths[piece] > num_positions:
                raise ValueError(
                    f"max_length: {self._where(seen)} has {seen.lengths[piece]} tokens, the model has {num_positions} "
                    "positions; lower max_length."
                )

    def _where(self, seen: Seen) -> str:
        return f"{self.stream.names[seen.file]}:{seen.line}"

    # --- telling each other -------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Let all ranks know of some rows more. Raises, on all of them, what went wrong on one."""
        until = self._told + self._num_to_tell() * self.stream.world_size
        mine: tuple = ([], [], None)
        error: Exception | None = None
        try:
            mine = self._own(until)
        except Exception as failure:
            error = failure
        told = _Told(*mine, _text(error), isinstance(error, ValueError), watchdog.beats())
        everyone: list[_Told] = self.stream.gather(told)
        watchdog.catch_up(max(one.beats for one in everyone))
        for rank, one in enumerate(everyone):
            if one.error and one.is_for_user:
                raise ValueError(one.error) from error
            if one.error:
                raise error if error is not None else RuntimeError(f"rank {rank} failed: {one.error}")
        self._merge(everyone)

    def _own(self, until: int) -> tuple[list[Seen], list[Window], int | None]:
        """What this rank has to tell of the rows up to `until`."""
        seen, windows = [], []
        while True:
            while self._ready and self._ready[0][0].number < until:
                one, became = self._ready.popleft()
                self._mine[one.number] = became
                self._next = one.number + self.stream.world_size
                keeps = self.rules.on_bad_row == "skip" and one.is_bad and self.place.epoch == 0
                seen.append(one if keeps or one.data is None else one._replace(data=None))
            if self._ready or self._next >= until or self._own_end is not None:
                return seen, windows, self._own_end
            began = time.perf_counter()
            chunk = self._ahead.take(self._beat)
            self._waited += time.perf_counter() - began
            if chunk.epoch == self.place.epoch:  # else the last one of the epoch before, and without a row
                windows += chunk.windows
                self._ready.extend(chunk.rows)
                self._own_end = chunk.num_rows

    def _beat(self) -> None:
        if self.stream.num_read > self._num_read:  # a file that is read again may take long
            self._num_read = self.stream.num_read
            watchdog.beat()

    def _num_to_tell(self) -> int:
        """Rows that each rank tells of next, in the hope that they are enough for a step and one more."""
        if not self._num_pieces:
            rows = self.rules.step_size if not self.rules.counts_tokens else 0
        else:
            left = self.rules.step_size + 1 - len(self._waiting)
            if self.rules.counts_tokens:
                waiting = sum(seen.lengths[piece] for seen, piece in self._waiting)
                left = 1 + (self.rules.step_size - waiting) * self._num_pieces / self._num_tokens
            rows = left * self._num_told / self._num_pieces
            if self.rules.counts_tokens or self._num_told != self._num_pieces:
                rows *= 1.1
        return min(
            max(math.ceil((rows + 1) / self.stream.world_size), 1 if self._num_pieces else _FIRST_ROWS), _MOST_ROWS
        )

    def _merge(self, everyone: list[_Told]) -> None:
        seen = sorted((one for told in everyone for one in told.seen), key=lambda one: one.number)
        windows = {window.index: window for told in everyone for window in told.windows}
        is_same = all(windows[window.index] == window for told in everyone for window in told.windows)
        num_rows = {told.num_rows for told in everyone} - {None}
        is_same &= [one.number for one in seen] == list(range(self._told, self._told + len(seen))) and len(num_rows) < 2
        if not is_same:
            raise ValueError(
                "the ranks read different rows from the same files. Check that the training data are the same on every "
                "node, and not being written to."
            )
        for window in sorted(windows.values()):
            if window.index > self._windows[-1].index:
                self._windows.append(window)
        self._told += len(seen)
        self._num_rows = num_rows.pop() if num_rows else self._num_rows
        for one in seen:
            self._num_told += 1
            self._num_pieces += len(one.lengths)
            self._num_tokens += sum(one.lengths)
            used = self.place.pieces if one.number == self.place.number else 0
            if not used:  # else it is done with already
                self._unread.append(one)
            self._waiting.extend((one, piece) for piece in range(used, len(one.lengths)))
            if one.is_bad and self.rules.on_bad_row == "stop":
                self._waiting.append((one, _STOPS))

    # --- who computes them --------------------------------------------------------------------------------------------

    def _computed(self, before: Place, chosen: list[tuple[Seen, int]], read: list[Seen]) -> Step:
        rank, world_size, size = self.stream.rank, self.stream.world_size, self.rules.per_device_batch_size
        lengths = np.array([seen.lengths[piece] for seen, piece in chosen])
        of_rank: list[list[int]] = [[] for _ in range(world_size)]
        for place, (seen, _) in enumerate(chosen):
            of_rank[seen.number % world_size].append(place)
        rows = {place: self._mine[chosen[place][0].number][chosen[place][1]] for place in of_rank[rank]}
        if self.rules.block_length is None:
            rows |= self._handed_over(of_rank, rows)
        sequences = [self._sequences(np.array(places, np.int64), lengths) for places in of_rank]
        count = max(1, *(math.ceil(len(one) / size) for one in sequences))
        micro_batches = [sequences[rank][at * size : (at + 1) * size] for at in range(count)]
        blocks = [[[rows[place] for place in sequence] for sequence in chunk] for chunk in micro_batches]
        ids = [before.rows_used + np.concatenate([*chunk, np.empty(0, np.int64)]) for chunk in micro_batches]
        return Step(
            [before.rows_used + place for place in range(len(chosen))],
            [self._where(seen) for seen, _ in chosen],
            read,
            before.epoch,
            self.place,
            ids,
            self._collator.submit(self._collated, blocks),
        )

    def _handed_over(self, of_rank: list[list[int]], rows: dict[int, Any]) -> dict[int, Any]:
        """Even out `of_rank`, in place, where a rank would need a micro-batch more than all would need together: where
        rows are refused or split, those of a step are not spread evenly. Returns the rows that come to this rank."""
        world_size, size = self.stream.world_size, self.rules.per_device_batch_size
        room = size * math.ceil(sum(map(len, of_rank)) / (world_size * size))
        moved: dict[int, int] = {}  # row of the step -> rank
        for places in of_rank:
            while len(places) > room:
                to = min(range(world_size), key=lambda rank: (len(of_rank[rank]), rank))
                moved[places[-1]] = to
                of_rank[to].append(places.pop())
        if not moved:
            return {}
        everyone = self.stream.gather({place: row for place, row in rows.items() if place in moved})
        return {place: row for theirs in everyone for place, row in theirs.items() if moved[place] == self.stream.rank}

    def _sequences(self, places: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
        """Rows put together as they are computed: packed into blocks, or those of like length after each other."""
        own = lengths[places]
        if self.rules.block_length is None:
            return [places[i : i + 1] for i in np.argsort(own, kind="stable")]
        blocks = packing.balanced(own, self.rules.block_length, self.rules.per_device_batch_size)
        return [places[block] for block in blocks]

    def _collated(self, micro_batches: list[list[list[dict]]]) -> list[Batch]:
        pad_token_id = self.rules.pad_token_id
        if self.rules.block_length is None:
            return [collate([row for block in blocks for row in block], pad_token_id) for blocks in micro_batches]
        return [collate_packed(blocks, pad_token_id, self.rules.is_flat) for blocks in micro_batches]


def _text(error: Exception | None) -> str:
    if error is None:
        return ""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"

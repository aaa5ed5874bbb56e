"""Which row is trained on when: a pure function of (seed, epoch, position), the same for every world size, accumulation
and strategy.

Rule for the end of an epoch: **every row is used exactly once per epoch**. The last optimizer step of an epoch takes
the rows that are left; nothing is dropped, repeated or carried over, and the loss of that step is a mean over the
items it really has. Ranks without a row in it contribute an empty micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np


@dataclass
class Progress:
    """Where a run stands; everything that the sample order and the schedule depend on."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epoch of the next row, from 0."""
    position: int = 0
    """Rows of that epoch already used, over all ranks."""
    total_steps: int = 0
    """Optimizer steps of the whole run."""

    def advance(self, num_rows: int, rows_per_epoch: int) -> None:
        """Count one optimizer step that used `num_rows` rows over all ranks."""
        self.step += 1
        self.position += num_rows
        if self.position >= rows_per_epoch:
            self.epoch, self.position = self.epoch + 1, 0

    def due(self, every: int) -> bool:
        """Whether something that happens `every` steps (and after the last one) happens now; -1 = only at the end."""
        return self.step == self.total_steps or (every > 0 and self.step % every == 0)


@dataclass(frozen=True)
class Order:
    """Which rows an epoch visits, and in which order: drawn from (seed, epoch) alone.

    Rows are numbered through all sources. Without weights an epoch is each row once. With weights (shares of the
    samples), each source gives its share of an epoch, in an order of its own that goes on from epoch to epoch: no row
    of a source comes a second time before all others of it have come.
    """

    sizes: tuple[int, ...]
    """Rows of each source."""
    weights: tuple[float, ...] | None = None
    """Share of each source, relative to the others'; None: each row once."""
    all_exhausted: bool = True
    """With weights: an epoch ends when every row has come, and else before the first source would repeat one."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each source in an epoch."""
        if self.weights is None:
            return self.sizes
        total = sum(self.weights)
        lengths = [size * total / weight for size, weight in zip(self.sizes, self.weights, strict=True)]
        # A source that is to be used up is, and no rounding may make one repeat that must not.
        length = max(lengths) if self.all_exhausted else min(lengths)
        rounded = math.ceil if self.all_exhausted else math.floor
        return tuple(max(1, rounded(round(length * weight / total, 6))) for weight in self.weights)

    def __len__(self) -> int:
        return sum(self.counts)

    def epoch(self, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        """The row numbers of an epoch in their order: (len(self),) int64."""
        if self.weights is None:
            return epoch_order(len(self), seed, epoch, shuffle)
        parts, start = [], 0
        for source, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            first = epoch * count  # of a sequence without end that is one pass over the source after the other
            passes = range(first // size, -(-(first + count) // size))
            turns = [_permutation([seed, source, turn], size, shuffle) for turn in passes]
            parts.append(start + np.concatenate(turns)[first % size :][:count])
            start += size
        if shuffle:
            return np.random.default_rng([seed, epoch]).permutation(np.concatenate(parts))
        # In the order of the files, the sources spread evenly over each other.
        places = np.concatenate([(np.arange(len(part)) + 0.5) / len(part) for part in parts])
        return np.concatenate(parts)[np.argsort(places, kind="stable")]


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """The order in which an epoch visits its rows: (num_rows,) int64, a permutation drawn from (seed, epoch) alone."""
    return _permutation([seed, epoch], num_rows, shuffle)


def _permutation(seed: list[int], size: int, shuffle: bool) -> np.ndarray:
    return np.random.default_rng(seed).permutation(size) if shuffle else np.arange(size)


def rows_of_step(order: np.ndarray, position: int, size: int, lengths: Callable | None) -> np.ndarray:
    """The rows of the optimizer step that begins at `position` of an epoch's order, at least one.

    lengths: None, and a step is `size` rows; or a function from row numbers (n,) to their tokens (n,), and a step is as
    many rows as come to at most `size` tokens.
    """
    if lengths is None:
        return order[position : position + size]
    taken, tokens = 0, 0
    while position + taken < len(order):
        some = order[position + taken : position + taken + 1024]
        ends = tokens + np.cumsum(lengths(some), dtype=np.int64)
        fitting = int(np.searchsorted(ends, size, side="right"))
        taken += fitting
        if fitting < len(some):
            break
        tokens = int(ends[-1])
    return order[position : position + max(taken, 1)]


def num_steps(order: np.ndarray, size: int, lengths: Callable | None, position: int = 0) -> int:
    """Optimizer steps from `position` to the end of an epoch; arguments as of `rows_of_step`."""
    if lengths is None:
        return -(-(len(order) - position) // size)
    steps = 0
    while position < len(order):
        position += len(rows_of_step(order, position, size, lengths))
        steps += 1
    return steps


def micro_batch_rows(
    rows: np.ndarray, *, rank: int, world_size: int, per_device_batch_size: int, accumulation_steps: int
) -> list[np.ndarray]:
    """The rows of one optimizer step that `rank` computes, one array per micro-batch (some may be empty).

    Micro-batch m of rank r is chunk number m * world_size + r, so that growing the world size and shrinking the
    accumulation by the same factor regroups the same chunks.
    """
    chunks = [
        rows[start : start + per_device_batch_size]
        for start in range(0, accumulation_steps * world_size * per_device_batch_size, per_device_batch_size)
    ]
    return chunks[rank::world_size]


def accumulation_of(num_sequences: int, *, world_size: int, per_device_batch_size: int) -> int:
    """Micro-batches of each rank in a step of so many sequences or packed blocks, at least 1."""
    return max(1, -(-num_sequences // (world_size * per_device_batch_size)))


def micro_batch_seeds(
    seed: int, step: int, *, rank: int, world_size: int, per_device_batch_size: int, accumulation_steps: int
) -> list[int]:
    """The seed of each micro-batch that `micro_batch_rows` gives `rank` in a step: drawn from (seed, step, number of
    its chunk), so a chunk has the same on whatever rank it is computed."""
    chunks = range(rank, accumulation_steps * world_size, world_size)
    return [int(np.random.SeedSequence([seed, step, chunk]).generate_state(1, np.uint64)[0] >> 1) for chunk in chunks]


def even_batches(num_rows: int, *, rank: int, world_size: int, per_device_batch_size: int) -> Iterator[np.ndarray]:
    """One pass in order over all rows for evaluation: equally many batches on each rank, the last ones maybe empty."""
    stride = world_size * per_device_batch_size
    for start in range(0, num_rows, stride):
        rows = np.arange(start, min(start + stride, num_rows))
        yield micro_batch_rows(
            rows,
            rank=rank,
            world_size=world_size,
            per_device_batch_size=per_device_batch_size,
            accumulation_steps=1,
        )[0]

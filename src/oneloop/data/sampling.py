"""Which row is trained on when: a pure function of (seed, epoch, position), the same for every world size, accumulation
and strategy.

Rule for the end of an epoch: **every row is used exactly once per epoch**. The last optimizer step of an epoch takes
the rows that are left; nothing is dropped, repeated or carried over, and the loss of that step is a mean over the
items it really has. Ranks without a row in it contribute an empty micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """The order in which an epoch visits its rows: (num_rows,) int64, a permutation drawn from (seed, epoch) alone."""
    if not shuffle:
        return np.arange(num_rows)
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


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
